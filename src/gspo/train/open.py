"""Open the parts of a run and close them again, also after an error half way through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gspo.config.objective import is_supervised
from gspo.faults import reached
from gspo.learner.ranks.signals import StopRequest
from gspo.learner.ranks.world import World
from gspo.monitor.display import Silent, make_display
from gspo.rewards.route import GivenRewards, NoRewards
from gspo.rollout.producer import NullProducer
from gspo.runs.code import changed_code
from gspo.runs.directory import RunDir
from gspo.system.heartbeat import beat, stalls_logged
from gspo.train.build.data import (
    make_curriculum,
    make_evaluator,
    open_data,
    prompt_stream,
    refuse_images,
    watched,
)
from gspo.train.build.episodes import make_episodes
from gspo.train.build.learner import identity_of, make_learner
from gspo.train.build.optim import make_updater
from gspo.train.build.policy import alphabet_warning, context_length
from gspo.train.build.rewards import default_rewards, make_rewards, reward_problems, scores_answers
from gspo.train.build.rollout import make_producer, make_single_turn, resumed_snapshot
from gspo.train.build.run import (
    headline,
    length_of,
    load_step,
    make_recorder,
    make_saver,
    opening_messages,
    resume_run,
    run_path,
)
from gspo.train.build.sampler import decoder, make_sampler, samples_in_process, weights_for
from gspo.train.parts import Given, LeaderParts, Parts


@contextmanager
def open_parts(given: Given, world: World, stop: StopRequest) -> Iterator[Parts]:
    """The parts of this rank; errors in the config or the data are raised before any training."""
    # Two stacks: the producer must close after the episodes that it runs, though it opens after them.
    with ExitStack() as outer, ExitStack() as inner:
        yield (
            _open_leader(given, world, stop, outer, inner)
            if world.is_first
            else _open_follower(given, world, stop, outer)
        )


def _open_leader(given: Given, world: World, stop: StopRequest, outer: ExitStack, inner: ExitStack) -> LeaderParts:
    loaded, config = given.loaded, given.loaded.config
    # The lock of the run directory comes first, so that a second trainer fails before it loads a model.
    run = RunDir(run_path(config))
    outer.callback(run.close)
    outer.push(lambda kind, error, trace: run.log_error(error))
    outer.enter_context(stalls_logged(run.path / "log.txt"))
    beat("importing the reward functions (reward.functions)")
    # Reward workers start before the model is loaded and import the libraries of built-in rewards in the meantime.
    rewards = make_rewards(config, given.reward, str(run.path / "rewards.log"))
    outer.callback(rewards.close)
    # Models, then data: the tokenizer and the context length decide which prompts fit.
    beat("loading the model (actor.path)")
    reached("start.model")
    learner = make_learner(loaded, world)
    outer.callback(learner.close)
    policy, decode = learner.policy, decoder(learner.tokenizer)
    max_context = context_length(config, policy)
    beat("loading the data (train_dataset, valid_dataset)")
    reached("start.data")
    reader = policy.processor or learner.tokenizer
    data, valid = open_data(config, given.dataset, given.valid, reader, max_context, given.environment)
    # An environment may give its own rewards; supervised fine-tuning needs none.
    both = [data, *([valid] if valid else [])]
    refuse_images(config, both, has_environment=given.environment is not None, policy=policy)
    scores = given.environment is not None or scores_answers(config, given.reward, both)
    chosen = [] if given.environment is not None or not scores else default_rewards(config, given.reward, both)
    workflow, count_episodes = given.workflow, dict[str, float]
    evaluation_workflow = workflow
    if not scores:
        rewards = NoRewards()
    if is_supervised(config):
        rewards, evaluation_workflow = GivenRewards(rewards), make_single_turn(config)
    if given.environment is not None:
        rewards = GivenRewards(rewards)
        workflow = evaluation_workflow = make_episodes(config, given.environment, data, learner.tokenizer, max_context)
        inner.callback(workflow.close)
        count_episodes = workflow.metrics
    checked = scores and given.environment is None and not is_supervised(config)
    total_steps, steps_per_epoch = length_of(config, len(data))
    display = make_display(f"gspo · {run.path}", total_steps)
    inner.callback(display.close)

    def say(message: str) -> None:
        display.say(message)
        run.log(message)

    outer.enter_context(stalls_logged(run.path / "log.txt", say))

    for line in headline(loaded):
        say(line)
    # Resume before the sampler is made, because the sampler gets the resumed weights.
    beat("looking for a checkpoint to resume")
    identity = identity_of(learner, data, world)
    state = resume_run(config, run, learner, identity, say)
    changed = changed_code(run.path, given.code)
    display.start_at(state.step)
    # The other ranks wait for this command: only rank 0 knows which checkpoint is valid.
    opened = {"step": state.step, "total_steps": total_steps, "in_process": samples_in_process()}
    world.broadcast_command("open", opened)
    beat("starting the sampler")
    reached("start.sampler")
    sampler = make_sampler(config, policy, learner.tokenizer, state.step, run.path, say)
    outer.callback(sampler.close)
    curriculum = make_curriculum(config, data, state.curriculum)
    state.curriculum = None  # `Leader.save` sets it again
    prompt_of = prompt_stream(config, data, curriculum)
    producer = make_producer(
        config,
        resumed_snapshot(run, state, prompt_of),
        sampler=sampler,
        rewards=rewards,
        prompt_of=prompt_of,
        decode=decode,
        workflow=workflow,
        reject_reason=watched(curriculum, given.reject_reason),
        step=state.step,
        total_steps=total_steps,
    )
    outer.callback(producer.close)
    recorder = make_recorder(loaded, run, learner, display, say, decode)
    inner.callback(recorder.close)
    # Last: before this point there is nothing to save, and a signal ends the run at once.
    stop.defer(say)
    return LeaderParts(
        path=run.path,
        world=world,
        stop=stop,
        learner=learner,
        updater=make_updater(config, learner, total_steps, say, recorder.save_samples),
        state=state,
        total_steps=total_steps,
        display=display,
        publish=lambda version: producer.publish(version, weights_for(config, sampler, policy)),
        producer=producer,
        say=say,
        data=data,
        valid=valid,
        sampler=sampler,
        rewards=rewards,
        workflow=workflow,
        decode=decode,
        prompt_of=prompt_of,
        evaluator=make_evaluator(
            config,
            valid,
            producer,
            decode,
            evaluation_workflow,
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            samples=scores,
        ),
        recorder=recorder,
        saver=make_saver(config, run, learner, identity, steps_per_epoch, state.step),
        opening_messages=[
            *opening_messages(loaded, given.warnings, data, valid, learner),
            *alphabet_warning(config, data.prompt(0).text),
            *chosen,
            *(
                reward_problems(config, given.reward, rewards, data, learner.tokenizer)
                if checked and not state.step
                else ()
            ),
            *changed * bool(state.step),
        ],
        count_episodes=count_episodes,
        curriculum=curriculum,
    )


def _open_follower(given: Given, world: World, stop: StopRequest, outer: ExitStack) -> Parts:
    """The other ranks have their shard of the models, at the step where rank 0 starts or resumes."""
    config, display = given.loaded.config, Silent()
    learner = make_learner(given.loaded, world)
    outer.callback(learner.close)
    opened = next(world.commands()).content
    producer = NullProducer(opened["in_process"])
    parts = Parts(
        path=run_path(config),
        world=world,
        stop=stop,
        learner=learner,
        updater=make_updater(config, learner, opened["total_steps"], display.say),
        state=load_step(config, learner, opened["step"]),
        total_steps=opened["total_steps"],
        display=display,
        publish=lambda version: producer.publish(version, weights_for(config, producer, learner.policy)),
        say=display.say,
    )
    # Rank 0 sends the weights to its sampler in `make_sampler`; gathering them needs every rank.
    parts.publish(opened["step"])
    outer.enter_context(stalls_logged(run_path(config) / "log.txt", display.say))
    stop.defer(display.say)
    return parts

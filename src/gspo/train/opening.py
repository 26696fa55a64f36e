"""Everything that a run has open: opened in order, closed again, also after an error half way through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gspo.data import Curriculum, Data
from gspo.faults import reached
from gspo.learner import Learner, World
from gspo.monitor import Display, make_display
from gspo.rewards import Rewards
from gspo.rollout import NullProducer, RolloutProducer, Workflow
from gspo.runs import RunDir, Saver, State, changed_code
from gspo.sampling import Sampler
from gspo.system import StopRequest, beat, stalls_logged
from gspo.train.build.data import (
    Answering,
    make_answering,
    make_curriculum,
    make_evaluator,
    make_rewards,
    open_data,
    prompt_stream,
    record_visit,
    reward_problems,
)
from gspo.train.build.given import Given
from gspo.train.build.learner import context_length, make_learner, make_updater, run_identity
from gspo.train.build.rollout import (
    decoder,
    make_filter,
    make_producer,
    make_sampler,
    resumed_snapshot,
    samples_in_process,
    weights_for,
)
from gspo.train.build.run import headline, length_of, load_step, make_recorder, make_saver, opening_messages, resume_run
from gspo.train.evaluate import Evaluator
from gspo.train.record import Recorder
from gspo.train.update import Updater
from gspo.types import Prompt


@dataclass
class Parts:
    """What every rank has open."""

    path: Path  # the run directory
    world: World
    stop: StopRequest
    learner: Learner
    updater: Updater
    state: State
    total_steps: int
    display: Display
    publish: Callable[[int], None]  # sends the current weights to the sampler as this version
    say: Callable[[str], None]


@dataclass
class LeaderParts(Parts):
    """What only rank 0 has open: data, sampler, rewards, and all that writes the run directory."""

    producer: RolloutProducer
    data: Data
    valid: Data | None  # None: no evaluation (evaluator.freq_steps: 0)
    sampler: Sampler
    rewards: Rewards
    workflow: Workflow
    decode: Callable[[Sequence[int]], str]
    prompt_of: Callable[[int], Prompt]
    evaluator: Evaluator | None
    recorder: Recorder
    saver: Saver
    opening_messages: Sequence[str]
    count_episodes: Callable[[], Mapping[str, float]]  # what the environment counted since the last call
    curriculum: Curriculum | None = None
    num_refilled: int = 0  # groups that were rejected on the way to the current batch


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


def _open_inputs(
    given: Given, world: World, outer: ExitStack, inner: ExitStack
) -> tuple[RunDir, Learner, Data, Data | None, Answering]:
    """What rank 0 opens before it knows where the run resumes: the run directory, the models and the data."""
    config = given.loaded.config
    # The lock of the run directory comes first, so that a second trainer fails before it loads a model.
    run = RunDir(config.run_path)
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
    learner = make_learner(given.loaded, world, given.objective)
    outer.callback(learner.close)
    max_context = context_length(config, learner.policy)
    beat("loading the data (train_dataset, valid_dataset)")
    reached("start.data")
    reader = learner.policy.processor or learner.tokenizer
    data, valid = open_data(config, given.dataset, given.valid, reader, max_context, given.environment)
    answering = make_answering(given, rewards, learner, data, valid, max_context)
    inner.callback(answering.close)
    return run, learner, data, valid, answering


def _open_leader(given: Given, world: World, stop: StopRequest, outer: ExitStack, inner: ExitStack) -> LeaderParts:
    loaded, config = given.loaded, given.loaded.config
    run, learner, data, valid, answering = _open_inputs(given, world, outer, inner)
    total_steps, steps_per_epoch = length_of(config, len(data))
    policy, decode = learner.policy, decoder(learner.tokenizer)
    display, say = _open_display(run, total_steps, outer, inner)
    say(headline(loaded))
    # Resume before the sampler is made, because the sampler gets the resumed weights.
    beat("looking for a checkpoint to resume")
    identity = run_identity(learner, data, world)
    state = resume_run(config, run, learner, identity, say)
    changed = changed_code(run.path, given.code)  # also of a new run, because it records the files
    display.start_at(state.step)
    # The other ranks wait for this command: only rank 0 knows which checkpoint is valid.
    where = {"step": state.step, "total_steps": total_steps, "in_process": samples_in_process()}
    world.broadcast_command("open", where)
    beat("starting the sampler")
    reached("start.sampler")
    sampler = make_sampler(config, policy, learner.tokenizer, state.step, run.path, say)
    outer.callback(sampler.close)
    curriculum = make_curriculum(config, data, state.curriculum)
    state.curriculum = None  # it can be large, and the state is sent to all ranks
    prompt_of = prompt_stream(config, data, curriculum)
    producer = make_producer(
        config,
        resumed_snapshot(run, state, prompt_of),
        sampler=sampler,
        rewards=answering.rewards,
        prompt_of=prompt_of,
        decode=decode,
        workflow=answering.workflow,
        reject_reason=record_visit(curriculum, make_filter(config, given.filter)),
        step=state.step,
        total_steps=total_steps,
    )
    outer.callback(producer.close)
    recorder = make_recorder(loaded, run, learner, display, say, decode)
    inner.callback(recorder.close)
    stop.defer(say)  # last: before this point there is nothing to save, and a signal ends the run at once
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
        rewards=answering.rewards,
        workflow=answering.workflow,
        decode=decode,
        prompt_of=prompt_of,
        evaluator=make_evaluator(
            config, valid, producer, decode, answering.evaluation_workflow,
            total_steps=total_steps, steps_per_epoch=steps_per_epoch, samples=answering.scores,
        ),
        recorder=recorder,
        saver=make_saver(config, run, learner, identity, steps_per_epoch, state.step),
        opening_messages=opening_messages(given, data, valid, learner, answering.messages)
        + (changed if state.step else reward_problems(given, answering, data, learner.tokenizer)),
        count_episodes=answering.count_episodes,
        curriculum=curriculum,
    )  # fmt: skip


def _open_display(
    run: RunDir, total_steps: int, outer: ExitStack, inner: ExitStack
) -> tuple[Display, Callable[[str], None]]:
    """The display, and a function for messages of the run: they go to the screen and to log.txt."""
    display = make_display(f"gspo · {run.path}", total_steps)
    inner.callback(display.close)

    def say(message: str) -> None:
        display.say(message)
        run.log(message)

    outer.enter_context(stalls_logged(run.path / "log.txt", say))
    return display, say


def _open_follower(given: Given, world: World, stop: StopRequest, outer: ExitStack) -> Parts:
    """The other ranks have their shard of the models, at the step where rank 0 starts or resumes."""
    config, display = given.loaded.config, Display()
    learner = make_learner(given.loaded, world, given.objective)
    outer.callback(learner.close)
    opened = next(world.commands()).content
    producer = NullProducer(opened["in_process"])
    parts = Parts(
        path=config.run_path,
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
    outer.enter_context(stalls_logged(config.run_path / "log.txt", display.say))
    stop.defer(display.say)
    return parts

"""The best step of a run: by accuracy, by reward where rewards are graded, or by the metric that was set."""

from gspo.runs.directory import State


def scores(accuracy, reward, graded=0.0, **more):
    return {"eval/accuracy": accuracy, "eval/reward": reward, "eval/graded": graded, **more}


def best_of(*evaluations, metric=None):
    state = State()
    for state.step, found in enumerate(evaluations):
        state = State.from_json(state.to_json())  # a resume between any two evaluations changes nothing
        state.compare_best(found, metric)
    return state.best_step


def test_the_later_of_equal_steps_is_the_best():
    assert best_of(scores(0.5, 0.5), scores(0.5, 0.5), scores(0.25, 0.25)) == 1


def test_graded_rewards_are_compared_by_reward_and_others_by_accuracy():
    assert best_of(scores(0, -2.0, 1.0), scores(0, -0.5, 1.0), scores(0, -0.7, 1.0)) == 1
    assert best_of(scores(0.5, 0.5), scores(0.4, 0.9)) == 0


def test_rewards_that_become_graded_are_compared_by_reward_with_the_best_so_far():
    assert best_of(scores(0.0, 0.0), scores(0.0, 0.2, 0.5), scores(0.0, 0.1, 0.5), scores(0.0, 0.0, 0.0)) == 1
    assert best_of(scores(0.5, 0.5), scores(0.6, 0.3, 0.5)) == 0


def test_a_named_metric_decides_and_a_step_without_it_is_not_the_best():
    found = (scores(0.9, 0.1), scores(0.1, 0.9), scores(0.5, 0.5))
    assert best_of(*found, metric="eval/reward") == 1
    sourced = [scores(0.5, 0.5, **{"eval/a/reward": r}) for r in (0.2, float("nan"), 0.3, float("nan"))]
    assert best_of(*sourced, metric="eval/a/reward") == 2


def test_a_checkpoint_of_an_older_version_keeps_its_best_accuracy():
    old = State(step=8, best_step=4).to_json() | {"best_accuracy": 0.75}
    del old["best"], old["graded"]
    state = State.from_json(old)
    state.compare_best(scores(0.5, 0.5), None)
    assert state.best_step == 4
    state.compare_best(scores(0.75, 0.75), None)
    assert (state.best_step, state.best["eval/reward"]) == (8, 0.75)

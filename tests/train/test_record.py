from dataclasses import replace

import pytest
from made_batches import make_batch, make_group
from training_runs import path_of, train

from gspo.errors import TrainingError
from gspo.runs import checkpoint
from gspo.train.record import _example


def test_the_example_of_the_display_is_the_question_not_the_end_of_a_chat_template():
    plain = make_group(0, [1, 0])
    chat = replace(plain.prompt, text="<user>2+2?<assistant>", messages=({"role": "user", "content": "2+2?"},))
    assert _example(make_batch([replace(plain, prompt=chat)])) == ("2+2?", "", True)
    assert _example(make_batch([plain])) == ("?", "", True)


@pytest.mark.run
def test_a_constant_reward_stops_the_run_before_its_first_step(tmp_path):
    (tmp_path / "reward.py").write_text("def always(text):\n    return 1.0\n")
    constant = f"reward.functions=[{tmp_path / 'reward.py'}:always]"
    with pytest.raises(TrainingError, match=r"stopped by reward.check: stop: every answer earns 1"):
        train(tmp_path, constant, "reward.check=stop")
    assert not (path_of(tmp_path) / "metrics.jsonl").exists()


@pytest.mark.full
def test_nothing_to_learn_in_the_first_batch_stops_a_run_that_solves_no_problem(tmp_path):
    dull = ("gconfig.max_new_tokens=2", "on_alarm=stop")
    with pytest.raises(TrainingError, match=r"at step 1: nothing was learnt .* every completion was truncated"):
        train(tmp_path, *dull)
    assert checkpoint.steps(path_of(tmp_path) / "checkpoints") == [1]

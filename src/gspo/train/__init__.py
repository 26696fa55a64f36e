"""Training: `Trainer(config, reward=…, dataset=…, workflow=…).train()`."""

from typing import TYPE_CHECKING, Any

from gspo.system import face, wait_without_spinning

if TYPE_CHECKING:
    # fmt: off
    from gspo.train import opening, trainer
    from gspo.train.build.data import (
        answer_markers, default_rewards, make_data, make_rewards, refuse_images, refuse_long_prompts, reward_specs,
        scores_answers,
    )
    from gspo.train.build.given import find_environment
    from gspo.train.build.learner import (
        alphabet_warning, assembly, context_length, device_and_dtype, limit_context, load_policy, make_credit,
        make_plan, make_policy, make_reader, make_tokenizer, narrowest_clip, published_dtype, set_threads,
        set_trained_part, whole_model, with_tower,
    )
    from gspo.train.build.rollout import (
        decoder, evaluation_params, local_sampler, make_sampler, sampler_dtype, sampling_params, sends_adapter,
        weights_for,
    )
    from gspo.train.commands import evaluate_run, export, preview, score_figures
    from gspo.train.evaluate import FIRST, first_reward
    from gspo.train.loop import Leader
    from gspo.train.trainer import Summary, Trainer, is_launched, run
    # fmt: on

_of_this_room = face(__name__)


def __getattr__(name: str) -> Any:
    wait_without_spinning()  # before torch is imported
    return _of_this_room(name)

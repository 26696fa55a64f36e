"""From scored groups to new weights."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.learner.credit import (
        Batch, Credit, Shaping, batch_with_advantages, is_flat, with_teacher_advantages, with_token_advantages,
    )
    from gspo.learner.critic import Critic, ValueModule, critic_metrics, token_values, train_critic
    from gspo.learner.optim import learning_rate, make_optimizer
    from gspo.learner.policy import HEAD_CHUNK
    from gspo.learner.policy.head import ChunkedHead, HeadForm, Targets
    from gspo.learner.policy.module import PolicyModule, packed_parts, recompute_gated_products, weight_names
    from gspo.learner.policy.packing import (
        Completion, PackItem, by_sequence, filler, gather, micro_batches, split_over_ranks,
    )
    from gspo.learner.policy.probe import LOGP_TOLERANCE, WORDS, image_prompts, probe
    from gspo.learner.policy.sharding import copy_into, full, full_parameters, like, shard, whole
    from gspo.learner.proximal import (
        AutoClip, Noise, ProximalSource, choose_proximal_source, clip_range, judge_noise, next_eps, noise_message,
        noise_of,
    )
    from gspo.learner.reference import Reference, Teacher, reference_logp, served_teacher
    from gspo.learner.step import Learner, Plan, StepReport, next_coefficient, train_step
    from gspo.learner.world import ALONE, Command, World, joined
    # fmt: on

__getattr__ = face(__name__)

"""Lint rules for the other models: the reference policy of the KL terms, and the critic."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.layout import layout_of
from gspo.lint.facts import Facts, Finding, rule
from gspo.system.text import number


@rule
def kl_without_reference(f: Facts) -> Iterator[Finding]:
    for key, coefficient in (("actor.kl_loss_coef", f.actor.kl_loss_coef), ("actor.kl_ctl", f.actor.kl_ctl)):
        if coefficient > 0 and f.config.ref is None:
            yield f.error(
                key,
                f"a KL coefficient of {number(coefficient)} needs a reference policy, but ref is null",
                f"add a ref section (ref.path={f.actor.path}), or set {key}: 0",
            )


@rule
def kl_counted_twice(f: Facts) -> Iterator[Finding]:
    if f.actor.kl_loss_coef > 0 and f.actor.kl_ctl > 0:
        yield f.warn(
            "actor.kl_ctl",
            "the KL to the reference counts twice: in the reward and in the loss",
            "set one of actor.kl_ctl and actor.kl_loss_coef to 0",
        )


@rule
def k1_in_the_loss(f: Facts) -> Iterator[Finding]:
    if f.actor.kl_loss_coef > 0 and f.actor.kl_estimator == "k1":
        yield f.warn(
            "actor.kl_estimator",
            "the gradient of k1 in the loss is 0 on average, so it does not keep the policy near the reference",
            "set actor.kl_estimator: k3 (the default in the loss) or k2, or use actor.kl_ctl, where k1 is correct",
        )


@rule
def kl_reward_averaged_over_a_sequence(f: Facts) -> Iterator[Finding]:
    if f.objective["level"] == "sequence" and f.actor.kl_ctl > 0:
        yield f.warn(
            "actor.kl_ctl",
            "a KL penalty in the reward differs from token to token, but one ratio per sequence uses its mean",
            "set algorithm: gspo_token, which keeps per-token advantages, or use actor.kl_loss_coef instead",
        )


@rule
def distillation_without_a_teacher(f: Facts) -> Iterator[Finding]:
    if f.objective["advantage"] == "teacher" and not (f.config.teacher and f.config.teacher.path):
        yield f.error(
            "algorithm",
            "distill needs a teacher, but teacher.path is not set",
            "set teacher.path to a model with the policy's vocabulary, or choose algorithm: gspo",
        )


@rule
def teacher_without_distillation(f: Facts) -> Iterator[Finding]:
    if f.objective["advantage"] != "teacher" and f.config.teacher is not None:
        yield f.error(
            "teacher",
            f"{f.objective['name']} does not use a teacher",
            "choose algorithm: distill, or remove the teacher section",
        )


@rule
def exact_kl_on_several_ranks(f: Facts) -> Iterator[Finding]:
    teacher = f.config.teacher
    if teacher is not None and teacher.exact_kl is not None and layout_of(f.config, f.num_gpus).ranks > 1:
        yield f.error(
            "teacher.exact_kl",
            "the exact KL needs the whole heads of both models in one rank, and several ranks train",
            "remove teacher.exact_kl, or set actor.backend: fsdp:d1",
        )


@rule
def server_as_teacher(f: Facts) -> Iterator[Finding]:
    """A server scores tokens at temperature 1, over the whole vocabulary."""
    teacher, generation = f.config.teacher, f.config.gconfig
    if teacher is None or not teacher.is_server:
        return
    if teacher.exact_kl is not None:
        yield f.error(
            "teacher.exact_kl",
            f"the exact KL needs the teacher's weights in the trainer, and {teacher.path} is a server",
            "remove teacher.exact_kl, or set teacher.path to a model",
        )
    if generation.temperature != 1 or f.truncations:
        key = "temperature" if generation.temperature != 1 else f.truncations[0]
        yield f.error(
            f"gconfig.{key}",
            f"a teacher on a server scores tokens at temperature 1 over the whole vocabulary, but gconfig.{key} is "
            f"{number(getattr(generation, key))}",
            f"remove gconfig.{key}, or set teacher.path to a model, which is loaded in the trainer",
        )


@rule
def gae_without_critic(f: Facts) -> Iterator[Finding]:
    if f.objective["advantage"] == "gae" and f.config.critic is None:
        yield f.error(
            "algorithm",
            f"{f.objective['name']} computes advantages from a value model, but critic is null",
            f"add a critic section (critic.path={f.actor.path}), or choose algorithm: gspo",
        )


@rule
def critic_without_gae(f: Facts) -> Iterator[Finding]:
    if f.objective["advantage"] != "gae" and f.config.critic is not None:
        yield f.warn(
            "critic",
            f"{f.objective['name']} computes advantages from the group, so the critic is never used",
            "remove the critic section, or choose algorithm: ppo",
        )

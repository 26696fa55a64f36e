"""`ref`, `teacher` and `critic`: the reference model, the teacher of distillation and the value model."""

from __future__ import annotations

from gspo.config.schema.key import Section, key


class ReferenceSection(Section):
    path: str | None = key(None, "Reference model.", unset="actor.path")


class TeacherSection(Section):
    path: str = key(
        "",
        "Teacher of algorithm distill, with the policy's vocabulary: as in actor.path, a LoRA adapter, or the address "
        "of a server that scores tokens (http://HOST:PORT, vLLM: http://HOST:PORT/v1); required.",
    )
    coef: float = key(1.0, "Weight of the teacher beside a reward (reward.functions).", above=0.0)
    exact_kl: float | None = key(
        None,
        "Exact KL over the vocabulary at trained tokens as a loss, instead of the sampled tokens' log-ratio as an "
        "advantage: 0 is the reverse KL(π_θ‖teacher), 1 the forward KL(teacher‖π_θ), between them their mixture.",
        low=0.0,
        high=1.0,
    )

    @property
    def is_server(self) -> bool:
        return self.path.startswith(("http://", "https://"))


class CriticOptimizer(Section):
    lr: float | None = key(
        None, "Learning rate of the critic; everything else is as in actor.optimizer.", unset="1e-5", low=0.0
    )


class CriticSection(Section):
    path: str | None = key(None, "Value model.", unset="actor.path with a new value head")
    optimizer: CriticOptimizer = key(CriticOptimizer, "Optimizer of the critic.")
    value_eps_clip: float = key(0.2, "Clip range of the value.", above=0.0)

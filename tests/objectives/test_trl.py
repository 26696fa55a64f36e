"""Our losses against TRL's: its trainer's own code, run on a tiny model, is the other opinion.

Nothing of TRL's loss is typed here again. A real `GRPOTrainer` gets constructed batches (left-padded prompts, uneven
completions, masked spans, an empty completion) and a proximal policy far enough away that both sides clip.

TRL spreads an update over micro-batches and normalises each one so that their sum is right. Our one `denominator` for
the whole update says the same: sequences, tokens or sequences × length of all micro-batches together.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", reason="the comparison with TRL's own loss needs the test extra: pip install .[test]")

from datasets import Dataset  # noqa: E402
from transformers import Qwen3ForCausalLM, TrainerCallback  # noqa: E402
from trl_runs import PLAIN, VOCAB, tiny_model, tiny_tokenizer  # noqa: E402

from gspo import objectives  # noqa: E402
from gspo.audit.trl import from_trl  # noqa: E402
from gspo.objectives import surrogate  # noqa: E402

LENGTHS = (7, 3, 9, 1, 6, 8, 2, 5)
PROMPT_LENGTHS = (4, 2, 3, 1, 4, 2, 3, 4)
# Both signs of A meet ratios below, inside and above the band (in units of ε); A = 0 stands below it, unclipped.
ADVANTAGES = (1.3, -0.7, 0.4, -1.1, 0.9, -0.2, 0.0, -1.6)
SHIFTS = (2.0, 2.0, -2.0, -2.0, 0.5, -0.5, -2.0, 3.0)
MAX_NEW_TOKENS = 11
MICRO_BATCHES = 4
PPO, GSPO = (0.2, 0.28), (3e-4, 4e-4)

# TRL announces changes of its own interface this way; they are not what these tests judge.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.run]


class Pair(NamedTuple):
    """One loss under its two names."""

    loss_type: str
    level: str
    name: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.loss_type}-{self.level}-is-{self.name}"


PAIRS = [
    Pair("grpo", "token", "grpo", {}),
    Pair("grpo", "sequence", "gspo", {}),
    Pair("grpo", "sequence", "gspo_token", {}),  # TRL has no sequence_token; with one A per sequence they are equal
    Pair("dr_grpo", "token", "dr_grpo", {}),
    Pair("dr_grpo", "sequence", "dr_grpo", {"level": "sequence"}),
    Pair("dapo", "token", "dapo", {}),
    Pair("dapo", "sequence", "dapo", {"level": "sequence"}),
    Pair("luspo", "token", "luspo", {"level": "token"}),
    Pair("luspo", "sequence", "luspo", {}),
    Pair("cispo", "token", "cispo", {}),
    Pair("cispo", "sequence", "cispo", {"level": "sequence"}),
    Pair("sapo", "token", "sapo", {}),
    Pair("sapo", "sequence", "sapo", {"level": "sequence"}),
]
CLIPPED_PAIRS = [pair for pair in PAIRS if pair.loss_type in ("grpo", "dr_grpo", "dapo", "luspo")]
# Each of both levels once; how losses are summed does not matter to who is clipped.
LEVEL_PAIRS = PAIRS[:3]
# Each loss once, as its preset has it.
PRESET_PAIRS = [pair for pair in PAIRS if not pair.settings]


@dataclasses.dataclass
class Batch:
    """Tensors of a micro-batch in our words."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    mask: Tensor
    advantage: Tensor
    proximal_logp: Tensor
    reference_logp: Tensor

    def for_trl(self, num_tokens: int) -> dict[str, Tensor]:
        """In TRL's words. `num_tokens` counts the trained tokens of the whole update."""
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "tool_mask": self.mask,
            "advantages": self.advantage,
            "old_per_token_logps": self.proximal_logp,
            "ref_per_token_logps": self.reference_logp,
            "num_items_in_batch": torch.tensor(num_tokens),
        }

    @classmethod
    def from_trl(cls, micro_batches: list[dict[str, Tensor]]) -> Batch:
        names = (
            "prompt_ids",
            "prompt_mask",
            "completion_ids",
            "completion_mask",
            "tool_mask",
            "advantages",
            "old_per_token_logps",
            "ref_per_token_logps",
        )
        return cls(*(torch.cat([micro_batch[name] for micro_batch in micro_batches]) for name in names))


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer reports its construction to huggingface.co; the environment is only read at the first import."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model on disk: with a KL term TRL loads its reference from the policy's path."""
    path = str(tmp_path_factory.mktemp("tiny"))
    tiny_model().save_pretrained(path)
    return path


def make_trainer(checkpoint: str, pair: Pair, trainer_class: type[Any] = trl.GRPOTrainer, **settings: Any) -> Any:
    """A GRPOTrainer on a float64 copy of the model. Its data and reward only satisfy the constructor."""
    settings = (
        {
            "loss_type": pair.loss_type,
            "importance_sampling_level": pair.level,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "num_generations": 8,
            "max_completion_length": MAX_NEW_TOKENS,
            # DeepSeek-V3.2's KL, weighted by the ratio, is TRL's default; ours is the plain k3.
            "use_bias_correction_kl": False,
            "output_dir": checkpoint + "-output",
            "logging_strategy": "no",
        }
        | PLAIN
        | settings
    )
    trainer = trainer_class(
        model=Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 8),
        processing_class=tiny_tokenizer(),
    )
    # The training loop sets it before each update.
    trainer.current_gradient_accumulation_steps = settings["gradient_accumulation_steps"]
    trainer.model.train()
    return trainer


def make_batch(model: Any, scale: float, *, empty: bool = True, seed: int = 0) -> Batch:
    """Completions whose token ratios scatter widely and whose sequence ratios stand at SHIFTS × scale."""
    generator = torch.Generator().manual_seed(seed)
    size, longest, prompt = len(LENGTHS), max(LENGTHS), max(PROMPT_LENGTHS)
    lengths = torch.tensor(LENGTHS)
    completion_mask = (torch.arange(longest) < lengths.unsqueeze(-1)).long()
    if empty:
        completion_mask[1] = 0  # as TRL's mask_truncated_completions does
    mask = completion_mask.clone()
    mask[2, 3:6] = 0  # a tool's answer inside the completion
    prompt_mask = (torch.arange(prompt) >= prompt - torch.tensor(PROMPT_LENGTHS).unsqueeze(-1)).long()
    batch = Batch(
        prompt_ids=torch.randint(3, VOCAB, (size, prompt), generator=generator),
        prompt_mask=prompt_mask,
        completion_ids=torch.randint(3, VOCAB, (size, longest), generator=generator),
        completion_mask=completion_mask,
        mask=mask,
        advantage=torch.tensor(ADVANTAGES, dtype=torch.float64),
        proximal_logp=torch.zeros(size, longest, dtype=torch.float64),
        reference_logp=torch.zeros(size, longest, dtype=torch.float64),
    )
    logp = float64_logp(model, batch).detach()
    noise = torch.randn(2, size, longest, generator=generator, dtype=torch.float64)
    mean = (noise[0] * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    log_ratio = 0.4 * (noise[0] - mean.unsqueeze(-1)) + scale * torch.tensor(SHIFTS).unsqueeze(-1)
    # What stands at masked tokens must not matter, to either of us.
    batch.proximal_logp = torch.where(mask == 1, logp - log_ratio, 0.7)
    batch.reference_logp = torch.where(mask == 1, logp + 0.5 * noise[1], -0.3)
    return batch


def scores(model: Any, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """log π and logits for each next token, in float64, by a plain forward."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1), logits


def in_float64(model: Any) -> Any:
    """The model as TRL calls it, but for its fused head, which computes log-probs in float32 whatever the model is."""

    def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, fused_lm_head: bool) -> SimpleNamespace:
        logp, logits = scores(model, input_ids, attention_mask)
        ignored = labels[:, 1:] == -100
        return SimpleNamespace(
            log_probs=logp.masked_fill(ignored, 0), entropy=surrogate.entropy(logits).masked_fill(ignored, 0)
        )

    return forward


def float64_logp(model: Any, batch: Batch) -> Tensor:
    return scores(model, *model_inputs(batch))[0][:, -batch.mask.shape[1] :]


def trl_logp(trainer: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the completions through TRL's own float32 head."""
    logp, entropy, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, *model_inputs(batch), batch.mask.shape[1], compute_entropy=True
    )
    return logp, entropy


def model_inputs(batch: Batch) -> tuple[Tensor, Tensor]:
    input_ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    return input_ids, torch.cat([batch.prompt_mask, batch.completion_mask], 1)


def gate_settings(pair: Pair, clip: tuple[float, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the pair's gate in TRL's words and in ours."""
    if pair.loss_type == "cispo":
        # TRL bounds the weight by epsilon_high itself, not by 1 + epsilon_high.
        weight_max = 1 + clip[1]
        return {"epsilon_high": weight_max}, {"weight_max": weight_max}
    if pair.loss_type == "sapo":
        # TRL holds the temperatures in float32; these are exact there.
        return (
            {"sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.375},
            {"tau_pos": 0.75, "tau_neg": 1.375},
        )
    return {"epsilon": clip[0], "epsilon_high": clip[1]}, {"clip_low": clip[0], "clip_high": clip[1]}


def our_loss(
    pair: Pair,
    logp: Tensor,
    batch: Batch,
    settings: dict[str, Any],
    num_tokens: int = 1,
    denominator: float | None = None,
) -> objectives.Objective:
    """Our loss; by default of one of MICRO_BATCHES equal micro-batches of an update that holds `num_tokens`."""
    if denominator is None:
        denominator = objectives.denominator(
            pair.name,
            num_sequences=MICRO_BATCHES * len(batch.mask),
            num_tokens=num_tokens,
            max_new_tokens=MAX_NEW_TOKENS,
        )
    return objectives.loss(
        pair.name,
        logp,
        batch.proximal_logp.to(logp.dtype),
        batch.advantage,
        batch.mask,
        reference_logp=batch.reference_logp.to(logp.dtype),
        denominator=denominator,
        **pair.settings,
        **settings,
    )


def assert_same(ours: Tensor, theirs: Tensor, model: Any, rtol: float) -> None:
    """Equal values, and gradients whose difference is small beside the gradient of that parameter."""
    assert abs(ours.item() - theirs.item()) <= rtol * max(abs(theirs.item()), 1e-2)
    named = dict(model.named_parameters())
    our_grads = torch.autograd.grad(ours, list(named.values()))
    their_grads = torch.autograd.grad(theirs, list(named.values()))
    for name, our_grad, their_grad in zip(named, our_grads, their_grads, strict=True):
        assert their_grad.norm() > 1e-8, f"{name} has no gradient to compare"
        assert (our_grad - their_grad).norm() <= rtol * their_grad.norm(), name


def compare(trainer: Any, pair: Pair, batch: Batch, settings: dict[str, Any]) -> objectives.Objective:
    """Both losses on one micro-batch, in float64 and through TRL's own float32 head; our float64 one is returned."""
    num_tokens = 3 * int(batch.mask.sum())  # the other micro-batches hold other numbers of tokens than this one
    inputs = batch.for_trl(num_tokens)

    expected = trainer.compute_loss(in_float64(trainer.model), inputs)
    assert expected.dtype == torch.float64
    objective = our_loss(pair, float64_logp(trainer.model, batch), batch, settings, num_tokens)
    assert_same(objective.loss, expected, trainer.model, rtol=1e-12)

    # Here both see the same float32 log-probs; what remains is float32's rounding of ratios and sums.
    expected = trainer.compute_loss(trainer.model, inputs)
    rounded = our_loss(pair, trl_logp(trainer, batch)[0], batch, settings, num_tokens)
    assert rounded.loss.dtype == torch.float32
    assert_same(rounded.loss, expected, trainer.model, rtol=1e-5)
    return objective


@pytest.mark.parametrize(
    ("clip", "kl_coef"), [(PPO, 0.0), (GSPO, 0.0), (PPO, 0.05)], ids=["ppo-clip", "gspo-clip", "ppo-clip-kl"]
)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_loss_and_gradients_are_those_of_trl(
    checkpoint: str, pair: Pair, clip: tuple[float, float], kl_coef: float
) -> None:
    theirs, ours = gate_settings(pair, clip)
    trainer = make_trainer(checkpoint, pair, beta=kl_coef, **theirs)
    batch = make_batch(trainer.model, clip[1])
    objective = compare(trainer, pair, batch, ours | {"kl_coef": kl_coef})
    if pair in CLIPPED_PAIRS:
        low, high = objective.stats["clipped_low"].sum(), objective.stats["clipped_high"].sum()
        assert low > 0
        assert high > 0
        assert low + high < batch.mask.sum()
    if pair.loss_type == "cispo":
        assert objective.clipped[batch.mask == 1].any()


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.level == "token"], ids=str)
def test_advantages_per_token_are_used_as_trl_does(checkpoint: str, pair: Pair) -> None:
    # Only for token ratios: with a sequence ratio TRL lets every A_it act on the whole s_i, and clips it by its own
    # sign, which is neither our gspo (mean of A_it) nor gspo_token (A_it acts on its own token's gradient).
    theirs, ours = gate_settings(pair, PPO)
    trainer = make_trainer(checkpoint, pair, **theirs)
    batch = make_batch(trainer.model, PPO[1])
    generator = torch.Generator().manual_seed(1)
    batch.advantage = torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
    compare(trainer, pair, batch, ours)


@pytest.mark.parametrize("pair", LEVEL_PAIRS, ids=str)
def test_trls_delta_below_the_band_is_also_the_upper_bound_of_positive_advantages(checkpoint: str, pair: Pair) -> None:
    """What docs/migrating says of `delta`, and what `gspo audit` translates: actor.eps_clip_higher is delta − 1."""
    delta = 1.1
    theirs, ours = gate_settings(pair, PPO)
    draft = from_trl({"epsilon": PPO[0], "epsilon_high": PPO[1], "delta": delta, "loss_type": "grpo"}, "args")
    assert draft.keys["actor.eps_clip_higher"] == pytest.approx(delta - 1)
    assert draft.keys["actor.c_clip"] == 1 + PPO[1]
    trainer = make_trainer(checkpoint, pair, delta=delta, **theirs)
    batch = make_batch(trainer.model, PPO[1])
    narrowed = {"clip_high": draft.keys["actor.eps_clip_higher"], "dual_clip": draft.keys["actor.c_clip"]}
    objective = compare(trainer, pair, batch, ours | narrowed)
    plain = our_loss(pair, float64_logp(trainer.model, batch), batch, ours | {"dual_clip": delta}, 1)
    assert not torch.allclose(objective.per_sequence, plain.per_sequence)


@pytest.mark.parametrize("pair", LEVEL_PAIRS, ids=str)
def test_dual_clip_is_trls_delta_above_the_band(checkpoint: str, pair: Pair) -> None:
    # TRL bounds the unclipped ratio of both signs of A by delta. For delta ≥ 1 + ε_high only A < 0 can notice, and it
    # is the dual clip; below that delta would also tighten the band of A > 0, which the dual clip never does.
    delta = 1.4
    theirs, ours = gate_settings(pair, PPO)
    trainer = make_trainer(checkpoint, pair, delta=delta, **theirs)
    batch = make_batch(trainer.model, PPO[1])
    objective = compare(trainer, pair, batch, ours | {"dual_clip": delta})
    without = our_loss(pair, float64_logp(trainer.model, batch), batch, ours, 1)
    assert (objective.per_sequence < without.per_sequence - 0.1).any(), "delta bounded nothing"


@pytest.mark.parametrize("clip", [PPO, GSPO], ids=["ppo-clip", "gspo-clip"])
@pytest.mark.parametrize("pair", LEVEL_PAIRS, ids=str)
def test_clip_fractions_kl_and_entropy_are_the_metrics_of_trl(
    checkpoint: str, pair: Pair, clip: tuple[float, float]
) -> None:
    theirs, ours = gate_settings(pair, clip)
    trainer = make_trainer(checkpoint, pair, beta=0.05, **theirs)
    # No empty completion: TRL counts it among its sequences, we count only those that are trained.
    batch = make_batch(trainer.model, clip[1], empty=False)
    trainer.compute_loss(trainer.model, batch.for_trl(int(batch.mask.sum())))
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}

    logp, _ = trl_logp(trainer, batch)
    stats = our_loss(pair, logp, batch, ours | {"kl_coef": 0.05}, 1).stats
    # TRL counts tokens or sequences by its level, under one name; we count both.
    unit = "sequences" if pair.level == "sequence" else "tokens"
    fractions = surrogate.clip_fractions(stats)
    assert metrics["clip_ratio/low_mean"] > 0
    assert metrics["clip_ratio/high_mean"] > 0
    assert fractions[f"{unit}_low"].item() == pytest.approx(metrics["clip_ratio/low_mean"], rel=1e-6)
    assert fractions[f"{unit}_high"].item() == pytest.approx(metrics["clip_ratio/high_mean"], rel=1e-6)
    assert fractions[unit].item() == pytest.approx(metrics["clip_ratio/region_mean"], rel=1e-6)

    num_tokens = batch.mask.sum()
    assert ((stats["kl"] * stats["num_tokens"]).sum() / num_tokens).item() == pytest.approx(metrics["kl"], rel=1e-5)
    logits = scores(trainer.model, *model_inputs(batch))[1][:, -batch.mask.shape[1] :]
    entropy = (surrogate.entropy(logits) * batch.mask).sum() / num_tokens
    assert entropy.item() == pytest.approx(metrics["entropy"], rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cispo_weights_bounded_for_positive_advantages_are_the_metric_of_trl(checkpoint: str, level: str) -> None:
    pair = next(pair for pair in PAIRS if pair.loss_type == "cispo" and pair.level == level)
    theirs, ours = gate_settings(pair, PPO)
    trainer = make_trainer(checkpoint, pair, **theirs)
    batch = make_batch(trainer.model, PPO[1], empty=False)
    trainer.compute_loss(trainer.model, batch.for_trl(1))
    bounded = our_loss(pair, trl_logp(trainer, batch)[0], batch, ours, 1).clipped & (batch.mask == 1)
    # The weight is bounded whatever the sign of A; TRL's metric counts A > 0 only.
    counted = bounded & (batch.advantage > 0).unsqueeze(-1)
    assert 0 < counted.sum() < bounded.sum()
    share = counted.sum() / batch.mask.sum() if level == "token" else counted.any(-1).double().mean()
    assert share.item() == pytest.approx(trainer._metrics["train"]["cispo_clip_ratio"][-1], rel=1e-6)


class OnGivenBatch(trl.GRPOTrainer):
    """TRL's training loop over a batch that is given instead of generated, keeping what each micro-batch held."""

    given: dict[str, Tensor]
    seen: list[dict[str, Tensor]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self.given)

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


class KeepGradients(TrainerCallback):
    """The gradient of each optimizer update, as the optimizer meets it."""

    def __init__(self) -> None:
        self.updates: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.updates.append([p.grad.clone() for p in model.parameters()])


@pytest.mark.parametrize("pair", PRESET_PAIRS, ids=str)
def test_one_denominator_gives_the_gradients_of_trls_accumulating_training_loop(checkpoint: str, pair: Pair) -> None:
    theirs, ours = gate_settings(pair, PPO)
    # One rollout batch of 8 sequences: 2 updates of 2 micro-batches of 2 sequences, at constant weights.
    micro_batches, updates = 2, 2
    trainer = make_trainer(
        checkpoint,
        pair,
        OnGivenBatch,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches * updates,
        max_steps=updates,
        learning_rate=0.0,
        max_grad_norm=0.0,
        beta=0.05,
        **theirs,
    )
    batch = make_batch(trainer.model, PPO[1])
    total_tokens = int(batch.mask.sum())
    trainer.given, trainer.seen = batch.for_trl(total_tokens), []
    gradients = KeepGradients()
    trainer.add_callback(gradients)
    trainer.train()
    assert len(gradients.updates) == updates
    assert len(trainer.seen) == micro_batches * updates

    for i, expected in enumerate(gradients.updates):
        update = Batch.from_trl(trainer.seen[i * micro_batches : (i + 1) * micro_batches])
        num_tokens = int(update.mask.sum())
        assert num_tokens != total_tokens / updates
        denominator = objectives.denominator(
            pair.name,
            num_sequences=len(update.mask),
            # Ours is the number of tokens in the update. TRL takes the mean over the rollout batch's updates, so that
            # tokens of an update with short completions count less than its own token mean would have them.
            num_tokens=total_tokens / updates,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        # One call over the whole update: how it is split into micro-batches must not matter.
        logp, _ = trl_logp(trainer, update)
        objective = our_loss(pair, logp, update, ours | {"kl_coef": 0.05}, denominator=denominator)
        actual = torch.autograd.grad(objective.loss, list(trainer.model.parameters()))
        for ours_grad, trl_grad in zip(actual, expected, strict=True):
            assert trl_grad.norm() > 1e-8
            assert (ours_grad - trl_grad).norm() <= 1e-5 * trl_grad.norm()

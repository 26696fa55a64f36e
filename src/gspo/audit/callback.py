"""`TRLCallback`: records the ratios of a TRL GRPOTrainer and writes a run directory that `gspo report` opens.

A callback sees no tensors of the loss, so the trainer's three methods that make them are wrapped while it trains:
`_generate_and_score_completions` (texts, rewards; each sequence gets a number), `_compute_loss` (the inputs of a
micro-batch) and `_get_per_token_logps_and_entropies` (log π_θ). The wrapped methods return what TRL's return. A failure
in the audit is printed once and ends the recording, never the training.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainerCallback

from gspo.audit.findings import write_audit
from gspo.audit.trl import CLIPPED, from_trl
from gspo.errors import ConfigError
from gspo.learner import noise_of
from gspo.monitor import noise_metrics, ratio_metrics
from gspo.runs import RunDir
from gspo.system import to_json, versions_and_hardware, write_run_file

Floats = NDArray[np.float64]
Record = Mapping[str, Any]  # one micro-batch: arrays [B] of `FIELDS`, and numbers `update` and `loss`
FIELDS = (
    "index", "log_s", "clipped_low", "clipped_high", "length", "entropy", "noise", "kl_reference", "truncated",
)  # fmt: skip


def columns(records: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """The records of a step as arrays [m]: one entry per sequence and pass, in the order of training."""
    out = {name: np.concatenate([np.asarray(record[name]) for record in records]) for name in FIELDS}
    out["update"] = np.concatenate([np.full(len(record["index"]), record["update"]) for record in records])
    return out


def audit_step_metrics(
    samples: Sequence[Mapping[str, Any]], records: Sequence[Record], *, group_size: int, clips: bool, with_kl: bool
) -> dict[str, Any]:
    """Metrics of a step. `samples`: prompt, reward, advantage … of its rollout batch, groups one after another."""
    rewards = np.array([_number(sample["reward"]) for sample in samples])  # [n]
    advantages = np.array([_number(sample["advantage"]) for sample in samples])
    equal = equal_groups(rewards, group_size)
    scored = rewards[np.isfinite(rewards)]
    out: dict[str, Any] = {
        "reward/mean": float(scored.mean()) if len(scored) else None,
        "reward/std": float(scored.std()) if len(scored) else None,
        "reward/zero_variance_groups": float(equal.mean()) if len(equal) else None,
        "reward/failures": int((~np.isfinite(rewards)).sum()),
        **_parts(samples),
    }
    if not records:
        return out
    seen = columns(records)
    index, lengths = seen["index"], seen["length"]
    # Sequences of groups with equal rewards give no gradient; only with a KL term do they count as trained.
    learns = ~np.repeat(equal, group_size)[index] & (advantages[index] != 0)
    entered = np.isfinite(seen["log_s"]) & (learns | with_kl)
    first = seen["update"] == 0
    later = entered & (~first if seen["update"].max(initial=0) > 0 else True)
    arrays = (seen[name][later] for name in ("log_s", "clipped_low", "clipped_high", "length"))
    out |= ratio_metrics(*arrays)
    if not clips:
        out |= dict.fromkeys(("clip/sequences_low", "clip/sequences_high", "clip/tokens"))
    opening = np.abs(seen["log_s"][first & entered])
    once = np.unique(index, return_index=True)[1]  # one entry per sequence
    clipped = np.nan_to_num(seen["clipped_low"] + seen["clipped_high"]) > 0
    out |= {
        "ratio/first_minibatch_max_abs": float(opening.max()) if len(opening) else None,
        **noise_metrics(noise_of(seen["noise"][once], lengths[once])),
        "policy/entropy": _weighted(seen["entropy"], lengths),
        "length/mean": float(lengths[once].mean()),
        "length/max": int(lengths[once].max()),
        "length/clipped_mean": float(lengths[clipped].mean()) if clipped.any() else None,
        "length/truncated": float(seen["truncated"][once].mean()),
    }
    if with_kl:
        out["policy/kl_reference"] = _weighted(seen["kl_reference"], lengths)
    losses = [sum(r["loss"] for r in records if r["update"] == update) for update in np.unique(seen["update"])]
    return out | {"loss/mean": float(np.mean(losses))}


def equal_groups(rewards: Floats, group_size: int) -> NDArray[np.bool_]:
    """[groups] True where the rewards of a group are equal (up to rounding) or missing.

    >>> equal_groups(np.array([0.1, 0.1, 0.0, 1.0]), 2).tolist()
    [True, False]
    """
    groups = rewards[: len(rewards) // group_size * group_size].reshape(-1, group_size)
    spread = np.nan_to_num(groups.max(1) - groups.min(1)) if groups.size else np.zeros(len(groups))
    return spread <= 1e-6 * np.maximum(1.0, np.nan_to_num(np.abs(groups)).max(1, initial=0.0))


def audit_sample_rows(
    step: int, samples: Sequence[Mapping[str, Any]], records: Sequence[Record], group_size: int, clips: bool
) -> list[dict[str, Any]]:
    """Rows of samples/step_*.jsonl; ratios are those of a sequence's last pass."""
    last: dict[int, dict[str, Any]] = {}
    seen = columns(records) if records else {}
    for at, index in enumerate(seen["index"].tolist() if seen else ()):
        last[index] = {name: values[at] for name, values in seen.items()}
    rows = []
    for number, sample in enumerate(samples):
        at = last.get(number, {})
        clipped = at.get("clipped_low", np.nan) + at.get("clipped_high", np.nan)
        rows.append(
            {
                "step": step,
                "sequence": number,
                "submission": (step - 1) * (len(samples) // group_size) + number // group_size,
                "sample": number % group_size,
                **sample,
                "failure": None if np.isfinite(_number(sample["reward"])) else "no reward function gave a value",
                "length": int(at["length"]) if at else None,
                "finish": ("length" if at["truncated"] else "stop") if at else None,
                "log_s": at.get("log_s"),
                "clipped": bool(clipped > 0) if clips and np.isfinite(clipped) else None,
                "minibatch": int(at["update"]) if at else None,
                "version": step - 1,
                "oldest_version": step - 1,
                "pieces": None,
            }
        )
    return rows


def text_of(message: Any) -> str:
    """A prompt or completion as text: a string, or the messages of a conversation.

    >>> text_of([{"role": "user", "content": "2 + 2?"}])
    'user: 2 + 2?'
    """
    if isinstance(message, str):
        return message
    if isinstance(message, Sequence):
        return "\n".join(text_of(part) for part in message)
    if isinstance(message, Mapping):
        content = message.get("content", message.get("text"))
        return f"{message['role']}: {text_of(content)}" if "role" in message else text_of(content)
    return "" if message is None else str(message)


def _parts(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in (sample.get("reward_parts") or {}).items():
            if np.isfinite(number := _number(value)):
                values.setdefault(name, []).append(number)
    return {f"reward/part_{name}": float(np.mean(found)) for name, found in values.items()}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def _weighted(values: Floats, lengths: NDArray[np.int64]) -> float | None:
    """Token mean from per-sequence token means."""
    seen = np.isfinite(values) & (lengths > 0)
    return float((values[seen] * lengths[seen]).sum() / lengths[seen].sum()) if seen.any() else None


INDEX = "gspo_audit_index"  # TRL shuffles and splits every tensor of a rollout batch alike, this one too
HOOKS = ("_generate_and_score_completions", "_compute_loss", "_get_per_token_logps_and_entropies")
NEEDED = (*HOOKS, "_logs", "epsilon_low", "epsilon_high", "importance_sampling_level", "eos_token_ids")
ANSWERS = ("answer", "solution", "ground_truth", "target")  # columns of a row that may hold the reference answer


def check_trainer(trainer: Any) -> str:
    """TRL's version; ConfigError for a trainer or a version that cannot be recorded."""
    import trl

    version = str(trl.__version__)
    if version.partition(".")[0] != "1":
        raise ConfigError(
            f"gspo.audit.TRLCallback reads internals of TRL 1.x (tested with 1.16), but trl {version} is installed; "
            "install trl>=1.16,<2"
        )
    if not isinstance(trainer, trl.GRPOTrainer):  # pyright: ignore[reportPrivateImportUsage]
        raise ConfigError(f"gspo.audit.TRLCallback records a trl.GRPOTrainer, not a {type(trainer).__name__}")
    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"the GRPOTrainer of trl {version} has no {', '.join(missing)}, which gspo.audit.TRLCallback reads; "
            "install trl 1.16"
        )
    return version


class TRLCallback(TrainerCallback):
    """Record log s, clipping and samples of a TRL run: `trainer.add_callback(TRLCallback(trainer, "runs/audit/a"))`.

    The path is a new run directory; a run that resumes from a checkpoint continues its own. A step is one rollout batch
    with all its optimizer updates, as in gspo; TRL's global_step counts updates. With `numbered`, a path that
    holds another run gets a number.
    """

    def __init__(self, trainer: Any, path: str | Path | None = None, *, numbered: bool = False) -> None:
        self.trainer = trainer
        self.version = check_trainer(trainer)
        self.path = Path(path) if path else Path("runs/audit") / Path(trainer.args.output_dir).absolute().name
        self.draft = from_trl(_values(trainer), "GRPOConfig")
        self.numbered = numbered
        # Of gspo.trl.GSPOTrainer with our sampler, π_old is what the sampler computed.
        self.proximal: str = getattr(trainer, "proximal", "recompute")
        self.clips = trainer.loss_type in CLIPPED
        self.run: RunDir | None = None  # on the main process
        self._originals: dict[str, tuple[bool, Callable[..., Any]]] = {}
        self._failed = False
        self._step = 0
        self._logp: tuple[torch.Tensor, torch.Tensor] | None = None  # of the micro-batch in `_compute_loss`
        self._in_loss = False
        self._begin_step()

    def _begin_step(self) -> None:
        self._samples: list[dict[str, Any]] = []
        self._records: list[Record] = []
        self._logged: list[dict[str, float]] = []
        self._update = 0  # optimizer updates since the step began
        self._pending = 0  # micro-batches whose gradient is not yet applied
        self._rollouts = 0
        self._rollout_s = 0.0
        self._started = time.perf_counter()

    # -- called by the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step = state.global_step // self.draft.num_updates
        if self.trainer.accelerator.is_main_process:
            self._open()
        for name in HOOKS:
            self._originals[name] = (name in vars(self.trainer), getattr(self.trainer, name))
        wrappers = (self._generate, self._compute_loss, self._log_probs)
        for name, wrapper in zip(HOOKS, wrappers, strict=True):
            setattr(self.trainer, name, wrapper)
        self._begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._update += 1
        self._pending = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "grad_norm" in logs:
            self._logged.append({name: float(logs[name]) for name in ("grad_norm", "learning_rate") if name in logs})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pending = 0
        self._end_step()
        for name, (own, original) in self._originals.items():
            if own:
                setattr(self.trainer, name, original)
            else:
                delattr(self.trainer, name)
        self._originals = {}
        if self.run is not None:
            self.run.log(f"finished after step {self._step}")
            self.run.close()
            self.run = None

    # -- in place of the trainer's methods

    def _generate(self, inputs: Any) -> Any:
        original = self._originals[HOOKS[0]][1]
        if not self.trainer.model.training:
            return original(inputs)
        self._end_step()
        start = time.perf_counter()
        output = original(inputs)
        self._rollout_s += time.perf_counter() - start
        self._rollouts += 1
        self._guard(lambda: self._take_samples(inputs, output))
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        original = self._originals[HOOKS[1]][1]
        if not self.trainer.model.training:
            return original(model, inputs)
        self._in_loss, self._logp = True, None
        try:
            loss = original(model, inputs)
        finally:
            self._in_loss = False
        self._pending += 1
        self._guard(lambda: self._measure(inputs, loss))
        self._logp = None
        return loss

    def _log_probs(self, *args: Any, **kwargs: Any) -> Any:
        output = self._originals[HOOKS[2]][1](*args, **kwargs)
        if self._in_loss:
            self._logp = output[0].detach(), output[1].detach()
        return output

    # -- recording

    def _guard(self, record: Callable[[], None]) -> None:
        if not self._failed:
            try:
                with torch.no_grad():
                    record()
            except Exception as error:
                self._failed = True
                where = "".join(traceback.format_exception(error)[-2:]).strip()
                message = f"warning: the audit stopped recording after step {self._step}: {where}"
                print(f"gspo: {message}", flush=True)
                if self.run is not None:
                    self.run.log(message)

    def _open(self) -> None:
        resumed = self._step > 0 and (self.path / "audit.json").is_file()
        first = self.path
        for number in itertools.count(2) if self.numbered and not resumed else ():
            if not (self.path / "config.yaml").is_file():
                break
            self.path = first.with_name(f"{first.name}-{number}")
        if (self.path / "config.yaml").is_file() and not resumed:
            raise ConfigError(f"{self.path} already holds a run; pass another path to gspo.audit.TRLCallback")
        self.run = RunDir(self.path)
        self.run.cut_back(self._step)
        unknown = [] if self.trainer.use_vllm or self.proximal == "rollout" else [
            "the error of the sampler's log-probs (noise/): TRL records the sampler's log-probs with vLLM only"
        ]  # fmt: skip
        write_audit(
            self.path, self.draft, version=self.version, source=str(self.trainer.args.output_dir), unknown=unknown
        )
        with write_run_file(self.path / "environment.json") as tmp:
            found = versions_and_hardware(str(self.trainer.accelerator.device), torch.get_num_threads())
            tmp.write_text(to_json(found | {"trl": self.version}) + "\n", encoding="utf-8")

    def _take_samples(self, inputs: Any, output: dict[str, Any]) -> None:
        """Number the sequences of a rollout batch over all processes, and keep texts and rewards."""
        trainer, size = self.trainer, len(output["completion_ids"])
        processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        begin, total = len(self._samples), size * processes
        output[INDEX] = torch.arange(size, device=output["completion_ids"].device) + begin + rank * size
        # TRL has gathered the texts of all processes, in the order of their ranks, and keeps the newest.
        logs = trainer._logs
        prompts, completions, advantages = (
            list(logs[name])[-total:] for name in ("prompt", "completion", "advantages")
        )
        parts = {name: list(values)[-total:] for name, values in logs["rewards"].items()}
        weights = trainer.reward_weights.tolist()
        for at in range(total):
            own = {name: values[at] for name, values in parts.items()}
            scored = [w * v for w, v in zip(weights, own.values(), strict=True) if v is not None and v == v]
            row = inputs[at] if processes == 1 else {}
            self._samples.append(
                {
                    "prompt": text_of(prompts[at]),
                    "completion": text_of(completions[at]),
                    "answer": next((text_of(row[name]) for name in ANSWERS if isinstance(row.get(name), str)), None),
                    "reward": sum(scored) if scored else None,
                    "reward_parts": own,
                    "advantage": advantages[at],
                }
            )

    def _measure(self, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        """The ratios of one micro-batch, in float64. B sequences of up to T tokens."""
        if self._logp is None or INDEX not in inputs:
            return  # a loss that computes no log-probs of its own
        trainer, (logp, entropy) = self.trainer, self._logp
        ids, whole = inputs["completion_ids"], inputs["completion_mask"]  # [B, T]
        mask = (whole * inputs["tool_mask"] if "tool_mask" in inputs else whole).bool()
        lengths = mask.sum(-1)  # [B]
        old = inputs.get("old_per_token_logps")

        def mean(values: torch.Tensor) -> np.ndarray:  # over trained tokens, [B]; NaN for an empty completion
            total = torch.where(mask, values.double(), 0.0).sum(-1)
            return torch.where(lengths > 0, total / lengths.clamp(min=1), torch.nan).cpu().numpy()

        log_ratio = logp.double() - (logp if old is None else old).double()  # [B, T]
        log_s = mean(log_ratio)
        by_token = trainer.importance_sampling_level == "token"
        ratio = (log_ratio if by_token else torch.from_numpy(log_s).to(mask.device).unsqueeze(-1)).exp()
        advantage = inputs["advantages"] if inputs["advantages"].dim() > 1 else inputs["advantages"].unsqueeze(-1)
        low = (ratio < 1 - trainer.epsilon_low) & (advantage < 0) & mask
        high = (ratio > 1 + trainer.epsilon_high) & (advantage > 0) & mask
        noise, sampled = np.full(len(ids), np.nan), inputs.get("sampling_per_token_logps")
        own = logp if old is None or self.proximal == "rollout" else old  # of the trainer
        if sampled is not None and (own is not logp or self._update == 0):
            # At the weights of the start of the batch; vLLM gives NaN for a token that it could not score.
            noise = mean(torch.nan_to_num(own - sampled))
        reference = inputs.get("ref_per_token_logps")
        gap = torch.zeros_like(logp) if reference is None else reference - logp
        last = ids.gather(1, (whole.sum(-1, keepdim=True) - 1).clamp(min=0)).squeeze(1)  # [B]
        ended = torch.isin(last, torch.tensor(list(trainer.eos_token_ids), device=last.device)) & (whole.sum(-1) > 0)
        self._records.append(
            {
                "update": self._update,
                "loss": float(loss.detach()),
                "index": inputs[INDEX].cpu().numpy(),
                "log_s": log_s,
                "clipped_low": low.sum(-1).double().cpu().numpy(),
                "clipped_high": high.sum(-1).double().cpu().numpy(),
                "length": lengths.cpu().numpy(),
                "entropy": mean(entropy),
                "noise": noise,
                "kl_reference": mean(gap.exp() - gap - 1),
                "truncated": ~ended.cpu().numpy(),
            }
        )

    def _end_step(self) -> None:
        """Write the step if TRL samples again and every gradient has been applied. Every process calls this."""
        if not self._rollouts or self._pending:
            return
        self._step += 1
        records: list[Record] = self._records
        processes = self.trainer.accelerator.num_processes
        if processes > 1:
            from accelerate.utils import gather_object

            gathered: list[Record] = gather_object(records)
            gathered = [{**record, "loss": record["loss"] / processes} for record in gathered]
            records = sorted(gathered, key=lambda record: record["update"])
        if self.run is not None:
            self._guard(lambda: self._write(records))
        self._begin_step()

    def _write(self, records: list[Record]) -> None:
        trainer, run, group = self.trainer, self.run, self.trainer.num_generations
        assert run is not None, "the main process has the directory open"
        with_kl = trainer.beta != 0.0
        metrics = audit_step_metrics(self._samples, records, group_size=group, clips=self.clips, with_kl=with_kl)
        seconds = time.perf_counter() - self._started
        norms = [logged["grad_norm"] for logged in self._logged]
        rates = [logged["learning_rate"] for logged in self._logged if "learning_rate" in logged]
        run.samples(self._step, audit_sample_rows(self._step, self._samples, records, group, self.clips), {})
        run.metrics(
            {
                "step": self._step,
                **metrics,
                "clip/eps_low": trainer.epsilon_low if self.clips else None,
                "clip/eps_high": trainer.epsilon_high if self.clips else None,
                "policy/proximal": self.proximal,
                "grad/norm": float(np.mean(norms)) if norms else None,
                "grad/norm_max": max(norms, default=None),
                "optimizer/lr": rates[-1] if rates else None,
                "time/rollout_s": self._rollout_s,
                "time/train_s": seconds - self._rollout_s,
                "time/step_s": seconds,
            }
        )


def _values(trainer: Any) -> dict[str, Any]:
    """The trainer's GRPOConfig with what only the trainer knows."""
    model = getattr(getattr(trainer.model, "config", None), "_name_or_path", "") or "the policy"
    return {**vars(trainer.args), "world_size": trainer.accelerator.num_processes, "model": str(model)}

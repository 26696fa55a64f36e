"""What GSPOTrainer has beside TRL: prompts computed once, masked garbage, settings, fallbacks, reports, our sampler."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="needs the extra trl: pip install .[trl]")

import torch  # noqa: E402
from trl_runs import GROUP, GSPO, make_trainer, rollout, trained  # noqa: E402

from gspo.cli.reports import write_report_of  # noqa: E402
from gspo.errors import ConfigError  # noqa: E402
from gspo.report import Watch, open_run, read_metrics, sample_steps, status_of  # noqa: E402
from gspo.trl import GSPOConfig, GSPOTrainer  # noqa: E402

pytestmark = [
    pytest.mark.run,
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:You are using 'rollout_func'"
    ),
]


def inputs_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The micro-batch that TRL makes of one generation batch."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    batch = [trainer.train_dataset[i // GROUP] for i in range(4 * GROUP)]
    return trainer._generate_and_score_completions(batch)


class Tokens:
    """Tokens that enter the model, and rows of logits, with gradients and without."""

    def __init__(self, model: Any) -> None:
        self.inputs, self.logits = [], []
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: self.inputs.append(args[0].numel()))


def test_a_prompt_is_computed_once_in_policy_old_and_reference_passes(tmp_path):
    trainer = make_trainer(tmp_path, GSPOTrainer, **GSPO, beta=0.1, per_device_train_batch_size=16,
                           gradient_accumulation_steps=1, num_iterations=2)  # fmt: skip
    inputs_of(trainer)  # the probe
    policy, reference = Tokens(trainer.model), Tokens(trainer.ref_model)
    generate = trainer._generate_single_turn
    spent = []

    def generated(*args: Any, **named: Any) -> Any:
        found = generate(*args, **named)
        spent.append(len(policy.inputs))
        return found

    trainer._generate_single_turn = generated
    inputs = inputs_of(trainer)
    trainer._compute_loss(trainer.model, inputs)
    prompts = inputs["prompt_mask"][::GROUP].sum()
    # The last token of a completion is predicted and predicts nothing.
    wanted = int(prompts + (inputs["completion_mask"].sum(-1) - 1).sum())
    assert policy.inputs[spent[0] :] == [wanted, wanted], "old and policy pass"
    assert reference.inputs == [wanted]
    assert wanted < 0.7 * inputs["prompt_mask"].shape[1] * 16 + inputs["completion_ids"].numel()


def test_a_group_stays_together_within_an_update(tmp_path):
    trainer = make_trainer(tmp_path, GSPOTrainer, **GSPO, gradient_accumulation_steps=4)
    data = iter(trainer.get_train_dataloader())
    trainer.model.train()
    first = trainer._prepare_inputs(next(data))
    for batch in trainer._buffered_inputs:
        assert len(torch.unique(batch["prompt_ids"] * batch["prompt_mask"], dim=0)) == 1
    rows = torch.cat([batch["gspo_row"] for batch in trainer._buffered_inputs])
    assert sorted(rows.tolist()) == list(range(16)), "no sequence is lost"
    assert rows.tolist() != list(range(16)), "TRL had shuffled them"
    assert first is trainer._buffered_inputs[0]


def test_nan_and_infinity_at_masked_tokens_change_nothing(tmp_path):
    losses: dict[str, list[float]] = {}
    for trainer_class in (trl.GRPOTrainer, GSPOTrainer):
        settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "num_iterations": 2}
        trainer = make_trainer(tmp_path, trainer_class, **GSPO, **settings, beta=0.1, mask_truncated_completions=True)
        torch.manual_seed(1)
        inputs = inputs_of(trainer)
        masked = inputs["completion_mask"] == 0
        assert masked.any()
        clean = trainer._compute_loss(trainer.model, inputs)
        for name, garbage in (("old_per_token_logps", torch.nan), ("ref_per_token_logps", -torch.inf)):
            inputs[name] = inputs[name].masked_fill(masked, garbage)
        poisoned = trainer._compute_loss(trainer.model, inputs)
        poisoned.backward()
        losses[trainer_class.__name__] = [clean.item(), poisoned.item()]
        finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in trainer.model.parameters())
        assert finite == (trainer_class is GSPOTrainer)
    assert losses["GSPOTrainer"][0] == losses["GSPOTrainer"][1] == pytest.approx(losses["GRPOTrainer"][0], abs=1e-6)
    assert losses["GRPOTrainer"][1] != losses["GRPOTrainer"][1], "TRL's own loss is NaN"


def test_trls_default_bfloat16_and_checkpointing_take_our_path(tmp_path, capsys):
    settings = {**GSPO, "bf16": True, "gradient_checkpointing": True, "max_steps": 1}
    first = [
        trained(tmp_path / trainer_class.__name__, trainer_class, dict(settings)).state.log_history[0]
        for trainer_class in (trl.GRPOTrainer, GSPOTrainer)
    ]
    assert "TRL's own code" not in capsys.readouterr().out
    for name in ("loss", "grad_norm", "entropy"):
        assert first[1][name] == pytest.approx(first[0][name], rel=0.01), name


# -- settings


def config(config_class: Any = trl.GRPOConfig, **settings: Any) -> Any:
    return config_class("out", use_cpu=True, bf16=False, **settings)


def settled_of(args: Any) -> tuple[Any, list[str]]:
    from gspo.trl.config import settled

    said: list[str] = []
    return settled(args, said.append), said


def values(args: Any) -> tuple[Any, ...]:
    return args.importance_sampling_level, args.epsilon, args.epsilon_high, args.loss_type


def test_a_plain_grpo_config_stays_as_it_is():
    for settings in ({}, {"epsilon": 0.1}, {"importance_sampling_level": "sequence", "loss_type": "cispo"}):
        args = config(**settings)
        assert settled_of(args) == (args, [])


def test_sequence_ratios_with_trls_defaults_get_the_papers_range_and_mean_and_one_line():
    given = config(importance_sampling_level="sequence")
    args, said = settled_of(given)
    assert values(args) == ("sequence", 3e-4, 4e-4, "grpo")
    assert values(given) == ("sequence", 0.2, None, "dapo"), "the user's object is not changed"
    assert said == [
        "epsilon=0.0003, epsilon_high=0.0004, loss_type='grpo' (GSPO's) in place of epsilon=0.2, epsilon_high=None, "
        "loss_type='dapo', TRL's defaults for token ratios; to use those with sequence ratios, set them in a "
        "gspo.trl.GSPOConfig"
    ]


def test_what_the_user_has_set_stays():
    args, _ = settled_of(config(importance_sampling_level="sequence", epsilon=1e-3))
    assert values(args) == ("sequence", 1e-3, None, "grpo")
    args, _ = settled_of(config(importance_sampling_level="sequence", loss_type="dr_grpo"))
    assert values(args) == ("sequence", 3e-4, 4e-4, "dr_grpo")
    args = config(GSPOConfig, epsilon=0.2, loss_type="dapo")
    assert settled_of(args) == (args, [])
    assert values(args) == ("sequence", 0.2, None, "dapo")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, ("sequence", 3e-4, 4e-4, "grpo")),
        ({"importance_sampling_level": "token"}, ("token", 0.2, None, "dapo")),
        ({"importance_sampling_level": "sequence_token"}, ("sequence_token", 3e-4, 4e-4, "grpo")),
        ({"objective": "dapo"}, ("sequence", 0.2, 0.28, "grpo")),
    ],
)
def test_a_gspo_config_has_the_defaults_of_its_objective(settings, wanted):
    assert values(config(GSPOConfig, **settings)) == wanted


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="objective must be"):
        config(GSPOConfig, objective="gsop")
    with pytest.raises(ConfigError, match="needs advantages by 'gae'"):
        config(GSPOConfig, objective="ppo")
    with pytest.raises(ConfigError, match="delta: TRL's loss has it"):
        config(GSPOConfig, objective="gspo", delta=2.0)
    with pytest.raises(ConfigError, match="sampler must be one of trl, gspo, got 'vllm'"):
        config(GSPOConfig, sampler="vllm")


# -- objectives


@pytest.mark.parametrize(
    "own",
    [
        {"importance_sampling_level": "sequence_token"},
        pytest.param({"objective": "gspo"}, marks=pytest.mark.full),
        pytest.param({"per_turn": True}, marks=pytest.mark.full),
    ],
)
def test_our_objectives_are_trls_where_they_are_the_same_formula(tmp_path, own):
    # One micro-batch per update: token means of TRL's metrics are those of a micro-batch.
    settings = {**GSPO, "max_steps": 6, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    theirs = trained(tmp_path / "theirs", trl.GRPOTrainer, dict(settings))
    ours = trained(tmp_path / "ours", GSPOTrainer, settings | {"config_class": GSPOConfig} | own)
    for mine, other in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"):
            assert mine[name] == pytest.approx(other[name], abs=1e-6), name
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert (mine - other).detach().abs().max() <= 1e-6


def test_a_function_of_the_user_is_the_loss(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def objective(logp, proximal_logp, token_advantage, eps_clip):\n"
        "    ratio = (logp - proximal_logp).exp()\n"
        "    bounded = ratio.clamp(1 - eps_clip, 1 + eps_clip)\n"
        "    return -torch.minimum(ratio * token_advantage, bounded * token_advantage)\n"
        "import torch\n"
    )
    settings = {"max_steps": 6, "epsilon": 5e-3, "importance_sampling_level": "token"}
    theirs = trained(tmp_path / "theirs", trl.GRPOTrainer, settings)
    ours = trained(
        tmp_path / "ours", GSPOTrainer, settings | {"config_class": GSPOConfig, "objective": f"{file}:objective"}
    )
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert (mine - other).detach().abs().max() <= 1e-6


def test_ratios_per_turn_and_corrections_change_the_loss(tmp_path):
    found = {}
    for name, own in {"whole": {}, "turns": {"per_turn": True}, "correction": {"correction": "tis"}}.items():
        settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "num_iterations": 2}
        trainer = make_trainer(
            tmp_path, GSPOTrainer, GSPOConfig, {"rollout_func": rollout}, **GSPO, **settings, objective="gspo", **own
        )
        torch.manual_seed(1)
        inputs = inputs_of(trainer)
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + 0.01 * torch.randn(
            inputs["completion_ids"].shape
        )
        inputs["gspo_num_tokens"] = inputs["completion_mask"].sum()
        found[name] = trainer._compute_loss(trainer.model, inputs).item()
    assert len(set(found.values())) == 3, found


# -- TRL's own path


REASONS = {
    "vLLM": lambda trainer: setattr(trainer, "use_vllm", True),
    "takes images": lambda trainer: setattr(trainer, "_is_vlm", True),
    "router's auxiliary term": lambda trainer: setattr(trainer, "aux_loss_enabled", True),
    "Liger": lambda trainer: setattr(trainer.args, "use_liger_kernel", True),
    "torch_compile": lambda trainer: setattr(trainer.args, "torch_compile", True),
    "several devices": lambda trainer: setattr(trainer.model, "hf_device_map", {"a": 0, "b": 1}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("plain"), GSPOTrainer, **GSPO)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_for_trls_own_path_is_named(plain, reason, monkeypatch):
    from gspo.trl.internals import why_not

    assert why_not(plain) == ""
    for holder in (plain, plain.args, plain.model):
        for name in ("use_vllm", "_is_vlm", "aux_loss_enabled", "use_liger_kernel", "torch_compile"):
            if name in vars(holder):
                monkeypatch.setattr(holder, name, getattr(holder, name))  # put back afterwards
    monkeypatch.setattr(plain.model, "hf_device_map", {}, raising=False)
    REASONS[reason](plain)
    assert reason in why_not(plain)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_sharded_weights_are_left_to_trl(plain, kind):
    from accelerate.utils import DistributedType

    from gspo.trl.internals import why_not

    state = plain.accelerator.state
    before = state.distributed_type
    state.distributed_type = DistributedType(kind)
    try:
        assert why_not(plain) == f"the weights are sharded ({kind})"
    finally:
        state.distributed_type = before


def gpt2(**settings: Any) -> Any:
    """A model with learned positions, which TRL's left padding shifts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=2, **settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "the model has dropout (transformer.h.0.attn"),
        ({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "log-probs of padded rows differ by"),
    ],
    ids=["dropout", "positions"],
)
def test_trls_own_path_is_taken_with_the_same_numbers_and_said_once(tmp_path, capsys, settings, words):
    runs = [
        trained(tmp_path / name, trainer_class, {**GSPO, "max_steps": 4}, model=gpt2(**settings))
        for name, trainer_class in (("ours", GSPOTrainer), ("theirs", trl.GRPOTrainer))
    ]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gspo: log-probs")]
    assert len(said) == 1
    assert words in said[0]
    for mine, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert (mine - other).detach().abs().max() <= 1e-6


@pytest.mark.parametrize("version", ["1.13.0", "1.15.0", "1.17.0", "2.0.0"])
def test_another_trl_is_an_error_that_names_the_version(version):
    from gspo.trl.internals import check_class

    words = rf"TRL 1\.14 and 1\.16, but trl {version} is installed: install trl>=1\.14,<1\.17,!=1\.15\.\*"
    with pytest.raises(ConfigError, match=words):
        check_class(trl.GRPOTrainer, version)


def test_a_changed_method_is_an_error_that_names_the_version():
    from gspo.trl.internals import check_batches, check_class

    class Changed(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, batch: Any) -> Any: ...

    with pytest.raises(
        ConfigError, match=r"trl 1\.16\.0 has changed GRPOTrainer\._compute_loss: it takes \(self, model, batch\)"
    ):
        check_class(Changed, "1.16.0")
    with pytest.raises(ConfigError, match=r"trl 1\.16\.0 keeps no prompt_mask"):
        check_batches([{"prompt_ids": 1}], 1, "1.16.0")


# -- run directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    return trained(folder, GSPOTrainer, {**GSPO, "max_steps": 4}), folder


def test_the_run_directory_is_read_by_report_watch_compare_and_audit(recorded, tmp_path, capsys):
    from gspo.cli.main import main

    trainer, folder = recorded
    run = folder / "gspo"
    rows = read_metrics(open_run(run))
    assert [row["step"] for row in rows] == [1, 2]
    assert list(sample_steps(run)) == [1, 2]
    assert status_of(run, 2, {}) == "finished"
    assert write_report_of(run).read_text().count('class="samples"') == 2
    logs = {log["step"]: log for log in trainer.state.log_history if "clip_ratio/low_mean" in log}
    for row in rows:
        theirs = logs[2 * row["step"]]
        assert row["clip/sequences_low"] == pytest.approx(theirs["clip_ratio/low_mean"])
        assert row["clip/sequences_high"] == pytest.approx(theirs["clip_ratio/high_mean"])
    assert "TRL differs from the paper" in (run / "audit.json").read_text()
    again = trained(folder, GSPOTrainer, {**GSPO, "max_steps": 2})
    assert again.state.global_step == 2
    assert len(read_metrics(folder / "gspo-2")) == 1, "a run beside the first"
    assert main(["compare", str(run), str(folder / "gspo-2")]) == 0
    assert main(["report", str(run)]) == 0
    watch = Watch(run, lambda _: {}, 0)
    assert b"gspo" in urllib.request.urlopen(watch.address, timeout=20).read()
    watch.close()


# -- our sampler


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.full)])
def test_our_sampler_generates_and_its_log_probs_are_pi_old(tmp_path, lora):
    settings = {**GSPO, "config_class": GSPOConfig, "sampler": "gspo", "max_steps": 4, "lora": lora,
                "generation_kwargs": None}  # fmt: skip
    trained(tmp_path, GSPOTrainer, settings)
    rows = read_metrics(tmp_path / "gspo")
    for row in rows:
        assert row["policy/proximal"] == "rollout"
        assert 0 < row["ratio/first_minibatch_max_abs"] < 1e-5, "the trainer's log-probs are the sampler's"
        assert row["noise/log_s_p95_abs"] < 1e-5
    assert len(rows) == 2
    texts = [
        json.loads(line) for line in (tmp_path / "gspo" / "samples" / "step_000002.jsonl").read_text().splitlines()
    ]
    assert len({text["completion"] for text in texts}) > 4


@pytest.mark.full
def test_with_a_smallest_length_pi_old_is_the_trainers(tmp_path):
    kwargs = {"generation_kwargs": {"min_new_tokens": 3}}
    settings = {"config_class": GSPOConfig, "sampler": "gspo", "max_steps": 2, **kwargs}
    trainer = trained(tmp_path, GSPOTrainer, settings)
    assert read_metrics(tmp_path / "gspo")[0]["policy/proximal"] == "recompute"
    assert trainer.state.log_history[0]["completions/min_length"] >= 3


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"repetition_penalty": 1.1}])
def test_what_our_sampler_cannot_do_is_left_to_trl(tmp_path, capsys, settings):
    make_trainer(tmp_path, GSPOTrainer, GSPOConfig, **GSPO, sampler="gspo", generation_kwargs=None, **settings)
    assert "sampler='gspo' is not used, TRL generates: top_p" in capsys.readouterr().out


# -- processes


@pytest.mark.full
def test_two_processes_compute_what_trl_does(tmp_path):
    script = Path(__file__).parents[1] / "helpers" / "trl_runs.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, script, tmp_path, "--compared"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, ours = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("GRPOTrainer", "GSPOTrainer"))
    assert "TRL's own code" not in done.stdout
    for mine, other in zip(ours["history"], theirs["history"], strict=True):
        for name in mine.keys() & {
            "loss",
            "grad_norm",
            "reward",
            "entropy",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
        }:
            assert mine[name] == pytest.approx(other[name], abs=1e-6), name
    assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
    assert len(read_metrics(tmp_path / "GSPOTrainer" / "gspo")) == 3

"""`gspo audit PATH`: files of TRL, verl and ms-swift (files/README.md) become a page with a diagnosis."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path

import pytest

from gspo.audit.disk import audit_files, files, interpret, read_training_args
from gspo.audit.findings import sections_of
from gspo.audit.samples import swift_rows, trl_rows
from gspo.audit.trl import from_swift, from_trl
from gspo.audit.verl import CORRECTION, A, from_verl
from gspo.cli import main as cli
from gspo.errors import ConfigError
from gspo.report import read_block, read_metrics, sample_steps, write_report

FILES = Path(__file__).parent / "files"


def overview(page: Path) -> dict:
    return json.loads(page.read_text().partition('class="boot">')[2].partition("</script>")[0])["overview"]


def warnings_of(found: dict) -> list[str]:
    return [finding["message"] for finding in found["doctor"]["warnings"]]


def test_a_trl_run_with_eps_0_2_and_sequence_level_is_diagnosed(tmp_path, capsys):
    assert cli.main(["audit", str(FILES / "trl"), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "epsilon (training_args.bin): ε = 0.2 is a clip range for token ratios" in said
    assert "Remedy: set epsilon and epsilon_high to 0.02" in said
    shown = overview(tmp_path / "run" / "report.html")
    assert (shown["audit"]["system"], shown["audit"]["version"]) == ("TRL", "1.16.0")
    assert shown["doctor"]["objective"]["same_as"] is None
    assert shown["doctor"]["objective"]["algorithm"] == "gspo"
    assert any("TRLCallback(trainer) records them" in line for line in shown["audit"]["unknown"])
    answers = {answer["question"]: answer for answer in shown["answers"]}
    assert "Nothing was clipped" in answers["Was anything clipped, and why?"]["text"]
    assert answers["Which sequences were the worst?"]["text"] == "The samples have no log s."
    assert answers["Where did the time go?"]["text"] == "The parts of a step were not recorded."
    origin = {line["key"]: line["origin"] for line in shown["config"]}
    assert origin["actor.eps_clip"] == "epsilon (training_args.bin)"


def test_trls_files_give_one_row_per_rollout_batch_and_its_samples(tmp_path):
    audit_files([FILES / "trl"], tmp_path)
    state = json.loads(next((FILES / "trl").rglob("trainer_state.json")).read_text())
    logs = [log for log in state["log_history"] if "loss" in log]
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        first, second = logs[2 * row["step"] - 2 : 2 * row["step"]]
        assert row["clip/sequences_low"] == second["clip_ratio/low_mean"]
        assert row["grad/norm"] == pytest.approx((first["grad_norm"] + second["grad_norm"]) / 2)
        assert row["reward/mean"] == pytest.approx(first["reward"])
    assert list(sample_steps(tmp_path)) == [1, 2, 3]
    block = read_block(tmp_path, 1)
    assert len(block["reward"]) == 16
    assert sum(block["reward"]) / 16 == pytest.approx(rows[0]["reward/mean"], abs=1e-5)
    assert block["log_s"] == [None] * 16


def test_clip_shares_are_those_of_later_mini_batches_if_every_update_was_logged():
    draft = from_trl({"importance_sampling_level": "sequence", "steps_per_generation": 2, "epsilon": 0.2}, "x")
    clips = [0.0, 0.3, 0.0, 0.1]
    history = [{"step": i + 1, "loss": 0.0, "clip_ratio/low_mean": clip} for i, clip in enumerate(clips)]
    unknown = []
    assert [row["clip/sequences_low"] for row in trl_rows(history, draft, unknown)] == [0.3, 0.1]
    assert unknown == []
    # Means over two updates contain mini-batch 1, and the page says so.
    assert [row["clip/sequences_low"] for row in trl_rows(history[1::2], draft, unknown)] == [0.3, 0.1]
    assert "mini-batch 1" in unknown[0]


def test_cispo_with_trls_default_epsilon_is_diagnosed():
    draft = from_trl({"loss_type": "cispo", "epsilon": 0.2, "importance_sampling_level": "token"}, "args")
    found = sections_of(draft)["warnings"]
    assert any("makes every weight about 0.2" in finding["message"] for finding in found)


def test_an_eps_of_sequence_ratios_with_token_ratios_is_diagnosed():
    values = {"loss_type": "grpo", "epsilon": 3e-4, "steps_per_generation": 4, "max_completion_length": 2048}
    found = {
        level: sections_of(from_trl({**values, "importance_sampling_level": level}, "args"))["warnings"]
        for level in ("token", "sequence")
    }
    (finding,) = found["token"]
    assert (finding["key"], finding["where"]) == ("epsilon", "args")
    assert "clip range for sequence ratios" in finding["message"]
    assert "importance_sampling_level=sequence" in finding["remedy"]
    assert found["sequence"] == []
    verl = {f"{A}clip_ratio_low": 3e-4, f"{A}clip_ratio_high": 4e-4, "algorithm.adv_estimator": "grpo"}
    verl |= {"data.train_batch_size": 64, f"{A}ppo_mini_batch_size": 16, "data.max_response_length": 2048}

    def remedies(values):
        return " ".join(finding["remedy"] for finding in sections_of(from_verl(values, "c"))["warnings"])

    assert "policy_loss.loss_mode=gspo" in remedies(verl)
    assert "policy_loss.loss_mode=gspo" not in remedies(verl | {f"{A}policy_loss.loss_mode": "gspo"})


def test_settings_that_gspo_has_too_are_explained():
    values = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "steps_per_generation": 4}
    values |= {"top_p": 0.9, "entropy_coef": 0.01, "max_completion_length": 2048, "use_vllm": True}
    values |= {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask"}
    found = sections_of(from_trl(values, "args"))
    assert any("entropy" in line for line in found["objective"]["words"])
    assert "the product of its tokens' π_old/μ" in found["policies"]["correction_words"]
    keys = [finding["key"] for finding in found["warnings"]]
    assert "top_p" in keys
    assert "vllm_importance_sampling_mode" in keys


def test_a_loss_that_gspo_does_not_have_is_named():
    assert "loss_type=vespo" in sections_of(from_trl({"loss_type": "vespo"}, "args"))["unreadable"]
    assert "loss_mode=clip_cov" in sections_of(from_verl({f"{A}policy_loss.loss_mode": "clip_cov"}, "c"))["unreadable"]


def test_every_loss_of_trl_has_the_objective_that_the_comparison_of_losses_holds():
    """tests/objectives/test_trl.py compares these pairs of losses, values and gradients."""
    pairs = {
        ("grpo", "sequence"): "gspo",
        ("grpo", "token"): "grpo",
        ("dapo", "token"): "dapo",
        ("cispo", "token"): "cispo",
        ("sapo", "token"): "sapo",
        ("luspo", "sequence"): "luspo",
    }
    for (loss, level), name in pairs.items():
        draft = from_trl({"loss_type": loss, "importance_sampling_level": level, "steps_per_generation": 4}, "args")
        objective = sections_of(draft)["objective"]
        assert name in (objective["same_as"], objective["algorithm"]), (loss, level)


def test_verls_files_tell_that_clip_ratio_has_no_effect(tmp_path):
    found = audit_files([FILES / "verl"], tmp_path)
    said = warnings_of(found)
    assert any("clip_ratio=3e-4 has no effect: clip_ratio_low=0.2" in message for message in said)
    assert any("nothing is ever clipped" in message for message in said)
    assert any("loss_agg_mode=token-mean: older versions of verl" in note for note in found["notes"])
    batch = found["doctor"]["batch"]
    assert (batch["prompts"], batch["group_size"], batch["minibatches"]) == (8, 4, 4)
    rows = read_metrics(tmp_path)
    assert [row["clip/tokens"] for row in rows] == [0.0, 0.0]
    shown = {answer["question"]: answer["text"] for answer in overview(write_report(tmp_path))["answers"]}
    assert shown["Was anything clipped, and why?"] == "Nothing was clipped."
    assert "was not reached" in shown["Is my ε sensible?"]
    # A group is found by its prompt: verl reorders the batch.
    block = read_block(tmp_path, 1)
    groups = {
        number: {p for p, s in zip(block["prompt"], block["submission"], strict=True) if s == number}
        for number in range(8)
    }
    assert all(len(prompts) == 1 for prompts in groups.values())


def test_verls_dumps_alone_give_rewards_and_say_what_is_missing(tmp_path):
    found = audit_files([FILES / "verl" / "rollouts"], tmp_path)
    assert "pass the Hydra folder" in found["doctor"]["unreadable"]
    assert any("file logger" in line for line in found["unknown"])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert all(0 < row["reward/mean"] < 1 for row in read_metrics(tmp_path))


def test_verls_bypass_mode_replaces_the_loss_that_was_chosen():
    bypass = {f"{A}policy_loss.loss_mode": "gspo", f"{CORRECTION}bypass_mode": True, "algorithm.adv_estimator": "grpo"}
    draft = from_verl(bypass, "config.yaml")
    assert (draft.keys["algorithm"], draft.keys["actor.importance_sampling_level"]) == ("grpo", "token")
    assert "loss_mode=gspo has no effect: with bypass_mode" in draft.findings[0].message
    assert from_verl(bypass | {f"{CORRECTION}loss_type": "reinforce"}, "config.yaml").unexplained
    assert from_verl(bypass | {f"{CORRECTION}bypass_mode": False}, "config.yaml").keys["algorithm"] == "gspo_token"


def test_settings_of_verl_without_a_counterpart_are_noted():
    values = {"algorithm.adv_estimator": "opo", f"{A}use_kl_loss": True, f"{A}kl_loss_type": "abs"}
    notes = from_verl(values, "config.yaml").notes
    assert ["adv_estimator=opo" in notes[0], "kl_loss_type=abs" in notes[1]] == [True, True]
    assert not from_verl({"algorithm.adv_estimator": "grpo_vectorized"}, "config.yaml").notes


def test_megatrons_log_of_ms_swift_counts_iterations_and_cispo_has_a_clip_share_of_its_own():
    draft = from_swift({"loss_type": "cispo", "steps_per_generation": 1}, "args.json")
    log = {"loss": 0.1, "reward": 0.5, "cispo_clip_ratio": 0.25}
    rows = swift_rows([{**log, "iteration": "3/8"}, {**log, "global_step/max_steps": "4/8"}], draft, [])
    assert [(row["step"], row["clip/tokens"]) for row in rows] == [(3, 0.25), (4, 0.25)]


def test_ms_swifts_files_are_diagnosed_too(tmp_path):
    found = audit_files([FILES / "swift"], tmp_path)
    assert (found["system"], found["version"]) == ("ms-swift", "4.6.0.dev0")
    assert any("nothing is ever clipped" in message for message in warnings_of(found))
    assert found["doctor"]["warnings"][0]["remedy"].startswith("set --epsilon and --epsilon_high to ")
    assert found["doctor"]["policies"]["kl"].startswith("0.04 × KL")
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]  # 8 updates, 4 per rollout batch
    assert rows[0]["reward/part_Accuracy"] == 0.25
    assert list(sample_steps(tmp_path)) == [1, 2]
    assert read_block(tmp_path, 1)["reward"][:4] == [2.0, 0.0, 1.0, 0.0]


def test_a_pickle_that_would_run_a_program_runs_nothing(tmp_path):
    canary = tmp_path / "canary"
    # c os\nsystem, a mark, the command, a tuple, a call.
    command = f"touch {canary}".encode()
    attack = b"\x80\x02cos\nsystem\n(X" + struct.pack("<I", len(command)) + command + b"tR."
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("training_args/data.pkl", attack)
    with pytest.raises(ConfigError, match="does not hold a training config"):
        read_training_args(tmp_path / "training_args.bin")
    assert interpret(attack).name == "os.system"
    assert not canary.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02}q\x00", b"\x80\x02X\xff\xff\xff\x7fa.", b"\x80\x02Rq.", b"no pickle"]
)
def test_a_damaged_config_is_refused_by_name(tmp_path, content):
    file = tmp_path / "training_args.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", content)
    with pytest.raises(ConfigError, match=r"training_args\.bin"):
        read_training_args(file)


def test_training_args_are_read_as_values():
    values = read_training_args(next((FILES / "trl").rglob("training_args.bin")))
    assert values["importance_sampling_level"] == "sequence"
    assert (values["epsilon"], values["steps_per_generation"], values["generation_batch_size"]) == (0.2, 4, 16)
    assert values["lr_scheduler_type"] == "constant"


def test_another_major_version_of_trl_is_refused_by_name(tmp_path):
    shutil.copytree(FILES / "trl", tmp_path / "trl")
    for card in (tmp_path / "trl").rglob("README.md"):
        card.write_text(card.read_text().replace("TRL: 1.16.0", "TRL: 2.0.1"))
    with pytest.raises(ConfigError, match=r"TRL 2\.0\.1; gspo audit reads TRL 1\.x"):
        audit_files([tmp_path / "trl"], tmp_path / "run")


def test_a_folder_without_a_known_run_is_refused_and_a_gspo_run_is_not_overwritten(tmp_path):
    with pytest.raises(ConfigError, match="no run of another trainer"):
        audit_files([tmp_path], tmp_path / "run")
    with pytest.raises(ConfigError, match="does not exist"):
        audit_files([tmp_path / "nothing"], tmp_path / "run")
    (tmp_path / "config.yaml").write_text("algorithm: gspo\n")
    with pytest.raises(ConfigError, match="holds a run of gspo"):
        audit_files([FILES / "swift"], tmp_path)


def test_the_newest_checkpoint_is_the_last(tmp_path):
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    found = [file.parent.name for file in files([tmp_path], "trainer_state.json")]
    assert found == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]


def test_an_audit_can_be_repeated(tmp_path):
    audit_files([FILES / "swift"], tmp_path)
    audit_files([FILES / "swift"], tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]

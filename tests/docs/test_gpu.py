"""docs/gpu.md and its config agree with what the program plans and estimates."""

import json
import re
from pathlib import Path

import yaml

from gspo.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGE, CONFIG = (ROOT / "docs/gpu.md").read_text(), ROOT / "examples/math/gsm8k_7b.yaml"
# The shape of Qwen2.5-7B, from its config.json.
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def leaves(tree, name=""):
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in leaves(value, f"{name}.{key}").items()}
    return {name: tree}


def test_the_config_on_the_page_is_that_of_the_file():
    shown = leaves(yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]))
    assert len(shown) > 10
    assert shown.items() <= leaves(yaml.safe_load(CONFIG.read_text())).items()


def test_the_plan_is_the_one_that_the_page_draws(tmp_path, capsys):
    assert cli.main(["train", str(CONFIG), "--dry-run", f"cluster.fileroot={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "1 machine with 8 GPUs each: 6 ranks train, 2 vllm servers sample" in out
    assert re.findall(r"(?:trainer|sampler)_\d +node 0, GPU (\S+)", out) == ["0-5,", "6", "7"]


def test_the_memory_on_the_page_is_the_doctors_estimate(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert cli.main(["doctor", "--quick", str(CONFIG), f"actor.path={tmp_path}", "actor.dtype=bfloat16"]) == 0
    out = capsys.readouterr().out
    for part, line in (
        ("parameters", "actor parameters"), ("gradients", "actor gradients"), ("optimizer", "actor optimizer state"),
        ("activations", "activations, at most"), ("gradient of the head", "gradient of the head"),
        (r"\*\*peak\*\*", "each rank, at its peak"),
    ):  # fmt: skip
        (shown,) = re.findall(rf"\| {part} \| \**([\d.]+)\** \|", PAGE)
        assert re.search(rf"{line} +{shown} GiB", out), (part, shown)

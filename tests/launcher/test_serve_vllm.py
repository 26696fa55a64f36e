"""What a vLLM server is started with, and what is compared before it serves."""

import subprocess
import sys
from pathlib import Path

import pytest

from gspo.config import layout_of, load
from gspo.errors import ConfigError, RolloutError
from gspo.launcher.serve import engine
from gspo.launcher.serve import model as serve_model
from gspo.launcher.serve import vllm as serve_vllm
from gspo.models import end_tokens, load_model, load_tokenizer
from gspo.sampling import WORKER_FOLDER, EngineAddress, context_limit, sampler_identity
from gspo.train import device_and_dtype

SOCKET = EngineAddress(socket="/private/http")


def config_of(*overrides):
    asked = ["rollout.backend=vllm:d1", "actor.path=embedded:tiny", f"vllm.python={sys.executable}", *overrides]
    return load(None, asked).config


def start(*overrides, num_gpus=0, endpoint=SOCKET, max_context=2048):
    config = config_of(*overrides)
    return serve_vllm.command(config, layout_of(config, num_gpus), "/model", max_context, endpoint)


def test_the_identity_is_that_of_the_trainers_model_without_its_weights(tiny):
    config = config_of("gconfig.max_tokens=300", "seed=7")
    source = serve_model.model_folder(config, Path("/nowhere"))
    model, tokenizer = load_model(tiny), load_tokenizer(tiny)
    expected = sampler_identity(
        model,
        seed=7,
        ends=end_tokens(model, tokenizer),
        max_context=context_limit(model, 300),
        dtype=device_and_dtype(config)[1],
    )
    assert serve_model.identity_for(config, source) == expected


def test_random_weights_are_written_where_vllm_can_read_them(tiny, tmp_path):
    folder = serve_model.as_folder(tiny)
    config = config_of(f"actor.path={folder}", "actor.init_from_scratch=true", "seed=3")
    source = serve_model.model_folder(config, tmp_path / "model")
    assert source == str(tmp_path / "model")
    random = load_model(folder, from_scratch=True, seed=3)
    assert load_model(source).state_dict()["model.norm.weight"].equal(random.state_dict()["model.norm.weight"])
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_the_command_line_has_what_the_run_needs_and_then_the_users_flags():
    made = start("vllm.gpu_memory_utilization=0.5", "vllm.enable_prefix_caching=false", "vllm.env={A: 1}")
    text = " ".join(made.argv)
    for part in ("--model /model", "--served-model-name gspo", "--uds /private/http", "--generation-config vllm",
                 "--logprobs-mode processed_logprobs", "--worker-extension-cls=gspo_vllm_worker.Worker",
                 "--max-model-len=2048", "--dtype=float32", "--enforce-eager", "--gpu-memory-utilization=0.5",
                 "--no-enable-prefix-caching"):  # fmt: skip
        assert part in text
    assert "--tensor-parallel-size" not in text
    assert made.env["A"] == "1"
    assert made.env["PYTHONPATH"].split(":")[0] == str(WORKER_FOLDER)
    # Whatever lies beside it would shadow a module of the same name there: `http`, for one.
    names = [path.name for path in WORKER_FOLDER.glob("*.py")]
    assert names
    assert all(name.startswith("gspo_") for name in names)


def test_gpus_bring_their_own_flags_and_one_gpu_brings_sleep(monkeypatch):
    text = " ".join(start("rollout.backend=vllm:d1t2", "cluster.n_gpus_per_node=4").argv)
    assert "--tensor-parallel-size 2" in text
    assert "--enforce-eager" not in text
    assert "sleep" not in text
    monkeypatch.setenv("GSPO_COLOCATED", "1")
    assert "--enable-sleep-mode" in start("cluster.n_gpus_per_node=1").argv


def test_a_context_that_is_too_short_for_samples_is_refused():
    with pytest.raises(ConfigError, match=r"gconfig\.max_tokens"):
        start("vllm.max_model_len=512")
    assert "--max-model-len=512" in start("vllm.max_model_len=512", "gconfig.max_tokens=512", max_context=512).argv


@pytest.mark.run
def test_an_engine_that_ends_before_it_serves_is_an_error_by_its_code(tmp_path):
    for code, error in ((2, ConfigError), (1, RolloutError)):
        child = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
        with pytest.raises(error, match=f"exit code {code} before it served"):
            engine.await_ready(EngineAddress(socket=str(tmp_path / "http")), child, 60)
    with pytest.raises(RolloutError, match=r"rollout\.request_timeout"):
        engine.await_ready(EngineAddress(socket=str(tmp_path / "http")), None, 0.2)


@pytest.mark.run
def test_the_engines_own_error_is_the_first_of_its_last_burst_and_reaches_the_user(tmp_path, capfdbinary):
    """As vLLM dies: a worker raises, then its other processes because of it."""
    prefix = "(Worker pid=7) ERROR 11-17 11:57:22 [multiproc_executor.py:1063]"
    lines = [
        "WARNING: errors like `OSError: [Errno 24] Too many open files`.",
        f"{prefix} Traceback (most recent call last):",
        f"{prefix}     return self._op(*args, **kwargs)",
        f"{prefix} RuntimeError: Unsupported CPU attention configuration: head_dim=16",
        "(APIServer pid=1) ERROR 11-17 11:57:23 [async_llm.py:7] vllm.v1.engine.exceptions.EngineDeadError: See above.",
    ]
    script = f"import sys; print(*{lines!r}, sep=chr(10)); sys.exit(1)"
    child = engine.start_engine(engine.Start([sys.executable, "-c", script], {}))
    child.wait(60)
    assert child.last_error() == "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    assert b"Traceback" in capfdbinary.readouterr().out  # its output is in our log
    address = EngineAddress(socket=str(tmp_path / "http"))
    config = load(None, ["rollout.backend=vllm:d1", "actor.path=embedded:tiny", "algorithm=gspo"]).config
    start = engine.Start([sys.executable, "-c", script], {})
    with pytest.raises(RolloutError, match=r"exit code 1 before it served.*own error: RuntimeError: Unsupported CPU"):
        engine.serve_engine(config, 0, tmp_path, address, start, None, {}, host="127.0.0.1", port=0)  # pyright: ignore[reportArgumentType]

"""A run directory whose small files hold anything: an error that names the file, or the file counts as absent."""

import contextlib

import pytest
from safetensors.numpy import save

from gspo.config import read_origins
from gspo.errors import CheckpointError, ConfigError
from gspo.models import cache
from gspo.report.page.page import write_report
from gspo.report.read import read_config, read_metrics
from gspo.runs import changed_code, checkpoint

HOSTILE = [
    "",
    "[" * 100_000,
    '{"a": ' * 100_000,
    "null",
    "[1]",
    '"x"',
    "{" + '"a": {}, ' * 3 + "}",
    "\x00",
    '{"a": 1' + "0" * 5000 + "}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_every_json_file_of_a_run_or_a_cache_may_hold_anything(tmp_path, text):
    for name in (
        "manifest.json",
        "state.json",
        "waiting.json",
        "origins.json",
        "audit.json",
        "code.json",
        "SHA256.json",
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "config.yaml").write_text("actor: {path: x}\n")
    (tmp_path / "metrics.jsonl").write_text(text + '\n{"step": 1}\n')
    (tmp_path / "waiting.safetensors").write_bytes(save({}))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.verify(tmp_path)
    with contextlib.suppress(CheckpointError):
        checkpoint.load_pending_groups(tmp_path)
    assert read_origins(tmp_path) == {}
    assert not cache.is_whole(tmp_path)
    assert changed_code(tmp_path, {}) == []
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert read_config(tmp_path) == {"actor": {"path": "x"}}
    write_report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 1000


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 60_000, "a: &a [*a]", "\x00", "a: !!python/name:os.system", "[1]", "{", "a: b: c"]
)
def test_a_config_of_a_run_may_hold_anything(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with contextlib.suppress(ConfigError):
        assert read_config(tmp_path) == {}

"""Only the table of sampler backends knows them by name, and a backend is refused what its entry lacks."""

import ast
import dataclasses
from pathlib import Path

import pytest

import gspo
from gspo.config import load
from gspo.config.backends import ENGINES, EXTERNAL
from gspo.config.schema import known_keys
from gspo.errors import ConfigError
from gspo.launcher import make_launch_plan
from gspo.lint import lint
from gspo.sampling import Sampler
from gspo.system import by_name

SOURCE = Path(gspo.__file__).parent
# The table, and each engine's own files.
OWN_FILES = {"config/backends.py"} | {
    Path(*name.partition(":")[0].split(".")[1:]).with_suffix(".py").as_posix()
    for engine in ENGINES.values()
    for name in (engine.sampler, engine.server)
}
# `local` is also a value of scheduler.type, and an address of Ray.
OF_THE_LAUNCHER = {
    "f.config.scheduler.type != 'local'",
    "self.config.scheduler.type in (None, 'local')",
    "on == 'local'",
    "address in ('', 'local')",
}


def comparisons(code: str) -> list[str]:
    """Expressions that compare with an engine's name, look something up by it, or match it."""
    found = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Compare():
                parts = [node.left, *node.comparators]
            case ast.Dict():
                parts = [key for key in node.keys if key is not None]
            case ast.Subscript():
                parts = [node.slice]
            case ast.MatchValue():
                parts = [node.value]
            case ast.Call(func=ast.Attribute(attr="startswith" | "removeprefix" | "get")):
                parts = node.args
            case _:
                continue
        flat = [each for part in parts for each in getattr(part, "elts", [part])]
        names = {each.value for each in flat if isinstance(each, ast.Constant)} & {*ENGINES, "sglang"}
        # "local" is a usual word; a mapping with other keys, too, is about something else.
        is_other = names == {"local"} and not isinstance(node, ast.Compare)
        is_other |= isinstance(node, ast.Dict) and len(names) < len(parts)
        if names and not is_other:
            found.append(ast.unparse(node))
    return found


def test_no_code_compares_with_an_engines_name_outside_its_entry_and_its_files():
    found = {
        f"{file.relative_to(SOURCE)}: {expression}"
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE).as_posix() not in OWN_FILES and "lab" not in file.relative_to(SOURCE).parts
        for expression in comparisons(file.read_text())
        if expression not in OF_THE_LAUNCHER
    }
    assert not found, "ask config.backends.ENGINES"


@pytest.mark.parametrize(
    "code",
    [
        "name == 'vllm'",
        "name in ('local', 'vllm')",
        "FLAGS = {'vllm': 1}",
        "flags['vllm']",
        "f(flags.get('vllm'))",
        "name.startswith('vllm')",
        "match name:\n    case 'vllm':\n        pass",
        "'local' != backend.name",
    ],
)
def test_such_a_comparison_is_found(code):
    assert comparisons(code)


def test_every_engine_has_a_sampler_with_the_whole_interface_and_a_server():
    wanted = {name for name in vars(Sampler) if not name.startswith("_")} - {"version"}
    for engine in ENGINES.values():
        assert wanted <= set(dir(by_name(engine.sampler))), engine.name
        assert callable(by_name(f"{engine.server}:main")), engine.name


def test_every_external_engine_has_a_key_for_its_flags():
    assert {name for name, key in known_keys().items() if key.free and "." not in name} == set(EXTERNAL)


# What an entry does not have is refused: vLLM's entry, changed


@pytest.fixture
def vllm(monkeypatch):
    return lambda **lacks: monkeypatch.setitem(ENGINES, "vllm", dataclasses.replace(ENGINES["vllm"], **lacks))


def errors(*overrides):
    loaded = load(None, ["rollout.backend=vllm:d4", *overrides])
    return {finding.key: finding.message for finding in lint(loaded, 0) if finding.severity == "error"}


def test_truncated_sampling_is_refused_for_an_engine_that_returns_no_kept_sets(vllm):
    assert "gconfig.top_p" not in errors("gconfig.top_p=0.9")
    vllm(returns_kept=False)
    assert "does not return the tokens that top_p keep" in errors("gconfig.top_p=0.9")["gconfig.top_p"]
    assert "gconfig.top_p" not in errors()


def test_broadcast_is_refused_for_an_engine_that_reads_files(vllm):
    broadcast = "actor.weight_update_mode=broadcast"
    assert "actor.weight_update_mode" not in errors(broadcast)
    own = errors(broadcast, "vllm.url=[http://a:1, http://a:2, http://a:3, http://a:4]")
    assert own["actor.weight_update_mode"] == "vllm, if you start it yourself, only loads weights from files"
    vllm(takes_broadcast=False)
    assert errors(broadcast)["actor.weight_update_mode"] == "vllm only loads weights from files"


def test_an_engine_that_needs_cuda_is_refused_where_no_gpu_is(vllm):
    loaded = load(None, ["rollout.backend=vllm:d4"])
    assert len(make_launch_plan(loaded.config, [], 0).samplers) == 4
    assert not [finding for finding in lint(loaded, 0) if finding.key == "rollout.backend"]
    vllm(needs_cuda=True)
    with pytest.raises(ConfigError, match=r"cluster\.n_gpus_per_node"):
        make_launch_plan(loaded.config, [], 0)
    (finding,) = (finding for finding in lint(loaded, 0) if finding.key == "rollout.backend")
    assert "need 4 GPUs" in finding.message


# SGLang


@pytest.mark.parametrize("backend", ["sglang", "sglang:d4", "SGLang:d2t2"])
def test_a_config_that_names_sglang_is_refused_with_what_to_use(tmp_path, backend):
    (tmp_path / "run.yaml").write_text(f"rollout:\n  backend: {backend}\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.yaml")
    for part in ("run.yaml:2: rollout.backend: sglang is not supported", "vllm:dN", "local:dN"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"rollout\.backend: sglang is not supported"):
        load(None, [f"rollout.backend={backend}", "+actor.group_size=4"])


def test_run_directories_with_a_section_of_sglang_load():
    loaded = load({"sglang": {}, "rollout": {"backend": "vllm:d2"}})
    assert loaded.config.rollout.backend == "vllm:d2"
    assert sum("sglang is ignored" in line for line in loaded.messages) == 1


def test_a_file_of_areal_that_names_sglang_samples_with_vllm_and_says_so():
    loaded = load({"rollout": {"backend": "sglang:d2p1t2", "queue_size": None}, "sglang": {"mem_fraction_static": 0.7}})
    assert loaded.config.rollout.backend == "vllm:d2p1t2"
    (said,) = (line for line in loaded.messages if "rollout.backend sglang" in line)
    assert "sglang:d2p1t2 is now vllm:d2p1t2" in said

"""Every file and answer of others is read by a reader with bounds: `system/foreign.py` and its neighbours.

An AST walk over src/gspo finds the calls of the libraries. ALLOWED names the other places, each with the reason.
"""

import ast
from pathlib import Path

import gspo

SOURCE = Path(gspo.__file__).parent

# (module, function): what reads without a bound.
CALLS = {
    ("json", "load"), ("json", "loads"), ("yaml", "load"), ("yaml", "safe_load"), ("yaml", "compose"),
    ("yaml", "parse"), ("yaml", "load_all"), ("yaml", "safe_load_all"), ("parquet", "read_table"),
    ("parquet", "ParquetFile"), ("parquet", "read_metadata"), ("pickle", "load"), ("pickle", "loads"),
    ("pickletools", "genops"),
    ("zipfile", "ZipFile"), ("lzma", "*"), ("bz2", "*"), ("gzip", "*"), ("zlib", "decompress"), ("tarfile", "*"),
    ("Image", "open"), ("tomllib", "*"), ("marshal", "*"), ("shelve", "*"), ("ElementTree", "*"), ("csv", "reader"),
    ("csv", "DictReader"), ("torch", "load"),
    ("numpy", "load"), ("numpy", "loadtxt"), ("numpy", "genfromtxt"), ("numpy", "fromfile"),
    ("shutil", "unpack_archive"), ("pandas", "read_csv"), ("pandas", "read_json"), ("pandas", "read_parquet"),
}  # fmt: skip

ALLOWED = {
    # The readers.
    "system/foreign.py": "JSON",
    "system/foreign_yaml.py": "YAML",
    "config/yaml_tree.py": "YAML with the line of each value",
    "data/files.py": "rows: CSV and Parquet",
    "data/images.py": "images",
    "audit/disk.py": "pickles, of which nothing is executed, in a stored member of a zip",
    # What a process of ours wrote, on a channel that no other program has.
    "data/reasoning_gym.py": "the pipe between this process and its workers, and the cache of this user",
    "rewards/pool.py": "the socket of our supervisor, which has parsed every line",
    "rewards/call.py": "a function that the trainer's process has pickled",
    "rewards/workers/supervisor.py": "the sockets of trainer and workers; a line that is no message ends its worker",
    "rewards/workers/worker.py": "the pipe of the supervisor, with what the trainer has pickled",
    "rewards/sandbox/box.py": "the status of bubblewrap, by a pipe that the program in it does not have",
    "rewards/sandbox/candidate.py": "inside the sandbox: the pipe of the trainer",
    "learner/world.py": "the store of this run's ranks",
    "learner/liveness.py": "the store of this run's ranks",
    "monitor/loggers.py": "what to_json has written a line before",
    "studies/worker.py": "the job file of the process that started it",
    "system/imports.py": "pip's record of this package",
    "data/digits.py": "a file of this package",
    "sampling/engines/base.py": "a .npy without pickles, whose size is that of a bounded reply",
    "sampling/engines/inside_vllm/gspo_collective.py": "inside vLLM's process, without gspo: the run's store",
    "sampling/engines/inside_vllm/gspo_vllm_worker.py": "inside vLLM's process: a folder that the trainer has checked",
}  # fmt: skip


def calls_of(text: str):
    """(line, call) of each call that reads without a bound, whatever name it was imported by."""
    tree = ast.parse(text)
    names: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: tuple(alias.name.split(".")) for alias in node.names}
            names |= {alias.name: tuple(alias.name.split(".")) for alias in node.names if not alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: (*(node.module or "").split("."), alias.name) for alias in node.names}
    for node in ast.walk(tree):
        # A call, or the function given to another one: map(json.loads, lines).
        if not isinstance(node, ast.Attribute | ast.Name) or not isinstance(node.ctx, ast.Load):
            continue
        parts = tuple(ast.unparse(node).split("."))
        whole = (*names.get(parts[0], (parts[0],)), *parts[1:])
        if len(whole) > 1 and (whole[-2:] in CALLS or (whole[-2], "*") in CALLS):
            yield node.lineno, ".".join(whole)


def test_only_the_readers_read_what_others_wrote():
    found = [
        f"{place}:{line}: {call}"
        for file in sorted(SOURCE.rglob("*.py"))
        if (place := file.relative_to(SOURCE).as_posix()) not in ALLOWED
        for line, call in calls_of(file.read_text(encoding="utf-8"))
    ]
    assert not found, "use gspo.system.parse_json, read_json, read_yaml, gspo.data.read_parquet, …:\n" + "\n".join(
        found
    )


def test_every_exception_is_needed():
    for place in ALLOWED:
        assert list(calls_of((SOURCE / place).read_text(encoding="utf-8"))), f"{place} reads nothing itself: remove it"


def test_calls_are_found_by_any_name():
    code = """
import json, lzma
import json as j
import pyarrow.parquet
import pyarrow.parquet as parquet
from json import loads as parse
from PIL import Image
from xml.etree import ElementTree
from zipfile import ZipFile
json.loads(x)
j.load(f)
parse(x)
map(json.loads, lines)
lzma.open(f)
pyarrow.parquet.read_table(f)
parquet.ParquetFile(f)
Image.open(f)
ZipFile(f)
ElementTree.fromstring(x)
json.dumps(x); yaml.safe_dump(x); Image.fromarray(x); loads(x); self.load(x)
"""
    assert [line for line, _ in calls_of(code)] == list(range(10, 20))

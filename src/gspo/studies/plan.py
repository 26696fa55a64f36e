"""A study: its YAML file as values, and the jobs (training runs) that it consists of. Torch-free.

Of a study of your own, base, seeds and arms are enough (docs/compare.md).

claim    the claim of the paper, or our own, that is tested
about    what was done, for the page
base     the config that the runs start from: a file next to the study's, or above the catalog of the shipped studies;
         or the name of an example (quickstart)
common   overrides of all arms
arms     name → overrides of the base (`~key` resets one); tasks: further overrides; every arm runs on every task, "name
         @ task" on one.
         `first` in an arm: the config of a first stage, for example supervised; the arm starts from its model
seeds    of the runs; `more_seeds` are added by --full
tune     a grid that every arm tries on separate seeds; the best point by one measure is then run on `seeds`
run_s    seconds that a run takes, for the estimate of `gspo study run`
compute  instead of training runs: a module of `lab/studies/direct/` that measures its arms directly, seed by seed
edge     a key that the tasks vary: the largest value at which an arm does not collapse becomes its measure `edge`
measures columns of the table
plots    which curves are drawn; of a shipped study, "final by actor.eps_clip" draws a measure over a key
checks   which results would show the claim, decided before the runs
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from gspo.config import Loaded, Section, known_keys, load, value_of, yaml_tree
from gspo.errors import ConfigError
from gspo.shipped import find_config
from gspo.studies.measure import CURVES, MEANING
from gspo.system import NO_LAB, laboratory, parse_yaml

Overrides = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """One decision: the interval of `arm` − factor · `against` (an arm, or a number) lies `side` of `margin`.

    >>> Check("gains", measure="gain", arm="gspo").sentence()
    'gain: gspo above 0'
    """

    says: str
    measure: str
    arm: str
    against: str | float = 0.0
    factor: float = 1.0
    side: Literal["above", "below"] = "above"
    margin: float = 0.0

    def sentence(self) -> str:
        """The decision as a formula."""
        other = "" if self.against == 0 else f" − {f'{self.factor:g} × ' if self.factor != 1 else ''}{self.against}"
        return f"{self.measure}: {self.arm}{other} {self.side} {self.margin:g}"


@dataclass(frozen=True)
class Tune:
    """Every arm tries every point of the grid on these seeds, which are disjoint from the seeds of the study."""

    seeds: Sequence[int]
    by: str  # the point with the highest mean of this measure is chosen
    grid: Mapping[str, Sequence[Overrides]]  # axis → values, each a set of overrides

    def points(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each point's name and overrides."""
        for values in itertools.product(*self.grid.values()):
            joined = {key: value for part in values for key, value in part.items()}
            first = [next(iter(part.values())) for part in values]
            yield " ".join(f"{axis}={value:g}" for axis, value in zip(self.grid, first, strict=True)), joined


@dataclass(frozen=True)
class Study:
    name: str
    base: str
    seeds: Sequence[int]
    arms: Mapping[str, Overrides]
    claim: str = ""
    about: str = ""
    common: Overrides = field(default_factory=dict)
    measures: Sequence[str] = ("start", "final", "gain", "reward_area", "clip_sequences", "collapsed")
    checks: Sequence[Check] = ()
    default: bool = False  # part of `gspo study run` without a name
    more_seeds: Sequence[int] = ()
    tasks: Mapping[str, Overrides] = field(default_factory=dict)
    tune: Tune | None = None
    compute: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of compute
    edge: str | None = None
    plots: Sequence[str] = ()
    run_s: float | None = None  # seconds of a run on one core
    needs: str | None = None  # what a run needs in addition to this package
    path: Path = Path()  # the study's own file

    @property
    def base_path(self) -> Path:
        return self.config_path(self.base)

    def config_path(self, name: str) -> Path:
        file = (self.path.parents[1] if self.is_shipped else self.path.parent) / name
        return Path(name) if not file.is_file() and find_config(name) else file

    @property
    def is_shipped(self) -> bool:
        return self.path.parent == catalog()

    @property
    def reference(self) -> str:
        """The argument with which `find_study` finds it: its name in the catalog, or its file."""
        return self.name if self.is_shipped else str(self.path)

    def all_seeds(self, full: bool) -> list[int]:
        return [*self.seeds, *(self.more_seeds if full else ())]

    def arm_names(self) -> list[str]:
        """Arms as named in result files: with their task if there are tasks."""
        if not self.tasks:
            return list(self.arms)
        return [
            arm if " @ " in arm else f"{arm} @ {task}"
            for task in self.tasks
            for arm in self.arms
            if " @ " not in arm or arm.endswith(f" @ {task}")
        ]

    def overrides(self, arm: str) -> dict[str, Any]:
        name, _, task = arm.partition(" @ ")
        own = self.arms[arm if arm in self.arms else name]
        return {**self.common, **(self.tasks[task] if task else {}), **own}


@dataclass(frozen=True)
class Job:
    """One run, or one seed of a computed study."""

    study: str
    arm: str  # empty for a computed study, which measures all arms
    seed: int
    stage: Literal["test", "tune"]
    overrides: Mapping[str, Any]
    digest: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.stage, self.arm, self.seed, self.digest


@cache
def catalog() -> Path | None:
    """The folder of the shipped studies, which the repository has and an installed package has not."""
    folder = laboratory()
    return folder / "studies" / "catalog" if folder is not None else None


@cache
def studies() -> Mapping[str, Study]:
    """The shipped studies by name, in the order of the page; read once per process. Empty without the repository."""
    folder = catalog()
    found = {path.stem: _read(path) for path in folder.glob("*.yaml")} if folder is not None else {}
    order = ("identity", "variance", "clipping", "precision", "moe", "precision_runs", "efficiency", "staleness")
    names = sorted(found, key=lambda n: (order.index(n) if n in order else 99, n))
    return MappingProxyType({name: found[name] for name in names})


def find_study(name: str) -> Study:
    """A study of the catalog by its name, or any study by its file."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name).resolve()
        if not path.is_file():
            raise ConfigError(f"there is no study file {name}; `gspo init PROJECT --task study` writes one")
        return _read(path)
    known = studies()
    if not known:
        raise ConfigError(f"study {name}: {NO_LAB}, or pass a study file of your own (my_study.yaml)")
    if name not in known:
        raise ConfigError(f"there is no study {name!r}; available: {', '.join(known)}")
    return known[name]


def _read(path: Path) -> Study:
    raw = parse_yaml(path.read_text(encoding="utf-8"))
    known = {entry.name for entry in fields(Study)} - {"name", "path"}
    if not isinstance(raw, dict) or not isinstance(raw.get("arms"), dict) or not {"base", "seeds"} <= raw.keys():
        raise ConfigError(f"{path}: a study needs base (a config), seeds ([1, 2, 3]) and arms (name: overrides)")
    if unknown := raw.keys() - known:
        raise ConfigError(f"{path}: unknown keys {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    groups = [raw["arms"], raw.setdefault("tasks", {}), {"common": raw.get("common")}]
    for name, overrides in [pair for group in groups for pair in group.items()]:
        if not isinstance(overrides, dict | None):
            raise ConfigError(f"{path}: {name} must be a mapping of overrides (key: value), got {overrides!r:.80}")
    raw["arms"] = {str(arm): overrides or {} for arm, overrides in raw["arms"].items()}
    raw["common"] = raw.get("common") or {}
    try:
        raw["checks"] = [Check(**check) for check in raw.get("checks", ())]
        raw["tune"] = Tune(**raw["tune"]) if raw.get("tune") else None
    except TypeError as cause:
        raise ConfigError(f"{path}: checks or tune: {cause}") from cause
    study = Study(name=path.stem, path=path, **raw)
    seeds = (*study.seeds, *study.more_seeds) if isinstance(study.seeds, list) else ()
    if not seeds or not all(type(seed) is int for seed in seeds):
        raise ConfigError(f"{path}: seeds must be a list of integers ([1, 2, 3]), got {study.seeds!r:.80}")
    if not study.base_path.is_file() and not find_config(study.base):
        raise ConfigError(f"{path}: base: {study.base} is neither a file beside the study nor an example")
    if study.tune and set(study.tune.seeds) & set(seeds):
        raise ConfigError(f"{path}: tuning seeds must not be test seeds")
    return study if study.is_shipped else _with_defaults(study)


def _with_defaults(study: Study) -> Study:
    """A user's study; without checks, each arm is compared with the first one; without plots, two curves are drawn."""
    checks, first = [], dict[str, str]()
    for arm in study.arm_names():
        base = first.setdefault(arm.partition(" @ ")[2], arm)
        if arm != base:
            checks.append(Check(f"{arm} ends higher than {base}", measure="final", arm=arm, against=base))
    named = {"arm": {arm for c in study.checks for arm in (c.arm, c.against) if isinstance(arm, str)}}
    named |= {"measure": {*study.measures, *(c.measure for c in study.checks)}, "curve": set(study.plots)}
    known = {"arm": study.arm_names(), "measure": list(MEANING), "curve": CURVES}
    for kind in known:
        if unknown := named[kind] - set(known[kind]):
            raise ConfigError(f"{study.path}: unknown {kind} {min(unknown)!r}; available: {', '.join(known[kind])}")
    return replace(study, checks=study.checks or checks, plots=study.plots or ("accuracy", "reward"))


@dataclass(frozen=True)
class Choice:
    """Which jobs of a study are meant: of all seeds or of the first ones, of all arms or of one."""

    full: bool = False  # with `more_seeds`
    only: str | None = None
    num_seeds: int | None = None


EVERYTHING = Choice()  # the seeds and arms of a plain run


def jobs(study: Study, choice: Choice = EVERYTHING) -> list[Job]:
    """The jobs whose settings are known (for a tuned study: its grid), ordered by seed so that pairs finish early."""
    seeds = study.all_seeds(choice.full)[: choice.num_seeds]
    if study.compute:
        return [Job(study.reference, "", seed, "test", {}, _computed_digest(study, seed)) for seed in seeds]
    if study.tune is not None:
        tried = [(arm, point, extra) for arm in _arms(study, choice.only) for point, extra in study.tune.points()]
        return [
            _job(study, f"{arm} {point}", seed, "tune", {**study.overrides(arm), **extra})
            for seed in list(study.tune.seeds)[: choice.num_seeds]
            for arm, point, extra in tried
        ]
    return [_job(study, arm, seed, "test", study.overrides(arm)) for seed in seeds for arm in _arms(study, choice.only)]


def tuned_jobs(study: Study, chosen: Mapping[str, Overrides], choice: Choice = EVERYTHING) -> list[Job]:
    """The test jobs of a tuned study, after the best point of each arm is known."""
    seeds = study.all_seeds(choice.full)[: choice.num_seeds]
    arms = [arm for arm in _arms(study, choice.only) if arm in chosen]
    return [_job(study, arm, seed, "test", {**study.overrides(arm), **chosen[arm]}) for seed in seeds for arm in arms]


def _arms(study: Study, only: str | None) -> list[str]:
    names = study.arm_names()
    if only is None:
        return names
    kept = [name for name in names if name == only or name.partition(" @ ")[0] == only]
    if not kept:
        raise ConfigError(f"{study.name} has no arm {only!r}; its arms: {', '.join(names)}")
    return kept


def _job(study: Study, arm: str, seed: int, stage: Literal["test", "tune"], overrides: Overrides) -> Job:
    # The configs of an arm differ only in the seed: it is resolved once.
    try:
        return Job(
            study.reference, arm, seed, stage, overrides, _digest({**recorded(study, overrides, 1), "seed": seed})
        )
    except ConfigError as error:
        raise ConfigError(_placed(study, arm, overrides, str(error))) from None


def _placed(study: Study, arm: str, overrides: Overrides, text: str) -> str:
    """Messages about overrides, with the file and line of the study in place of the command line."""
    root, (name, _, task) = yaml_tree.read(study.path), arm.partition(" @ ")

    def place(line: str) -> str:
        named = [key for key in overrides if key.lstrip("~+") in line]
        key = min(named, key=lambda key: line.index(key.lstrip("~+")), default="")
        for *above, last in (("arms", arm, key), ("arms", name, key), ("tasks", task, key), ("common", key)):
            node = root
            for part in (*above, last):
                node = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
            if node is not None:
                return node.place
        return str(study.path)

    start = f"{yaml_tree.COMMAND_LINE}: "
    lines = ((place(line) if line.startswith(start) else "", line) for line in text.splitlines())
    return "\n".join(f"{at}, arm {arm}: {line.removeprefix(start)}" if at else line for at, line in lines)


def dropped(study: Study) -> list[str]:
    """The values of the base that are dropped in an arm: an ε that does not fit the ratios of the arm's algorithm."""
    found = ((arm, configured(study, study.overrides(arm), study.seeds[0]).messages) for arm in study.arm_names())
    lines = (f"{arm}: {text}" for arm, texts in found for text in texts if " is dropped: " in text)
    return [line.replace("on the command line", "in the arm") for line in lines]


def recorded(study: Study, overrides: Overrides, seed: int) -> dict[str, Any]:
    """What a record holds of its config: the keys that were set, also of the first stage."""
    base = study.base_path
    changed = base.stat().st_mtime_ns if base.is_file() else 0  # 0: an example
    decided = _decided(base, changed, tuple(words(overrides, seed)))
    first = first_stage(study, overrides, {}, seed)
    return decided if first is None else {**decided, "first": set_keys(first)}


@cache
def _decided(base: Path, changed: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The cached result of `set_keys`; `changed` is the file's time, so an edited base is read again."""
    return set_keys(load(base, overrides))


def configured(study: Study, overrides: Overrides, seed: int) -> Loaded:
    """The resolved config of one run."""
    return load(study.base_path, words(overrides, seed))


def first_stage(study: Study, overrides: Overrides, place: Overrides, seed: int) -> Loaded | None:
    """The resolved config of an arm's first stage, if it has one."""
    return load(study.config_path(overrides["first"]), words(place, seed)) if "first" in overrides else None


def words(overrides: Overrides, seed: int) -> list[str]:
    """Overrides as command-line arguments."""
    given = {**overrides, "seed": seed}.items()
    return [key if key.startswith("~") else f"{key}={_typed(value)}" for key, value in given if key != "first"]


def train_command(study: Study, overrides: Overrides, seed: int) -> str:
    """The `gspo train` command of the same run; of two stages, two commands."""
    folder = "lab/studies/" if study.is_shipped else f"{study.path.parent}/"
    base = folder + study.base if study.is_shipped else str(study.base_path)
    first, own = first_stage(study, overrides, {}, seed), dict(overrides)
    before = ""
    if first is not None:
        before = f"{shlex.join(['gspo', 'train', folder + own['first'], *words({}, seed)])} && "
        own["actor.path"] = f"{first.config.cluster.fileroot}/{first.config.experiment_name}/{first.config.trial_name}"
    return before + shlex.join(["gspo", "train", base, *words(own, seed)])


def _typed(value: Any) -> str:
    # A string that YAML could parse as another type is quoted.
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./:+-]*", value)
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def set_keys(loaded: Loaded) -> dict[str, Any]:
    """Keys set by the base, the arm or the algorithm, with their values; without names and folders of the run.

    Defaults are not included, so a key that is added to the schema later does not make old results invalid.
    """
    decided = ("file", "command line", "algorithm", "level")
    keys = (key for key, origin in loaded.origins.items() if origin.kind in decided)
    return {key: _plain(value_of(loaded.config, key)) for key in sorted(keys) if key not in _NAMES}


# prox_logp_force decides whether a run is refused, not what it computes.
_NAMES = ("experiment_name", "trial_name", "cluster.fileroot", "actor.prox_logp_force")


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def config_digest(loaded: Loaded) -> str:
    return _digest(set_keys(loaded))


def _computed_digest(study: Study, seed: int) -> str:
    return _digest(_computed(study, set_keys(load(study.base_path, [f"seed={seed}"]))))


def _computed(study: Study, base: Mapping[str, Any]) -> dict[str, Any]:
    return {"compute": study.compute, "settings": dict(study.settings), "base": base}


def digest_today(study: Study, config: Mapping[str, Any], digest: str) -> str:
    """The digest of a recorded config without the keys that the schema no longer has.

    A key that was removed from the schema had no effect on the run, so its removal does not make the result invalid.
    """
    kept = {key: _without_removed(key, value) for key, value in config.items() if key == "first" or _is_key(key)}
    if kept == config:
        return digest
    if study.compute is None:
        return _digest(kept)
    # The settings of a computed study are in its digest but not in its record: they must be those of today.
    same_settings = digest == _digest(_computed(study, config))
    return _digest(_computed(study, kept)) if same_settings else digest


def _without_removed(key: str, value: Any) -> Any:
    """The value of a key; of a section, without the keys that the schema no longer has."""
    known = known_keys()
    if key not in known or known[key].section is None or not isinstance(value, dict):
        return value
    inside = {name: f"{key}.{name}" for name in value}
    return {name: _without_removed(inside[name], value[name]) for name in value if inside[name] in known}


def _is_key(key: str) -> bool:
    known, parts = known_keys(), key.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return key in known or any(section in known and known[section].free for section in above)


# Records have the names of their time. A moved reward is the same experiment, so digests hold its recorded name.
RENAMED = {"gspo.lab.studies.control": "gspo.studies.control"}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    for recorded_name, today in RENAMED.items():
        text = text.replace(today, recorded_name)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def command_today(recorded_command: str) -> str:
    """The `gspo train` command of a record, with the names and folders of today.

    >>> command_today("gspo train src/gspo/lab/studies/micro.yaml seed=1")
    'gspo train lab/studies/micro.yaml seed=1'
    """
    for recorded_name, today in {**RENAMED, "src/gspo/lab/studies/": "lab/studies/"}.items():
        recorded_command = recorded_command.replace(recorded_name, today)
    return recorded_command

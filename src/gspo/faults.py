"""Fault injection for tests: kill, stop or fail a run at a named place.

Enabled only by environment variables, so that no config and no file can do it:

    GSPO_FAULT=checkpoint.rename:2:kill  GSPO_FAULT_LOG=/tmp/fired  gspo train …

kills the process group at the second visit of `checkpoint.rename`. The visit is written to the log, with fsync, before
the fault happens, so that a test can check that it happened. If disabled, a site costs one comparison.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import NamedTuple

from gspo.errors import ConfigError

SITES = {
    "start.import": "before `gspo train` imports torch",
    "start.model": "before the models are loaded",
    "start.data": "before the data is loaded and rendered",
    "start.sampler": "before the sampler is made",
    "rollout.token": "before the next token of all running rows is sampled",
    "reward.submit": "before a complete group is submitted to the rewards",
    "reward.wait": "before the trainer waits for outstanding rewards",
    "train.backward": "after the backward pass of a micro-batch",
    "train.optimizer": "after clipping, before the optimizer changes a weight",
    "train.updated": "after the optimizer has changed the weights",
    "record.samples": "before a step's samples are written",
    "record.metrics": "before a step's metrics are written",
    "eval.begin": "before an evaluation starts",
    "weights.publish": "after a weight version is written, before it is published",
    "weights.copy": "before each tensor of a new weight version is copied into a sampler",
    "sampler.start": "before a sampler server loads its model",
    "sampler.register": "before a sampler server registers its address",
    "sampler.load": "after a sampler server has verified new weights, before it uses them",
    "sampler.collect": "before a sampler server returns finished samples",
    "checkpoint.file": "before each file of a checkpoint is written",
    "checkpoint.sync": "before each fsync",
    "checkpoint.replace": "before an older checkpoint of the same step is removed",
    "checkpoint.rename": "before a checkpoint is published",
    "checkpoint.prune": "before each removal of an old checkpoint",
    "end.close": "after the last step, before the parts of the run are closed",
    "end.report": "before the results are printed, and the plot and the page are written",
}
_SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1, "stop": signal.SIGSTOP}
ACTIONS = ("kill", "full", "hang", *_SIGNALS)


class Fault(NamedTuple):
    site: str
    visit: int
    action: str


def parse_fault(text: str) -> Fault:
    """
    >>> parse_fault("train.backward:3:kill")
    Fault(site='train.backward', visit=3, action='kill')
    """
    site, _, rest = text.partition(":")
    visit, _, action = rest.partition(":")
    if site not in SITES or not visit.isdecimal() or int(visit) < 1 or action not in ACTIONS:
        raise ConfigError(
            f"GSPO_FAULT is {text!r}; it must be site:visit:action with a site of {', '.join(SITES)} "
            f"and an action of {', '.join(ACTIONS)}"
        )
    return Fault(site, int(visit), action)


_armed = parse_fault(os.environ["GSPO_FAULT"]) if os.environ.get("GSPO_FAULT") else None
_visits = 0


def reached(site: str) -> None:
    """Called at `site`: trigger the fault if this is the chosen visit."""
    if _armed is None or site != _armed.site:
        return
    global _visits
    _visits += 1
    if _visits == _armed.visit:
        _fire(_armed)


def _fire(fault: Fault) -> None:
    if path := os.environ.get("GSPO_FAULT_LOG"):
        with open(path, "a") as file:
            file.write(f"{fault.site}:{fault.visit}:{fault.action}\n")
            file.flush()
            os.fsync(file.fileno())
    if fault.action == "kill":
        os.killpg(0, signal.SIGKILL)
    elif fault.action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.action == "hang":
        time.sleep(10**9)  # wait: 10⁹ s, intentionally: the stall timeout or a signal ends it
    else:
        os.kill(os.getpid(), _SIGNALS[fault.action])

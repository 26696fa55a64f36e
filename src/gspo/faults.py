"""Faults on purpose: what the tests of our promises use to kill, stop or fail a run at a chosen place.

Armed by the environment alone, so no config and no file can do it:

    GSPO_FAULT=checkpoint.rename:2:kill  GSPO_FAULT_LOG=/tmp/fired  gspo train …

means: at the second visit of `checkpoint.rename`, kill the process group. The visit is written to the log, synced,
before anything happens: a test asserts that its fault fired. Unarmed, a site costs one comparison.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import NamedTuple

from gspo.errors import ConfigError

SITES = {
    "rollout.token": "before a token is sampled for all running rows",
    "reward.submit": "before a whole group is handed to the rewards",
    "reward.wait": "before waiting for what is left of scoring",
    "train.backward": "after the backward pass of a micro-batch",
    "train.optimizer": "after clipping, before the optimizer changes a weight",
    "train.updated": "after the optimizer has changed the weights",
    "record.samples": "before a step's samples are written",
    "record.metrics": "before a step's metrics are written",
    "eval.begin": "before held-out problems are answered",
    "weights.publish": "after a version of the weights is written, before it is published",
    "weights.copy": "before each tensor of a new version is copied into a sampler",
    "sampler.start": "before a sampler server loads its model",
    "sampler.register": "before a sampler server says where it is",
    "sampler.load": "after a sampler server has verified new weights, before it takes them",
    "sampler.collect": "before a sampler server hands over finished samples",
    "checkpoint.file": "before each file of a checkpoint is written",
    "checkpoint.sync": "before each sync to disk",
    "checkpoint.replace": "before an older checkpoint of the same step is removed",
    "checkpoint.rename": "before a checkpoint is published",
    "checkpoint.prune": "before each removal of a checkpoint that is no longer needed",
}
_SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1, "stop": signal.SIGSTOP}
ACTIONS = ("kill", "full", "hang", *_SIGNALS)


class Fault(NamedTuple):
    site: str
    visit: int
    action: str


def parse(text: str) -> Fault:
    """
    >>> parse("train.backward:3:kill")
    Fault(site='train.backward', visit=3, action='kill')
    """
    site, _, rest = text.partition(":")
    visit, _, action = rest.partition(":")
    if site not in SITES or not visit.isdigit() or int(visit) < 1 or action not in ACTIONS:
        raise ConfigError(
            f"GSPO_FAULT is {text!r}; it reads site:visit:action with a site of {', '.join(SITES)} "
            f"and an action of {', '.join(ACTIONS)}"
        )
    return Fault(site, int(visit), action)


_armed = parse(os.environ["GSPO_FAULT"]) if os.environ.get("GSPO_FAULT") else None
_visits = 0


def reached(site: str) -> None:
    """The code is at `site`: do what the environment asks for here, which is nearly always nothing."""
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
        time.sleep(10**9)
    else:
        os.kill(os.getpid(), _SIGNALS[fault.action])

"""A server of runs that faults end: it imports everything once and forks a process group per run, so a start is cheap.

It has used no tensor when it forks, so the child is as clean as a new process. One JSON line in, one out.
"""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

RUN = (
    "total_train_steps=20", "evaluator.freq_steps=6", "saver.freq_steps=3", "evaluator.size=8", "saver.keep=2",
    "train_dataset.batch_size=4", "gconfig.max_new_tokens=24",
)  # fmt: skip


class Runs:
    """Talks to the server."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("GSPO_FAULT", "GSPO_FAULT_LOG")}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, root: Path, *overrides: str, fault: str = "", seconds: float = 0.0, forget: bool = False) -> int:
        """The exit code, −9 for a kill. `seconds`: killed from outside after so long. `forget`: a seed is not kept."""
        root.mkdir(parents=True, exist_ok=True)
        asked = {"root": str(root), "overrides": overrides, "fault": fault, "seconds": seconds, "forget": forget}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return int(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def fired(root: Path) -> list[str]:
    """What the injector wrote before it acted."""
    log = root / "fired"
    return log.read_text().split() if log.exists() else []


def end_as(job, out: Path | str, fired: Path | str, fault: str) -> NoReturn:
    """In a forked child: do the job with its output in `out` and this fault armed, and end with its exit code."""
    from gspo import faults

    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["GSPO_FAULT_LOG"] = str(fired)
    faults._armed = faults.parse_fault(fault) if fault else None
    code = 1
    try:
        code = job() or 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def serve() -> None:
    import training_runs  # noqa: F401 - imported for the children

    from gspo import faults, train  # noqa: F401 - imported for the children

    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            root = Path(asked["root"])
            end_as(partial(_train, root, asked), root / "out.txt", root / "fired", asked["fault"])
        if asked["seconds"]:
            time.sleep(asked["seconds"])
            os.kill(pid, signal.SIGKILL)  # not yet waited for: the number is still its own
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _train(root: Path, asked: dict) -> int:
    import training_runs

    from gspo.train import opening

    if asked["forget"]:
        opening.make_sampler = _forgetful(opening.make_sampler)
    summary = training_runs.make_trainer(root, *RUN, *asked["overrides"]).train(report=False)
    return 0 if summary.finished else 3


def _forgetful(make):
    def make_sampler(*args):
        sampler = make(*args)
        sampler._seed += 1
        return sampler

    return make_sampler


if __name__ == "__main__":
    serve()

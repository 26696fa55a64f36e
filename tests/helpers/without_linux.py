"""As sitecustomize.py: hides from all Python code what Linux has and macOS has not, and logs what was asked for."""

import ctypes
import os
import signal
import sys

FOLDERS = ("/proc", "/sys/", "/dev/shm")
CALLS = ("prctl", "malloc_trim")


def refuse(path):
    path = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    if path.startswith(FOLDERS):
        log(path)
        raise FileNotFoundError(2, "hidden by the test", path)


def log(name):
    with open(os.environ["HIDDEN_LOG"], "a") as file:
        file.write(f"{name}\n")


def audit(event, args):
    if event in ("open", "os.listdir", "os.scandir"):
        refuse(args[0])


def checked(function):
    def call(path, *args, **kwargs):
        refuse(path)
        return function(path, *args, **kwargs)

    return call


def symbol(library, name, real=ctypes.CDLL.__getattr__):
    if name in CALLS:
        log(name)
        raise AttributeError(name)
    return real(library, name)


sys.addaudithook(audit)
os.stat, os.access = checked(os.stat), checked(os.access)
ctypes.CDLL.__getattr__ = symbol
del os.sched_getaffinity, os.pipe2, os.pidfd_open, signal.pidfd_send_signal

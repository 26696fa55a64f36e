"""Counting the GPUs that CUDA would show."""

from gspo.system import process
from gspo.system.process import visible_gpus


def test_hidden_gpus_are_not_counted(monkeypatch):
    monkeypatch.setattr(process, "_names", lambda folder: ["nvidia0", "nvidia1", "nvidiactl", "null"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == 2
    for value, expected in (("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == expected

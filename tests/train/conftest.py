import fcntl

import pytest
import torch


@pytest.fixture
def exact(monkeypatch):
    """transformers computes norms, softmaxes and rotations in float32 whatever the model's dtype. Here those casts go
    to float64, so that 1e-10 means something."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="session")
def tiny():
    """The embedded model, built once per machine: workers wait for the one that builds it."""
    from gspo.models import embedded

    folder = embedded.folder("embedded:tiny")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        embedded.build("embedded:tiny")
    return "embedded:tiny"

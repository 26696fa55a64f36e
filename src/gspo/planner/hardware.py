"""What GPUs can do, by their vendors' data sheets, and how much of it programs get.

The shares (of peak arithmetic and of memory bandwidth) are assumptions, written here in one place. Nothing of this was
measured by us: there was no GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gspo.errors import ConfigError

TRAIN_SHARE = 0.40  # of peak arithmetic in training; published figures of dense models are between 0.3 and 0.5
MOE_TRAIN_SHARE = 0.20  # mixtures of experts
PREFILL_SHARE = 0.50  # of peak arithmetic in prefill and large decode batches
BANDWIDTH_SHARE = 0.70  # of memory bandwidth in decoding
MEMORY_SHARE = 0.90  # of a GPU's memory that an engine may use
STEP_S = 0.004  # of a decode step outside kernels: scheduling, launches, sampling
REDUCE_S = 15e-6  # one all-reduce of a decode step, for tensor parallelism; two per layer
DIGEST = 1.7e9  # bytes/s of sha256 on one core; measured on an AMD EPYC
HOST_COPY = 25e9  # bytes/s from host memory to a GPU


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float  # bfloat16, dense, per second
    bandwidth: float  # bytes/s of its memory
    memory: float  # bytes
    link: float  # bytes/s between the GPUs of a machine, one direction
    network: float  # bytes/s of a GPU's share of the network between machines
    per_machine: int = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 312e12, 2.04e12, 80e9, 300e9, 25e9),
        Gpu("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9),
        Gpu("H800", 989e12, 3.35e12, 80e9, 200e9, 50e9),
        Gpu("H20", 148e12, 4.0e12, 96e9, 450e9, 50e9),
        Gpu("H200", 989e12, 4.8e12, 141e9, 450e9, 50e9),
        Gpu("B200", 2250e12, 8.0e12, 180e9, 900e9, 50e9),
        Gpu("L40S", 362e12, 0.864e12, 48e9, 32e9, 12.5e9),
    )
}


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """`H100:64` as a GPU and a number.

    >>> gpu, count = parse_gpus("H100:64")
    >>> gpu.name, count
    ('H100', 64)
    """
    found = re.fullmatch(r"([A-Za-z0-9]+):(\d+)", text)
    if not found or found[1].upper() not in GPUS or not 2 <= int(found[2]) <= 65536:
        raise ConfigError(
            f"--gpus {text}: expected NAME:NUMBER with a name of {', '.join(GPUS)} and a number from 2 to 65536, "
            "for example H100:64"
        )
    return GPUS[found[1].upper()], int(found[2])

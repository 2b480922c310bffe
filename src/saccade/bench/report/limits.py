"""Limits: what a machine can do at most, for the machines of which that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from saccade.bench.results import Result


@dataclass(frozen=True)
class Limit:
    """What a device can do at most.

    Attributes:
        device: its name, as PyTorch gives it.
        tflops: by dtype. Of half precision: tensor cores, without sparsity. Of float32: without
            tensor cores, whose tf32 has too few bits to be float32.
        gbps: of its memory.
        source: where the numbers come from.
    """

    device: str
    tflops: Mapping[str, float]
    gbps: float
    source: str

    def most(self, result: Result) -> float | None:
        """The most that a result's rate can be, in its own unit; None where that is unknown."""
        return self.gbps if result.gbps is not None else self.tflops.get(result.case["dtype"])


def _nvidia(device: str, half: float, single: float, gbps: float) -> Limit:
    tflops = {"bfloat16": half, "float16": half, "float32": single}
    return Limit(device, tflops, gbps, "NVIDIA's data sheet")


LIMITS = (
    _nvidia("NVIDIA H200", 989.5, 67.0, 4800.0),
    _nvidia("NVIDIA H100 80GB HBM3", 989.5, 67.0, 3350.0),
    _nvidia("NVIDIA A100-SXM4-80GB", 312.0, 19.5, 2039.0),
    _nvidia("NVIDIA A100-SXM4-40GB", 312.0, 19.5, 1555.0),
)


def limit_of(device: str) -> Limit | None:
    """The limit of a device; None of one that is not in the table."""
    return next((limit for limit in LIMITS if limit.device == device), None)

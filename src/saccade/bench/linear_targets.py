"""Linear targets: what linear attention is meant to reach on one H200."""

from __future__ import annotations

from collections.abc import Iterator

from saccade.bench.target import Target
from saccade.bench.yardsticks import Copying, Time

PASSES = ("forward", "backward")
# Milliseconds of the two passes, features and normaliser included: portable, Hopper.
LIMITS = {
    "gpu-linear-bf16-d128-8x8k": ((0.80, 2.3), (0.40, 1.3)),
    "gpu-linear-bf16-d64-8x8k": ((0.55, 1.8), (0.42, 1.2)),
    "gpu-linear-bf16-d128-1x128k": ((1.0, 2.8), (0.60, 1.6)),
    "gpu-linear-bf16-d256-8x2k": ((1.6, 5.0), (0.9, 2.7)),
}


def _targets(who: str, column: int) -> Iterator[Target]:
    for case, limits in LIMITS.items():
        for which, limit in zip(PASSES, limits[column], strict=True):
            what = f"{who}, {case.removeprefix('gpu-')}, {which}: at most {limit} ms"
            yield Target(what, (case,), Time(), limit, (which,), f"saccade/{who}")


STEP = Target(
    "a step of 64 × 16 float32 states: at least 0.80 of a copy's bandwidth",
    ("gpu-linear-step-*",), Copying(), 1 / 0.80, ("forward",), "saccade/portable",
)  # fmt: skip
LINEAR_TARGETS = (*_targets("portable", 0), *_targets("hopper", 1), STEP)

"""Hopper targets: what saccade's kernels for Hopper alone are meant to reach on one H200."""

from __future__ import annotations

from collections.abc import Iterator

from saccade.bench.target import Target
from saccade.bench.yardsticks import Peer

WHO = "saccade/hopper"
CUDNN = Peer("sdpa/cudnn")
NARROW = tuple(f"gpu-{mask}-bf16-d{dim}-*" for mask in ("full", "causal") for dim in (64, 128))
WIDE = tuple(f"gpu-{mask}-bf16-d256-*" for mask in ("full", "causal"))
# From 1k on: a length of 512 is not written with a k.
NARROW_FROM_1K = tuple(f"{glob}k" for glob in NARROW)
MASKED = (
    "gpu-window1024-bf16-d128-16k", "gpu-packed-causal-bf16-d128-8192+64x128",
    "gpu-grouped-bf16-d128-4k",
)  # fmt: skip


def _against_cudnn(
    what: str, mean: float, cases: tuple[str, ...], which_pass: str
) -> Iterator[Target]:
    """Never much slower than cuDNN, and faster in the mean."""
    yield Target(f"{what}: at least 0.98 of cuDNN", cases, CUDNN, 1 / 0.98, (which_pass,), WHO)
    yield Target(
        f"{what}: in the mean at least {mean} of cuDNN",
        cases, CUDNN, 1 / mean, (which_pass,), WHO, mean=True,
    )  # fmt: skip


HOPPER_TARGETS = (
    *_against_cudnn("Hopper, D64 and D128, forward", 1.15, NARROW, "forward"),
    *_against_cudnn("Hopper, D256, forward", 1.12, WIDE, "forward"),
    *_against_cudnn("Hopper, D64 and D128, backward", 1.12, NARROW_FROM_1K, "backward"),
    Target(
        "Hopper, window 1k in 16k, packed mix, grouped heads: at least 1.3 of FlexAttention",
        MASKED, Peer("flex"), 1 / 1.3, ("forward",), WHO,
    ),
)  # fmt: skip

"""Portable targets: what saccade's portable kernels are meant to reach on one H200."""

from __future__ import annotations

from saccade.bench.target import Target
from saccade.bench.yardsticks import Peer, Sum, Tiles, Yardstick


def _gpu(
    what: str,
    limit: float,
    yardstick: Yardstick,
    *cases: str,
    passes: tuple[str, ...] = ("forward", "backward"),
) -> Target:
    return Target(what, cases, yardstick, limit, passes, "saccade/portable")


# From 1k on: a length of 512 is not written with a k.
CAUSAL = ("gpu-causal-bf16-d64-*k", "gpu-causal-bf16-d128-*k")
DENSE = ("gpu-full-bf16-d64-*k", "gpu-full-bf16-d128-*k", *CAUSAL)
WINDOW, DOCUMENTS = "gpu-window256-bf16-d128-16k", "gpu-documents-bf16-d128-16x1024"
PREFIX, BLOCKS = "gpu-prefix4096-bf16-d128-16k", "gpu-blocks128-bf16-d128-16k"
EQUAL = Sum(
    {
        "gpu-packed-bf16-d128-16x1024": ("gpu-full-bf16-d128-1k",),
        "gpu-packed-causal-bf16-d128-16x1024": ("gpu-causal-bf16-d128-1k",),
    }
)
MIX = Sum(
    {
        "gpu-packed-causal-bf16-d128-8192+64x128": (
            "gpu-packed-causal-bf16-d128-1x8192", "gpu-packed-causal-bf16-d128-64x128",
        ),
    }
)  # fmt: skip

PORTABLE_TARGETS = (
    _gpu(
        "dense: forward at most 1/1.25 of SDPA's flash",
        1 / 1.25, Peer("sdpa/flash"), *DENSE, passes=("forward",),
    ),
    _gpu(
        "dense: backward at most 1/1.15 of SDPA's flash",
        1 / 1.15, Peer("sdpa/flash"), *DENSE, passes=("backward",),
    ),
    _gpu("dense: never slower than FlexAttention", 1.0, Peer("flex"), *DENSE),
    _gpu(
        "window, documents, prefix, blocks: at most FlexAttention's time",
        1.0, Peer("flex"), WINDOW, DOCUMENTS, PREFIX, BLOCKS,
    ),
    _gpu(
        "window, documents, blocks: a visible tile takes at most 1.2 of what it does in full",
        1.2, Tiles("gpu-full-bf16-d128-16k"), WINDOW, DOCUMENTS, BLOCKS,
    ),
    _gpu("packed 16 × 1k: at most 1.05 of the dense batch", 1.05, EQUAL, *EQUAL.others),
    _gpu("packed 8k + 64 × 128: at most 1.15 of its parts' sum", 1.15, MIX, *MIX.others),
    _gpu(
        "causal: at most 1/4 of flash_attention_triton's time",
        1 / 4, Peer("flash_attention_triton"), *CAUSAL,
    ),
)  # fmt: skip

"""Paged targets: what attention over pages is meant to reach on one H200.

Measure them with `saccade bench --graph --cold`: replays of CUDA graphs, with a cold L2 cache.
"""

from __future__ import annotations

from saccade.bench.target import Target
from saccade.bench.yardsticks import Bytes, Peer, Published, Reading, Sum, Time

WHO = "saccade/scattered-64"  # pages as they lie after a while of serving


def _name(heads: str, lengths: str, dtype: str = "bf16") -> str:
    return f"gpu-pages-h{heads}-{dtype}-d128-{lengths}"


# FlashAttention-3 on pages of 64, with a cold L2 cache, where a copy ran at 4,250 GB/s: µs.
FLASH_3 = Published(
    {
        _name("32x8", "1x8k"): 24.4,
        _name("32x8", "1x128k"): 146.0,
        _name("32x8", "16x8k"): 143.0,
        _name("32x8", "64x4k"): 267.0,
        _name("32x8", "128x8k"): 992.0,
        _name("64x8", "16x8k"): 158.0,
        _name("32x32", "16x8k"): 500.0,
    },
    4250.0,
)
LARGE = (
    *(_name("32x8", sizes) for sizes in ("1x128k", "16x8k", "64x4k", "128x8k", "256x2k")),
    *(_name(heads, sizes) for heads in ("64x8", "32x32") for sizes in ("16x8k", "128x8k")),
)
RAGGED = _name("32x8", "131072+63x1024")
WIDER = Sum({_name("32x8", size, "fp8"): (_name("32x8", size),) for size in ("16x8k", "128x8k")})

PAGED_TARGETS = (
    Target(
        "pages: at most FlashAttention-3's time, scaled by the rate of a copy",
        tuple(FLASH_3.micros), FLASH_3, 1.0, ("forward",), WHO,
    ),
    Target(
        "pages: in the mean at most 1/1.1 of it",
        tuple(FLASH_3.micros), FLASH_3, 1 / 1.1, ("forward",), WHO, mean=True,
    ),
    Target(
        "pages, from 512 MB on: 4.3 TB/s, or 0.97 of a pure read",
        LARGE, Reading(), 1 / 0.97, ("forward",), WHO,
    ),
    Target(
        "pages, one sequence of 8k: at most 0.015 ms",
        (_name("32x8", "1x8k"),), Time(), 0.015, ("forward",), WHO,
    ),
    Target(
        "pages of 16: at most 1.03 of the time with pages of 256",
        LARGE, Peer("saccade/scattered-256"), 1.03, ("forward",), "saccade/scattered-16",
    ),
    Target(
        "pages, 128k and 63 × 1k: a byte takes at most 1.1 of what it does in 64 × 4k",
        (RAGGED,), Bytes(_name("32x8", "64x4k")), 1.1, ("forward",), WHO,
    ),
    Target(
        "pages in fp8: at most 1/1.7 of the time in bf16",
        tuple(WIDER.others), WIDER, 1 / 1.7, ("forward",), WHO,
    ),
    Target(
        "chunks of a prompt over pages, portable: at most 1.08 of the dense kernel's time",
        ("gpu-pages-*-new*",), Peer("saccade/portable"), 1.08, ("forward",),
        "portable/scattered-64",
    ),
    Target(
        "chunks of a prompt over pages, Hopper: at most 1.08 of the dense Hopper kernel's time",
        ("gpu-pages-*-new*",), Peer("saccade/hopper"), 1.08, ("forward",), "hopper/scattered-64",
    ),
)  # fmt: skip

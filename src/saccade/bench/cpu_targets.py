"""CPU targets: what saccade is meant to reach on two cores."""

from __future__ import annotations

from saccade.bench.target import Target
from saccade.bench.yardsticks import Memory, Peer, Tokens


def _cpu(what: str, limit: float, *cases: str) -> Target:
    return Target(what, cases, Peer("sdpa"), limit, ("forward", "forward+backward"))


CPU_TARGETS = (
    _cpu("dense fp32: at most 1.05 of SDPA's time", 1.05, "cpu-full-fp32-*", "cpu-causal-fp32-*"),
    _cpu("dense bf16: at most 1.05 of SDPA's time", 1.05, "cpu-full-bf16-*", "cpu-causal-bf16-*"),
    _cpu("window of 256 in 4k: at most 0.25 of SDPA with that mask", 0.25, "cpu-window256-*"),
    _cpu("packed 8 × 512: at most 0.25 of SDPA with the block mask", 0.25, "cpu-packed-*"),
    _cpu("decode 32/8 heads, 16k keys: at most 0.50 of SDPA's time", 0.5, "cpu-decode-*"),
    *(
        Target(
            f"decode from neighbouring pages of {size}: at most 1.1 of the time without pages",
            ("cpu-decode-*",), Peer("saccade/cpu"), 1.1, ("forward",), f"saccade/paged-{size}",
        )
        for size in (16, 64, 256)
    ),
    Target(
        "decode from neighbouring pages of 16: at most 0.50 of SDPA's time without pages",
        ("cpu-decode-*",), Peer("sdpa"), 0.5, ("forward",), "saccade/paged-16",
    ),
    Target(
        "decode from scattered pages of 16: at most 0.50 of gathering them for SDPA",
        ("cpu-decode-*",), Peer("sdpa/gathered-16"), 0.5, ("forward",), "saccade/scattered-16",
    ),
    Target(
        "32k, one head: under 200 MB beyond the inputs",
        ("cpu-memory-*",), Memory(), 200.0, ("forward+backward",),
    ),
    Target(
        "linear attention, forward: at least 0.35 of torch.bmm's rate",
        ("cpu-linear-fp32-d128-4k",), Peer("bmm"), 1 / 0.35, ("forward",),
    ),
    Target(
        "linear attention, forward+backward: at least 0.30 of torch.bmm's rate",
        ("cpu-linear-fp32-d128-4k",), Peer("bmm"), 1 / 0.30, ("forward+backward",),
    ),
    Target(
        "linear attention: a token takes at most 1.2 of its time at 4k, up to 256k",
        ("cpu-linear-length-*-16k", "cpu-linear-length-*-64k", "cpu-linear-length-*-256k"),
        Tokens("cpu-linear-length-fp32-d64-4k"), 1.2, ("forward", "forward+backward"),
    ),
)  # fmt: skip

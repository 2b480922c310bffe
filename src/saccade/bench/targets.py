"""Targets: what saccade is meant to reach, on a CPU and on one GPU of Hopper's size."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from saccade.bench.cases import CASES
from saccade.bench.history import FASTEST
from saccade.bench.selection import passes_of
from saccade.bench.yardsticks import Memory, Peer, Sum, Tiles, Tokens, Yardstick


@dataclass(frozen=True)
class Target:
    """A bound that must hold in every case and pass it names.

    Attributes:
        what: the bound in words.
        cases: globs of case names; they begin with the machine.
        yardstick: what is compared with.
        limit: the largest value that the yardstick may give.
        passes: which passes.
        subject: whose times are judged; by default the fastest of saccade's implementations.
    """

    what: str
    cases: tuple[str, ...]
    yardstick: Yardstick
    limit: float
    passes: tuple[str, ...]
    subject: str = FASTEST

    @property
    def machine(self) -> str:
        """The first word of its cases' names."""
        return self.cases[0].split("-")[0]

    def expected(self) -> list[tuple[str, str]]:
        """Every case and pass that must be measured."""
        names = [name for name in CASES if any(fnmatchcase(name, glob) for glob in self.cases)]
        return [(name, which) for name in names for which in passes_of(CASES[name], self.passes)]


def _cpu(what: str, limit: float, *cases: str) -> Target:
    return Target(what, cases, Peer("sdpa"), limit, ("forward", "forward+backward"))


def _gpu(
    what: str,
    limit: float,
    yardstick: Yardstick,
    *cases: str,
    passes: tuple[str, ...] = ("forward", "backward"),
) -> Target:
    return Target(what, cases, yardstick, limit, passes, "saccade/portable")


CPU_TARGETS = (
    _cpu("dense fp32: at most 1.05 of SDPA's time", 1.05, "cpu-full-fp32-*", "cpu-causal-fp32-*"),
    _cpu("dense bf16: at most 1.05 of SDPA's time", 1.05, "cpu-full-bf16-*", "cpu-causal-bf16-*"),
    _cpu("window of 256 in 4k: at most 0.25 of SDPA with that mask", 0.25, "cpu-window256-*"),
    _cpu("packed 8 × 512: at most 0.25 of SDPA with the block mask", 0.25, "cpu-packed-*"),
    _cpu("decode 32/8 heads, 16k keys: at most 0.50 of SDPA's time", 0.5, "cpu-decode-*"),
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

GPU_TARGETS = (
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

TARGETS = (*CPU_TARGETS, *GPU_TARGETS)

"""Targets: what saccade is meant to reach, one table, and how far result files show it reached.

One part is for two CPU cores, the other for an H200. Targets of pages are measured with
`saccade bench --graph --cold`: replays of CUDA graphs, with a cold L2 cache. A time is compared
only with times of the same run, in which both took turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import geometric_mean
from typing import ClassVar, NamedTuple

from saccade.bench.case import BenchCase
from saccade.bench.cases import CASES, folded, passes_of
from saccade.bench.peers.pytorch import COPY_BYTES
from saccade.bench.results import Result, runs_of

FASTEST = "saccade"
"""Stands for the fastest of saccade's implementations in a run; the reference is none of them."""

TILE = (128, 64)  # query rows, key rows
GOOD_RATE = 4300.0  # GB/s, of an H200's memory


class Unmeasured(Exception):
    """What a target needs was not measured; the message says what is missing."""


class History:
    """All runs of a file of results."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.runs = runs_of(results)

    def together(self, case: str, which_pass: str, *names: str) -> list[Result]:
        """Results of all of these peers, from the last run in which they took turns."""
        runs = self.runs.get((case, which_pass), [])
        for members in reversed(runs):
            found = [_member(members, name) for name in names]
            results = [result for result in found if result is not None]
            if len(results) == len(names):
                return results
        if not runs:
            raise Unmeasured("not measured")
        present = {name for members in runs for name in names if _member(members, name)}
        if missing := [name for name in names if name not in present]:
            raise Unmeasured(f"without {' and '.join(missing)}")
        raise Unmeasured(f"{' and '.join(names)} never took turns in one run")

    def alike(self, result: Result, case: str) -> Result:
        """A result of this implementation and pass in another case, on the same device."""
        try:
            (other,) = self.together(case, result.which_pass, result.who)
        except Unmeasured as error:
            raise Unmeasured(f"{case}: {error}") from None
        if other.device != result.device:
            raise Unmeasured(f"{case}: measured on another device")
        return other


def _member(members: dict[str, Result], name: str) -> Result | None:
    if name != FASTEST:
        return members.get(name)
    return min(_ours(members), key=lambda result: result.median_ms, default=None)


def _ours(members: dict[str, Result]) -> list[Result]:
    return [
        result
        for who, result in members.items()
        if who.startswith("saccade/") and who != "saccade/reference"
    ]


@dataclass(frozen=True)
class Yardstick:
    """What a target's time is compared with.

    Attributes:
        unit: of the value, which has none if it is a ratio.
    """

    unit: ClassVar[str] = ""

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """What the subject reached: its time over the yardstick's.

        Raises:
            Unmeasured: if something for it is missing.
        """
        ours, *others = history.together(case, which_pass, subject, *self._peers())
        return ours.median_ms / self._milliseconds(history, ours, *others)

    def _peers(self) -> tuple[str, ...]:
        """Peers that must have taken turns with the subject."""
        return ()

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        raise NotImplementedError


class Time(Yardstick):
    """Nothing but the time, in milliseconds."""

    unit = " ms"

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        return 1.0


@dataclass(frozen=True)
class AgainstPeer(Yardstick):
    """A peer's time in the same run."""

    who: str

    def _peers(self) -> tuple[str, ...]:
        return (self.who,)

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        return others[0].median_ms


@dataclass(frozen=True)
class Sum(Yardstick):
    """The subject's own times in other cases, added up; `others` says in which, by case."""

    others: Mapping[str, tuple[str, ...]]

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        parts = self.others[ours.case["name"]]
        return sum(history.alike(ours, other).median_ms for other in parts)


AMOUNTS: dict[str, Callable[[BenchCase], int]] = {
    "tiles": lambda case: case.tiles(TILE),  # that hold a visible pair
    "tokens": lambda case: case.query_len,
    "bytes": lambda case: case.bytes,  # that a forward pass moves at least
}


@dataclass(frozen=True)
class SameAmount(Yardstick):
    """The subject's own time in another case, had it as many tiles, tokens or bytes."""

    of: str  # one of AMOUNTS
    other: str

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        amount, other = AMOUNTS[self.of], history.alike(ours, self.other)
        return other.median_ms * (amount(CASES[ours.case["name"]]) / amount(CASES[self.other]))


class Copying(Yardstick):
    """A copy of as many bytes, by the rate of the copy in the same run."""

    def _peers(self) -> tuple[str, ...]:
        return ("copy",)

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        return others[0].median_ms * CASES[ours.case["name"]].bytes / COPY_BYTES


@dataclass(frozen=True)
class Published(Copying):
    """Times that others published, of a machine that copies at `rate`; scaled to this one's."""

    micros: Mapping[str, float]  # by case
    rate: float  # GB/s

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        rate = COPY_BYTES / others[0].median_ms / 1e6
        return self.micros[ours.case["name"]] / 1e3 * self.rate / rate


class Reading(Yardstick):
    """A pure read of as many bytes in the same run, or a good rate if that is slower."""

    def _peers(self) -> tuple[str, ...]:
        return ("read",)

    def _milliseconds(self, history: History, ours: Result, *others: Result) -> float:
        return max(others[0].median_ms, CASES[ours.case["name"]].bytes / GOOD_RATE / 1e6)


class Memory(Yardstick):
    """No time: the least memory of any implementation at its worst moment, in megabytes."""

    unit = " MB"

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The least memory in the last run that has any of saccade's implementations."""
        runs = history.runs.get((case, which_pass), [])
        ours = next((found for members in reversed(runs) if (found := _ours(members))), None)
        if ours is None:
            raise Unmeasured("not measured")
        known = [result.peak_mb for result in ours if result.peak_mb is not None]
        if not known:
            raise Unmeasured("memory not measured")
        return min(known)


FORWARD, BACKWARD = ("forward",), ("backward",)
BOTH = FORWARD + BACKWARD
TRAINED = ("forward", "forward+backward")
TRITON, HOPPER = "saccade/triton", "saccade/hopper"
SCATTERED = "saccade/scattered-64"  # pages as they lie after a while of serving


@dataclass(frozen=True)
class Target:
    """A bound that must hold in every case and pass it names, or for their geometric mean.

    Attributes:
        what: the bound as a sentence.
        cases: globs of case names; they begin with the machine.
        yardstick: what is compared with.
        limit: the largest value that the yardstick may give.
        passes: which passes.
        subject: the peer whose times count; by default the fastest of saccade's implementations.
        mean: whether the mean is bounded instead of each.
    """

    what: str
    cases: tuple[str, ...]
    yardstick: Yardstick
    limit: float
    passes: tuple[str, ...]
    subject: str = FASTEST
    mean: bool = False

    @property
    def machine(self) -> str:
        """The first word of its cases' names."""
        return self.cases[0].split("-")[0]

    def expected(self) -> list[tuple[str, str]]:
        """Every case and pass that must be measured."""
        names = [name for name in CASES if any(fnmatchcase(name, glob) for glob in self.cases)]
        return [(name, which) for name in names for which in passes_of(CASES[name], self.passes)]


def _pages(heads: str, *lengths: str, dtype: str = "bf16") -> tuple[str, ...]:
    return tuple(f"gpu-pages-h{heads}-{dtype}-d128-{length}" for length in lengths)


# Milliseconds of both passes by Triton and by Hopper, features and normaliser included.
LINEAR_LIMITS = {
    "d128-8x8k": ((0.80, 2.3), (0.40, 1.3)),
    "d64-8x8k": ((0.55, 1.8), (0.42, 1.2)),
    "d128-1x128k": ((1.0, 2.8), (0.60, 1.6)),
    "d256-8x2k": ((1.6, 5.0), (0.9, 2.7)),
}
NARROW = tuple(f"gpu-{mask}-bf16-d{dim}-*" for mask in ("full", "causal") for dim in (64, 128))
NARROW_FROM_1K = tuple(f"{glob}k" for glob in NARROW)  # a length of 512 is not written with a k
WIDE = ("gpu-full-bf16-d256-*", "gpu-causal-bf16-d256-*")
WINDOW, DOCUMENTS = "gpu-window256-bf16-d128-16k", "gpu-documents-bf16-d128-16x1024"
PREFIX, BLOCKS = "gpu-prefix4096-bf16-d128-16k", "gpu-blocks128-bf16-d128-16k"
MIXED = "gpu-packed-causal-bf16-d128-8192+64x128"
MASKED = ("gpu-window1024-bf16-d128-16k", MIXED, "gpu-grouped-bf16-d128-4k")
EQUAL_PARTS = Sum({
    "gpu-packed-bf16-d128-16x1024": ("gpu-full-bf16-d128-1k",),
    "gpu-packed-causal-bf16-d128-16x1024": ("gpu-causal-bf16-d128-1k",),
})  # fmt: skip
MIXED_PARTS = Sum({
    MIXED: ("gpu-packed-causal-bf16-d128-1x8192", "gpu-packed-causal-bf16-d128-64x128"),
})  # fmt: skip
# FlashAttention-3 on pages of 64, with a cold L2 cache, where a copy ran at 4,250 GB/s: µs.
FLASH_3 = Published(
    dict(zip(
        (*_pages("32x8", "1x8k", "1x128k", "16x8k", "64x4k", "128x8k"),
         *_pages("64x8", "16x8k"), *_pages("32x32", "16x8k")),
        (24.4, 146.0, 143.0, 267.0, 992.0, 158.0, 500.0),
        strict=True,
    )),
    4250.0,
)  # fmt: skip
LARGE_PAGES = (
    *_pages("32x8", "1x128k", "16x8k", "64x4k", "128x8k", "256x2k"),
    *_pages("64x8", "16x8k", "128x8k"),
    *_pages("32x32", "16x8k", "128x8k"),
)
(MANY_EQUAL,) = _pages("32x8", "64x4k")
IN_FP8 = Sum({
    fp8: (bf16,)
    for fp8, bf16 in zip(
        _pages("32x8", "16x8k", "128x8k", dtype="fp8"), _pages("32x8", "16x8k", "128x8k"),
        strict=True,
    )
})  # fmt: skip
# How many times as fast as fla: Triton and Hopper, forward and backward.
DELTA_LIMITS = ((1.5, 1.3), (2.5, 1.8))
DELTA = ("gpu-delta-h16x32-*", "gpu-delta-packed-*")
# TFLOP/s of e4m3 rows of 128 channels, without a mask and causal.
FP8_RATES = {"16x1k": (750, 520), "4x4k": (930, 830), "1x16k": (1000, 950)}
FP8 = ("gpu-full-fp8-*", "gpu-causal-fp8-*")
FP8_OTHER_WIDTHS = tuple(
    f"gpu-*-fp8-d{dim}-{size}" for dim in (64, 256) for size in ("4x4k", "1x16k")
)
DECODE, CHUNKS, MATRIX = ("cpu-decode-*",), ("gpu-pages-*-new*",), ("cpu-linear-fp32-d128-4k",)
LONG_LINEAR = tuple(f"cpu-linear-length-*-{length}" for length in ("16k", "64k", "256k"))

CPU_TARGETS = (
    Target("Dense attention in float32 takes at most 1.05 of SDPA's time.",
           ("cpu-full-fp32-*", "cpu-causal-fp32-*"), AgainstPeer("sdpa"), 1.05, TRAINED),
    Target("Dense attention in bfloat16 takes at most 1.05 of SDPA's time.",
           ("cpu-full-bf16-*", "cpu-causal-bf16-*"), AgainstPeer("sdpa"), 1.05, TRAINED),
    Target("A window of 256 in 4k takes at most 0.25 of SDPA's time with that mask.",
           ("cpu-window256-*",), AgainstPeer("sdpa"), 0.25, TRAINED),
    Target("Eight packed sequences of 512 take at most 0.25 of SDPA's time with the block mask.",
           ("cpu-packed-*",), AgainstPeer("sdpa"), 0.25, TRAINED),
    Target("Decoding with 32/8 heads and 16k keys takes at most 0.50 of SDPA's time.",
           DECODE, AgainstPeer("sdpa"), 0.5, TRAINED),
    *(
        Target(f"Decoding from neighbouring pages of {size} takes at most 1.1 of the time "
               "without pages.", DECODE, AgainstPeer("saccade/cpu"), 1.1,
               FORWARD, f"saccade/paged-{size}")
        for size in (16, 64, 256)
    ),
    Target("Decoding from neighbouring pages of 16 takes at most 0.50 of SDPA's time without "
           "pages.", DECODE, AgainstPeer("sdpa"), 0.5, FORWARD, "saccade/paged-16"),
    Target("Decoding from scattered pages of 16 takes at most 0.50 of gathering them for SDPA.",
           DECODE, AgainstPeer("sdpa/gathered-16"), 0.5, FORWARD, "saccade/scattered-16"),
    Target("One head of 32k rows takes less than 200 MB beyond the inputs.",
           ("cpu-memory-*",), Memory(), 200.0, ("forward+backward",)),
    Target("Linear attention reaches at least 0.35 of torch.bmm's rate, forward.",
           MATRIX, AgainstPeer("bmm"), 1 / 0.35, FORWARD),
    Target("Linear attention reaches at least 0.30 of torch.bmm's rate, forward and backward.",
           MATRIX, AgainstPeer("bmm"), 1 / 0.30, ("forward+backward",)),
    Target("The gated delta rule reaches at least 0.25 of torch.bmm's rate, forward.",
           ("cpu-delta-h8x8-fp32-*", "cpu-delta-channels-h8x8-fp32-*"), AgainstPeer("bmm"),
           1 / 0.25, FORWARD),
    Target("Linear attention takes at most 1.2 times as long for a token at up to 256k as at 4k.",
           LONG_LINEAR, SameAmount("tokens", "cpu-linear-length-fp32-d64-4k"), 1.2, TRAINED),
)  # fmt: skip

GPU_TARGETS = (
    Target("Triton kernels take at most 1/1.25 of the time of SDPA's flash, dense, forward.",
           NARROW_FROM_1K, AgainstPeer("sdpa/flash"), 1 / 1.25, FORWARD, TRITON),
    Target("Triton kernels take at most 1/1.15 of the time of SDPA's flash, dense, backward.",
           NARROW_FROM_1K, AgainstPeer("sdpa/flash"), 1 / 1.15, BACKWARD, TRITON),
    Target("Triton kernels are never slower than FlexAttention on dense cases.",
           NARROW_FROM_1K, AgainstPeer("flex"), 1.0,
           BOTH, TRITON),
    Target("Triton kernels take at most FlexAttention's time under a window, documents, a prefix "
           "and blocks.", (WINDOW, DOCUMENTS, PREFIX, BLOCKS), AgainstPeer("flex"), 1.0,
           BOTH, TRITON),
    Target("Triton kernels take at most 1.2 times as long for a visible tile under a window, "
           "documents and blocks as without a mask.",
           (WINDOW, DOCUMENTS, BLOCKS), SameAmount("tiles", "gpu-full-bf16-d128-16k"), 1.2, BOTH,
           TRITON),
    Target("Sixteen packed sequences of 1k take at most 1.05 of the dense batch's time.",
           tuple(EQUAL_PARTS.others), EQUAL_PARTS, 1.05, BOTH, TRITON),
    Target("One packed sequence of 8k with 64 of 128 takes at most 1.15 of its parts' sum.",
           tuple(MIXED_PARTS.others), MIXED_PARTS, 1.15, BOTH, TRITON),
    Target("Triton kernels take at most 1/4 of flash_attention_triton's time on causal cases.",
           NARROW_FROM_1K[2:], AgainstPeer("flash_attention_triton"), 1 / 4, BOTH, TRITON),
    *(
        Target(f"{kernels} kernels take at most {limit} ms for linear attention, {shape}, {one}.",
               (f"gpu-linear-bf16-{shape}",), Time(), limit, (one,), f"saccade/{kernels.lower()}")
        for shape, limits in LINEAR_LIMITS.items()
        for kernels, of_passes in zip(("Triton", "Hopper"), limits, strict=True)
        for one, limit in zip(BOTH, of_passes, strict=True)
    ),
    Target("A step of 64 × 16 float32 states reaches at least 0.80 of a copy's bandwidth.",
           ("gpu-linear-step-*",), Copying(), 1 / 0.80, FORWARD, TRITON),
    *(
        Target(f"{kernels} kernels take at most 1/{times} of fla's time for the gated delta rule "
               f"with Qwen3-Next's heads, dense and packed, {one}.", DELTA, AgainstPeer("fla"),
               1 / times, (one,), f"saccade/{kernels.lower()}")
        for kernels, of_passes in zip(("Triton", "Hopper"), DELTA_LIMITS, strict=True)
        for one, times in zip(BOTH, of_passes, strict=True)
    ),
    Target("The gated delta rule of one sequence of 64k with 2/8 heads takes at most 1/4 of fla's "
           "time, forward.", ("gpu-delta-h2x8-*",), AgainstPeer("fla"), 1 / 4, FORWARD, TRITON),
    *(
        Target(f"The gated delta rule with a decay for each channel takes at most 1/{times} of "
               f"fla's time, {one}.", ("gpu-delta-channels-h32x32-*",), AgainstPeer("fla"),
               1 / times, (one,), TRITON)
        for one, times in zip(BOTH, (1.8, 1.5), strict=True)
    ),
    Target("A step of the gated delta rule of 64 sequences reaches at least 0.80 of a copy's "
           "bandwidth.", ("gpu-delta-step-*", "gpu-delta-channels-step-*"), Copying(), 1 / 0.80,
           FORWARD, TRITON),
    Target("Attention over pages takes at most FlashAttention-3's time, scaled by the rate of a "
           "copy.", tuple(FLASH_3.micros), FLASH_3, 1.0, FORWARD, SCATTERED),
    Target("Attention over pages takes in the mean at most 1/1.1 of FlashAttention-3's time.",
           tuple(FLASH_3.micros), FLASH_3, 1 / 1.1, FORWARD, SCATTERED, mean=True),
    Target("Attention over pages reads 4.3 TB/s, or 0.97 of a pure read, from 512 MB on.",
           LARGE_PAGES, Reading(), 1 / 0.97, FORWARD, SCATTERED),
    Target("One sequence of 8k in pages takes at most 0.015 ms.",
           _pages("32x8", "1x8k"), Time(), 0.015, FORWARD, SCATTERED),
    Target("Pages of 16 take at most 1.03 of the time with pages of 256.",
           LARGE_PAGES, AgainstPeer("saccade/scattered-256"), 1.03, FORWARD,
           "saccade/scattered-16"),
    Target("A byte of one sequence of 128k with 63 of 1k takes at most 1.1 times as long as in "
           "64 of 4k.", _pages("32x8", "131072+63x1024"), SameAmount("bytes", MANY_EQUAL), 1.1,
           FORWARD, SCATTERED),
    Target("Pages in fp8 take at most 1/1.7 of the time in bfloat16.",
           tuple(IN_FP8.others), IN_FP8, 1 / 1.7, FORWARD, SCATTERED),
    Target("Triton kernels take at most 1.08 of their dense time for chunks of a prompt over "
           "pages.", CHUNKS, AgainstPeer(TRITON), 1.08, FORWARD, "triton/scattered-64"),
    Target("Hopper kernels take at most 1.08 of their dense time for chunks of a prompt over "
           "pages.", CHUNKS, AgainstPeer(HOPPER), 1.08, FORWARD, "hopper/scattered-64"),
    *(
        target
        for what, mean, cases, passes in (
            ("D64 and D128, forward", 1.15, NARROW, FORWARD),
            ("D256, forward", 1.12, WIDE, FORWARD),
            ("D64 and D128, backward", 1.12, NARROW_FROM_1K, BACKWARD),
        )
        for target in (
            Target(f"Hopper kernels reach at least 0.98 of cuDNN's rate in every case, {what}.",
                   cases, AgainstPeer("sdpa/cudnn"), 1 / 0.98, passes, HOPPER),
            Target(f"Hopper kernels reach in the mean at least {mean} of cuDNN's rate, {what}.",
                   cases, AgainstPeer("sdpa/cudnn"), 1 / mean, passes, HOPPER, mean=True),
        )
    ),
    *(
        Target(f"fp8 attention of rows of 128 channels reaches at least {rate} TFLOP/s, {kind} "
               f"{size}.", (name := f"gpu-{kind}-fp8-d128-{size}",), Time(),
               CASES[name].flops("forward") / rate / 1e9, FORWARD, HOPPER)
        for size, rates in FP8_RATES.items()
        for kind, rate in zip(("full", "causal"), rates, strict=True)
    ),
    Target("fp8 attention takes at most the time of bfloat16, from 1k on.",
           FP8, AgainstPeer("saccade/bf16"), 1.0, FORWARD, HOPPER),
    Target("fp8 attention takes at most 1/1.35 of the time of bfloat16 with 64 and 256 channels, "
           "from 4k on.", FP8_OTHER_WIDTHS, AgainstPeer("saccade/bf16"), 1 / 1.35, FORWARD, HOPPER),
    *(
        Target(f"Rows that are quantised inside take at most {limit} of the time of e4m3 rows, "
               f"{size}.", (f"gpu-*-fp8-d128-{size}",), AgainstPeer(HOPPER), limit, FORWARD,
               "saccade/inside")
        for size, limit in (("4x4k", 1.08), ("1x16k", 1.03))
    ),
    Target("Hopper kernels reach at least 1.3 of FlexAttention's rate under a window of 1k in 16k, "
           "on a packed mix and with grouped heads.",
           MASKED, AgainstPeer("flex"), 1 / 1.3, FORWARD, HOPPER),
)  # fmt: skip

TARGETS = (*CPU_TARGETS, *GPU_TARGETS)


class Verdict(NamedTuple):
    """How far a target is reached: what was measured of it, worst first, and what is missing."""

    target: Target
    measured: list[tuple[float, str, str]]  # value, case, pass
    missing: list[tuple[str, str, str]]  # case, pass, what is missing of it

    @property
    def misses(self) -> list[tuple[float, str, str]]:
        """What lies beyond the limit."""
        return [found for found in self.measured if found[0] > self.target.limit]

    @property
    def answer(self) -> str:
        """Yes only if all of it was measured and holds."""
        if self.misses:
            return "no"
        return "not measured" if self.missing else "yes"


def compare_with_targets(results: Sequence[Result]) -> list[Verdict]:
    """A verdict on each target of the machines that the results' cases are meant for.

    Results of no such machine leave all targets open.
    """
    history = History(results)
    machines = {result.case["name"].split("-")[0] for result in results}
    named = [target for target in TARGETS if target.machine in machines]
    return [_verdict(target, history) for target in named or TARGETS]


def _verdict(target: Target, history: History) -> Verdict:
    verdict = Verdict(target, [], [])
    for case, which_pass in target.expected():
        try:
            value = target.yardstick.value(history, target.subject, case, which_pass)
            verdict.measured.append((value, case, which_pass))
        except Unmeasured as error:
            verdict.missing.append((case, which_pass, str(error)))
    verdict.measured.sort(reverse=True)
    if target.mean and verdict.measured:
        mean = geometric_mean([value for value, _, _ in verdict.measured])
        verdict.measured[:] = [(mean, f"mean of {len(verdict.measured)}", "")]
    return verdict


def still_missing(verdicts: Sequence[Verdict]) -> list[str]:
    """What must still be measured, each thing once, cases of one kind folded together."""
    cases: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for verdict in verdicts:
        for case, which_pass, reason in verdict.missing:
            cases[reason, which_pass][case] = None
    return [
        f"{reason}: {which_pass} of {', '.join(folded(list(names)))}"
        for (reason, which_pass), names in cases.items()
    ]


def number_text(verdict: Verdict, value: float) -> str:
    """A value of a target's yardstick, in its unit; with digits that tell a miss from the limit."""
    unit, limit = verdict.target.yardstick.unit, verdict.target.limit
    if unit:
        return f"{value:.3g}{unit}"
    near = any(f"{miss[0]:.2f}" == f"{limit:.2f}" for miss in verdict.misses)
    return f"{value:.3f}" if near else f"{value:.2f}"

"""Configs: the schedule of the Hopper kernel of fp8 attention, a pure function of the problem."""

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.hopper.pipeline import width_of
from saccade.ops.attention.hopper.configs import ADDED_BYTES, ROWS, ends_align
from saccade.runtime.fp8_spec import E4M3, Fp8Inputs
from saccade.runtime.spec import Variant


class Fp8Problem(NamedTuple):
    """What a schedule depends on."""

    head_width: int  # as the kernel widens them
    value_width: int
    masked: bool
    scored: bool = False  # whether the caller changes scores
    causal: bool = False  # whether the mask is causal and nothing else
    aligned: bool = False  # whether queries and keys end together, or whole tiles apart
    # Whether e4m3 rows that are not packed have no scales, and of queries there are LONG or more,
    # and of keys no fewer.
    long_and_bare: bool = False


class Fp8Schedule(NamedTuple):
    """How the kernel runs; fields as in `ops/attention/hopper/configs.KernelSchedule`."""

    consumers: int
    kv_tile: int
    stages: int
    query_stages: int
    output_parts: int
    consumer_registers: int
    producer_registers: int
    # "first": references are raised before for the first tile alone, where all others are full and
    # every row sees a key of it; "unseen": for partial tiles and the first full one; or "all".
    max_of: str
    skip_masked_tile: bool = False

    @property
    def query_tile(self) -> int:
        """Query rows of a program."""
        return self.consumers * ROWS

    def shared_memory(self, head_width: int, value_width: int) -> int:
        """Bytes of shared memory, of e4m3 numbers but for the output's 16 bits."""
        queries = self.query_tile * self.query_stages * head_width
        outputs = 2 * self.query_tile * value_width // self.output_parts
        keys_and_values = self.stages * self.kv_tile * (head_width + value_width)
        return queries + keys_and_values + outputs + ADDED_BYTES


LONG = 4096  # query rows: from there on three consumers were timed

OVERRIDE: Fp8Schedule | None = None
"""Taken instead of what `choose` would take, to measure what it should."""


def choose(problem: Fp8Problem) -> Fp8Schedule:
    """The schedule of a problem."""
    if OVERRIDE is not None:
        return OVERRIDE
    plain = not problem.masked and not problem.scored
    aligned = problem.causal and problem.aligned and not problem.scored
    straight = plain or aligned
    width = max(problem.head_width, problem.value_width)
    if width <= 64 and straight and problem.long_and_bare:
        # 1.04 to 1.18 times the rate of two consumers, though each step moves a few registers to
        # memory; 0.88 times with 1k rows under a causal mask (benchmarks/results/h200/fp8.txt).
        return Fp8Schedule(3, 128, 3, 2, 1, 160, 32, "first", aligned)
    if width <= 128:
        return Fp8Schedule(2, 128, 4, 2, 1, 240, 24, "first" if straight else "unseen")
    # Two ways to weigh a tile, in one loop, have no registers beside so many sums.
    return Fp8Schedule(2, 128, 2, 1, 2, 240, 24, "first" if straight else "all")


def problem_of(inputs: Fp8Inputs, variant: Variant, causal: bool) -> Fp8Problem:
    """What the schedule of a call depends on."""
    head_width, value_width = (width_of(rows.shape[-1]) for rows in (inputs.query, inputs.value))
    scored = variant.score != "" or variant.scale <= 0
    aligned = ends_align(inputs)  # type: ignore[arg-type]
    query, key = inputs.query, inputs.key
    packed = inputs.cu_seqlens_q is not None
    bare = query.dtype == E4M3 and all(scale is None for scale in inputs[3:6])
    long_and_bare = not packed and bare and LONG <= query.shape[2] <= key.shape[2]
    return Fp8Problem(
        head_width, value_width, variant.mask != "", scored, causal, aligned, long_and_bare
    )

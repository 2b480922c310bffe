"""Passes of wide linear attention: the kernel of scan_d256.py, started for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu.hopper.descriptors import Box, descriptor
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch, Pointer
from saccade.ops.attention.triton.kind import remembered
from saccade.ops.linear_attention.hopper.backward_rows import RowNumbers
from saccade.ops.linear_attention.hopper.program import Kept
from saccade.ops.linear_attention.hopper.scan_d256 import linear_wide
from saccade.ops.linear_attention.hopper.split import BLOCK, maybe, sizes
from saccade.ops.linear_attention.triton.given import Given, State, sums
from saccade.ops.linear_attention.triton.passes import Passes

INNER = 4 * BLOCK  # channels of a and b, whether they exist or not
OUTER = 2 * BLOCK  # channels of the result that a program computes


class WideSchedule(NamedTuple):
    """How the kernel runs."""

    stages: int  # of a, b and c
    consumer_registers: int
    mapper_registers: int


SCHEDULE = WideSchedule(2, 208, 48)
OVERRIDE: WideSchedule | None = None
"""Taken instead of SCHEDULE, to measure what it should be."""


class WidePass(NamedTuple):
    """What a pass reads and writes."""

    name: str
    a: Tensor
    b: Tensor
    c: Tensor
    result: Tensor
    own: Tensor | None = None  # what a gradient of features is of, before it is mapped
    given: Given | None = None
    totals: Tensor | None = None  # sums of scores, written with the output

    def start(
        self, passes: Passes, before: State | None, after: State | None, segments: int,
        spoilt: Tensor,
    ) -> None:  # fmt: skip
        """Start the kernel. spoilt: flags to be written, of each 64 channels of the result."""
        kind = passes.kind
        tiles = self.parts // 2
        schedule = OVERRIDE or SCHEDULE

        def make() -> Launch:
            constants = {
                **self._shares(passes),
                "GROUP": kind.group,
                "HEAD_DIM": kind.head_dim,
                "VALUE_DIM": kind.value_dim,
                "TILES": tiles,
                "SEGMENTS": segments,
                "PASS": self.name,
                "BOTTOM_RIGHT": kind.bottom_right,
                "STARTED": kind.started,
                "FEATURE_MAP": kind.variant.feature_map,
                "SCALE": kind.variant.scale,
                "NORMALIZE": kind.variant.normalize,
                "STAGES": schedule.stages,
                "CONSUMER_REGISTERS": schedule.consumer_registers,
                "MAPPER_REGISTERS": schedule.mapper_registers,
            }
            return Launch(linear_wide, constants, {"num_warps": 4})

        def arguments(pointer: Pointer) -> tuple[Any, ...]:
            lengths = passes.inputs.key_lengths
            return (
                *self._described(pointer),
                self._numbers(pointer),
                Kept(maybe(pointer, self.totals), maybe(pointer, lengths), pointer(spoilt)),
                sums(pointer, before),
                sums(pointer, after),
                sizes(kind, kind.heads),
                kind.variant.eps,
            )

        rows = there_are((self.a, self.b, self.c, self.own, self.result, self.totals, spoilt))
        numbers = [] if self.given is None else there_are(self.given[:3])
        states = (*(before or ()), *(after or ()))
        strides = tuple(operand.stride() for operand in rows)
        key = "hopper wide", self.name, segments, before is None, after is None, schedule, strides
        launch = remembered(kind.launches, key, make)
        programs = kind.sequences * kind.heads * tiles * segments
        launch(programs, kind.device, (*passes.known(), *rows, *numbers, *states), arguments)

    @property
    def parts(self) -> int:
        """Blocks of 64 channels of the result that programs have."""
        return 2 * -(-self.result.shape[-1] // OUTER)

    def _shares(self, passes: Passes) -> dict[str, int]:
        operands = {"A": self.a, "B": self.b, "C": self.c, "OWN": self.own}
        return {
            f"{name}_SHARE": 1 if rows is None else passes.share(rows.shape[1])
            for name, rows in operands.items()
        }

    def _described(self, pointer: Pointer) -> Iterator[Any]:
        """All rows as TMA moves them: 64 of them, and so many channels."""
        for rows, channels in (
            (self.a, INNER), (self.b, INNER), (self.c, OUTER), (self.own, BLOCK),
            (self.result, BLOCK),
        ):  # fmt: skip
            if rows is None:
                yield None
            else:
                yield descriptor(pointer, rows, Box.of(rows, False, BLOCK, channels))

    def _numbers(self, pointer: Pointer) -> RowNumbers | None:
        if self.given is None:
            return None
        return RowNumbers(maybe(pointer, self.given.factors), pointer(self.given.minus_delta))

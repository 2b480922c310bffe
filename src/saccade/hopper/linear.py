"""Linear attention by Hopper kernels: the body that the operators run on GPUs of capability 9.0.

The forward pass has a kernel of its own (linear_forward.py). Where heads are few, the length is cut
into segments, and portable kernels find the states that they start from. Gradients and steps are
those of `saccade.portable.linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.hopper.descriptors import Box, aligned, descriptor
from saccade.hopper.linear_again import linear_again
from saccade.hopper.linear_collect import linear_collect
from saccade.hopper.linear_forward import linear_forward
from saccade.hopper.linear_program import Kept, Sizes
from saccade.hopper.schedule import as_odd
from saccade.kernels.launch import Launch, Pointer, next_width
from saccade.linear.problem import (
    LinearInputs,
    LinearResults,
    LinearVariant,
    empty_linear_results,
)
from saccade.portable.arguments import there_are
from saccade.portable.kind import remembered
from saccade.portable.linear import backward as backward
from saccade.portable.linear import initial_of, passes_of
from saccade.portable.linear import step as step
from saccade.portable.linear_chain import chained
from saccade.portable.linear_kind import SHORTEST_SEGMENT, LinearKind
from saccade.portable.linear_passes import Passes, State, sums
from saccade.problem import Config

BLOCK = 64  # channels of a partition, and rows of a chunk


class LinearSchedule(NamedTuple):
    """How the kernel runs."""

    stages: int  # of queries, keys and values
    output_stages: int
    consumer_registers: int
    mapper_registers: int


SCHEDULE = LinearSchedule(3, 2, 168, 56)
COLLECT_STAGES = 6  # of keys and values alone
OVERRIDE: LinearSchedule | None = None
"""Taken instead of SCHEDULE, to measure what it should be."""


def forward(inputs: LinearInputs, variant: LinearVariant, config: Config) -> LinearResults:
    """Output, normaliser and last state; see `saccade.linear_attention`."""
    inputs = aligned(inputs)
    passes = passes_of(inputs, variant, Config(kv_tile=BLOCK))
    results = empty_linear_results(inputs, variant)
    before, after = initial_of(passes), None
    split = Split.of(passes.kind)
    if split.segments == 1:
        after = results.kv, results.key_sum
    else:
        parts = collect(passes, split)
        before, last = chained(passes, parts, before, split.segments, False)
        results.kv.copy_(last[0])
        results.key_sum.copy_(last[1])
    Forward(passes, results, before, after, split).run()
    return results


class Split(NamedTuple):
    """How a call is split into programs; see linear_program.py."""

    blocks: int
    tiles: int  # of 128 channels of values
    segments: int

    @staticmethod
    def of(kind: LinearKind) -> Split:
        """The split of a call. One program runs on a multiprocessor; few of them are cut along
        the length."""
        blocks = 1 if max(kind.head_dim, kind.value_dim) <= BLOCK else 2
        tiles = 1 if blocks == 1 else -(-kind.value_dim // (2 * BLOCK))
        whole = Split(blocks, tiles, 1)
        shift = kind.kv_len - kind.query_len if kind.bottom_right else 0
        if shift > 0 and shift % BLOCK:  # chunks would not be those of portable kernels
            return whole
        wanted = kind.multiprocessors // max(whole.programs(kind, kind.heads), 1)
        return whole._replace(segments=max(min(wanted, kind.places // SHORTEST_SEGMENT), 1))

    def programs(self, kind: LinearKind, heads: int) -> int:
        """How many programs so many heads take."""
        units = kind.sequences * heads
        units = -(-units // 2) if self.blocks == 1 else units
        return units * self.tiles * self.segments

    def constants(self, kind: LinearKind) -> dict[str, Any]:
        """What every kernel of a call is compiled for."""
        return {
            "HEAD_DIM": kind.head_dim,
            "VALUE_DIM": kind.value_dim,
            "BLOCKS": self.blocks,
            "TILES": self.tiles,
            "SEGMENTS": self.segments,
            "BOTTOM_RIGHT": kind.bottom_right,
            "FEATURE_MAP": kind.variant.feature_map,
        }

    @property
    def parts(self) -> int:
        """Blocks of values' channels in a head."""
        return 1 if self.blocks == 1 else 2 * self.tiles


def moved(pointer: Pointer, tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """Tensors as TMA moves them, a block at a time."""
    for tensor in tensors:
        yield descriptor(pointer, tensor, Box.of(tensor, False, BLOCK, BLOCK))


def maybe(pointer: Pointer, tensor: Tensor | None) -> Any:
    """The address of a tensor, if there is one."""
    return None if tensor is None else pointer(tensor)


def sizes(kind: LinearKind, heads: int) -> Sizes:
    """The sizes of a call, for programs of so many heads."""
    return Sizes(*map(as_odd, (kind.query_len, kind.kv_len, heads, kind.sequences)))


def collect(passes: Passes, split: Split) -> State:
    """The states of each segment alone."""
    kind, inputs = passes.kind, passes.inputs
    counts = kind.sequences, kind.state_heads, split.segments, kind.head_dim
    query = inputs.query
    matrix = query.new_empty(*counts, kind.value_dim, dtype=torch.float32)
    vector = query.new_empty(counts, dtype=torch.float32)

    def make() -> Launch:
        constants = {
            "KEY_SHARE": kind.state_heads // kind.key_heads,
            "VALUE_SHARE": kind.state_heads // kind.value_heads,
            **split.constants(kind),
            "STAGES": COLLECT_STAGES,
            "CONSUMER_REGISTERS": SCHEDULE.consumer_registers,
            "MAPPER_REGISTERS": SCHEDULE.mapper_registers,
        }
        return Launch(linear_collect, constants, {"num_warps": 4})

    def arguments(pointer: Pointer) -> tuple[Any, ...]:
        return (
            *moved(pointer, inputs[1:3]),
            Kept(None, maybe(pointer, inputs.key_lengths), None),
            sums(pointer, (matrix, vector)),
            sizes(kind, kind.state_heads),
        )

    programs = split.programs(kind, kind.state_heads)
    launch = remembered(kind.launches, ("hopper collect", split), make)
    launch(programs, kind.device, (*passes.known(), matrix, vector), arguments)
    return matrix, vector


class Forward(NamedTuple):
    """One forward pass under way."""

    passes: Passes
    results: LinearResults
    before: State | None
    after: State | None
    split: Split

    def run(self) -> None:
        """Write the results, and once more what a spoilt value may have reached."""
        kind = self.passes.kind
        shape = kind.sequences, kind.heads, self.split.segments, self.split.parts
        spoilt = self.results.output.new_empty(shape, dtype=torch.int32)
        self._sweep(spoilt)
        self._again(spoilt)

    def _totals(self) -> Tensor | None:
        return None if self.passes.kind.variant.normalize == "none" else self.results.normaliser

    def _states(self) -> list[Tensor]:
        return there_are((*(self.before or ()), *(self.after or ())))

    def _sweep(self, spoilt: Tensor) -> None:
        passes, totals = self.passes, self._totals()
        kind, inputs = passes.kind, passes.inputs
        split = self.split
        schedule, output = OVERRIDE or SCHEDULE, self.results.output

        def make() -> Launch:
            constants = {
                "QUERY_SHARE": passes.share(kind.query_heads),
                "KEY_SHARE": passes.share(kind.key_heads),
                "VALUE_SHARE": passes.share(kind.value_heads),
                "GROUP": kind.group,
                **split.constants(kind),
                "SCALE": kind.variant.scale,
                "NORMALIZE": kind.variant.normalize,
                "STAGES": schedule.stages,
                "OUTPUT_STAGES": schedule.output_stages,
                "CONSUMER_REGISTERS": schedule.consumer_registers,
                "MAPPER_REGISTERS": schedule.mapper_registers,
            }
            return Launch(linear_forward, constants, {"num_warps": 4})

        def arguments(pointer: Pointer) -> tuple[Any, ...]:
            lengths = inputs.key_lengths
            return (
                *moved(pointer, (*inputs[:3], output)),
                Kept(maybe(pointer, totals), maybe(pointer, lengths), pointer(spoilt)),
                sums(pointer, self.before),
                sums(pointer, self.after),
                sizes(kind, kind.heads),
                kind.variant.eps,
            )

        tensors = (*passes.known(), *there_are((output, totals, spoilt)), *self._states())
        key = "hopper", split, self.before is None, schedule
        launch = remembered(kind.launches, key, make)
        launch(split.programs(kind, kind.heads), kind.device, tensors, arguments)

    def _again(self, spoilt: Tensor) -> None:
        passes, totals = self.passes, self._totals()
        kind = passes.kind
        tiles = passes.tiles(kind.value_dim)

        def make() -> Launch:
            constants = {
                "A_SHARE": passes.share(kind.query_heads),
                "B_SHARE": passes.share(kind.key_heads),
                "C_SHARE": passes.share(kind.value_heads),
                "THROUGH_SHARE": passes.share(1),
                "GROUP": kind.group,
                "STATE_HEADS": kind.state_heads,
                "SEGMENTS": self.split.segments,
                "INNER": kind.head_dim,
                "INNER_WIDTH": next_width(kind.head_dim),
                "OUTER": kind.value_dim,
                "OUTER_TILE": min(kind.config.tile, next_width(kind.value_dim)),
                "TILES": tiles,
                "CHUNK": kind.config.chunk,
                "PASS": "output",
                "CAUSAL": True,
                "BOTTOM_RIGHT": kind.bottom_right,
                "STARTED": kind.started,
                "NORMALIZE": kind.variant.normalize,
                "PRECISION": kind.precision,
                "BEFORE": self.before is not None,
                "NUMBERS": totals is not None,
                "PARTS": self.split.parts,
            }
            options = {"num_warps": kind.config.num_warps, "num_stages": kind.config.num_stages}
            return Launch(linear_again, constants, options)

        def arguments(pointer: Pointer) -> tuple[Any, ...]:
            rows = passes.queries(pointer), passes.keys(pointer), passes.values(pointer)
            numbers = None
            if totals is not None:
                numbers = kind.numbers(pointer, totals, None, keys=False)
            written = passes.query_side(pointer, self.results.output), numbers
            return (
                pointer(spoilt), *rows, *written, kind.variant.eps, passes.sequence(pointer),
                sums(pointer, self.before),
            )  # fmt: skip

        tensors = (
            *passes.known(), spoilt, self.results.output, *there_are((totals,)),
            *(self.before or ()),
        )  # fmt: skip
        key = "again", self.split, self.before is None
        programs = kind.sequences * kind.heads * self.split.segments * tiles
        remembered(kind.launches, key, make)(programs, kind.device, tensors, arguments)

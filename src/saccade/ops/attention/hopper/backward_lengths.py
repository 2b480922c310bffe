"""What lengths decide of a Hopper backward pass: its memory, how many programs each kernel has, and
the numbers that kernels are handed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.kernel_args import Geometry, there_are
from saccade.gpu.launcher import Launch
from saccade.gpu.pass_recorder import MemoryLayout
from saccade.gpu.recording import Lengths
from saccade.ops.attention.hopper import configs
from saccade.ops.attention.hopper.dq_accumulate import PARTS
from saccade.ops.attention.hopper.gradients import (
    LONGEST_SIDE,
    QUERY_PASS,
    SUM_TILE,
    BackwardInputs,
)
from saccade.ops.attention.triton.call_spec import (
    beside_channels,
    contiguous,
    laid_numbers,
    numbers_of,
)
from saccade.runtime.spec import Inputs

if TYPE_CHECKING:
    from saccade.ops.attention.hopper.host import HopperBackward


class BackwardPrograms(NamedTuple):
    """How many programs each kernel has, in the order in which they start; None: it does not."""

    lse_residual: int | None
    begin: int
    main: int
    add_splits: int | None
    end: int | None
    query_pass: int | None
    nan_safe_keys: int | None
    queries: int | None


class BackwardLengths:
    """A backward pass of calls of the same lengths and strides, in numbers."""

    def __init__(
        self, kind: HopperBackward, inputs: Inputs, passed: BackwardInputs, queries: Launch | None
    ):
        """queries: Triton's kernel for the gradients of queries, if there is one."""
        self.kind, self.geometry = kind, Geometry.of(inputs)
        query_len, kv_len = self.geometry.lengths()
        problem = kind.problem._replace(query_len=query_len, kv_len=kv_len)
        keys, spec = self.geometry.keys, kind.spec
        self.in_key_order = configs.in_key_order(problem)
        self.schedule = configs.choose_backward(problem)
        self.tile = self.schedule.query_tile
        self.slots = self.geometry.queries.programs(self.tile)
        group = spec.constants["HEADS_PER_KV_HEAD"]
        self.splits = configs.backward_splits(problem, keys, group, spec.multiprocessors)
        self.present = (
            passed.grad_lse is not None, passed.residual is not None, self.in_key_order,
            self.splits > 1,
        )  # fmt: skip
        order = self._order(problem)
        wide = self._order_of_queries() if kind.apart else ()
        self.memory = self._memory(inputs, passed)
        self.numbers = self._numbers((order, wide), inputs, passed)
        self.programs = self._programs(order, wide, queries)

    def of_pass(self) -> Lengths:
        """The lengths, in the words of recordings."""
        programs = tuple([number for number in self.programs if number is not None])
        return Lengths(self.numbers, programs, there_are(self.memory))

    def _order(self, problem: configs.BackwardProblem) -> tuple[int, int, int]:
        """In which order the kernel takes tiles of keys."""
        # Of a head: queries, gradients of outputs, float32 partial sums.
        of_query_head = 8 * self.kind.widths[0] * problem.query_len
        spec, keys = self.kind.spec, self.geometry.keys
        group = spec.constants["HEADS_PER_KV_HEAD"] // self.splits
        at_once = (self.schedule.at_once_mb << 20) // max(of_query_head * group, 1)
        # As programs count heads of keys.
        tiles = keys._replace(heads=keys.heads * self.splits), self.schedule.kv_tile
        heads = configs.backward_heads_at_once(problem, at_once, *tiles, spec.multiprocessors)
        return tile_scheduler.order_of(*tiles, heads)

    def _order_of_queries(self) -> tuple[int, int, int]:
        """In which order the pass for gradients of queries, above 128 channels, takes its tiles."""
        kind, tile, queries = self.kind, QUERY_PASS.query_tile, self.geometry.queries
        heads = configs.heads_at_once(
            kind.problem.masked, queries.heads * queries.sequences, queries.slots(tile),
            kind.spec.multiprocessors, kind.spec.constants["HEADS_PER_KV_HEAD"],
            2 * sum(kind.widths) * self.geometry.lengths()[1],
        )  # fmt: skip
        return tile_scheduler.order_of(queries, tile, heads)

    def _memory(self, inputs: Inputs, passed: BackwardInputs) -> tuple[MemoryLayout | None, ...]:
        """That of `BackwardMemory`, in its order."""
        kind, dtype, single = self.kind, inputs.query.dtype, torch.float32
        tile, slots, width = self.tile, self.slots, kind.widths[0]
        lie = contiguous if self.geometry.queries.packed else beside_channels
        gradients = [  # as `empty_gradients` has them
            MemoryLayout(tuple(rows.shape), lie(rows.shape), dtype) for rows in inputs[:3]
        ]
        parts: list[MemoryLayout | None] = [None, None]
        if self.splits > 1:
            for number, ((rows_or_batch, heads, *rest), _, _) in enumerate(gradients[1:]):
                shape = (rows_or_batch, heads * self.splits, *rest)
                parts[number] = MemoryLayout(shape, contiguous(shape), single)
        shape = tuple(passed.lse.shape)
        of_rows = MemoryLayout(shape, contiguous(shape), single)
        statistics = of_rows if kind.by_triton else None
        return (
            *gradients,
            MemoryLayout((slots * kind.rows_of_starts, 2 * tile), (2 * tile, 1), single),
            statistics,
            statistics,
            of_rows if kind.scored else None,
            None if kind.ordered else MemoryLayout((slots * tile, width), (width, 1), single),
            MemoryLayout((), (), torch.int32) if kind.nan_safe else None,
            MemoryLayout((slots * PARTS.value,), (1,), torch.int32) if self.in_key_order else None,
            *parts,
        )

    def _numbers(
        self, orders: tuple[tuple[int, ...], ...], inputs: Inputs, passed: BackwardInputs
    ) -> tuple[int, ...]:
        """`HopperBackwardCall` says which of them is what."""
        memory, queries = self.memory, self.geometry.queries
        laid = there_are((*memory[:3], *memory[4:7], *memory[10:]))
        side = self.slots * self.tile * self.kind.widths[0] // LONGEST_SIDE
        return (
            *orders[0], self.slots * self.kind.rows_of_starts, side, self.splits, queries.batch,
            *numbers_of((*inputs[:3], *there_are(passed))), *laid_numbers(laid), *orders[1],
        )  # fmt: skip

    def _programs(
        self, order: tuple[int, ...], wide: tuple[int, ...], of_queries: Launch | None
    ) -> BackwardPrograms:
        kind, (queries, keys), again = self.kind, self.geometry, self.kind.again
        residual = kind.residual
        return BackwardPrograms(
            None if residual is None else queries.programs(residual.constants["QUERY_TILE"]),
            self.slots,
            min(order[0], kind.spec.multiprocessors),
            keys.programs(SUM_TILE) if self.splits > 1 else None,
            None if kind.ordered else self.slots,
            min(wide[0], kind.spec.multiprocessors) if wide else None,
            None if again is None else keys.programs(again.keys.constants["KV_TILE"]),
            None if of_queries is None
            else queries.programs(of_queries.constants["QUERY_TILE"]),
        )  # fmt: skip

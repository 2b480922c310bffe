"""Passes: the sweeps of linear attention, started with the rows that each of them reads."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import torch
from torch import Tensor

from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch, next_width
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.triton.call_spec import plain
from saccade.ops.linear_attention.triton.chunk_scan import SweepMeta, linear_sweep
from saccade.ops.linear_attention.triton.chunk_state import CollectMeta, linear_collect
from saccade.ops.linear_attention.triton.configs import BACKWARDS, LinearConfig, collecting, sharing
from saccade.ops.linear_attention.triton.positions import (
    LinearBackwardInputs,
    Recompute,
    Rows,
    State,
    Sums,
    sums,
)


class Passes(Rows):
    """One call under way, and what can be started for it."""

    # ---- sums over one side -------------------------------------------------------------------

    def collect(self, given: LinearBackwardInputs | None, segments: int) -> State:
        """The states of each segment alone: of keys, or of queries where gradients are given."""
        spec = self.spec
        counts = spec.sequences, spec.state_heads, segments, spec.head_dim
        empty = self.inputs.query.new_empty
        matrix = empty(*counts, spec.value_dim, dtype=torch.float32)
        vector = empty(counts, dtype=torch.float32)
        tiles = self.tiles(spec.value_dim)
        of_keys, of_queries = (spec.key_heads, spec.value_heads), (spec.query_heads, spec.heads)
        shares = of_keys if given is None else of_queries
        launch = self.launch(
            linear_collect,
            CollectMeta,
            ("collect", segments, given and given.grad_output.stride()),
            collecting(spec.config, 1 if given is None else spec.group),
            HEADS_PER_ROWS=self.share(shares[0]),
            HEADS_PER_OTHERS=self.share(shares[1]),
            INNER=spec.head_dim,
            INNER_WIDTH=next_width(spec.head_dim),
            OUTER=spec.value_dim,
            OUTER_TILE=self._tile(spec.value_dim),
            TILES=tiles,
            SEGMENTS=segments,
            QUERIES=given is not None,
            NORMALIZE=spec.variant.normalize,
        )

        def arguments() -> tuple[Any, ...]:
            if given is None:
                read = self.keys(), self.values(), None, None
            else:
                weights = self.per_row(given.minus_delta)
                mapped = self.queries(), self.grad(given)
                read = (*mapped, self.factors(given), weights)
            return (*read, self.sequence(), Sums(matrix, vector))

        tensors = (*self.known(), *there_are((given or ())[:3]), matrix, vector)
        programs = spec.sequences * spec.state_heads * segments * tiles
        launch(programs, spec.device, tensors, arguments)
        return matrix, vector

    # ---- sweeps -------------------------------------------------------------------------------

    def output(
        self, output: Tensor, totals: Tensor | None, before: State | None, after: State | None,
        segments: int, counted: bool, recompute: Recompute | None = None,
        mapped: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Write the output and, where wanted, each row's sum of scores and the last states.

        counted: the sums of scores are known. The last states have no sum of keys then. mapped:
        features of queries and keys, where they are known, too.
        """
        spec = self.spec

        def operands() -> tuple[Any, ...]:
            numbers = None if totals is None else self.per_row(totals)
            rows = self.queries(), self.keys()
            if mapped is not None:
                sides = self.query_side(mapped[0]), self.key_side(mapped[1])
                rows = plain(sides[0]), plain(sides[1])
            known, numbers = (numbers, None) if counted else (None, numbers)
            written = self.query_side(output), numbers
            return (*rows, self.values(), known, None, *written, None, spec.variant.eps)

        heads = spec.query_heads, spec.key_heads, spec.value_heads, 1
        more = there_are((output, totals, *(mapped or ())))
        numbered = totals is not None and not counted
        self._sweep("output", operands, more, heads, (before, after), segments, numbered, recompute)

    def grad_query(
        self, given: LinearBackwardInputs, result: Tensor, dots: Tensor | None, before: State |
        None, segments: int, recompute: Recompute | None = None,
    ) -> None:  # fmt: skip
        """Write the gradients of queries, one for each output head."""

        def operands() -> tuple[Any, ...]:
            numbers = None if dots is None else self.per_row(dots)
            rows = self.grad(given), self.values(), self.keys()
            more = self.factors(given), self.per_row(given.minus_delta)
            written = self.query_side(result), numbers
            return (*rows, *more, *written, self.queries(), 0.0)

        spec = self.spec
        heads = spec.heads, spec.value_heads, spec.key_heads, spec.query_heads
        more = there_are((*given[:3], result, dots))
        ends, numbered = (before, None), dots is not None
        self._sweep("grad_query", operands, more, heads, ends, segments, numbered, recompute)

    def grad_key(
        self, given: LinearBackwardInputs, result: Tensor, dots: Tensor | None, before: State |
        None, after: State | None, segments: int, recompute: Recompute | None = None,
    ) -> None:  # fmt: skip
        """Write the gradients of keys, one for each head of the state, and of the first states."""
        spec = self.spec

        def operands() -> tuple[Any, ...]:
            numbers = None
            if dots is not None:
                numbers = spec.numbers(dots, self.inputs.cu_seqlens_k, keys=True)
            rows = self.values(), self.grad(given), self.queries()
            more = self.factors(given), self.per_row(given.minus_delta)
            written = self.key_side(result), numbers
            return (*rows, *more, *written, self.keys(), 0.0)

        heads = spec.value_heads, spec.heads, spec.query_heads, spec.key_heads
        more = there_are((*given[:3], result, dots))
        ends, numbered = (before, after), dots is not None
        self._sweep("grad_key", operands, more, heads, ends, segments, numbered, recompute)

    def grad_value(
        self, given: LinearBackwardInputs, result: Tensor, before: State | None, segments: int,
        recompute: Recompute | None = None,
    ) -> None:  # fmt: skip
        """Write the gradients of values, one for each head of the state."""
        spec = self.spec

        def operands() -> tuple[Any, ...]:
            rows = (
                self.keys(),
                self.queries(),
                self.grad(given),
            )
            more = self.factors(given), None, self.key_side(result)
            return (*rows, *more, None, None, 0.0)

        heads = spec.key_heads, spec.query_heads, spec.heads, 1
        more = there_are((*given[:3], result))
        self._sweep("grad_value", operands, more, heads, (before, None), segments, False, recompute)

    def grad_key_value(
        self, given: LinearBackwardInputs, results: tuple[Tensor, Tensor], dots: Tensor | None,
        before: State | None, after: State | None, segments: int, recompute: Recompute | None =
        None,
    ) -> None:  # fmt: skip
        """Write the gradients of keys and of values, and of the first states."""
        self.grad_key(given, results[0], dots, before, after, segments, recompute)
        self.grad_value(given, results[1], before, segments, recompute)

    def _sweep(
        self, which: str, operands: Any, more: Several[Tensor], heads: tuple[int, ...],
        states: tuple[State | None, State | None], segments: int, numbered: bool,
        recompute: Recompute | None = None,
    ) -> None:  # fmt: skip
        spec, (before, after) = self.spec, states
        inner, outer = spec.head_dim, spec.value_dim
        if which in ("grad_query", "grad_key"):
            inner, outer = outer, inner
        tiles = self.tiles(outer)
        shares = zip(("A", "B", "C", "THROUGH"), heads, strict=True)
        parts = {} if recompute is None else {"PARTS": recompute.nonfinite.shape[-1]}
        strides = tuple(rows.stride() for rows in more)
        launch = self.launch(
            linear_sweep if recompute is None else recompute.kernel,
            SweepMeta,
            (which, segments, before is None, after is None, numbered, recompute is None, strides),
            sharing(spec.config, which, spec.group),
            **parts,
            **{f"HEADS_PER_{name}": self.share(count) for name, count in shares},
            INNER=inner,
            INNER_WIDTH=next_width(inner),
            OUTER=outer,
            OUTER_TILE=self._tile(outer),
            TILES=tiles,
            SEGMENTS=segments,
            PASS=which,
            NORMALIZE=spec.variant.normalize,
            BEFORE=before is not None,
            AFTER=after is not None and recompute is None,
            NUMBERS=numbered,
        )

        def arguments() -> tuple[Any, ...]:
            ends = sums(before), sums(after)
            given = operands()
            if recompute is not None:
                given, ends = (recompute.nonfinite, *given), ends[:1]
            return (*given, self.sequence(), *ends)

        flags = None if recompute is None else recompute.nonfinite
        tensors = (*self.known(), *more, *there_are((*(before or ()), *(after or ()), flags)))
        count = spec.state_heads if which in BACKWARDS else spec.heads
        launch(spec.sequences * count * segments * tiles, spec.device, tensors, arguments)

    # ---- launches -----------------------------------------------------------------------------

    def launch(
        self,
        kernel: Any,
        meta: type[tuple[Any, ...]],
        key: Any,
        config: LinearConfig,
        /,
        **more: Any,
    ) -> Launch:
        """A kernel, prepared once, with what all of them are told."""
        spec = self.spec

        def make() -> Launch:
            constants = {
                "GROUP": spec.group,
                "STATE_HEADS": spec.state_heads,
                "CHUNK": config.chunk,
                "CAUSAL": spec.variant.causal,
                "BOTTOM_RIGHT": spec.bottom_right,
                "STARTED": spec.started,
                "PRECISION": spec.precision,
            }
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            return Launch(kernel, {**constants, **more}, options, meta)

        return remembered(spec.launches, key, make)

    def tiles(self, outer: int) -> int:
        """Programs along so many channels of a result."""
        return max(-(-outer // self._tile(outer)), 1)

    def gradient_segments(self, keys: bool) -> int:
        """Into how many parts sequences are cut for gradients of queries, or of keys and values."""
        heads = self.spec.state_heads if keys else self.spec.heads
        return self.segments(heads, self.spec.head_dim) if self.spec.variant.causal else 1

    def segments(self, heads: int, outer: int) -> int:
        """Into how many parts sequences are cut for a pass of so many heads and channels."""
        return self.spec.segments(self.spec.sequences * heads * self.tiles(outer))

    def share(self, heads: int) -> int:
        """How many output heads share one of so many heads."""
        return self.spec.heads // max(heads, 1)

    def _tile(self, outer: int) -> int:
        return min(self.spec.config.tile, next_width(max(outer, 1)))

"""Passes: the sweeps of linear attention, started with the rows that each of them reads."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.features import MAPS, Operand
from saccade.gpu.kernel_args import Extent, number_strides, row_strides, there_are, view
from saccade.gpu.launcher import Launch, current_device, next_width
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.triton.chunk_scan import SweepMeta, linear_sweep
from saccade.ops.linear_attention.triton.chunk_state import (
    CollectMeta,
    Sequence,
    Sums,
    linear_collect,
)
from saccade.ops.linear_attention.triton.configs import (
    BACKWARDS,
    LinearConfig,
    choose,
    collecting,
    sharing,
)
from saccade.runtime.spec import KernelConfig, LinearInputs, LinearVariant, precision

SHORTEST_SEGMENT = 512  # places: shorter ones cost more states than they save time
RESIDENT_WARPS = 8  # of one multiprocessor, as each thread holds as many registers as it can
NO_STEPS = (0, 0, 0)


class LinearCallSpec(NamedTuple):
    """Sizes of a call, and the kernels that were prepared for it."""

    packed: bool
    device: int | None
    sequences: int
    query_len: int  # rows of each dense sequence, or all packed ones
    kv_len: int
    heads: int  # of query, key, value
    key_heads: int
    value_heads: int
    query_heads: int
    state_heads: int
    head_dim: int
    value_dim: int
    started: bool
    variant: LinearVariant
    precision: str
    config: LinearConfig
    multiprocessors: int
    launches: dict[Any, Launch]

    @staticmethod
    def of(
        inputs: LinearInputs, variant: LinearVariant, config: KernelConfig, forward: bool = False
    ) -> LinearCallSpec:
        """The kind of a call, or of its output alone if `forward`."""
        query, key, value = inputs[:3]
        rows = 0 if inputs.packed else 2
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        width = next_width(max(head_dim, value_dim, 1))
        wide = query.dtype == torch.float32
        group = inputs.heads // max(inputs.state_heads, 1)
        # Narrower values leave programs of a forward config idle; with decay and float16 it spills.
        forward = forward and inputs.decay is None and query.dtype == torch.bfloat16
        forward = forward and next_width(value_dim) == width
        return LinearCallSpec(
            packed=inputs.packed,
            device=current_device(query),
            sequences=inputs.num_sequences,
            query_len=query.shape[rows],
            kv_len=key.shape[rows],
            heads=inputs.heads,
            key_heads=key.shape[1],
            value_heads=value.shape[1],
            query_heads=query.shape[1],
            state_heads=inputs.state_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            started=inputs.initial_kv is not None,
            variant=variant,
            precision=precision(query.dtype),
            config=choose(call_spec.architecture(query), width, wide, config, group, forward),
            multiprocessors=call_spec.multiprocessors(query),
            launches={},
        )

    @property
    def group(self) -> int:
        """Output heads that share a state."""
        return self.heads // max(self.state_heads, 1)

    @property
    def positions(self) -> int:
        """Positions of the longest sequence, or more."""
        shift = self.kv_len - self.query_len if self.bottom_right else 0
        return max(self.kv_len, self.query_len + shift) - min(shift, 0)

    @property
    def bottom_right(self) -> bool:
        """Whether the last row and the last key meet; without causality all rows meet all keys."""
        return self.variant.causal and self.variant.align == "bottom_right"

    def segments(self, programs: int) -> int:
        """Into how many parts sequences are cut, so that few of them fill a GPU."""
        if self.packed or programs == 0:
            return 1
        resident = max(RESIDENT_WARPS // self.config.num_warps, 1)
        wanted = resident * self.multiprocessors // programs
        return max(min(wanted, self.positions // SHORTEST_SEGMENT), 1)

    def row_programs(self, tile: int) -> int:
        """Programs that each take so many query rows of one output head."""
        return Extent(self.sequences, self.query_len, self.heads, self.packed).programs(tile)

    # ---- arguments --------------------------------------------------------------------------

    def side(self, rows: Tensor | None, offsets: Tensor | None, keys: bool) -> Any:
        """A View of rows beside the keys or the queries (None: of rows without memory)."""
        length, heads = self.kv_len if keys else self.query_len, self.heads
        extent = Extent(
            self.sequences, length, heads if rows is None else rows.shape[1], self.packed
        )
        strides = NO_STEPS if rows is None else row_strides(rows, self.packed)
        return view(rows, strides, extent, offsets)

    def numbers(self, rows: Tensor, offsets: Tensor | None, keys: bool) -> Any:
        """A View of one number for each row."""
        length = self.kv_len if keys else self.query_len
        extent = Extent(self.sequences, length, rows.shape[-2], self.packed)
        return view(rows, number_strides(rows, self.packed), extent, offsets)

    def features(self, rows: Any, scaled: bool) -> Operand:
        """Queries or keys, as features."""
        apply, derivative = MAPS[self.variant.feature_map]
        scale = self.variant.scale if scaled and self.variant.scale != 1.0 else None
        return Operand(rows, apply, derivative, scale)


def plain(rows: Any) -> Operand:
    """Rows as they are."""
    return Operand(rows, None, None, None)


def signature(
    inputs: LinearInputs, variant: LinearVariant, config: KernelConfig
) -> tuple[Any, ...]:
    """What tells calls like one another from another: everything but addresses."""
    return (
        *((None if t is None else (t.shape, t.stride(), t.dtype)) for t in inputs),
        inputs.query.device, variant, config,
        precision(inputs.query.dtype),
    )  # fmt: skip


# ---- rows ----------------------------------------------------------------------------------------
# What kernels of linear attention read of a call, and write beside it.

State = tuple[Tensor, Tensor]  # matrices and vectors, float32


class LinearBackwardInputs(NamedTuple):
    """What a backward pass adds to the inputs."""

    grad_output: Tensor
    factors: Tensor | None  # 1 / divisor; None without a normaliser
    minus_delta: Tensor
    quotient: tuple[Tensor, Tensor] | None = None
    """Output and normaliser, where the pass over queries is to write the other two."""


class Recompute(NamedTuple):
    """What does a pass once more where a flag says so."""

    kernel: Any  # takes the flags, and what linear_sweep takes of rows and states
    nonfinite: Tensor  # int32 [sequences, heads, segments, parts]


def sums(state: State | None) -> Sums | None:
    """States as kernels take them."""
    if state is None:
        return None
    matrix, vector = state
    return Sums(matrix, vector)


class Rows(NamedTuple):
    """One call under way."""

    spec: LinearCallSpec
    inputs: LinearInputs
    summed_decay: Tensor | None
    slots: Tensor | None = None
    num_states: int = 0  # of the memory that slots say the places of

    def known(self) -> list[Tensor]:
        """The tensors that every kernel may read."""
        return there_are((*self.inputs, self.summed_decay, self.slots))

    def sequence(self) -> Sequence:
        """Where rows meet."""
        spec, inputs, summed_decay = self.spec, self.inputs, None
        if self.summed_decay is not None:
            head_step = self.summed_decay.shape[-1]
            batch_step = spec.state_heads * head_step if self.summed_decay.dim() == 3 else 0
            summed_decay = (self.summed_decay, batch_step, head_step)
        in_decayed = spec.packed and self.summed_decay is not None
        return Sequence(
            spec.side(None, inputs.cu_seqlens_q, keys=False),
            spec.side(None, inputs.cu_seqlens_k, keys=True),
            inputs.key_lengths,
            summed_decay,
            inputs.cu_seqlens_k if in_decayed and inputs.cu_seqlens_k is not None else None,
            self.slots,
            None if self.slots is None else self.num_states,
        )

    def queries(self) -> Any:
        """Queries, to be mapped and scaled."""
        view = self.query_side(self.inputs.query)
        return self.spec.features(view, True)

    def keys(self) -> Any:
        """Keys, to be mapped."""
        return self.spec.features(self.key_side(self.inputs.key), False)

    def values(self) -> Any:
        """Values, as they are."""
        return plain(self.key_side(self.inputs.value))

    def grad(self, given: LinearBackwardInputs) -> Any:
        """Gradients of the output, as they are."""
        return plain(self.query_side(given.grad_output))

    def factors(self, given: LinearBackwardInputs) -> Any:
        """1 / divisor, where there is one."""
        return None if given.factors is None else self.per_row(given.factors)

    def query_side(self, rows: Tensor) -> Any:
        """A View of rows beside the queries."""
        return self.spec.side(rows, self.inputs.cu_seqlens_q, keys=False)

    def key_side(self, rows: Tensor) -> Any:
        """A View of rows beside the keys."""
        return self.spec.side(rows, self.inputs.cu_seqlens_k, keys=True)

    def per_row(self, numbers: Tensor) -> Any:
        """A View of one number for each query row."""
        return self.spec.numbers(numbers, self.inputs.cu_seqlens_q, keys=False)


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

"""Passes: the kernels of linear attention, started with the rows that each of them reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.features import MAPS, Operand
from saccade.gpu.kernel_args import Extent, number_strides, row_strides, there_are, view
from saccade.gpu.launcher import Launch, current_device, next_width
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.triton.chunk_scan import (
    ScanMeta,
    linear_forward_scan,
    linear_reverse_scan,
)
from saccade.ops.linear_attention.triton.chunk_state import (
    CollectMeta,
    Sequence,
    Sums,
    linear_collect,
)
from saccade.ops.linear_attention.triton.configs import (
    REVERSE,
    LinearConfig,
    choose,
    collecting,
    sharing,
)
from saccade.runtime.spec import KernelConfig, LinearInputs, LinearVariant, precision

SHORTEST_SEGMENT = 512  # positions: shorter ones cost more states than they save time
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
        """The sizes and the config of a call, or of its output alone if `forward`."""
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

    kernel: Any  # takes the flags, and what a scan takes but `after`
    nonfinite: Tensor  # int32 [sequences, heads, segments, parts]


def sums(state: State | None) -> Sums | None:
    """States as kernels take them."""
    if state is None:
        return None
    matrix, vector = state
    return Sums(matrix, vector)


class Passes(NamedTuple):
    """One call under way: its rows as kernels take them, and the kernels that can be started."""

    spec: LinearCallSpec
    inputs: LinearInputs
    summed_decay: Tensor | None
    slots: Tensor | None = None
    num_states: int = 0  # of the memory that slots say the positions of

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

    def grad(self, upstream: LinearBackwardInputs) -> Any:
        """Gradients of the output, as they are."""
        return plain(self.query_side(upstream.grad_output))

    def gradients(self, upstream: LinearBackwardInputs | None, name: str) -> tuple[Any, ...]:
        """What a pass reads of gradients: those of the output, 1 / divisor and −δ."""
        if upstream is None:
            return None, None, None
        delta = None if name == "grad_value" else self.per_row(upstream.minus_delta)
        return self.grad(upstream), self.factors(upstream), delta

    def factors(self, upstream: LinearBackwardInputs) -> Any:
        """1 / divisor, where there is one."""
        return None if upstream.factors is None else self.per_row(upstream.factors)

    def query_side(self, rows: Tensor) -> Any:
        """A View of rows beside the queries."""
        return self.spec.side(rows, self.inputs.cu_seqlens_q, keys=False)

    def key_side(self, rows: Tensor) -> Any:
        """A View of rows beside the keys."""
        return self.spec.side(rows, self.inputs.cu_seqlens_k, keys=True)

    def per_row(self, numbers: Tensor, keys: bool = False) -> Any:
        """A View of one number for each query row, or each key row."""
        inputs = self.inputs
        offsets = inputs.cu_seqlens_k if keys else inputs.cu_seqlens_q
        return self.spec.numbers(numbers, offsets, keys)

    # ---- sums over one side -------------------------------------------------------------------

    def collect(self, upstream: LinearBackwardInputs | None, segments: int) -> State:
        """The states of each segment alone: of keys, or of queries where there are gradients."""
        spec = self.spec
        matrix, vector = self.empty_states(segments)
        tiles = self.tiles(spec.value_dim)
        of_keys, of_queries = (spec.key_heads, spec.value_heads), (spec.query_heads, spec.heads)
        heads = of_keys if upstream is None else of_queries
        launch = self.launch(
            linear_collect,
            CollectMeta,
            ("collect", segments, upstream and upstream.grad_output.stride()),
            collecting(spec.config, 1 if upstream is None else spec.group),
            HEADS_PER_ROWS=self.heads_per(heads[0]),
            HEADS_PER_OTHERS=self.heads_per(heads[1]),
            INNER=spec.head_dim,
            INNER_WIDTH=next_width(spec.head_dim),
            OUTER=spec.value_dim,
            OUTER_TILE=self._tile(spec.value_dim),
            TILES=tiles,
            SEGMENTS=segments,
            QUERIES=upstream is not None,
            NORMALIZE=spec.variant.normalize,
        )

        def arguments() -> tuple[Any, ...]:
            if upstream is None:
                read = self.keys(), self.values(), None, None
            else:
                weights = self.per_row(upstream.minus_delta)
                mapped = self.queries(), self.grad(upstream)
                read = (*mapped, self.factors(upstream), weights)
            return (*read, self.sequence(), Sums(matrix, vector))

        tensors = (*self.known(), *there_are((upstream or ())[:3]), matrix, vector)
        programs = spec.sequences * spec.state_heads * segments * tiles
        launch(programs, spec.device, tensors, arguments)
        return matrix, vector

    def empty_states(self, segments: int) -> State:
        """Memory for the states of each segment."""
        counts = self.spec.sequences, self.spec.state_heads, segments, self.spec.head_dim
        empty = self.inputs.query.new_empty
        matrix = empty(*counts, self.spec.value_dim, dtype=torch.float32)
        return matrix, empty(counts, dtype=torch.float32)

    # ---- scans --------------------------------------------------------------------------------

    def grad_query(
        self, upstream: LinearBackwardInputs, result: Tensor, dots: Tensor | None,
        before: State | None, segments: int,
    ) -> None:  # fmt: skip
        """Write the gradients of queries, one for each output head."""
        self.scan("grad_query", result, (before, None), segments, upstream=upstream, dots=dots)

    def grad_key_value(
        self, upstream: LinearBackwardInputs, results: tuple[Tensor, Tensor], dots: Tensor | None,
        before: State | None, after: State | None, segments: int,
    ) -> None:  # fmt: skip
        """Write the gradients of keys and of values, and of the first states."""
        self.scan("grad_key", results[0], (before, after), segments, upstream=upstream, dots=dots)
        self.scan("grad_value", results[1], (before, None), segments, upstream=upstream)

    def scan(
        self, name: str, result: Tensor, states: tuple[State | None, State | None], segments: int,
        recompute: Recompute | None = None, *, upstream: LinearBackwardInputs | None = None,
        totals: Tensor | None = None, dots: Tensor | None = None, counted: bool = False,
        mapped: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Write the result of a pass: one for each output head, or for each head of the state.

        states: that segments start from, and to be written; `counted`, they have no sum of keys.
        totals: sums of scores of the output's rows, written unless they are `counted`. dots: to be
        written, features · gradient. mapped: features of queries and keys, where they are known.
        """
        spec, (before, after) = self.spec, states
        inner, outer = spec.head_dim, spec.value_dim
        if name in ("grad_query", "grad_key"):
            inner, outer = outer, inner
        of_keys, tiles = name in REVERSE, self.tiles(outer)
        rows = there_are((*(upstream or ())[:3], result, totals, dots, *(mapped or ())))
        absent = (before is None, after is None, totals is None, dots is None, recompute is None)
        parts = {} if recompute is None else {"PARTS": recompute.nonfinite.shape[-1]}
        launch = self.launch(
            recompute.kernel if recompute else linear_reverse_scan if of_keys else
            linear_forward_scan,
            ScanMeta,
            (name, segments, counted, absent, tuple(each.stride() for each in rows)),
            sharing(spec.config, name, spec.group),
            HEADS_PER_QUERY=self.heads_per(spec.query_heads),
            HEADS_PER_KEY=self.heads_per(spec.key_heads),
            HEADS_PER_VALUE=self.heads_per(spec.value_heads),
            SEGMENTS=segments,
            INNER=inner,
            INNER_WIDTH=next_width(inner),
            OUTER=outer,
            OUTER_TILE=self._tile(outer),
            TILES=tiles,
            PASS=name,
            COUNTED=counted,
            NORMALIZE=spec.variant.normalize,
            **parts,
        )  # fmt: skip

        def arguments() -> tuple[Any, ...]:
            query, key = self.queries(), self.keys()
            if mapped is not None:
                query, key = plain(self.query_side(mapped[0])), plain(self.key_side(mapped[1]))
            numbers = (
                None if totals is None else self.per_row(totals),
                None if dots is None else self.per_row(dots, of_keys),
            )
            into = self.key_side(result) if of_keys else self.query_side(result)
            read = query, key, self.values(), *self.gradients(upstream, name), *numbers, into
            more = spec.variant.eps, self.sequence(), sums(before)
            if recompute is not None:
                return (recompute.nonfinite, *read, *more)
            return (*read, *more, sums(after))

        flags = None if recompute is None else recompute.nonfinite
        tensors = (*self.known(), *rows, *there_are((*(before or ()), *(after or ()), flags)))
        heads = spec.state_heads if of_keys else spec.heads
        launch(spec.sequences * heads * segments * tiles, spec.device, tensors, arguments)

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
                "ALIGN": spec.variant.align if spec.variant.causal else "all",
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

    def heads_per(self, heads: int) -> int:
        """How many output heads share one of so many heads."""
        return self.spec.heads // max(heads, 1)

    def _tile(self, outer: int) -> int:
        return min(self.spec.config.tile, next_width(max(outer, 1)))

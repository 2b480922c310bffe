"""Kinds of calls of linear attention: what stays the same between calls, worked out once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.features import MAPS, Operand
from saccade.gpu.kernel_args import Extent, number_strides, row_strides, view
from saccade.gpu.launcher import Launch, current_device, next_width
from saccade.ops.attention.triton import call_spec
from saccade.ops.linear_attention.triton.configs import LinearConfig, choose
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

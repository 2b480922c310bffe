"""Kernel arguments: a call's tensors as kernels take them: Views, Mask, Score and Dropout."""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu import tensor_view, tile_ranges
from saccade.gpu.compose import mask_functions, score_functions
from saccade.gpu.language import tl, triton
from saccade.gpu.signature import Length, Stride
from saccade.gpu.tensor_view import View
from saccade.gpu.tile_ranges import Mask
from saccade.modifiers.expression import Captured, slots
from saccade.runtime import dropout
from saccade.runtime.spec import Inputs, Variant, precision


class Extent(NamedTuple):
    """One side of a call: its sequences, rows (of each dense one, or all packed ones), heads."""

    batch: int
    length: int
    heads: int
    packed: bool

    def slots(self, tile: int) -> int:
        """Programs along the rows of one head: of one dense sequence, or of all packed ones."""
        if self.length == 0:
            return 0
        return self.length // tile + self.batch if self.packed else -(-self.length // tile)

    def programs(self, tile: int) -> int:
        """Programs in all."""
        return self.slots(tile) * self.heads * (1 if self.packed else self.batch)

    @property
    def sequences(self) -> int:
        """Batch entries that slots do not tell apart."""
        return 1 if self.packed else self.batch


class Geometry(NamedTuple):
    """Both sides of a call."""

    queries: Extent
    keys: Extent

    @staticmethod
    def of(inputs: Inputs) -> Geometry:
        """The geometry of a dense or packed call."""
        query, key, offsets = inputs.query, inputs.key, inputs.cu_seqlens_q
        if offsets is None:
            batch, query_heads, query_len = query.shape[:3]
            return Geometry(
                Extent(batch, query_len, query_heads, False),
                Extent(batch, key.shape[2], key.shape[1], False),
            )
        batch = offsets.shape[0] - 1
        return Geometry(
            Extent(batch, query.shape[0], query.shape[1], True),
            Extent(batch, key.shape[0], key.shape[1], True),
        )

    def lengths(self) -> tuple[int, int]:
        """Rows of a sequence on both sides; of packed ones, on average."""
        queries, keys = self
        if not queries.packed:
            return queries.length, keys.length
        return queries.length // max(queries.batch, 1), keys.length // max(keys.batch, 1)


def view(
    tensor: Tensor | None, strides: tuple[int, int, int], extent: Extent,
    offsets: Tensor | None, find: Any = tensor_view.packed_program,
) -> View:  # fmt: skip
    """A View of a tensor (None: of rows without memory); strides are batch, head and row.

    find: what a program works on, where sequences are packed.
    """
    steps = strides[:2]
    if strides[2] != 1:  # rows of channels, which are loaded 16 bytes at once
        steps = Stride(steps[0]), Stride(steps[1])
    step = tl.constexpr(strides[2])
    if offsets is None:
        data: tuple[Any, ...] = (Length(extent.length), extent.heads)
        return View(tensor, steps, step, tensor_view.dense, tensor_view.dense_program, data)
    numbers = extent.batch, extent.heads, extent.length
    data = (offsets, *numbers)
    return View(tensor, steps, step, tensor_view.packed, find, data, pad=tensor_view.fill_padding)


def row_strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of batch, head and row of [batch, heads, length, dim] or [tokens, heads, dim]."""
    strides = tensor.stride()
    return (0, strides[1], strides[0]) if packed else (strides[0], strides[1], strides[2])


def number_strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """The same of one number a row: [batch, heads, length] or [heads, tokens]."""
    strides = tensor.stride()
    return (0, strides[0], strides[1]) if packed else (strides[0], strides[1], strides[2])


def captured_data(key: str, captured: Captured) -> tuple[Any, ...]:
    """What an expression captured, slot by slot; a tensor as (address, sizes, strides)."""
    data: list[Any] = []
    for slot in slots(key):
        value = captured.value(slot)
        if isinstance(value, Tensor):
            if value.numel() == 0:  # nothing meets, but programs without rows still look
                value = value.new_zeros((1,) * value.dim())
            data.append((value, tuple(value.shape), tuple(map(Stride, value.stride()))))
        else:
            data.append(Length(value) if type(value) is int else value)
    return tuple(data)


NOTHING_HIDDEN = Mask(None, None, tile_ranges.everything, tile_ranges.next_in_range)


def mask_argument(variant: Variant, plan: tuple[Any, ...] = ()) -> Mask:
    """The mask as kernels take it; `plan` holds addresses of what was planned ahead."""
    if not variant.mask:
        return NOTHING_HIDDEN
    functions = mask_functions(variant.mask)
    data = captured_data(variant.mask, variant.mask_captured)
    if not plan:
        tile_range, tile = tile_ranges.found, tile_ranges.next_in_range
    elif len(plan) == 3:
        tile_range, tile = tile_ranges.planned, tile_ranges.next_in_range
    else:
        tile_range, tile = tile_ranges.listed, tile_ranges.next_in_list
    return Mask(functions.visible, functions.classify, tile_range, tile, data, plan)


def score_argument(variant: Variant, by: int | None = None) -> Score | None:
    """The score as kernels take it, with its derivative by the score, or by a captured tensor."""
    if variant.score:
        functions = score_functions(variant.score)
        data = captured_data(variant.score, variant.score_captured)
        derivative = functions.derivative if by is None else functions.reads[by].derivative
        return Score(functions.change, derivative, data)
    if variant.scale <= 0:  # softmax_step folds positive scales only
        return Score(unchanged, one, ())
    return None


def dropout_argument(inputs: Inputs, variant: Variant) -> Dropout | None:
    """Dropout as kernels take it."""
    if inputs.seed is None:
        return None
    dropout_scale = 1.0 / (1.0 - variant.dropout_p)
    return Dropout(inputs.seed, dropout.threshold(variant.dropout_p), dropout_scale)


def rules(
    inputs: Inputs,
    variant: Variant,
    plan: tuple[Any, ...] = (),
    by: int | None = None,
) -> Rules:
    """What a kernel does to pairs; `by` as in `score_argument`."""
    return Rules(
        mask_argument(variant, plan),
        score_argument(variant, by),
        dropout_argument(inputs, variant),
        variant.scale,
    )


def signature(inputs: Inputs, variant: Variant) -> tuple[Any, ...]:
    """What tells calls like one another from another: everything but addresses."""
    query, key, value = inputs.query, inputs.key, inputs.value
    sinks, offsets = inputs.sinks, inputs.cu_seqlens_q
    captured = ()
    if variant.mask or variant.score:
        captured = tuple(map(kind_of_captured, (variant.mask_captured, variant.score_captured)))
    return (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        query.dtype, query.device, variant.mask, variant.score, variant.scale, captured,
        None if inputs.seed is None else variant.dropout_p,
        None if sinks is None else sinks.dtype, None if offsets is None else offsets.shape,
        precision(query.dtype),
    )  # fmt: skip


def kind_of_captured(captured: Captured) -> tuple[Any, ...]:
    """What tells one kind of captured values from another."""
    tensors = tuple((table.shape, table.stride(), table.dtype) for table in captured.tensors)
    return tensors, tuple(captured.ints), tuple(captured.floats)


NO_OTHERS = (None,) * len(Inputs._fields[3:])


def there_are(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Tensors without those that are None."""
    return [tensor for tensor in tensors if tensor is not None]


def brings_three(inputs: Inputs, variant: Variant) -> bool:
    """Whether a call, and every one like it, has no tensors but query, key and value."""
    captured = variant.mask_captured.tensors or variant.score_captured.tensors
    return inputs[3:] == NO_OTHERS and not captured


def tensors_of(inputs: Inputs, variant: Variant) -> tuple[Tensor, ...]:
    """All tensors that a call brings with it, those that its mask and score captured too."""
    captured = *variant.mask_captured.tensors, *variant.score_captured.tensors
    return (*there_are(inputs), *captured)


class Rules(NamedTuple):
    """Which pairs are visible, how scores change, which weights are dropped; the scores' scale."""

    mask: Any  # a Mask (tile_ranges.py)
    score: Any  # a Score, or None
    dropout: Any  # a Dropout, or None
    scale: float


class Score(NamedTuple):
    """A change of the scaled score; a kernel whose scores do not change gets None instead."""

    change: Any  # from (score, batch, head, query rows, key rows, shift, data)
    derivative: Any  # of the same arguments; None where there is none
    data: tuple[Any, ...]  # what the score captured


@triton.jit
def unchanged(score, batch, head, query_row, kv_row, shift, data):
    """The score as it is: for scales of 0 or less, which softmax_step cannot fold in."""
    return score


@triton.jit
def one(score, batch, head, query_row, kv_row, shift, data):
    """The derivative of `unchanged`."""
    return score * 0.0 + 1.0


class Dropout(NamedTuple):
    """What a kernel needs to drop the pairs that `runtime/dropout.py` drops; None: drops none."""

    seed: Any  # int64 scalar in memory
    threshold: int  # a random word below it drops its pair
    dropout_scale: float  # what kept weights are multiplied by: 1 / (1 - dropout_p)


# Triton (3.6) mixes up the words of fewer groups than a program has threads, so a tile smaller than
# this draws for each pair.
SMALL_TILE = tl.constexpr(4 * 512)


@triton.jit
def kept(dropout, batch, head, query_rows, kv_start, KV_TILE: tl.constexpr):
    """True where a pair is kept: [query rows, KV_TILE]."""
    if query_rows.shape[0] * KV_TILE < SMALL_TILE:
        kv_rows = kv_start + tl.arange(0, KV_TILE)[None, :]
        word_0, word_1, word_2, word_3 = draw(dropout, batch, head, query_rows, kv_rows // 4)
        low_bit, high_bit = kv_rows % 2 == 0, kv_rows % 4 < 2
        words = tl.where(
            high_bit, tl.where(low_bit, word_0, word_1), tl.where(low_bit, word_2, word_3)
        )
    else:
        groups = kv_start // 4 + tl.arange(0, KV_TILE // 4)[None, :]
        word_0, word_1, word_2, word_3 = draw(dropout, batch, head, query_rows, groups)
        # join adds a last dimension: [rows, groups, 2 (high bit), 2 (low bit)] → word number.
        pairs = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
        words = tl.reshape(pairs, (query_rows.shape[0], KV_TILE))
    return words.to(tl.int64) >= dropout.threshold


@triton.jit
def draw(dropout, batch, head, query_rows, groups):
    """The four random words of each query row and group of four keys."""
    rows = query_rows[:, None]
    zero = (rows + groups) * 0
    counter = (zero + groups).to(tl.uint32), (zero + rows).to(tl.uint32)
    of_head, of_batch = (zero + head).to(tl.uint32), (zero + batch).to(tl.uint32)
    return tl.philox(tl.load(dropout.seed), counter[0], counter[1], of_head, of_batch)

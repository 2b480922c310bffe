"""Kernel arguments: a call's tensors as kernels take them: Views, Mask, Score and Dropout.

The device functions of a mask or score are written from its key as one small module of text, which
Triton then compiles like any other. Equal keys give equal text in every process, so Triton's disk
cache knows them again.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from saccade.gpu import device_ops, tensor_view, tile_ranges
from saccade.gpu.device_ops import divisor_of
from saccade.gpu.language import Constant, tl, triton
from saccade.gpu.signature import FIXED, Length, Stride, fixed
from saccade.gpu.tensor_view import View
from saccade.gpu.tile_ranges import Mask
from saccade.modifiers import triton_source
from saccade.modifiers.derivative import derivatives
from saccade.modifiers.division import block_sizes, divisors
from saccade.modifiers.expression import Captured, mentions, parse, slots
from saccade.modifiers.triton_source import Dependence
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
    step = Constant(strides[2])
    if offsets is None:
        data: tuple[Any, ...] = (Length(extent.length), extent.heads)
        return View(tensor, steps, step, tensor_view.dense, tensor_view.dense_program, data)
    numbers = extent.batch, extent.heads, extent.length
    data = (offsets, *numbers)
    return View(tensor, steps, step, tensor_view.packed, find, data, pad=tensor_view.fill_padding)


def row_strides(tensor: Any, packed: bool) -> tuple[int, int, int]:
    """Strides of batch, head and row of [batch, heads, length, dim] or [tokens, heads, dim]."""
    strides = tensor.stride()
    return (fixed(0), strides[1], strides[0]) if packed else strides[:3]


def number_strides(tensor: Any, packed: bool) -> tuple[int, int, int]:
    """Strides of batch, head and row of numbers: [batch, heads, length] or [heads, tokens]."""
    strides = tensor.stride()
    return (fixed(0), strides[0], strides[1]) if packed else strides[:3]


MOST_ENTRIES = 2**31 - 1  # of a captured tensor along a dimension: indices may have 32 bits


def captured_data(key: str, captured: Captured) -> tuple[Any, ...]:
    """What an expression captured, slot by slot; a tensor as (address, sizes, strides), a number
    that divides as a `Divisor`. Kernels are not compiled for what a number is a multiple of, but
    for that of blocks."""
    data: list[Any] = []
    divide, of_blocks = divisors(parse(key)), block_sizes(parse(key))
    for slot in slots(key):
        value = captured.value(slot)
        if isinstance(value, Tensor):
            if max(value.shape, default=0) > MOST_ENTRIES:
                raise ValueError(
                    f"mask, score: got a captured tensor of {list(value.shape)}, takes at most "
                    f"{MOST_ENTRIES} entries along a dimension on a GPU, where indices have 32 bits"
                )
            if value.numel() == 0:  # nothing meets, but programs without rows still look
                value = value.new_zeros((1,) * value.dim())
            steps = tuple([Stride(step, FIXED) for step in value.stride()])
            data.append((value, tuple(map(fixed, value.shape)), steps))
        elif slot in divide:
            data.append(divisor_of(value, slot in of_blocks))
        else:
            data.append(fixed(value) if slot[0] == "i" else value)
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


def changes_scores(variant: Variant) -> bool:
    """Whether kernels take a Score, and scores are natural to them (gpu/online_softmax.py)."""
    return variant.score != "" or variant.scale <= 0


def score_argument(variant: Variant, by: int | None = None) -> Score | None:
    """The score as kernels take it, with its derivative by the score, or by a captured tensor."""
    if variant.score:
        functions = score_functions(variant.score)
        data = captured_data(variant.score, variant.score_captured)
        derivative = functions.derivative if by is None else functions.reads[by].derivative
        return Score(functions.change, derivative, data)
    if changes_scores(variant):  # softmax_step folds positive scales only
        return Score(unchanged, one, ())
    return None


def dropout_argument(inputs: Inputs, variant: Variant) -> Dropout | None:
    """Dropout as kernels take it."""
    if inputs.seed is None:
        return None
    threshold, table = fixed(dropout.threshold(variant.dropout_p)), inputs.numbers
    draws = Draws(inputs.seed, threshold, 1.0 / (1.0 - variant.dropout_p))
    if table is None:
        return Dropout(kept, Constant(True), draws)
    numbered, grouped = NumberedDraws(*draws, table), Constant(variant.grouped)
    if len(table) == 1:
        return Dropout(kept_of_heads, grouped, numbered)
    if inputs.cu_seqlens_q is None:
        return Dropout(kept_of_rows, grouped, numbered)
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    return Dropout(kept_of_packed_rows, grouped, PackedDraws(*numbered, *offsets))


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
    """What tells calls like one another from another: all but addresses, lengths and strides."""
    query, key, value = inputs.query, inputs.key, inputs.value
    sinks, offsets = inputs.sinks, inputs.cu_seqlens_q
    captured = ()
    if variant.mask or variant.score:
        captured = tuple(map(kind_of_captured, (variant.mask_captured, variant.score_captured)))
    return (
        query.shape[1], key.shape[1], query.shape[-1], value.shape[-1],
        query.dtype, query.device, variant.mask, variant.score, variant.scale, captured,
        None if inputs.seed is None else kind_of_dropout(inputs, variant),
        None if sinks is None else sinks.dtype, offsets is None,
        variant.residual, variant.max_logit, precision(query.dtype),
    )  # fmt: skip


def kind_of_dropout(inputs: Inputs, variant: Variant) -> tuple[Any, ...]:
    """What tells one kind of dropout from another."""
    numbers = inputs.numbers
    return variant.dropout_p, None if numbers is None else len(numbers) > 1, variant.grouped


def kind_of_captured(captured: Captured) -> tuple[Any, ...]:
    """What tells one kind of captured values from another."""
    tensors = tuple((table.shape, table.stride(), table.dtype) for table in captured.tensors)
    return tensors, tuple(captured.ints), tuple(captured.floats)


NO_OTHERS = (None,) * len(Inputs._fields[3:])


T = TypeVar("T")


def there_are(values: Iterable[T | None]) -> list[T]:
    """Values without those that are None."""
    return [value for value in values if value is not None]


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


# Triton (3.6) mixes up the words of fewer groups than a program has threads, so a tile smaller than
# this draws for each pair.
SMALL_TILE = tl.constexpr(4 * 512)


@triton.jit
def kept(dropout, batch, head, query_rows, kv_start, KV_TILE: tl.constexpr):
    """True where a pair is kept: [query rows, KV_TILE]."""
    if query_rows.shape[0] * KV_TILE < SMALL_TILE:
        kv_rows = kv_start + tl.arange(0, KV_TILE)[None, :]
        words = words_of_pairs(dropout, batch, head, query_rows, kv_rows)
    else:
        groups = kv_start // 4 + tl.arange(0, KV_TILE // 4)[None, :]
        words = words_of_groups(dropout, batch, head, query_rows, groups)
    return words.to(tl.int64) >= dropout.data.threshold


@triton.jit
def kept_of_heads(dropout, batch, head, query_rows, kv_start, KV_TILE: tl.constexpr):
    """`kept` of a call that has some heads of a longer one."""
    first = tl.load(dropout.data.table)
    return kept(dropout, batch, head + first, query_rows, kv_start, KV_TILE)


@triton.jit
def kept_of_rows(dropout, batch, head, query_rows, kv_start, KV_TILE: tl.constexpr):
    """`kept` of a call that has some rows of a longer one."""
    return kept_by_numbers(dropout, batch, head, query_rows, kv_start, 1, 1, KV_TILE)


@triton.jit
def kept_of_packed_rows(dropout, batch, head, query_rows, kv_start, KV_TILE: tl.constexpr):
    """`kept_of_rows` of sequences that lie back to back."""
    first_query = tl.load(dropout.data.query_offsets + batch) + 1
    first_key = tl.load(dropout.data.kv_offsets + batch) + 1
    return kept_by_numbers(
        dropout, batch, head, query_rows, kv_start, first_query, first_key, KV_TILE
    )


@triton.jit
def kept_by_numbers(
    dropout, batch, head, query_rows, kv_start, first_query, first_key, KV_TILE: tl.constexpr
):  # fmt: skip
    """`kept` of rows whose numbers lie in the table, those of a sequence from its first row on."""
    table = dropout.data.table
    places = table + tl.cast(first_query + query_rows, tl.int64) * 4
    rows, batches = tl.load(places), batch + tl.load(places + 1)[:, None]
    head += tl.load(table)
    if not dropout.grouped or query_rows.shape[0] * KV_TILE < SMALL_TILE:
        keys = kv_start + tl.arange(0, KV_TILE)[None, :]
        numbers = tl.load(table + tl.cast(first_key + keys, tl.int64) * 4 + 2)
        words = words_of_pairs(dropout, batches, head, rows, numbers)
    else:
        keys = kv_start + tl.arange(0, KV_TILE // 4)[None, :] * 4
        numbers = tl.load(table + tl.cast(first_key + keys, tl.int64) * 4 + 2)
        words = words_of_groups(dropout, batches, head, rows, numbers // 4)
    return words.to(tl.int64) >= dropout.data.threshold


@triton.jit
def words_of_pairs(dropout, batch, head, query_rows, kv_rows):
    """A random word for each pair, drawn for each."""
    word_0, word_1, word_2, word_3 = draw(dropout, batch, head, query_rows, kv_rows // 4)
    low_bit, high_bit = kv_rows % 2 == 0, kv_rows % 4 < 2
    return tl.where(high_bit, tl.where(low_bit, word_0, word_1), tl.where(low_bit, word_2, word_3))


@triton.jit
def words_of_groups(dropout, batch, head, query_rows, groups):
    """A random word for each pair, drawn for four keys that follow one another."""
    word_0, word_1, word_2, word_3 = draw(dropout, batch, head, query_rows, groups)
    # join adds a last dimension: [rows, groups, 2 (high bit), 2 (low bit)] → word number.
    pairs = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    return tl.reshape(pairs, (query_rows.shape[0], 4 * groups.shape[1]))


@triton.jit
def draw(dropout, batch, head, query_rows, groups):
    """The four random words of each query row and group of four keys."""
    rows = query_rows[:, None]
    zero = (rows + groups) * 0
    counter = (zero + groups).to(tl.uint32), (zero + rows).to(tl.uint32)
    of_head, of_batch = (zero + head).to(tl.uint32), (zero + batch).to(tl.uint32)
    return tl.philox(tl.load(dropout.data.seed), counter[0], counter[1], of_head, of_batch)


class Dropout(NamedTuple):
    """What a kernel needs to drop the pairs that `runtime/dropout.py` drops; None: drops none.

    Functions and numbers lie apart: in loops Triton (3.6) forgets functions beside numbers.
    """

    kept: Any  # or kept_of_heads, …: what knows the numbers that heads and rows have elsewhere
    grouped: Any  # tl.constexpr: whether four keys that have a counter in common lie together
    data: Any  # Draws, or NumberedDraws, or PackedDraws


class Draws(NamedTuple):
    """What random words are drawn from, and what becomes of weights."""

    seed: Any  # int64 scalar in memory
    threshold: int  # a random word below it drops its pair
    dropout_scale: float  # what kept weights are multiplied by: 1 / (1 - dropout_p)


class NumberedDraws(NamedTuple):
    """`Draws` in a part of a longer call, with what heads and rows are called there."""

    seed: Any
    threshold: int
    dropout_scale: float
    table: Any  # int32 [rows, 4], see `runtime/dropout.py`


class PackedDraws(NamedTuple):
    """`NumberedDraws` of sequences that lie back to back, and where they begin."""

    seed: Any
    threshold: int
    dropout_scale: float
    table: Any
    query_offsets: Any
    kv_offsets: Any


class MaskFunctions(NamedTuple):
    """The device functions of a mask, and what its classes on tiles depend on."""

    visible: Any
    classify: Any
    # as classify, but tables read along both query rows and keys say "perhaps"
    coarse_classify: Any
    spans_read: int  # along how many row axes captured tensors are read for a tile class
    in_blocks: bool  # whether all that is read along two axes is read in blocks
    dependences: frozenset[Dependence]


class ReadFunctions(NamedTuple):
    """The device functions of one captured tensor of a score.

    Attributes:
        derivative: by what grows with an entry that is read, for each pair.
        place: where the entry of each pair lies, in a table of given sizes and steps.
        along_queries, along_keys: whether pairs of other query rows, or keys, read other entries.
        as_bias: whether it is read at (batch, head, query_row, kv_row), or broadcast there.
    """

    derivative: Any
    position: Any
    along_queries: bool
    along_keys: bool
    as_bias: bool


class ScoreFunctions(NamedTuple):
    """The device functions of a score; those of captured tensors by their place."""

    change: Any
    derivative: Any
    reads: dict[int, ReadFunctions]


@functools.cache
def mask_functions(key: str) -> MaskFunctions:
    """Compose the functions of a mask."""
    expression, order = parse(key), slots(key)
    classify = triton_source.tile_function("classify", expression, order)
    texts = [
        triton_source.function("visible", expression, order, len(expression) - 1, score=False),
        classify.text,
    ]
    if classify.spans_read > 1:
        texts.append(triton_source.tile_function("coarse_classify", expression, order, 1).text)
    module = _executed("".join(texts))
    coarse_classify = module["coarse_classify" if classify.spans_read > 1 else "classify"]
    return MaskFunctions(module["visible"], module["classify"], coarse_classify, *classify[1:])


@functools.cache
def score_functions(key: str) -> ScoreFunctions:
    """Compose the functions of a score."""
    found, order = derivatives(key), slots(key)
    expression, texts = found.expression, []

    def define(name: str, result: int) -> None:
        texts.append(triton_source.function(name, expression, order, result, score=True))

    define("change", found.result)
    if found.of_score is not None:
        define("derivative", found.of_score)
    for slot, (slope, read) in found.of_reads.items():
        define(f"derivative_{slot}", slope)
        texts.append(triton_source.offset_function(f"place_{slot}", expression, order, read))
    module = _executed("".join(texts))
    by_query, by_key = (mentions(expression, [name]) for name in ("query_row", "kv_row"))
    reads = {}
    for slot, (_, read) in found.of_reads.items():
        step = expression[read]
        indices = [expression[number].op for number in step.operands]
        reads[slot] = ReadFunctions(
            module[f"derivative_{slot}"],
            module[f"place_{slot}"],
            any(by_query[number] for number in step.operands),
            any(by_key[number] for number in step.operands),
            step.op == "take" and indices == ["batch", "head", "query_row", "kv_row"],
        )
    return ScoreFunctions(module["change"], module.get("derivative", _no_slope), reads)


@triton.jit
def _no_slope(score, batch, head, query_row, kv_row, shift, data):
    """The derivative of what does not depend on the score."""
    return tl.where(score == score, 0.0, 0.0)


@triton.jit
def as_bool(answer, kv_row):
    """A mask's answer as a tensor of truths (it may be the same for all keys, or plainly True)."""
    return answer & (kv_row == kv_row)


@triton.jit
def as_score(changed, score):
    """What a score gives, in float32 and in the shape of the scores."""
    return tl.where(score == score, changed, changed).to(tl.float32)


@functools.cache
def _executed(text: str) -> dict[str, Any]:
    """Run generated text as a module whose source Triton can read again."""
    filename = f"<saccade {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module: dict[str, Any] = {
        "__name__": "saccade.gpu.composed",
        "triton": triton,
        "tl": tl,
        "as_bool": as_bool,
        "as_score": as_score,
    }
    for source in (device_ops, tile_ranges):
        module.update({k: v for k, v in vars(source).items() if hasattr(v, "fn")})
    exec(compile(text, filename, "exec"), module)  # the text holds operations of expressions alone
    return module

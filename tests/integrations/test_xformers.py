"""xformers' biases: what each class shows, against its documentation written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from saccade.integrations import xformers as stand_in
from saccade.integrations.xformers import attn_bias as biases
from saccade.integrations.xformers import fmha

calls: Any = fmha  # called with unpacked lists
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a few dozen terms


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, M, H, K] and lse [B, H, M]; rows that see nothing give 0 and -inf."""
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(query.shape[-1])
    if added is not None:
        scores = scores + added
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    lse = scores.masked_fill(empty, 0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", weights, value), lse


written_out: Any = _written_out


# What the documentation says of query i of `queries` and key j of `keys` in one sequence.
Sees = Callable[[int, int, int, int], bool]


def everything(i: int, j: int, queries: int, keys: int) -> bool:
    return True


def no_farther_from_the_first(i: int, j: int, queries: int, keys: int) -> bool:
    return j <= i


def no_nearer_to_the_last(i: int, j: int, queries: int, keys: int) -> bool:
    return keys - 1 - j >= queries - 1 - i


def local(size: int) -> Sees:
    """From the top left: greater than i - size, up to i."""
    return lambda i, j, queries, keys: i - size < j <= i


def local_to_the_last(size: int) -> Sees:
    """By distances from the last rows: from a query's own up to less than size more."""

    def sees(i: int, j: int, queries: int, keys: int) -> bool:
        own = queries - 1 - i
        return own <= keys - 1 - j < own + size

    return sees


def between(left: int, right: int) -> Sees:
    return lambda i, j, queries, keys: i - left <= j + queries - keys <= i + right


# ---- sequences of one length ---------------------------------------------------------------------

DENSE: list[tuple[Any, Sees]] = [
    (biases.LowerTriangularMask(), no_farther_from_the_first),
    (biases.LowerTriangularFromBottomRightMask(), no_nearer_to_the_last),
    (biases.LowerTriangularFromBottomRightMask().make_local_attention(3), local_to_the_last(3)),
    (biases.LowerTriangularFromBottomRightLocalAttentionMask(1), local_to_the_last(1)),
    (biases.LocalAttentionFromBottomRightMask(1, 2), between(1, 2)),
    (biases.LocalAttentionFromBottomRightMask(0, 0), between(0, 0)),
]


def name_of(value: Any) -> str:
    return type(value).__name__


def compare(bias: Any, tensors: list[Tensor], visible: Tensor, gradients: bool = True) -> None:
    """Output, lse and gradients under a bias; keys that no query sees hold NaN."""
    seen = visible.any(0)[None, :, None, None]
    clean = [tensors[0], *(rows.masked_fill(~seen, 0) for rows in tensors[1:])]
    wanted, wanted_lse = written_out(*clean, visible)
    given = [tensors[0], *(rows.masked_fill(~seen, torch.nan) for rows in tensors[1:])]
    given = [rows.detach().requires_grad_(gradients) for rows in given]
    output, lse = calls.memory_efficient_attention_forward_requires_grad(*given, bias)
    torch.testing.assert_close(output, wanted, **CLOSE)
    torch.testing.assert_close(lse, wanted_lse, **CLOSE)
    with torch.no_grad():
        again = calls.memory_efficient_attention(*given, bias)
    torch.testing.assert_close(again, wanted.detach(), **CLOSE)
    if gradients:
        grad = torch.randn_like(wanted)
        found = torch.autograd.grad(output, given, grad)
        expected = torch.autograd.grad(wanted, tensors, grad)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def rows_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("lengths", [(4, 6), (6, 4)])
@pytest.mark.parametrize(("bias", "sees"), DENSE, ids=name_of)
def test_sequences_of_one_length(bias: Any, sees: Sees, lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    visible = torch.tensor([[sees(i, j, *lengths) for j in range(keys)] for i in range(queries)])
    shape = (2, keys, 2, 8)
    compare(bias, rows_of((2, queries, 2, 8), shape, (2, keys, 2, 4)), visible)
    bias = bias.to("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        found = bias.materialize((3, *lengths), dtype)
        assert found.dtype == dtype and found.equal(visible.log().to(dtype).expand(3, -1, -1))


# ---- sequences one behind the other --------------------------------------------------------------

QUERIES, KEYS = [3, 2, 0, 4], [5, 1, 2, 4]
SLAB, IN_SLAB = 6, [5, 1, 6, 4]
STARTS, GAPPY = [2, 8, 10, 15, 22], [5, 1, 2, 4]
TABLE = torch.tensor([[4, 1, 0], [7, 0, 0], [2, 5, 6], [3, 8, 0]], dtype=torch.int32)
FROM = [1, 0, 2, 3]  # the first row of each sequence over pages


class Packed(NamedTuple):
    """A bias, which keys each sequence has in their order, of how many, and what a query sees."""

    bias: Any
    keys: list[list[int]]
    num_keys: int
    sees: Sees


def behind(lengths: list[int]) -> list[list[int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [list(range(end - n, end)) for end, n in zip(ends, lengths, strict=True)]


PLAIN = biases.BlockDiagonalMask.from_seqlens(QUERIES, KEYS)
SLABS = [list(range(b * SLAB, b * SLAB + n)) for b, n in enumerate(IN_SLAB)]
GAPS = [list(range(start, start + n)) for start, n in zip(STARTS[:-1], GAPPY, strict=True)]


def pages(first: list[int], lengths: list[int]) -> list[list[int]]:
    """Rows of pages of 2 slots, by the table."""
    table = TABLE.tolist()
    return [
        [table[b][j // 2] * 2 + j % 2 for j in range(start, start + n)]
        for b, (start, n) in enumerate(zip(first, lengths, strict=True))
    ]


def padded(kind: Any) -> Any:
    return kind.from_seqlens(QUERIES, SLAB, IN_SLAB)


def gappy(kind: Any) -> Any:
    return kind.from_seqlens(QUERIES, STARTS, GAPPY)


CAUSAL_PADDED = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask
LOCAL_PADDED = biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
    QUERIES, SLAB, IN_SLAB, 2
)
IN_PAGES = pages([0] * 4, IN_SLAB)
FROM_START = pages(FROM, [4, 1, 3, 1])

PACKED = [
    Packed(PLAIN, behind(KEYS), 12, everything),
    Packed(PLAIN.make_causal(), behind(KEYS), 12, no_farther_from_the_first),
    Packed(PLAIN.make_causal_from_bottomright(), behind(KEYS), 12, no_nearer_to_the_last),
    Packed(PLAIN.make_local_attention(2), behind(KEYS), 12, local(2)),
    Packed(PLAIN.make_local_attention_from_bottomright(2), behind(KEYS), 12, local_to_the_last(2)),
    Packed(padded(biases.BlockDiagonalPaddedKeysMask), SLABS, 24, everything),
    Packed(padded(CAUSAL_PADDED), SLABS, 24, no_nearer_to_the_last),
    Packed(
        biases.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
            QUERIES, SLAB, IN_SLAB, 1, 1
        ),
        SLABS, 24, between(1, 1),
    ),
    Packed(LOCAL_PADDED, SLABS, 24, local_to_the_last(2)),
    Packed(gappy(biases.BlockDiagonalGappyKeysMask), GAPS, 22, everything),
    Packed(
        gappy(biases.BlockDiagonalCausalWithOffsetGappyKeysMask), GAPS, 22, no_nearer_to_the_last
    ),
    Packed(
        gappy(biases.BlockDiagonalGappyKeysMask).make_local_attention_from_bottomright(2, 0),
        GAPS, 22, between(2, 0),
    ),
    Packed(
        padded(CAUSAL_PADDED).make_paged(TABLE, 2, biases.PagedBlockDiagonalPaddedKeysMask),
        IN_PAGES, 18, everything,
    ),
    Packed(
        biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            QUERIES, IN_SLAB, TABLE, 2
        ),
        IN_PAGES, 18, no_nearer_to_the_last,
    ),
    Packed(
        LOCAL_PADDED.make_paged(TABLE, 2, biases.PagedBlockDiagonalCausalLocalPaddedKeysMask),
        IN_PAGES, 18, local_to_the_last(2),
    ),
    Packed(
        biases.PagedBlockDiagonalGappyKeysMask.from_seqlens(QUERIES, FROM, [4, 1, 3, 1], TABLE, 2),
        FROM_START, 18, everything,
    ),
    Packed(
        biases.BlockDiagonalGappyKeysMask.from_seqlens(
            QUERIES, [b * SLAB + start for b, start in enumerate(FROM)] + [24], [4, 1, 3, 1]
        ).make_paged(TABLE, 2, SLAB, biases.PagedBlockDiagonalCausalWithOffsetGappyKeysMask),
        FROM_START, 18, no_nearer_to_the_last,
    ),
]  # fmt: skip


def visible_pairs(case: Packed) -> Tensor:
    visible = torch.zeros(sum(QUERIES), case.num_keys, dtype=torch.bool)
    for queries, keys in zip(behind(QUERIES), case.keys, strict=True):
        for i, row in enumerate(queries):
            for j, column in enumerate(keys):
                visible[row, column] = case.sees(i, j, len(queries), len(keys))
    return visible


@pytest.mark.parametrize("case", PACKED, ids=lambda case: type(case.bias).__name__)
def test_sequences_one_behind_the_other(case: Packed) -> None:
    visible, over_pages = visible_pairs(case), hasattr(case.bias, "block_tables")
    tensors = rows_of((1, 9, 2, 8), (1, case.num_keys, 2, 8), (1, case.num_keys, 2, 4))
    compare(case.bias, tensors, visible, gradients=not over_pages)
    columns = TABLE.numel() * 2 if over_pages else case.num_keys
    found = case.bias.to("cpu").materialize((2, 9, columns))
    assert found.equal(visible.float().log().expand(2, -1, -1))
    assert all(first.equal(second) for first, second in zip(found, found.flip(0), strict=True))


def test_every_class_is_here() -> None:
    tested = {type(case.bias) for case in PACKED} | {type(bias) for bias, _ in DENSE}
    named = {value for value in vars(biases).values() if isinstance(value, type)}
    helpers = {biases._SeqLenInfo, biases._PaddedSeqLenInfo, biases._GappySeqInfo}
    others = {biases.AttentionBias, biases.LowerTriangularMaskWithTensorBias}
    assert named - helpers - others == tested
    assert all(isinstance(case.bias, biases.VARLEN_BIASES) for case in PACKED)


# ---- lists of tensors, and lengths ---------------------------------------------------------------


def test_lists_there_and_back() -> None:
    queries = rows_of((1, 3, 2, 8), (2, 4, 2, 8), (1, 1, 2, 8))
    keys = rows_of((1, 5, 2, 8), (2, 4, 2, 8), (1, 2, 2, 8))
    bias, rows = biases.BlockDiagonalMask.from_tensor_list(queries)
    assert rows.shape == (1, 12, 2, 8) and bias.q_seqinfo.seqstart_py == [0, 3, 7, 11, 12]
    for one, other in zip(bias.split(rows), queries, strict=True):
        assert one.equal(other)
    bias, q, k, v = biases.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys, keys)
    assert v is not None
    parts = bias.split_queries(calls.memory_efficient_attention(q, k, v, bias))
    for part, query, key in zip(parts, queries, keys, strict=True):
        wanted = calls.memory_efficient_attention(query, key, key)
        torch.testing.assert_close(part, wanted, **CLOSE)
    assert [rows.shape[:2] for rows in bias.split_kv(k)] == [(1, 5), (2, 4), (1, 2)]
    grad = torch.autograd.grad(parts[0].sum(), keys, allow_unused=True)
    assert grad[0] is not None and grad[0].abs().sum() > 0
    with pytest.raises(ValueError, match="split: got queries and keys of different lengths"):
        bias.split(q)
    with pytest.raises(ValueError, match=r"tensors_k: got batches of \[1, 2\], takes tensors_q's"):
        biases.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys[:2])


def test_lengths_and_their_updates() -> None:
    info = biases._SeqLenInfo.from_seqlens([2, 3, 2], device="cpu")
    assert info.seqstart.tolist() == info.seqstart_py == [0, 2, 5, 7]
    assert info.seqstart.dtype == torch.int32 and (info.max_seqlen, info.min_seqlen) == (3, 2)
    assert list(info.intervals()) == [(0, 2), (2, 5), (5, 7)]
    slabs = biases._PaddedSeqLenInfo.from_seqlens_padded([2, 3, 2], 4)
    assert (slabs.seqstart_py, slabs.seqlen_py, slabs.padding) == ([0, 4, 8, 12], [2, 3, 2], 4)
    assert list(slabs.intervals()) == [(0, 2), (4, 7), (8, 10)]
    gaps = biases._GappySeqInfo.from_seqlens_gappy([0, 7, 12, 14], [6, 3, 1], False)
    assert list(gaps.intervals()) == [(0, 6), (7, 10), (12, 13)] and gaps.max_seqlen == 6
    tensor = slabs.seqlen
    slabs.from_seqlens_padded_inplace([1, 3, 3])
    info.from_seqlens_inplace([1, 3, 3])
    assert tensor.tolist() == slabs.seqlen_py == [1, 3, 3] and info.seqstart_py == [0, 1, 4, 7]
    for wrong, message in (([4, 0, 0], "got 4, takes at most 3"), ([1], "got 1 lengths, takes 3")):
        with pytest.raises(ValueError, match=f"seqlens: {message}"):
            slabs.from_seqlens_padded_inplace(wrong)


def test_lengths_in_place_are_those_of_the_next_call() -> None:
    bias = CAUSAL_PADDED.from_seqlens([1, 1], 4, [2, 4])
    query, key, value = rows_of((1, 2, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8))
    bias.k_seqinfo.from_seqlens_padded_inplace([1, 3])
    visible = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]]).bool()
    compare(bias, [query, key, value], visible)


def test_lengths_of_a_generator_are_read_once() -> None:
    lengths = [2, 3]
    for bias in (
        biases.BlockDiagonalMask.from_seqlens(n for n in lengths),
        biases.BlockDiagonalMask.from_seqlens(iter(lengths), (n for n in lengths)),
        biases.BlockDiagonalPaddedKeysMask.from_seqlens(iter(lengths), 4, iter(lengths)),
        biases.BlockDiagonalGappyKeysMask.from_seqlens(iter(lengths), [0, 2, 5], iter(lengths)),
    ):
        assert bias.q_seqinfo.seqstart_py == [0, 2, 5]
        assert [end - first for first, end in bias.k_seqinfo.intervals()] == lengths


def test_a_dtype_leaves_offsets_whole_numbers() -> None:
    bias = biases.BlockDiagonalMask.from_seqlens([2, 3]).to(torch.float16)
    padded = biases.BlockDiagonalPaddedKeysMask.from_seqlens([2, 3], 4, [1, 4]).to(torch.float16)
    assert bias.q_seqinfo.seqstart.dtype == padded.k_seqinfo.seqlen.dtype == torch.int32
    tensor = biases.LowerTriangularMaskWithTensorBias(torch.zeros(1, 1, 2, 2))
    assert tensor.to(torch.float16)._bias.dtype == torch.float16


def test_what_programs_import_beside_attention() -> None:
    with stand_in.installed():
        import xformers as found  # as ComfyUI, sd-webui and dinov2 do
        import xformers.version as version
        from xformers.ops import fmha, index_select_cat, scaled_index_add

        assert version.__version__ == found.__version__ and found._has_cpp_library
        forward, _ = found.ops.MemoryEfficientAttentionFlashAttentionOp
        rows = torch.randn(1, 4, 2, 8)
        assert forward.supports(fmha.Inputs(query=rows, key=rows, value=rows, attn_bias=None))
        assert not forward.not_supported_reasons(fmha.Inputs(rows, rows, rows))
    torch.manual_seed(0)
    source, scaling = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    whole, index = torch.randn(5, 3, 4, requires_grad=True), torch.tensor([3, 0])
    given = whole * 1.0
    added = scaled_index_add(given, index, source, scaling=scaling, alpha=2.5)
    wanted = whole.index_add(0, index, source * scaling, alpha=2.5)
    assert added is given and torch.equal(added, wanted)
    leaves = [whole, source, scaling]
    for one, other in zip(
        *(torch.autograd.grad(x.square().sum(), leaves) for x in (added, wanted)), strict=True
    ):
        assert torch.equal(one, other)
    picked = index_select_cat([whole.flatten(1), source.flatten(1)], [index, index[1:]])
    rows_of = torch.cat([whole[index].flatten(), source[:1].flatten()])
    assert torch.equal(picked, rows_of)

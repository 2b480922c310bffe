"""xformers' calls: layouts, tensor biases, lse, partial results, misfits, imports by its name."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade.integrations.xformers as shim
from saccade import masks
from saccade.integrations.xformers import attn_bias, fmha

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a few dozen terms
calls: Any = fmha  # called with unpacked lists


def qkv(queries: int = 5, keys: int = 7, *, heads: tuple[int, ...] = (4,)) -> list[Tensor]:
    torch.manual_seed(queries * keys)
    shapes = ((2, queries, *heads, 8), (2, keys, *heads, 8), (2, keys, *heads, 6))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, added: Any = 0.0, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, M, heads..., K], lse [B, heads..., M]; rows that see nothing give 0 and -inf."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.einsum("bi...d,bj...d->b...ij", query, key) * scale + added
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    lse = scores.masked_fill(empty, 0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return torch.einsum("b...ij,bj...d->bi...d", weights, value), lse


written_out: Any = _written_out


def same(found: Any, wanted: Any, tensors: list[Tensor]) -> None:
    """Output, lse, and gradients of a sum that weighs both."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    grads = [torch.randn_like(each) for each in wanted]
    one = torch.autograd.grad(found, tensors, grads)
    other = torch.autograd.grad(wanted, tensors, grads)
    for got, expected in zip(one, other, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


# ---- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(), (4,), (2, 3)])
def test_layouts(heads: tuple[int, ...]) -> None:
    tensors = qkv(heads=heads)
    output, lse = calls.memory_efficient_attention_forward_requires_grad(*tensors, scale=0.3)
    assert output.shape == (2, 5, *heads, 6) and lse.shape == (2, *(heads or (1,)), 5)
    wanted, wanted_lse = written_out(*tensors, scale=0.3)
    same((output, lse.reshape(wanted_lse.shape)), (wanted, wanted_lse), tensors)
    again = calls.memory_efficient_attention_forward(*tensors, scale=0.3, op=shim.fmha.flash)
    assert again.equal(output)


def test_heads_that_are_views_of_one_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, *_ = qkv(heads=(2, 3))
    few = qkv(heads=(2, 1))[1:]
    seen = []
    attention: Any = fmha.memory_efficient_attention.__globals__["saccade"].attention

    def watched(*rows: Tensor, **options: Any) -> Any:
        seen.append([tuple(tensor.shape[:2]) for tensor in rows])
        return attention(*rows, **options)

    monkeypatch.setattr("saccade.attention", watched)
    key, value = (rows.expand(-1, -1, -1, 3, -1) for rows in few)
    found = calls.memory_efficient_attention_forward_requires_grad(query, key, value)
    assert seen == [[(2, 6), (2, 2), (2, 2)]]
    wanted = written_out(query, *(rows.repeat_interleave(3, 3) for rows in few))
    same(found, wanted, [query, *few])
    # A leaf with such strides has a gradient for each of its heads.
    leaves = [rows.detach().expand(-1, -1, -1, 3, -1).requires_grad_() for rows in few]
    found = calls.memory_efficient_attention_forward_requires_grad(query, *leaves)
    same(found, written_out(query, *leaves), [query, *leaves])


def test_groups_of_packed_sequences() -> None:
    query, key, value = (rows[:1] for rows in qkv(5, 7, heads=(2, 3)))
    bias = attn_bias.BlockDiagonalMask.from_seqlens([2, 3], [3, 4])
    output, lse = calls.memory_efficient_attention_forward_requires_grad(query, key, value, bias)
    assert lse.shape == (1, 2, 3, 5)
    for rows, keys in ((slice(0, 2), slice(0, 3)), (slice(2, 5), slice(3, 7))):
        wanted, wanted_lse = written_out(query[:, rows], key[:, keys], value[:, keys])
        torch.testing.assert_close(output[:, rows], wanted, **CLOSE)
        torch.testing.assert_close(lse[..., rows], wanted_lse, **CLOSE)


def test_one_slab_longer_than_a_page() -> None:
    query, key, value = (rows[:1] for rows in qkv(2, 2 * 1026))
    bias = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 1026, [1025, 3])
    with torch.no_grad():
        output = calls.memory_efficient_attention(query, key, value, bias)
    for row, keys in ((0, slice(0, 1025)), (1, slice(1026, 1029))):
        wanted, _ = written_out(query[:, row : row + 1], key[:, keys], value[:, keys])
        torch.testing.assert_close(output[:, row : row + 1], wanted, **CLOSE)


# ---- tensors that are added ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "shape"),
    [
        ((4,), (2, 4, 5, 7)), ((4,), (1, 4, 1, 7)), ((4,), (5, 7)), ((4,), (7,)),
        ((), (2, 5, 7)), ((2, 3), (2, 2, 3, 5, 7)), ((2, 3), (2, 1, 5, 7)), ((2, 3), (5, 1)),
    ],
)  # fmt: skip
def test_a_tensor_is_added_and_gets_a_gradient(
    heads: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    tensors = qkv(heads=heads)
    bias = torch.randn(shape, dtype=torch.float64).requires_grad_()
    found, lse = calls.memory_efficient_attention_forward_requires_grad(*tensors, bias)
    wanted, wanted_lse = written_out(*tensors, bias)
    same((found, lse.reshape(wanted_lse.shape)), (wanted, wanted_lse), [*tensors, bias])


def test_a_tensor_under_a_causal_mask() -> None:
    tensors = qkv()
    bias = torch.randn(2, 4, 5, 7, dtype=torch.float64).requires_grad_()
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)
    causal = attn_bias.LowerTriangularMask(device="cpu").add_bias(bias)
    assert isinstance(causal, attn_bias.LowerTriangularMaskWithTensorBias)
    found = calls.memory_efficient_attention_forward_requires_grad(*tensors, causal)
    same(found, written_out(*tensors, bias.masked_fill(hidden, -torch.inf)), [*tensors, bias])
    wanted = bias.masked_fill(hidden, -torch.inf)
    assert causal.to("cpu").materialize((2, 4, 5, 7), torch.float64).equal(wanted)


def test_rows_that_a_tensor_hides_whole() -> None:
    tensors = qkv()
    bias = torch.zeros(5, 7, dtype=torch.float64)
    bias[1], bias[3, 2:] = -torch.inf, -torch.inf
    found = calls.memory_efficient_attention_forward_requires_grad(*tensors, bias)
    wanted = written_out(*tensors, bias)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    grads = torch.autograd.grad(found[0].sum(), tensors)
    for one, other in zip(grads, torch.autograd.grad(wanted[0].sum(), tensors), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


# ---- backward, parts and merging -----------------------------------------------------------------


@pytest.mark.parametrize("heads", [(), (4,), (2, 3)])
def test_backward_gives_what_autograd_gives(heads: tuple[int, ...]) -> None:
    tensors = qkv(heads=heads)
    bias = attn_bias.LowerTriangularFromBottomRightMask()
    output, lse = calls.memory_efficient_attention_forward_requires_grad(*tensors, bias)
    grad = torch.randn_like(output)
    wanted = torch.autograd.grad(output, tensors, grad)
    found = calls.memory_efficient_attention_backward(grad, output, lse, *tensors, bias)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def parts_of(tensors: list[Tensor]) -> list[list[Tensor]]:
    query, key, value = tensors
    cuts = (slice(0, 3), slice(3, 4), slice(4, 7))
    return [[query, key[:, cut], value[:, cut]] for cut in cuts]


@pytest.mark.parametrize("heads", [(4,), (2, 3)])
@pytest.mark.parametrize("stacked", [True, False])
def test_parts_are_merged_with_gradients(heads: tuple[int, ...], stacked: bool) -> None:
    tensors = qkv(heads=heads)
    found = [calls.memory_efficient_attention_partial(*part) for part in parts_of(tensors)]
    outputs, lses = ([*each] for each in zip(*found, strict=True))
    if stacked:
        outputs, lses = torch.stack(outputs), torch.stack(lses)
    same(calls.merge_attentions(outputs, lses), written_out(*tensors), tensors)
    output, lse = calls.merge_attentions(outputs, lses, False, torch.float32)
    assert output.dtype == torch.float32 and lse is None


def test_a_part_of_the_keys_gets_its_part_of_the_gradient() -> None:
    """What ring attention wants: the output and lse of all keys, the keys of one rank."""
    tensors = qkv()
    hidden = torch.zeros(5, 7, dtype=torch.float64)
    hidden[2, :3] = -torch.inf  # a row that sees nothing of the first part
    output, lse = written_out(*tensors, hidden)
    grad = torch.randn_like(output)
    wanted = torch.autograd.grad(output, tensors, grad)
    sums, first = torch.zeros_like(tensors[0]), 0
    for part in parts_of(tensors):
        last = first + part[1].shape[1]
        bias = hidden[:, first:last]
        found = calls.memory_efficient_attention_backward(grad, output, lse, *part, bias)
        sums = sums + found[0]
        for one, other in zip(found[1:], wanted[1:], strict=True):
            torch.testing.assert_close(one, other[:, first:last], **CLOSE)
        first = last
    torch.testing.assert_close(sums, wanted[0], **CLOSE)


def test_dtypes_of_outputs() -> None:
    tensors = [rows.detach().to(torch.float16) for rows in qkv()]
    exact, _ = written_out(*(rows.double() for rows in tensors))
    output, lse = calls.memory_efficient_attention_partial(*tensors)
    assert output.dtype == lse.dtype == torch.float32
    assert output.equal(calls.memory_efficient_attention(*tensors).float())
    assert calls.memory_efficient_attention(*tensors, output_dtype=torch.float64).dtype == (
        torch.float64
    )
    # Rounding of the output, once, and of the inputs' products in float32.
    torch.testing.assert_close(output.double(), exact, rtol=2**-11, atol=2**-11)


@pytest.mark.parametrize("kind", ["slabs", "pages"])
def test_autocast_casts_keys_in_slabs_and_pages_too(kind: str) -> None:
    query, key, value = (torch.randn(1, 8, 4, 16) for _ in range(3))
    bias: Any = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([5, 3], 4, [4, 2], device="cpu")
    if kind == "pages":
        table = torch.tensor([[0], [1]], dtype=torch.int32)
        bias = bias.make_paged(table, 4, attn_bias.PagedBlockDiagonalPaddedKeysMask)
    wanted = calls.memory_efficient_attention(
        *(rows.to(torch.bfloat16) for rows in (query, key, value)), bias
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = calls.memory_efficient_attention(query, key, value, bias)
    assert found.dtype == torch.bfloat16 and found.equal(wanted)


def test_dropout_keeps_the_mean() -> None:
    tensors = [rows.detach().float() for rows in qkv(16, 32)]
    torch.manual_seed(0)
    found = torch.stack([calls.memory_efficient_attention(*tensors, p=0.5) for _ in range(100)])
    spread = found.std(0) / 10
    off = (found.mean(0) - calls.memory_efficient_attention(*tensors)).abs()
    assert spread.min() > 0 and (off < 6 * spread).all()
    slabs = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([16], 32, [20])
    rows = [each[:1] for each in tensors]
    dropped = calls.memory_efficient_attention(*rows, slabs, p=0.5)
    assert not dropped.equal(calls.memory_efficient_attention(*rows, slabs))


# ---- misfits -------------------------------------------------------------------------------------

PAGED = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
    [5], [6], torch.tensor([[0, 1]], dtype=torch.int32), 4
)


def test_misfits_are_refused_by_name() -> None:
    query, key, value = (rows.detach() for rows in qkv())
    block = attn_bias.BlockDiagonalMask.from_seqlens([2, 3], [3, 4])
    refused: list[tuple[type[Exception], str, list[Any], dict[str, Any]]] = [
        (TypeError, "attn_bias: got a str, takes a tensor", [], {"attn_bias": "causal"}),
        (TypeError, "attn_bias: got torch.bool", [], {"attn_bias": torch.ones(5, 7).bool()}),
        (ValueError, r"attn_bias: got \[5, 6\], takes what broadcasts to \[2, 4, 5, 7\]", [],
         {"attn_bias": torch.ones(5, 6)}),
        (NotImplementedError, "attn_bias: got a AttentionBias", [],
         {"attn_bias": attn_bias.AttentionBias()}),
        (ValueError, "query: got 2 x 5 rows, takes 1 x 5", [], {"attn_bias": block}),
        (ValueError, "key: got 1 x 6 rows, takes 1 x 7", [query[:1], key[:1, :6], value[:1, :6]],
         {"attn_bias": block}),
        (ValueError, "key: got 7 rows, takes pages of 4", [query[:1], key[:1], value[:1]],
         {"attn_bias": PAGED}),
        (ValueError, r"key: got \[2, 7, 2, 8\], takes \[2, 7, 4, 8\]; fewer heads", 
         [query, key[:, :, :2], value[:, :, :2]], {}),
        (ValueError, r"value: got \[2, 6, 4, 6\], takes \[2, 7, 4, any width\]",
         [query, key, value[:, :6]], {}),
        (ValueError, r"key: got \[2, 7, 8\], takes", [query, key[:, :, 0], value], {}),
        (TypeError, "value: got NoneType, takes a tensor", [query, key, None], {}),
        (ValueError, "p: got 1.0, takes a probability", [], {"p": 1.0}),
        (TypeError, "scale: got 'a'", [], {"scale": "a"}),
    ]  # fmt: skip
    for error, message, tensors, options in refused:
        with pytest.raises(error, match=message):
            calls.memory_efficient_attention(*(tensors or (query, key, value)), **options)


def test_what_pages_and_an_lse_do_not_have() -> None:
    query, key, value = (rows[:1] for rows in qkv(5, 8))
    slabs = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([5], 6, [6])
    short = slabs.make_paged(torch.zeros(1, 1).int(), 4, attn_bias.PagedBlockDiagonalPaddedKeysMask)
    with pytest.raises(ValueError, match="attn_bias: got a sequence of 6 rows, and pages for 4"):
        calls.memory_efficient_attention(query, key, value, short)
    with pytest.raises(NotImplementedError, match=r"attn_bias: got a PagedBlock.* forward only"):
        calls.memory_efficient_attention(query, key, value, PAGED)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"p: got 0\.5, takes 0"):
        calls.memory_efficient_attention(query, key, value, PAGED, 0.5)
    with pytest.raises(NotImplementedError, match=r"p: got 0\.5, takes 0"):
        calls.memory_efficient_attention_partial(query, key, value, None, 0.5)
    output, lse = calls.memory_efficient_attention_partial(query, key, value)
    with pytest.raises(ValueError, match=r"lse: got \[1, 4, 4\], takes \[1, 4, 5\]"):
        calls.memory_efficient_attention_backward(output, output, lse[..., 1:], query, key, value)
    with pytest.raises(ValueError, match=r"lse_split: got \[1, 4, 4\], takes \[1, 4, 5\]"):
        calls.merge_attentions([output], [lse[..., 1:]])
    with pytest.raises(ValueError, match="lse_split: got 2 parts for 1 outputs"):
        calls.merge_attentions([output], [lse, lse])


def test_what_biases_do_not_take() -> None:
    gappy = attn_bias.BlockDiagonalGappyKeysMask
    padded = attn_bias.BlockDiagonalPaddedKeysMask
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "window_size: got 0, takes at least 1",
         lambda: attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(0)),
        (ValueError, "window_left: got -1, takes at least 0",
         lambda: attn_bias.LocalAttentionFromBottomRightMask(-1, 2)),
        (ValueError, "kv_seqlen: got 1 lengths, takes 2",
         lambda: attn_bias.BlockDiagonalMask.from_seqlens([1, 2], [3])),
        (ValueError, "tensors_q: got an empty list, takes at least one",
         lambda: attn_bias.BlockDiagonalMask.from_tensor_list([])),
        (TypeError, "seqlens: got a tensor, takes a list",
         lambda: attn_bias.BlockDiagonalMask.from_seqlens(torch.tensor([1]))),  # type: ignore[arg-type]
        (TypeError, r"seqlens: got 1\.5", lambda: attn_bias.BlockDiagonalMask.from_seqlens([1.5])),  # type: ignore[list-item]
        (ValueError, "batch_sizes: got 3 in sum, takes the 2 sequences",
         lambda: attn_bias._SeqLenInfo.from_seqlens([2, 2]).split(torch.zeros(1, 4), [1, 2])),
        (ValueError, r"x: got \[1, 5\], takes \[1, 4, \.\.\.\]",
         lambda: attn_bias._SeqLenInfo.from_seqlens([2, 2]).split(torch.zeros(1, 5))),
        (NotImplementedError, "split: got padded sequences",
         lambda: padded.from_seqlens([1], 4, [2]).k_seqinfo.split(torch.zeros(1, 4))),
        (ValueError, "seqlens: got -1, takes",
         lambda: attn_bias.BlockDiagonalMask.from_seqlens([-1])),
        (ValueError, "seqlens: got 5, takes at most the padding, 4",
         lambda: padded.from_seqlens([1], 4, [5])),
        (ValueError, "seqstarts: got 1 for 1 lengths, takes 2",
         lambda: gappy.from_seqlens([1], [0], [4])),
        (ValueError, "notional_padding: got 5, takes a multiple",
         lambda: gappy.from_seqlens([1], [0, 4], [4]).make_paged(
             torch.zeros(1, 1).int(), 2, 5, attn_bias.PagedBlockDiagonalGappyKeysMask)),
        (ValueError, "block_tables: got room for 2 rows",
         lambda: gappy.from_seqlens([1], [0, 4], [4]).make_paged(
             torch.zeros(1, 1).int(), 2, 4, attn_bias.PagedBlockDiagonalGappyKeysMask)),
        (ValueError, r"shape: got \[3, 3\], takes 3 and 5",
         lambda: attn_bias.BlockDiagonalMask.from_seqlens([3], [5]).materialize((3, 3))),
    ]  # fmt: skip
    for error, message, make in refused:
        with pytest.raises(error, match=message):
            make()
    query, key, value = (rows[:1] for rows in qkv())
    with pytest.raises(ValueError, match="attn_bias: got keys that end at 4 where others start at"):
        overlapping = gappy.from_seqlens([2, 3], [0, 3, 7], [4, 4])
        calls.memory_efficient_attention(query, key, value, overlapping)
    elsewhere = attn_bias.BlockDiagonalMask.from_seqlens([5], [7], device="meta")
    with pytest.raises(ValueError, match=r"attn_bias: got one on meta, .*attn_bias.to\('cpu'\)"):
        calls.memory_efficient_attention(query, key, value, elsewhere)


# ---- compiled ------------------------------------------------------------------------------------


def test_a_compiled_call_is_one_graph() -> None:
    query, key, value = (rows[:1].detach().requires_grad_() for rows in qkv())
    packed = attn_bias.BlockDiagonalCausalMask.from_seqlens([2, 3], [3, 4])
    gappy = attn_bias.BlockDiagonalCausalWithOffsetGappyKeysMask
    gaps = gappy.from_seqlens([2, 3], [1, 4, 7], [2, 3])

    def three(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = fmha.memory_efficient_attention(query, key, value, shim.LowerTriangularMask())
        second = fmha.memory_efficient_attention(query, key, value, packed)
        return first + second + fmha.memory_efficient_attention(query, key, value, gaps)

    compiled: Any = torch.compile(three, backend="aot_eager", fullgraph=True)
    tensors = [query, key, value]
    same((compiled(*tensors),), (three(*tensors),), tensors)


def test_a_graph_that_makes_its_bias_serves_other_lengths() -> None:
    def in_parts(one: Tensor, two: Tensor) -> list[Tensor]:
        bias, rows = attn_bias.BlockDiagonalMask.from_tensor_list([one, two])
        return bias.split(fmha.memory_efficient_attention(rows, rows, rows, bias.make_causal()))

    compiled: Any = torch.compile(in_parts, backend="eager", fullgraph=True)
    for lengths in ((2, 3), (4, 7)):
        parts = [torch.randn(1, length, 2, 8) for length in lengths]
        for found, wanted in zip(compiled(*parts), in_parts(*parts), strict=True):
            torch.testing.assert_close(found, wanted)


def test_hidden_tiles_are_skipped_by_name() -> None:
    """Each class is a mask that saccade knows, and none is written out."""
    assert attn_bias.LowerTriangularMask().pairs() == masks.causal("top_left")
    assert attn_bias.LowerTriangularFromBottomRightMask().pairs() == masks.causal()
    assert attn_bias.LocalAttentionFromBottomRightMask(3, 2).pairs() == masks.window(3, 2)
    block = attn_bias.BlockDiagonalMask.from_seqlens([4])
    assert block.pairs() is None
    assert block.make_local_attention(3).pairs() == masks.window(2, 0, "top_left")


# ---- in other people's code ----------------------------------------------------------------------


def test_an_import_finds_the_calls_until_they_are_taken_away() -> None:
    absent = importlib.util.find_spec("xformers") is None
    with shim.installed():
        shim.install()  # once more changes nothing
        import xformers.ops as xops
        from xformers.ops import fmha as theirs
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, _SeqLenInfo
        from xformers.ops.fmha.common import AttentionFwOpBase

        assert shim.memory_efficient_attention is theirs.memory_efficient_attention
        assert theirs.memory_efficient_attention is fmha.memory_efficient_attention
        assert BlockDiagonalCausalMask is theirs.BlockDiagonalCausalMask
        assert _SeqLenInfo is attn_bias._SeqLenInfo
        assert issubclass(theirs.cutlass.FwOp, AttentionFwOpBase)
        assert importlib.import_module("xformers.ops.fmha.flash").BwOp is theirs.flash.BwOp
        operator = xops.MemoryEfficientAttentionFlashAttentionOp
        assert operator == (theirs.flash.FwOp, theirs.flash.BwOp)
        rows = torch.randn(1, 4, 2, 8)
        found = shim.memory_efficient_attention(rows, rows, rows, op=operator)
        assert found.equal(fmha.memory_efficient_attention(rows, rows, rows))
        assert [each.shape for each in xops.unbind(rows, 2)] == [(1, 4, 8)] * 2
        with pytest.raises(ImportError):
            importlib.import_module("xformers.components")
        with pytest.raises(ImportError, match="SwiGLU"):
            from xformers.ops import SwiGLU  # noqa: F401
        everything: dict[str, Any] = {}
        exec("from xformers.ops import *", everything)
        assert everything["BlockDiagonalCausalMask"] is BlockDiagonalCausalMask
    assert all(hasattr(shim, name) for name in shim.__all__)
    shim.uninstall()  # once more changes nothing
    assert "xformers.ops" not in sys.modules
    assert (importlib.util.find_spec("xformers") is None) == absent


def test_a_bias_that_is_written_by_hand_is_refused() -> None:
    """What xformers does too, whose kernels know no class of somebody else's."""

    class Everything(attn_bias.LowerTriangularMask):
        def materialize(
            self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu"
        ) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

    class Child(Everything):
        pass

    class Packed(attn_bias.BlockDiagonalMask):
        def materialize(
            self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu"
        ) -> Tensor:
            return super().materialize(shape, dtype, device) + 1

    class Named(attn_bias.LowerTriangularMask):
        """Of another name, and nothing else."""

    rows = torch.randn(1, 6, 2, 8)
    for bias in (Everything(), Child(), Packed.from_seqlens([2, 4])):
        for call in (
            shim.memory_efficient_attention, shim.memory_efficient_attention_forward_requires_grad,
        ):  # fmt: skip
            with pytest.raises(NotImplementedError, match=r"attn_bias: got a .* of its own, takes"):
                call(rows, rows, rows, bias)
    assert bool((Packed.from_seqlens([2, 4]).materialize((6, 6))[:2, :2] == 1).all())
    wanted = shim.memory_efficient_attention(rows, rows, rows, attn_bias.LowerTriangularMask())
    found = shim.memory_efficient_attention(rows, rows, rows, Named())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)

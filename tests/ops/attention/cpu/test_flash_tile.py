"""One rectangle by PyTorch's flash kernel, against plain float64 mathematics."""

import pytest
import torch

import saccade
from saccade.ops.attention.cpu import flash_tile

SCALE = 0.3


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rectangle(
    heads: int = 4, kv_heads: int = 2, rows: int = 5, keys: int = 7, dims: tuple[int, int] = (8, 8)
) -> list[torch.Tensor]:
    return [
        normal(2, heads, rows, dims[0], seed=1),
        normal(2, kv_heads, keys, dims[0], seed=2),
        normal(2, kv_heads, keys, dims[1], seed=3),
    ]


def as_partial(visible: torch.Tensor | None, query: torch.Tensor) -> flash_tile.PartialTile | None:
    return None if visible is None else flash_tile.partial(visible, query.dtype)


def forward(
    rows: list[torch.Tensor], visible: torch.Tensor | None, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query, key and value by the kernel."""
    query, key, value = rows
    return flash_tile.forward(query, key, value, SCALE, as_partial(visible, query), causal)


def backward(
    rows: list[torch.Tensor], visible: torch.Tensor | None, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for grad_output, query, key, value, output and lse."""
    grad_output, query, key, value, output, lse = (part.detach() for part in rows)
    partial = as_partial(visible, query)
    return flash_tile.backward(grad_output, query, key, value, output, lse, SCALE, partial, causal)


def plain(
    rows: list[torch.Tensor], visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, every score written out."""
    query, key, value = rows
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = SCALE * query @ key.mT
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return weights @ value, lse


def mask_of(*shape: int) -> torch.Tensor:
    """A random mask; where it varies by row, the first row sees nothing."""
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.6
    if shape[2] > 1:
        visible[:, :, 0] = False
    if shape[1] > 1:
        visible[:, -1] = False
    return visible


SHAPES = {
    "one head to a kv head": rectangle(4, 4),
    "grouped": rectangle(),
    "all heads share": rectangle(6, 1),
    "one row": rectangle(rows=1),
    "one key": rectangle(keys=1),
    "wide values": rectangle(dims=(4, 24)),
    "narrow values": rectangle(dims=(24, 3)),
    "one channel": rectangle(dims=(1, 1)),
    "too many rows to pack": rectangle(rows=flash_tile.PACK_BELOW, keys=40, dims=(8, 5)),
    "just few enough rows": rectangle(rows=flash_tile.PACK_BELOW - 1, keys=40, dims=(8, 5)),
}
MASKS = ["none", "causal", "1111", "b111", "1h11", "11r1", "111k", "11rk", "b1rk", "1hrk", "bhrk"]


def visible_in(mask: str, tensors: list[torch.Tensor]) -> tuple[torch.Tensor | None, bool]:
    """The `visible` and `causal` that a name stands for: which dimensions the mask varies in."""
    batch, heads, rows = tensors[0].shape[:3]
    if mask in ("none", "causal"):
        return None, mask == "causal"
    sizes = (batch, heads, rows, tensors[1].shape[2])
    shape = [size if axis != "1" else 1 for axis, size in zip(mask, sizes, strict=True)]
    return mask_of(*shape), False


def written_out(
    visible: torch.Tensor | None, causal: bool, tensors: list[torch.Tensor]
) -> torch.Tensor | None:
    rows, keys = tensors[0].shape[2], tensors[1].shape[2]
    return torch.ones(rows, keys).tril().bool() if causal else visible


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, mask):
    tensors = SHAPES[shape]
    visible, causal = visible_in(mask, tensors)
    wanted = plain(tensors, written_out(visible, causal, tensors))
    output, lse = forward(tensors, visible, causal)
    torch.testing.assert_close(output, wanted[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, mask):
    tensors = [tensor.clone().requires_grad_() for tensor in SHAPES[shape]]
    visible, causal = visible_in(mask, tensors)
    output, lse = plain(tensors, written_out(visible, causal, tensors))
    grad_output = normal(*output.shape, seed=4)
    wanted = torch.autograd.grad(output, tensors, grad_output)
    sees_nothing = lse == -torch.inf
    known = grad_output.masked_fill(sees_nothing.unsqueeze(-1), 0)
    rows = [known, *tensors, output, lse.masked_fill(sees_nothing, 0)]
    found = backward(rows, visible, causal)
    for gradient, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, exact.nan_to_num(0), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shape", ["grouped", "narrow values", "too many rows to pack"])
def test_rectangles_add_up_to_the_whole(shape):
    """Each rectangle is given the lse and output of the whole rows."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in SHAPES[shape])
    output, lse = plain([query, key, value], None)
    grad_output = normal(*output.shape, seed=4)
    wanted = torch.autograd.grad(output, (query, key, value), grad_output)
    cut = key.shape[2] // 2
    contributions = [
        backward([grad_output, query, key[:, :, keys], value[:, :, keys], output, lse], None)
        for keys in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(
        contributions[0][0] + contributions[1][0], wanted[0], rtol=1e-10, atol=1e-11
    )
    for k in (1, 2):
        joined = torch.cat([contribution[k] for contribution in contributions], 2)
        torch.testing.assert_close(joined, wanted[k], rtol=1e-10, atol=1e-11)


# Weights may be as inexact as the dtype before they are added up: without AVX-512 PyTorch's
# exponentials of bfloat16 are. A relative error of all weights is that absolute error of the lse.
@pytest.mark.parametrize(
    ("dtype", "slack", "lse_slack"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 0.05, 2**-9)]
)
@pytest.mark.parametrize("mask", ["none", "causal", "b1rk", "1hrk"])
def test_low_precision(dtype, slack, lse_slack, mask):
    tensors = [tensor.to(dtype) for tensor in rectangle(rows=9, keys=9, dims=(16, 8))]
    visible, causal = visible_in(mask, tensors)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    wanted = plain(exact, written_out(visible, causal, tensors))
    output, lse = forward(tensors, visible, causal)
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(output.double(), wanted[0].detach(), rtol=0, atol=slack)
    torch.testing.assert_close(lse.double(), wanted[1].detach(), rtol=0, atol=lse_slack)
    sees_nothing = lse == -torch.inf
    grad_output = torch.ones_like(output).masked_fill(sees_nothing.unsqueeze(-1), 0)
    rows = [grad_output, *tensors, output, lse.masked_fill(sees_nothing, 0)]
    found = backward(rows, visible, causal)
    gradients = torch.autograd.grad(wanted[0], exact, grad_output.double())
    for gradient, truth in zip(found, gradients, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), truth.nan_to_num(0), rtol=0, atol=6 * slack)


def test_rows_that_see_nothing_give_zero_and_minus_infinity():
    tensors = rectangle()
    visible = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    visible[1, :, 3] = False
    output, lse = forward(tensors, visible)
    assert (output[1, :, 3] == 0).all()
    assert (lse[1, :, 3] == -torch.inf).all()
    assert lse[0].isfinite().all()


@pytest.mark.parametrize("dims", [(8, 8), (5, 3)])
def test_rows_of_any_strides(dims):
    tensors = rectangle(dims=dims)
    odd = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    odd[1] = torch.cat([odd[1], odd[1]], -1)[..., : dims[0]]
    assert not any(tensor.is_contiguous() for tensor in odd)
    visible = mask_of(1, 1, 5, 7)
    found, wanted = (forward(t, visible) for t in (odd, tensors))
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dims", [(8, 8), (5, 3), (3, 16), (24, 1)])
def test_channels_last(dims):
    """`pad` keeps PyTorch's channels_last, in which channels lie apart."""
    tensors = [tensor.requires_grad_() for tensor in rectangle(dims=dims)]
    output, lse = plain(tensors, None)
    grad_output = normal(*output.shape, seed=4)
    wanted = torch.autograd.grad(output, tensors, grad_output)
    odd = [t.detach().contiguous(memory_format=torch.channels_last) for t in tensors]
    torch.testing.assert_close(forward(odd, None), (output, lse), rtol=1e-11, atol=1e-12)
    of_output = grad_output.contiguous(memory_format=torch.channels_last)
    for gradient, exact in zip(backward([of_output, *odd, output, lse], None), wanted, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("scale", [0.4, -0.4])
def test_one_channel_between_heads(scale):
    """[batch, rows, heads, 1], as other libraries lay it out, looks like channels_last too."""
    query, key = normal(2, 5, 4, 1, seed=1), normal(2, 7, 4, 1, seed=2)
    rows = [query.transpose(1, 2), key.transpose(1, 2), normal(2, 4, 7, 5, seed=3)]
    wanted = saccade.attention(*rows, scale=scale, implementation="reference")
    torch.testing.assert_close(saccade.attention(*rows, scale=scale), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", ["query", "key", "value"])
@pytest.mark.parametrize("causal", [True, False])
def test_inf_that_a_row_sees_shows_in_its_output(dtype: torch.dtype, of: str, causal: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 64, 64).to(dtype).unbind()
    {"query": query, "key": key, "value": value}[of][0, 0, 2, 3] = torch.inf
    output, lse = saccade.attention(query, key, value, causal=causal, return_lse=True)
    scores = query.double() @ key.double().mT / 8
    if causal:
        scores = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1).unsqueeze(-1)
    exact = torch.where(weights == 0, 0.0, weights * value.double().unsqueeze(2)).sum(-2)
    shown = ~exact.isfinite().all(-1)
    assert shown.any()
    assert not output[shown].isfinite().all(-1).any()
    assert lse.shape == shown.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", ["query", "key"])
@pytest.mark.parametrize("how", ["full", "causal", "window", "packed heads"])
def test_inf_that_makes_all_scores_of_a_row_minus_inf_shows(
    dtype: torch.dtype, of: str, how: str
) -> None:
    heads = 4 if how == "packed heads" else 2
    query = torch.randn(1, heads, 64, 64).to(dtype)
    key, value = torch.randn(2, 1, 2, 64, 64).to(dtype).unbind()
    key[..., 3] = -key[..., 3].abs() - 1
    if of == "query":
        query[0, 0, 2, 3] = torch.inf
    else:
        query[..., 3] = query[..., 3].abs() + 1
        key[0, 0, : 64 if how in ("full", "packed heads") else 3, 3] = -torch.inf
    mask = saccade.masks.window(7) if how == "window" else None
    options = {"causal": how == "causal", "mask": mask, "return_lse": True}
    output, lse = saccade.attention(query, key, value, **options)
    expected, of_reference = saccade.attention(
        query, key, value, implementation="reference", **options
    )
    assert output[0, 0, 2].isnan().all()
    assert lse[0, 0, 2].isnan()
    # The reference says NaN wherever a row sees inf, though a score of -inf may weigh nothing.
    assert expected[output.isnan()].isnan().all()
    assert of_reference[lse.isnan()].isnan().all()


def test_scores_below_all_numbers_weigh_nothing():
    query, key, value = torch.randn(3, 1, 2, 64, 64).unbind()
    key[..., 3] = -1e5
    query[0, 0, 2, 3] = 3e38
    output, lse = saccade.attention(query, key, value, return_lse=True)
    expected, of_reference = saccade.attention(
        query, key, value, implementation="reference", return_lse=True
    )
    assert of_reference[0, 0, 2] == lse[0, 0, 2] == -torch.inf
    assert (expected[0, 0, 2] == 0).all()
    assert (output[0, 0, 2] == 0).all()


def test_rows_whose_one_score_is_0_keep_their_lse():
    query, key, value = torch.zeros(3, 1, 2, 64, 64).unbind()
    output, lse = saccade.attention(query, key, value, causal=True, return_lse=True)
    assert (output == 0).all()
    torch.testing.assert_close(lse, torch.arange(1, 65).log().expand(1, 2, 64))

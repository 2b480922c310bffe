"""Rows all of whose scores are so large that their lse has no room for the log of the sum.

A mask that is added as -1e9 or as a dtype's smallest number makes them so where it hides a row's
every key. Their scores are equal then, as what they differ by is rounded away when it is added.
"""

from typing import Any

import pytest
import torch

import saccade
from saccade import masks, scores
from saccade.ops.attention.cpu import host
from saccade.runtime.spec import KernelConfig, Results
from saccade.runtime.validation import prepare

SMALLEST = "the smallest number"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"mask": masks.window(900, 100) & ~masks.window(40, 3)},
    "sinks like them": {"sinks": -1e9},
    "sinks": {"sinks": 0.5},
}


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def results(
    tensors: list[torch.Tensor], implementation: str | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Output, lse and gradients of query, key, value, bias, and of sinks."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    query, key, value, bias, *sinks = leaves
    output, lse = saccade.attention(
        query, key, value, score=scores.bias(bias), return_lse=True,
        sinks=sinks[0] if sinks else None, implementation=implementation, **options,
    )  # fmt: skip
    grad_output = normal(*output.shape, seed=5, dtype=output.dtype)
    grad_lse = normal(*lse.shape, seed=6, dtype=lse.dtype)
    return output, lse, *torch.autograd.grad((output, lse), leaves, (grad_output, grad_lse))


def problem(
    size: float | str, dtype: torch.dtype, keys: int, sinks: float | None
) -> list[torch.Tensor]:
    """Query, key, value, a bias of one size for all keys of all rows but the last, and sinks."""
    bias = torch.zeros(1, 1, 5, keys, dtype=dtype)
    bias[:, :, :-1] = torch.finfo(dtype).min if isinstance(size, str) else size
    found = [
        normal(2, 4, 5, 8, seed=1, dtype=dtype),
        normal(2, 2, keys, 8, seed=2, dtype=dtype),
        normal(2, 2, keys, 3, seed=3, dtype=dtype),
        bias,
    ]
    return found if sinks is None else [*found, torch.full((4,), sinks, dtype=dtype)]


@pytest.mark.parametrize("keys", [7, 1300])  # one plain tile, and three
@pytest.mark.parametrize("size", [-1e9, 1e9, SMALLEST])
@pytest.mark.parametrize("option", OPTIONS)
def test_results(option, size, keys):
    options = dict(OPTIONS[option])
    tensors = problem(size, torch.float32, keys, options.pop("sinks", None))
    found, wanted = (results(tensors, name, **options) for name in ("cpu", "reference"))
    for one, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Of bfloat16 and float16, whose sums are of float32, float16's smallest is not so large."""
    tensors = problem(SMALLEST, dtype, 1300, None)
    found, wanted = (results(tensors, name) for name in ("cpu", "reference"))
    slack = 1e-10 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    for one, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            one, exact, rtol=slack, atol=slack * float(exact.detach().abs().max())
        )


def test_a_mean_of_values():
    """The output of such a row is the mean of its values, and no more than the largest of them."""
    tensors = problem(-1e9, torch.float32, 1300, None)
    output = results(tensors, None)[0]
    mean = tensors[2].mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(output[:, :, :-1], mean.expand(-1, -1, 4, -1), rtol=0, atol=1e-5)


def test_packed_and_pages():
    query, key, value, bias = problem(-1e9, torch.float32, 1300, None)
    score = scores.bias(bias[0, 0, :, :1].expand(1, 1, -1, 1300))
    wanted = saccade.attention(query, key, value, score=score, implementation="reference")
    lengths = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 1300, 2600]).int()
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    packed = saccade.attention_varlen(rows[0], rows[1], rows[2], *lengths, score=score)
    torch.testing.assert_close(packed.unflatten(0, (2, 5)).transpose(1, 2), wanted)
    pages = [tensor.unflatten(2, (26, 50)).transpose(1, 2).flatten(0, 1) for tensor in (key, value)]
    table = torch.arange(52, dtype=torch.int32).view(2, 26)
    kv_lens = torch.full((2,), 1300, dtype=torch.int32)
    paged = saccade.attention_paged(query, pages[0], pages[1], table, kv_lens, score=score)
    torch.testing.assert_close(paged, wanted)


ALIKE = {
    "sinks": ({}, 12),
    "sinks and a mask": ({"mask": masks.window(8)}, 12),
    "causal and sinks": ({"causal": True}, 700),
    "runs": ({"mask": masks.window(1900)}, 2600),  # a long full one between two under their mask
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", ALIKE)
def test_products_that_are_all_alike(option, dtype):
    """The flash kernel gives an lse and no sums: such rows are not merged by it, nor with sinks."""
    options, keys = ALIKE[option]
    size = 2.0**15 if dtype == torch.float16 else 2.0**17
    key = torch.full((1, 1, keys, 1), size, dtype=dtype)
    query = key.expand(-1, 2, -1, -1)
    value = normal(1, 1, keys, 3, seed=3, dtype=dtype)
    sinks = torch.full((2,), size * size) if "sinks" in option else None
    leaves = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    found = saccade.attention(*leaves, sinks=sinks, implementation="cpu", **options)
    (of_value,) = torch.autograd.grad(found.sum(), leaves[2:])
    mask = options.get("mask", masks.causal() if options else None)
    visible = torch.ones(keys, keys, dtype=torch.bool)
    visible = visible if mask is None else mask.to_dense(1, 1, keys, keys)[0, 0]
    weights = visible.double() / (visible.sum(1, keepdim=True) + (sinks is not None))
    slack: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
    if dtype != torch.float32:
        slack = {"rtol": 2 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    torch.testing.assert_close(found[:, 0].double(), weights @ value[0].double(), **slack)
    exact = 2 * weights.sum(0).view(1, 1, -1, 1).expand_as(of_value)
    torch.testing.assert_close(of_value.double(), exact, **slack)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "lens"),
    [(1, (33, 5, 17)), (1, (700, 3000, 1)), (3, (33, 40, 17))],
    ids=["side by side", "views", "chunks"],
)
def test_pages_of_products_that_are_all_alike(rows, lens, packed):
    size, batch, most = 2.0**17, 3, -(-max(lens) // 16)
    key_pages = torch.full((batch * most, 1, 16, 1), size)
    value_pages = normal(batch * most, 1, 16, 3, seed=3, dtype=torch.float32)
    table = torch.arange(batch * most, dtype=torch.int32).view(batch, most)
    query, sinks = torch.full((batch, 2, rows, 1), size), torch.full((2,), size * size)
    options: dict[str, Any] = {"sinks": sinks, "implementation": "cpu"}
    if packed:
        query = query.transpose(1, 2).flatten(0, 1)
        options["cu_seqlens_q"] = torch.arange(batch + 1, dtype=torch.int32) * rows
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    found = saccade.attention_paged(query, key_pages, value_pages, table, kv_lens, **options)
    found = found.unflatten(0, (batch, rows)).transpose(1, 2) if packed else found
    values = value_pages.double().view(batch, -1, 3)
    for sequence, length in enumerate(lens):
        mean = values[sequence, :length].sum(0) / (length + 1)
        wanted = mean.expand_as(found[sequence])
        torch.testing.assert_close(found[sequence].double(), wanted, rtol=1e-5, atol=1e-6)


def test_parts_of_the_keys_add_up():
    """As in a ring: each part's backward pass is given the output and lse of all keys."""
    query, key, value, bias = problem(2e4, torch.float32, 64, None)
    output, lse, *wanted = results([query, key, value, bias], "reference")
    grad_output = normal(*output.shape, seed=5, dtype=output.dtype)
    grad_lse = normal(*lse.shape, seed=6, dtype=lse.dtype)
    saved = Results(output.detach(), lse.detach())
    found = []
    for part in (slice(0, 40), slice(40, 64)):
        inputs, variant, _, _ = prepare(
            query, key[:, :, part], value[:, :, part], None, None, None, None, mask=None,
            score=scores.bias(bias[..., part]), scale=None, sinks=None, dropout_p=0.0,
            return_lse=True, deterministic=False, config=None,
        )  # fmt: skip
        arguments = saved, grad_output, grad_lse, [], False
        found.append(host.backward(inputs, variant, KernelConfig(), *arguments))
    # The lse of all keys is rounded to 2^-9, so that each weight is off by half of that at most.
    compare: dict[str, Any] = {"rtol": 2**-9, "atol": 2**-9}
    torch.testing.assert_close(found[0].query + found[1].query, wanted[0], **compare)
    for name, exact in (("key", wanted[1]), ("value", wanted[2])):
        whole = torch.cat([getattr(part, name) for part in found], 2)
        torch.testing.assert_close(whole, exact, **compare)

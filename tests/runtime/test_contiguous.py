"""Numbers of heads, sequences and offsets that do not follow each other in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade.gpu import language

INTERPRETED = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
    ),
)
ENDS = torch.tensor([0, 3, 9], dtype=torch.int32)
call_of: Any = saccade  # options come in dictionaries, which a checker does not look into
SINKS = torch.tensor([1.0, -2.0])


def rows_of(*sizes: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sizes, generator=generator) for _ in range(count)]


def attention(apart: Any, name: str) -> Any:
    return call_of.attention(*rows_of(1, 2, 9, 16), sinks=apart(SINKS), implementation=name)


def varlen(apart: Any, name: str) -> Any:
    rows, options = rows_of(9, 2, 16), {"implementation": name, "return_lse": True}
    once = call_of.attention_varlen(*rows, apart(ENDS), causal=True, **options)
    ends = apart(ENDS), apart(ENDS)
    return (*once, *call_of.attention_varlen(*rows, *ends, sinks=apart(SINKS), **options))


def gradients(apart: Any, name: str) -> Any:
    leaves = [rows.requires_grad_() for rows in rows_of(9, 2, 16)]
    sinks = SINKS.clone().requires_grad_()
    output = call_of.attention_varlen(*leaves, apart(ENDS), sinks=apart(sinks), implementation=name)
    return torch.autograd.grad(output.square().sum(), [*leaves, sinks])


def mapped(apart: Any, name: str) -> Any:
    rows, every = rows_of(1, 2, 9, 16), torch.stack([SINKS, SINKS + 1, SINKS * 2])
    call = lambda sinks: call_of.attention(*rows, sinks=sinks, implementation=name)  # noqa: E731
    one_by_one = apart is Tensor.clone
    if one_by_one:
        return torch.stack([call(each) for each in every])
    return torch.vmap(call, in_dims=1)(every.mT.contiguous())


def pages(apart: Any, name: str) -> Any:
    query, key_pages, value_pages = *rows_of(2, 2, 1, 16, count=1), *rows_of(6, 1, 4, 16, count=2)
    table = torch.tensor([[0, 5], [3, 1]], dtype=torch.int32)
    lens = torch.tensor([7, 5], dtype=torch.int32)
    options = {"sinks": apart(SINKS), "implementation": name}
    given = key_pages, value_pages, apart(table), apart(lens)
    packed = apart(torch.arange(3, dtype=torch.int32))
    return (
        call_of.attention_paged(query, *given, **options),
        call_of.attention_paged(query.squeeze(2), *given, cu_seqlens_q=packed, **options),
    )


def linear(apart: Any, name: str) -> Any:
    rows, decay = rows_of(2, 2, 9, 16), apart(torch.tensor([-0.1, -0.9]))
    lengths = apart(torch.tensor([5, 9]))
    return (
        call_of.linear_attention(*rows, decay=decay, key_lengths=lengths, implementation=name),
        call_of.linear_attention_varlen(*rows_of(9, 2, 16), apart(ENDS), implementation=name),
    )


def delta(apart: Any, name: str) -> Any:
    rows, beta = rows_of(9, 2, 16), torch.full((9, 2), 0.5)
    options: dict[str, Any] = {"normalize_qk": True, "implementation": name}
    return call_of.gated_delta_rule_varlen(*rows, beta, apart(ENDS), **options)


def steps(apart: Any, name: str) -> Any:
    rows, beta = rows_of(2, 2, 1, 16), torch.full((2, 2, 1), 0.5)
    states = torch.ones(5, 2, 16, 16), torch.ones(5, 2, 16, 16)
    sums = saccade.LinearState(states[1], torch.ones(5, 2, 16))
    options: dict[str, Any] = {
        "state_index": apart(torch.tensor([3, 1])), "implementation": name,
    }  # fmt: skip
    outputs = (
        call_of.gated_delta_rule_step(states[0], *rows, beta, normalize_qk=True, **options),
        call_of.linear_attention_step(sums, *rows, **options),
    )
    return *outputs, *states


def fp8(apart: Any, name: str) -> Any:
    rows = [each.to(torch.float8_e4m3fn) for each in rows_of(1, 2, 9, 16)]
    tokens = [each.to(torch.float8_e4m3fn) for each in rows_of(9, 2, 16)]
    options: dict[str, Any] = {"sinks": apart(SINKS), "implementation": name}
    scale = apart(torch.tensor([[0.5, 1.5]]))
    return (
        call_of.attention_fp8(*rows, query_scale=scale, key_scale=scale, **options),
        call_of.attention_fp8_varlen(*tokens, apart(ENDS), **options),
    )


CALLS: list[Callable[..., Any]] = [
    attention, varlen, gradients, mapped, pages, linear, delta, steps, fp8,
]  # fmt: skip


def every_second(numbers: Tensor) -> Tensor:
    """The numbers with others between them."""
    return torch.stack([numbers, torch.full_like(numbers, 7)], -1)[..., 0]


@pytest.mark.parametrize("implementation", ["cpu", INTERPRETED])
@pytest.mark.parametrize("call", CALLS)
def test_numbers_that_lie_apart(call: Callable[..., Any], implementation: str) -> None:
    assert not every_second(ENDS).is_contiguous()
    found, wanted = call(every_second, implementation), call(Tensor.clone, implementation)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["cpu", INTERPRETED])
def test_one_sink_for_all_heads(implementation: str) -> None:
    rows, one = rows_of(1, 2, 9, 16), torch.tensor([0.5])
    found = call_of.attention(*rows, sinks=one.expand(2), implementation=implementation)
    wanted = call_of.attention(*rows, sinks=one.repeat(2), implementation=implementation)
    assert torch.equal(found, wanted)

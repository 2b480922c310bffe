"""Tracing: nothing is read where numbers have no values, and a graph computes what the call does.

Calls are cold, and none was remembered: the first one of a kind is the one that is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import saccade
from saccade import masks, scores
from saccade.runtime import call_cache

OFFSETS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
LENGTHS = torch.tensor([7, 3])
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def _cold() -> None:
    call_cache.forget()


def rows(*heads: int, length: int = 9) -> list[Tensor]:
    return [torch.randn(2, number, length, 8) for number in heads]


def packed(*heads: int) -> list[Tensor]:
    return [torch.randn(13, number, 8) for number in heads]  # a row of padding


def pages(*queries: Any) -> list[Tensor]:
    pools = torch.randn(2, 9, 2, 4, 8).unbind()
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    return [torch.randn(*queries), *pools, table, torch.tensor([3, 10], dtype=torch.int32)]


def delta_rows() -> list[Tensor]:
    return [*rows(2, 2, 4), torch.rand(2, 4, 9)]


def delta_step(*tensors: Tensor) -> Any:
    state = tensors[4].clone()
    return saccade.gated_delta_rule_step(state, *tensors[:4]), state


def state() -> list[Tensor]:
    return [torch.rand(2, 2, 8, 8), torch.rand(2, 2, 8)]


def with_state(query: Tensor, key: Tensor, value: Tensor, kv: Tensor, key_sum: Tensor) -> Any:
    output, after = saccade.linear_attention(
        query, key, value, initial_state=saccade.LinearState(kv, key_sum), return_state=True
    )
    return output, after.kv, after.key_sum


def step(query: Tensor, key: Tensor, value: Tensor, kv: Tensor, key_sum: Tensor) -> Any:
    sums = kv.clone(), key_sum.clone()
    output = saccade.linear_attention_step(saccade.LinearState(*sums), query, key, value)
    return output, *sums


def pooled_step(*tensors: Tensor) -> Any:
    *token, kv, key_sum, index = tensors
    sums = kv.clone(), key_sum.clone()
    output = saccade.linear_attention_step(saccade.LinearState(*sums), *token, state_index=index)
    return output, *sums


def written(key: Tensor, value: Tensor, *pools_and_slots: Tensor) -> Any:
    key_pages, value_pages, slots = (each.clone() for each in pools_and_slots)
    saccade.write_kv_cache(key, value, key_pages, value_pages, slots)
    return key_pages, value_pages


def moved(pages: Tensor, source: Tensor, target: Tensor) -> Any:
    kept = pages.clone()
    saccade.move_pages([kept], source, target)
    return kept


DIFFERENTIABLE: dict[str, tuple[Call, Callable[[], list[Tensor]]]] = {
    "attention": (
        lambda *given: saccade.attention(*given, mask=masks.causal(), return_lse=True),
        lambda: rows(4, 2, 2),
    ),
    "attention, captured lengths, sinks, a bias": (
        lambda query, key, value, sinks, bias, lengths: saccade.attention(
            query, key, value, mask=masks.key_lengths(lengths), sinks=sinks,
            score=scores.bias(bias),
        ),
        lambda: [*rows(4, 2, 2), torch.randn(4), torch.randn(1, 4, 9, 9), LENGTHS],
    ),
    "packed": (
        lambda *given: saccade.attention_varlen(*given, mask=masks.causal(), return_lse=True),
        lambda: [*packed(4, 2, 2), OFFSETS],
    ),
    "packed, two offsets and lengths": (
        lambda *given: saccade.attention_varlen(*given, max_seqlen_q=7, max_seqlen_k=8),
        lambda: [*packed(4, 2, 2), OFFSETS, torch.tensor([0, 3, 4, 12], dtype=torch.int32)],
    ),
    "linear": (saccade.linear_attention, lambda: rows(4, 2, 2)),
    "linear, decay and lengths": (
        lambda query, key, value, decay, lengths: saccade.linear_attention(
            query, key, value, decay=-decay.abs(), key_lengths=lengths
        ),
        lambda: [*rows(4, 2, 2), torch.randn(2, 2, 9), LENGTHS],
    ),
    "linear, a state": (with_state, lambda: [*rows(4, 2, 2), *state()]),
    "linear packed": (saccade.linear_attention_varlen, lambda: [*packed(4, 2, 2), OFFSETS]),
    "delta rule": (
        lambda *given: saccade.gated_delta_rule(
            *given[:4], decay=-given[4].abs(), initial_state=given[5], return_state=True
        ),
        lambda: [*delta_rows(), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 8, 8)],
    ),
    "delta rule packed": (
        saccade.gated_delta_rule_varlen,
        lambda: [*packed(2, 2, 4), torch.rand(13, 4), OFFSETS],
    ),
    "linear packed, softmax": (
        lambda *given: saccade.linear_attention_varlen(*given, feature_map="softmax"),
        lambda: [*packed(4, 2, 2), OFFSETS],
    ),
}  # fmt: skip
FORWARD_ONLY: dict[str, tuple[Call, Callable[[], list[Tensor]]]] = {
    "pages": (
        lambda *given: saccade.attention_paged(*given, mask=masks.causal(), return_lse=True),
        lambda: pages(2, 4, 3, 8),
    ),
    "pages, packed": (
        lambda *given: saccade.attention_paged(*given[:-1], cu_seqlens_q=given[-1]),
        lambda: [*pages(3, 4, 8), torch.tensor([0, 2, 3], dtype=torch.int32)],
    ),
    "step": (step, lambda: [*rows(4, 2, 2, length=1), *state()]),
    "step in a pool": (
        pooled_step, lambda: [*rows(4, 2, 2, length=1), *state(), torch.tensor([1, 0])],
    ),
    "delta rule, step": (
        delta_step,
        lambda: [*(each[:, :, :1] for each in delta_rows()), torch.randn(2, 4, 8, 8)],
    ),
    "merge": (
        lambda *given: saccade.merge_states(list(given[:2]), list(given[2:])),
        lambda: [*torch.randn(2, 2, 4, 9, 8).unbind(), *torch.randn(2, 2, 4, 9).unbind()],
    ),
    "cache write": (
        written,
        lambda: [
            *torch.randn(2, 3, 2, 8).unbind(), *torch.randn(2, 9, 2, 4, 8).unbind(),
            torch.tensor([3, 30, -1]),
        ],
    ),
    "move pages": (
        moved, lambda: [torch.randn(9, 2, 4, 8), torch.tensor([1, 2]), torch.tensor([5, 6])],
    ),
}  # fmt: skip
ALL = {**DIFFERENTIABLE, **FORWARD_ONLY}


def flat(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", ALL)
def test_fake_tensors(name: str) -> None:
    call, make = ALL[name]
    tensors = make()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        found = flat(call(*(mode.from_tensor(tensor) for tensor in tensors)))
    call_cache.forget()
    with torch.no_grad():
        wanted = flat(call(*tensors))
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in wanted]


@pytest.mark.parametrize("offsets", ["plain", "fake"])
@pytest.mark.parametrize("call", [saccade.attention_varlen, saccade.linear_attention_varlen])
def test_fake_tensors_beside_offsets_of_either_kind(call: Any, offsets: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in packed(4, 2, 2)]
        given = OFFSETS if offsets == "plain" else mode.from_tensor(OFFSETS)
        assert call(*fake, given).shape == (13, 4, 8)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ALL)
def test_make_fx(name: str, tracing: Any) -> None:
    call, make = ALL[name]
    tensors = make()
    with torch.no_grad():
        traced: Any = make_fx(lambda *given: flat(call(*given)), tracing_mode=tracing)(*tensors)
        call_cache.forget()
        torch.testing.assert_close(traced(*tensors), flat(call(*tensors)))


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_make_fx_of_gradients(name: str, tracing: Any) -> None:
    call, make = DIFFERENTIABLE[name]
    tensors = make()

    def gradients(*given: Tensor) -> list[Tensor]:
        leaves = [
            one.detach().requires_grad_() if one.is_floating_point() else one for one in given
        ]
        total = torch.stack([(one * one).sum() for one in flat(call(*leaves))]).sum()
        return list(torch.autograd.grad(total, [one for one in leaves if one.requires_grad]))

    traced: Any = make_fx(gradients, tracing_mode=tracing)(*tensors)
    call_cache.forget()
    torch.testing.assert_close(traced(*tensors), gradients(*tensors))


def test_a_symbolic_graph_serves_other_sizes() -> None:
    call, make = DIFFERENTIABLE["packed"]
    traced: Any = make_fx(lambda *given: flat(call(*given)), tracing_mode="symbolic")(*make())
    longer = [torch.randn(20, heads, 8) for heads in (4, 2, 2)]
    offsets = torch.tensor([0, 9, 11, 20], dtype=torch.int32)
    torch.testing.assert_close(traced(*longer, offsets), flat(call(*longer, offsets)))


def test_offsets_are_read_elsewhere() -> None:
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        saccade.attention_varlen(*packed(4, 2, 2), OFFSETS + 1)  # pyright: ignore[reportCallIssue]

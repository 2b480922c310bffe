"""Padding: packed tokens behind the last offset, which no sequence owns and nobody reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implementations import (
    IMPLEMENTATIONS,
    LINEAR_IMPLEMENTATIONS,
    PAGED_IMPLEMENTATIONS,
    Implementation,
    fixture_of,
)
from torch import Tensor

import saccade
from saccade import feature_maps, masks

soft = fixture_of(IMPLEMENTATIONS)
linear = fixture_of(LINEAR_IMPLEMENTATIONS)
paged = fixture_of(PAGED_IMPLEMENTATIONS)

ENDS = [0, 5, 5, 23], [0, 9, 12, 30]  # of queries and keys; the last query's tile is half padding
TOKENS = 61, 52


def rows(one: Implementation, *shape: int) -> Tensor:
    chance = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=chance).to(one.device, one.dtypes[0])


def offsets(one: Implementation, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=one.device)


def nonfinite(tensor: Tensor, end: int, value: float) -> Tensor:
    return tensor.clone().index_fill(0, torch.arange(end, len(tensor), device=tensor.device), value)


def assert_padded(found: Tensor, wanted: Tensor, padding: float = 0.0) -> None:
    """Rows of sequences are as without padding; those behind hold one number."""
    end = len(wanted)
    # Other programs add up the same rounded numbers in another order.
    largest = float(wanted.nan_to_num(neginf=0).abs().max()) if wanted.numel() else 0.0
    rounding = 4 * torch.finfo(wanted.dtype).eps * largest
    torch.testing.assert_close(found[:end], wanted, rtol=1e-5, atol=max(rounding, 1e-5))
    assert len(found) > end
    assert bool((found[end:] == padding).all())


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "ordered"])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_attention(soft: Implementation, mask: Any, deterministic: bool) -> None:
    given = rows(soft, TOKENS[0], 4, 16), rows(soft, TOKENS[1], 2, 16), rows(soft, TOKENS[1], 2, 16)
    ends = [offsets(soft, values) for values in ENDS]
    q, k = ENDS[0][-1], ENDS[1][-1]
    grads = rows(soft, TOKENS[0], 4, 16), rows(soft, 4, TOKENS[0]).to(torch.float32)
    sinks = rows(soft, 4).float()

    def run(*tensors: Tensor, of: tuple[Tensor, Tensor]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (*tensors, sinks)]
        output, lse = saccade.attention_varlen(
            *leaves[:3], *ends, sinks=leaves[3], mask=mask, return_lse=True,
            deterministic=deterministic, implementation=soft.name,
        )  # fmt: skip
        of_output, of_lse = of
        found = torch.autograd.grad(
            [output, lse], leaves, [of_output.to(output.dtype), of_lse.to(lse.dtype)]
        )
        return [output.detach(), lse.detach().T, *found]

    wanted = run(given[0][:q], given[1][:k], given[2][:k], of=(grads[0][:q], grads[1][:, :q]))
    found = run(
        nonfinite(given[0], q, torch.nan), nonfinite(given[1], k, torch.nan),
        nonfinite(given[2], k, torch.inf),
        of=(nonfinite(grads[0], q, torch.nan), nonfinite(grads[1].T, q, torch.inf).T),
    )  # fmt: skip
    for place, (mine, without) in enumerate(zip(found[:5], wanted[:5], strict=True)):
        assert_padded(mine, without, -torch.inf if place == 1 else 0.0)
    # A sink's gradient sums output times grad_output over its rows: what outputs may differ by
    # (they hold rounded numbers), that sum may.
    apart = (found[0][:q].float() - wanted[0].float()).abs() * grads[0][:q].float().abs()
    wider = apart.sum((0, 2)) + 1e-5 * (1 + wanted[5].abs())
    assert bool(((found[5] - wanted[5]).abs() <= wider).all()), (found[5], wanted[5])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"normalize": "none"},
        {"feature_map": (torch.exp, torch.exp)},
        {"feature_map": "favor"},
    ],
    ids=["causal", "full", "plain", "own", "favor"],
)
def test_linear_attention(linear: Implementation, options: dict[str, Any]) -> None:
    if options.get("feature_map") == "favor":
        torch.manual_seed(1)
        options = {"feature_map": feature_maps.Favor(16, 16).to(linear.device)}
    given = [rows(linear, TOKENS[0], 2, 16), *(rows(linear, TOKENS[1], 2, 16) for _ in "kv")]
    decay = -rows(linear, TOKENS[1], 2).float().abs() / 8
    ends = [offsets(linear, values) for values in ENDS]
    q, k = ENDS[0][-1], ENDS[1][-1]

    def run(*tensors: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output, state = saccade.linear_attention_varlen(
            *leaves[:3], *ends, decay=leaves[3], return_state=True, implementation=linear.name,
            **options,
        )  # fmt: skip
        found = torch.autograd.grad([output, state.kv], leaves, [grad, state.kv.detach()])
        return [output.detach(), *found, state.kv.detach()]

    grad = rows(linear, TOKENS[0], 2, 16)
    wanted = run(given[0][:q], given[1][:k], given[2][:k], decay[:k], grad=grad[:q])
    found = run(
        nonfinite(given[0], q, torch.nan), nonfinite(given[1], k, torch.inf),
        nonfinite(given[2], k, torch.nan), nonfinite(decay, k, torch.nan),
        grad=nonfinite(grad, q, torch.nan),
    )  # fmt: skip
    for mine, without in zip(found[:5], wanted[:5], strict=True):
        assert_padded(mine, without)
    torch.testing.assert_close(found[5], wanted[5])


@pytest.mark.parametrize("ends", [[0, 2, 3, 4, 24], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_attention_over_pages(paged: Implementation, mask: Any, ends: list[int]) -> None:
    keys, values = (rows(paged, 12, 2, 16, 16) for _ in "kv")
    table = torch.arange(16).view(4, 4).remainder(12).int().to(paged.device)
    lens = torch.tensor([9, 40, 1, 33], dtype=torch.int32, device=paged.device)
    query, end = rows(paged, ends[-1] + 19, 4, 16), ends[-1]
    sinks = rows(paged, 4).float()

    def run(query: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = saccade.attention_paged(
            query, keys, values, table, lens, cu_seqlens_q=offsets(paged, ends), mask=mask,
            sinks=sinks, return_lse=True, implementation=paged.name,
        )  # fmt: skip
        return output, lse.T

    wanted, found = run(query[:end]), run(nonfinite(query, end, torch.nan))
    assert_padded(found[0], wanted[0])
    assert_padded(found[1], wanted[1], -torch.inf)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("trash", [torch.nan, torch.inf])
def test_keys_behind_the_last_row_are_not_read(
    linear: Implementation, trash: float, packed: bool
) -> None:
    """Aligned at the top left no row sees them; without a state nothing does."""
    rows, keys = 20, 30
    options: dict[str, Any] = {"align": "top_left", "implementation": linear.name}
    chance = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        found = torch.randn(*shape, generator=chance)
        return found.to(linear.device, linear.dtypes_of(0)[0])

    given = [random(2, 2, length, 16) for length in (rows, keys, keys)]
    given.append(-random(2, 2, keys).float().abs() / 8)
    grad = random(2, 2, rows, 16)

    def run(trash: float) -> list[Tensor]:
        leaves = [tensor.clone() for tensor in given]
        for leaf in leaves[1:3]:
            leaf[:, :, rows:] = trash
        leaves = [leaf.requires_grad_() for leaf in leaves]
        query, key, value, decay = leaves
        if packed:
            ends = [
                torch.tensor([0, length, 2 * length], dtype=torch.int32, device=grad.device)
                for length in (rows, keys)
            ]
            laid = (leaf.transpose(1, 2).flatten(0, 1) for leaf in leaves)
            query, key, value, decay = laid
            output = saccade.linear_attention_varlen(
                query, key, value, *ends, decay=decay, **options
            )
            output = output.unflatten(0, (2, rows)).transpose(1, 2)
        else:
            output = saccade.linear_attention(query, key, value, decay=decay, **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    for found, wanted in zip(run(trash), run(0.0), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)

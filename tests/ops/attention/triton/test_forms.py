"""Both forms of the backward pass in Triton's interpreter: exact, and hidden stays hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade.masks import as_mask
from saccade.modifiers import evaluate
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention.triton import host
from saccade.testing import Case, assert_exact, make_case, oracle, tolerances

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),  # numpy on rows of NaN
]

TILES = saccade.KernelConfig(16, 16, backward=saccade.KernelConfig(16, 16))
FORMS = pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
PACKED: dict[str, Any] = {"packed": True, "lengths": ((17, 20), (0, 5), (9, 9), (6, 0))}
HIDDEN: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal", "lengths": ((24, 20),)},
    "documents": {"mask": "documents", "lengths": ((2, 40),)},
    "blocks": {"mask": "blocks", "lengths": ((5, 40),)},
    "lengths": {"mask": "key_lengths", "lengths": ((10, 40),), "dropout_p": 0.3},
    "packed causal": {**PACKED, "mask": "causal"},
    "packed documents": {**PACKED, "mask": "documents", "sinks": True},
}


@pytest.fixture(autouse=True)
def _atomic_unless_deterministic(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> Iterator[None]:
    """Take the atomic form where it is allowed; at the end make sure that the right one ran."""
    monkeypatch.setattr(host, "ordered_is_faster", lambda spec: False)
    monkeypatch.setattr(host, "_launches", {})
    yield
    forms = {launches.queries is not None for launches in host._launches.values()}
    assert forms == {deterministic}


def small(**changes: Any) -> Case:
    return make_case(**{"batch": 1, "kv_heads": 1, "group": 2, **changes})


def run(case: Case, deterministic: bool) -> dict[str, Tensor]:
    return case.run("triton", deterministic=deterministic, config=TILES)


@FORMS
@pytest.mark.parametrize("name", list(HIDDEN))
def test_nan_in_hidden_keys_and_values_changes_nothing(name: str, deterministic: bool) -> None:
    full, nonfinite = (small(**HIDDEN[name], poison_hidden=poison) for poison in (False, True))
    assert_exact(nonfinite, "triton", deterministic=deterministic, config=TILES)
    if name in ("documents", "blocks", "lengths", "packed documents"):
        assert not torch.equal(full.tensors["key"], nonfinite.tensors["key"])  # something is hidden


@FORMS
def test_nan_in_query_rows_that_see_nothing_changes_nothing(deterministic: bool) -> None:
    case = small(mask="causal", lengths=((30, 14),), score="bias")
    wanted = run(case, deterministic)
    blind = wanted["lse"] == -torch.inf
    assert int(blind[0, 0].sum()) == 16
    for tensor in (case.tensors["query"], case.grads["output"], case.grads["lse"]):
        tensor[blind] = torch.nan
    found = run(case, deterministic)
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def visible_pairs(case: Case) -> Tensor:
    """[batch, head, query, key] of a dense case."""
    mask, d = as_mask(case.mask), case.description
    (query_len, kv_len), sizes = d.lengths[0], (d.batch, d.query_heads)
    ranges = [evaluate.index_range(0, n, dim) for dim, n in enumerate((*sizes, query_len, kv_len))]
    seen = evaluate.visible(mask.key, mask.captured, Coordinates(*ranges, shift=kv_len - query_len))
    return seen.expand(*sizes, query_len, kv_len)


@FORMS
@pytest.mark.parametrize("nonfinite", ["query", "key", "value", "grad"])
@pytest.mark.parametrize("mask", ["window", "documents"])
def test_a_visible_nan_reaches_only_what_sees_it(
    mask: str, nonfinite: str, deterministic: bool
) -> None:
    case = small(mask=mask, lengths=((32, 32),), seed=2)
    exact, position = oracle(case), 17
    allowed, seen = tolerances(case, exact), visible_pairs(case)
    if nonfinite in ("key", "value"):
        case.tensors[nonfinite][:, :, position] = torch.nan
        rows = seen[..., position]
    else:
        rows = torch.zeros_like(seen[..., 0])
        rows[:, :, position] = seen[:, :, position].any(-1)
        tensor = case.grads["output"] if nonfinite == "grad" else case.tensors["query"]
        tensor[:, :, position] = torch.nan
    keys = (seen & rows[..., None]).any(2).any(1, keepdim=True)
    found = run(case, deterministic)
    reached = {
        "output": rows,
        "lse": rows,
        "grad_query": rows,
        "grad_key": keys,
        "grad_value": keys,
    }
    if nonfinite == "grad":  # the forward pass knows nothing of it
        reached["output"] = reached["lse"] = torch.zeros_like(rows)
    for name, reach in reached.items():
        error = (found[name].double() - exact[name]).abs() - allowed[name]
        assert bool((error[~reach] <= 0).all()), f"{name}: it came where nothing sees it"
    of_sums = found["grad_query"] if nonfinite in ("key", "value") else found["grad_value"]
    if nonfinite != "value":  # and it does show where it is seen
        reach = rows if of_sums is found["grad_query"] else keys
        assert bool(of_sums[reach].isnan().all())


@FORMS
@pytest.mark.parametrize(
    "description",
    [
        {"group": 3, "kv_heads": 2, "mask": "causal"},
        {"group": 3, "score": "softcap", "sinks": True, "scale": -0.3},
        {"score": "bias", "mask": "causal", "dropout_p": 0.4},
        {"score": "head_bias", "mask": "blocks"},
        {"score": "key_bias", "mask": "window"},
        {"score": "batch_bias", "lengths": ((20, 10),), "batch": 2},
        {"score": "bias >> softcap", "mask": "documents", "scale": 0.0},
        {**PACKED, "score": "bias", "mask": "causal", "dropout_p": 0.3},
        {"layout": "permuted", "head_dim": 24, "value_dim": 40, "mask": "own_table"},
        {"layout": "strided_last", "mask": "mixed"},
    ],
    ids=str,
)
def test_both_forms_are_exact(description: dict[str, Any], deterministic: bool) -> None:
    case = small(**{"lengths": ((20, 24),), **description})
    assert_exact(case, "triton", deterministic=deterministic, config=TILES)

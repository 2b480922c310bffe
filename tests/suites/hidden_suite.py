"""Hidden numbers: NaN and inf in every place that nothing may read, one place after the other.

Each place is nonfinite alone as well as with all others, since NaN in one may make an
implementation look again NaN-safe, and so hide that NaN in another does not.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from implementations import IMPLEMENTATIONS, Implementation, fixture_of
from torch import Tensor

from saccade import masks
from saccade.masks import as_mask
from saccade.modifiers.evaluate import take
from saccade.ops.attention import reference
from saccade.runtime.validation import prepare
from saccade.testing import Case, oracle, poisoned, tolerances
from saccade.testing.cases import padded
from saccade.testing.oracle import assert_within

implementation = fixture_of(IMPLEMENTATIONS)

MASKS = ("causal", "causal_top_left", "window", "documents", "key_lengths", "blocks", "tensor")
SCORES = ("none", "softcap", "alibi", "bias", "key_bias", "bias >> softcap")
PACKED = ((24, 30), (5, 0), (20, 9), (0, 4), (7, 7))
TRASH = (torch.nan, torch.inf, -torch.inf)
GRADIENTS = ("grad of output", "grad of lse")
ALL = "all"


# Two thirds of all pairs, of each mask and of each score; the others are slow.
MASKS_AND_SCORES = [
    pytest.param(mask, score, marks=[pytest.mark.slow] * ((at + number) % 3 == 0))
    for at, mask in enumerate(MASKS)
    for number, score in enumerate(SCORES)
]


class TestHiddenNumbers:
    """Contract items 2 and 3: what is hidden is never read as a number, in no pass."""

    @pytest.mark.parametrize(("mask", "score"), MASKS_AND_SCORES)
    def test_no_hidden_number_is_read(
        self, implementation: Implementation, mask: str, score: str
    ) -> None:
        number = MASKS.index(mask) * len(SCORES) + SCORES.index(score)
        options = [each for each in product((0, 1), repeat=3) if sum(each) % 2 == number % 2]
        drops, sinks, with_lse = options[number // 2 % 4]
        packed, dtypes = number % 2 == 1, implementation.dtypes_of(number)
        lengths = PACKED if packed else ((24, 30), (30, 19))[number // 2 % 2 :]
        if implementation.interpreted:
            lengths = lengths[:3:2]
        case = implementation.case(
            mask=mask,
            score=score,
            packed=packed,
            lengths=lengths,
            dtype=dtypes[(number + number // 8) % len(dtypes)],  # each with all of the options
            dropout_p=0.3 * drops,
            sinks=bool(sinks),
            seed=number,
            **({"batch": 1} if implementation.interpreted else {}),
        )
        _check(implementation, case, bool(with_lse), number)


def _check(implementation: Implementation, case: Case, with_lse: bool, turn: int) -> None:
    """Spoil the hidden places of a case and compare with what float64 gives with zeros there."""
    case.mask = as_mask(case.mask) & _holes(case)
    if not with_lse:
        case.grads["lse"].zero_()
    hidden = _hidden(case)
    if not with_lse:
        del hidden["grad of lse"]
    for places in hidden:
        _fill(case, {places: hidden[places]}, 0.0)
    exact = oracle(case)
    allowed = tolerances(case, exact)
    nonfinite = [ALL, *hidden]
    if implementation.interpreted:
        nonfinite = [nonfinite[turn % len(nonfinite)]]
    configs = implementation.configs_of(turn)
    for step, name in enumerate(nonfinite):
        trash = TRASH[(turn + step) % 3]
        places = hidden if name == ALL else {name: hidden[name]}
        _fill(case, places, trash)
        config = configs[(turn + step) % len(configs)]
        with poisoned():
            got = _run(case, implementation.name, with_lse, config)
        what = f"{trash} in the hidden numbers of {name}\n{case.description}"
        assert_within(got, exact, allowed, what)
        _fill(case, places, 0.0)


def _run(case: Case, name: str, with_lse: bool, config: object) -> dict[str, Tensor]:
    """Results of a case, with no gradient of the lse at all if it is not wanted."""
    given = {} if config is None else {"config": config}
    leaves = case.leaves()
    output, lse = case.call(leaves, implementation=name, **given)
    if with_lse:
        return case.with_gradients(leaves, {"output": output, "lse": lse})
    grad = case.grads["output"].to(output.dtype)
    found = torch.autograd.grad(output, list(leaves.values()), grad)
    gradients = {f"grad_{leaf}": tensor for leaf, tensor in zip(leaves, found, strict=True)}
    return {"output": output.detach(), "lse": lse.detach(), **gradients}


def _holes(case: Case) -> masks.Mask:
    """Hides some rows, one of them beside clean ones, and some keys from everything."""
    d = case.description
    rows, keys = d.longest
    visible = torch.ones(d.batch_size, 1, rows, keys, dtype=torch.bool)
    for row in (2, 17, 18, 19):
        visible[:, :, row : row + 1] = False
    for key in (3, 16, keys - 1):
        visible[..., key : key + 1] = False
    return masks.dense(visible.to(d.device))


def _hidden(case: Case) -> dict[str, Tensor]:
    """Which numbers of each tensor nothing may read, broadcastable to the tensor.

    A row that sees no key but a sink has a result; only its query is hidden.
    """
    leaves = {name: leaf.detach() for name, leaf in case.leaves(torch.float64).items()}
    positional, keywords = case.arguments(leaves)
    inputs, variant, _, _ = prepare(
        *padded(positional), return_lse=True, deterministic=False, config=None, **keywords
    )
    dense, at, reachable = reference.lay_out(inputs)
    scores, visible, _ = reference.score_pairs(dense, variant, at, reachable)
    visible = visible.expand(scores.shape)
    blind = ~visible.any(-1)  # [batch, heads, rows]
    group = case.description.group
    unseen = ~visible.any(2).unflatten(1, (-1, group)).any(2)  # [batch, kv_heads, keys]
    of_lse = blind
    if case.cu_seqlens is not None:
        of_lse, blind, unseen = blind[0], blind[0].T, unseen[0].T
    assert bool(blind.any())
    assert bool(unseen.any())
    hidden = {"query": blind.unsqueeze(-1)}
    hidden |= dict.fromkeys(("key", "value"), unseen.unsqueeze(-1))
    if "bias" in leaves:
        hidden["bias"] = _nobody_takes(leaves["bias"], visible, at)
        assert "key" in case.description.score or bool(hidden["bias"].any())
    without = case.description.sinks
    hidden["grad of output"] = blind.unsqueeze(-1) & (not without)
    hidden["grad of lse"] = of_lse & (not without)
    return hidden


def _nobody_takes(table: Tensor, visible: Tensor, at: Any) -> Tensor:
    """Which entries of a table only hidden pairs take."""
    table = table.clone().requires_grad_()
    entries = take(table, at.batch, at.head, at.query_row, at.kv_row).expand(visible.shape)
    (times,) = torch.autograd.grad(entries, table, visible.to(table.dtype))
    return times == 0


def _fill(case: Case, places: dict[str, Tensor], number: float) -> None:
    for name, hidden in places.items():
        tensors = case.grads if name in GRADIENTS else case.tensors
        of = name.removeprefix("grad of ")
        tensors[of] = tensors[of].masked_fill(hidden.to(tensors[of].device), number)


__all__ = ["TestHiddenNumbers", "implementation"]

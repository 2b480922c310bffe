"""The specification of linear attention: three forms that are equal, and its gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade.ops.linear_attention import reference
from saccade.runtime.spec import FUSED_MAPS, NORMALIZERS, LinearState
from saccade.testing import make_linear_case

LENGTHS = [(7, 7), (5, 9), (9, 5), (0, 4), (4, 0)]
# A sum of features that have signs is no divisor.
FORMS = [form for form in itertools.product(FUSED_MAPS, NORMALIZERS) if form != ("identity", "sum")]
ALIGNMENTS = ("bottom_right", "top_left")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_three_forms_are_equal(causal: bool, lengths: tuple[int, int]) -> None:
    for align, decay, state in itertools.product(
        ALIGNMENTS, ("none", "heads", "rows"), (False, True)
    ):
        case = make_linear_case(
            causal=causal, align=align, lengths=(lengths,), decay=decay, state=state, padded=True,
            heads=(4, 2, 2), head_dim=3, value_dim=2, dtype=torch.float64,
        )  # fmt: skip
        prepared = case.prepared(case.tensors)
        rows = reference.lay_out(prepared.inputs, prepared.variant, torch.float64)
        pairs = reference.quadratic(rows)
        others = [reference.recurrent(rows)]
        others += [reference.chunked(rows, chunk) for chunk in (1, 3, 100)]
        for other in others:
            for one, two in zip(pairs, other, strict=True):
                torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-12)


def test_the_formula() -> None:
    """Against the sums of Katharopoulos et al. 2020, equations 8 to 12, written out as loops."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 4, 3).double() for _ in range(3))
    found = saccade.linear_attention(query, key, value, eps=0.0, implementation="reference")
    features = [torch.nn.functional.elu(rows[0, 0]) + 1 for rows in (query, key)]
    for i in range(4):
        weights = [float(features[0][i] @ features[1][j]) for j in range(i + 1)]
        wanted = sum(w * value[0, 0, j] for j, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(found[0, 0, i], wanted)


def leaves_of(case: Any) -> tuple[list[str], list[Tensor]]:
    leaves = case.leaves()
    return list(leaves), list(leaves.values())


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize(("feature_map", "normalize"), FORMS)
def test_gradcheck(feature_map: str, normalize: str, implementation: str) -> None:
    number = FUSED_MAPS.index(feature_map)
    turn = number + NORMALIZERS.index(normalize)
    for causal, packed in [((True, False), (False, False), (True, True))[turn % 3]]:
        case = make_linear_case(
            normalize=normalize, feature_map=feature_map, eps=0.1, causal=causal,
            align=ALIGNMENTS[number % 2], decay=("none", "heads", "rows", "rows")[number],
            state=number != 1, padded=number == 2 and not packed, packed=packed,
            lengths=((3, 5), (4, 2)) if packed else ([(5, 3), (3, 5)][number % 2],),
            heads=[(2, 1, 1), (1, 1, 2)][number % 2], batch=1, head_dim=2, value_dim=2,
            dtype=torch.float64, seed=number + 1,
        )  # fmt: skip
        names, tensors = leaves_of(case)
        if case.key_lengths is not None:  # finite differences of NaN say nothing
            tensors = [t.detach().nan_to_num(0).requires_grad_() for t in tensors]

        def function(*given: Tensor, case: Any = case, names: Any = names) -> Any:
            leaves = dict(zip(names, given, strict=True))
            return tuple(case.call(leaves, implementation=implementation).values())

        # Of the reference every entry of the Jacobian; the rest is compared with it elsewhere too,
        # so here in random directions.
        fast = implementation != "reference"
        assert torch.autograd.gradcheck(function, tensors, fast_mode=fast)


def test_differentiates_to_any_order() -> None:
    case = make_linear_case(
        lengths=((4, 4),), batch=1, head_dim=2, value_dim=2, decay="rows", dtype=torch.float64
    )
    names, tensors = leaves_of(case)

    def function(*given: Tensor) -> Tensor:
        return case.call(dict(zip(names, given, strict=True)), implementation="reference")["output"]

    assert torch.autograd.gradgradcheck(function, tensors)
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)


def test_all_rows_see_the_initial_state_unfaded_before_the_first_key() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 1, 4, 3), torch.randn(1, 1, 1, 3), torch.randn(1, 1, 1, 2)
    state = LinearState(torch.rand(1, 1, 3, 2), torch.rand(1, 1, 3))
    output = saccade.linear_attention(
        query, key, value, initial_state=state, decay=torch.tensor([-1.0]), eps=0.0,
        implementation="reference",
    )  # fmt: skip
    features = torch.nn.functional.elu(query) + 1
    wanted = features @ state.kv / (features @ state.key_sum.unsqueeze(-1))
    torch.testing.assert_close(output[:, :, :3], wanted[:, :, :3])
    assert not torch.allclose(output[:, :, 3], wanted[:, :, 3])

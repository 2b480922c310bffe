"""The one suite of linear attention. See implementations.py for a new implementation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from answers import expected
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import F64, LINEAR_IMPLEMENTATIONS, Implementation, fixture_of
from pairs import covering
from torch import Tensor

import saccade
from saccade.runtime.spec import FUSED_MAPS, NORMALIZERS
from saccade.testing import (
    linear_oracle,
    make_linear_case,
    poisoned,
)
from saccade.testing.cases import LAYOUTS
from saccade.testing.linear import DECAYS, LinearDescription
from saccade.testing.oracle import assert_within

HEADS = [(2, 2, 2), (4, 2, 2), (2, 2, 4), (4, 1, 2), (1, 1, 3)]
# A sum of features that have signs is no divisor.
FORMS = [form for form in itertools.product(FUSED_MAPS, NORMALIZERS) if form != ("identity", "sum")]


implementation = fixture_of(LINEAR_IMPLEMENTATIONS)


def check(implementation: Implementation, configs: Any = None, **description: Any) -> None:
    """Compare one case with float64, in memory that holds NaN; small chunks too where there are."""
    case = implementation.linear_case(**description)
    with poisoned():
        answer = expected(case.description)
        for config in configs or implementation.configs_of(0):
            given_config: dict[str, Any] = {} if config is None else {"config": config}
            found = case.run(implementation.name, **given_config)
            assert_within(found, *answer, str(case.description))


PACKED = ((24, 30), (5, 0), (0, 4), (7, 7), (7, 7))


class TestExactness:
    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    @pytest.mark.parametrize(("feature_map", "normalize"), FORMS)
    def test_every_map_with_every_normaliser(
        self, implementation: Implementation, feature_map: str, normalize: str, packed: bool
    ) -> None:
        number = FUSED_MAPS.index(feature_map) * len(NORMALIZERS) + NORMALIZERS.index(normalize)
        combinations = implementation.combinations_of(2 * number + packed, (True, False))
        for dtype, config, causal in combinations:
            check(
                implementation,
                configs=[config],
                feature_map=feature_map,
                normalize=normalize,
                eps=1.0 if feature_map == "identity" else 1e-3,
                dtype=dtype,
                causal=causal,
                packed=packed,
                lengths=PACKED if packed else ((24, 30),),
                decay=DECAYS[number % 3],
                state=number % 2 == 0,
                padded=number % 3 == 0,
                scale=0.3,
                seed=number,
            )

    @pytest.mark.parametrize(
        ("lengths", "decay", "align", "state"),
        covering(
            [(13, 29), (29, 13), (1, 17), (17, 1)], DECAYS, ["bottom_right", "top_left"],
            [False, True],
        ),
        ids=str,
    )  # fmt: skip
    def test_unequal_lengths_in_both_alignments(
        self,
        implementation: Implementation,
        lengths: tuple[int, int],
        decay: str,
        align: str,
        state: bool,
    ) -> None:
        check(implementation, lengths=(lengths,), align=align, decay=decay, state=state)

    @pytest.mark.parametrize("heads", HEADS, ids=str)
    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    def test_shared_heads(
        self, implementation: Implementation, packed: bool, heads: tuple[int, int, int]
    ) -> None:
        lengths = PACKED if packed else ((17, 17),)
        if implementation.interpreted:  # a program for each sequence and head: fewer will do
            lengths = lengths[:2]
        for dtype in implementation.dtypes_of(HEADS.index(heads)):
            check(
                implementation,
                heads=heads,
                packed=packed,
                lengths=lengths,
                decay="rows",
                state=True,
                dtype=dtype,
            )

    def test_random_problems(self, implementation: Implementation) -> None:
        @settings(
            max_examples=6 if implementation.slow else 40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(description=descriptions(implementation.dtypes, **implementation.draws))
        def run(description: LinearDescription) -> None:
            check(implementation, **description.__dict__)

        run()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_strides(self, implementation: Implementation, layout: str) -> None:
        for dtype in implementation.dtypes_of(LAYOUTS.index(layout)):
            check(implementation, layout=layout, dtype=dtype, lengths=((17, 29),))

    @pytest.mark.parametrize("sizes", [(64, 128), (128, 16), (1, 1), (3, 40)])
    def test_head_dims(self, implementation: Implementation, sizes: tuple[int, int]) -> None:
        for dtype in implementation.dtypes_of(sizes[0]):
            check(implementation, head_dim=sizes[0], value_dim=sizes[1], dtype=dtype)

    @pytest.mark.parametrize("normalize", ["none", "abs"])
    @pytest.mark.parametrize("scale", [0, -0.5])
    def test_scales_of_at_most_zero(
        self, implementation: Implementation, scale: float, normalize: str
    ) -> None:
        check(implementation, scale=scale, normalize=normalize, eps=0.1, decay="rows")

    @pytest.mark.parametrize("decay", DECAYS)
    def test_lengths_of_many_chunks(self, implementation: Implementation, decay: str) -> None:
        length = 100 if implementation.slow else 700
        check(implementation, lengths=((length, length),), batch=1, decay=decay, state=True)


@st.composite
def descriptions(
    draw: Any,
    dtypes: Sequence[torch.dtype],
    dims: Sequence[int] = (16, 8, 1, 5),
    layouts: Sequence[str] = LAYOUTS,
    least: int = 0,
) -> LinearDescription:
    """Descriptions of linear cases: anything goes with anything, zero lengths included.

    least: of lengths, and of batch entries.
    """
    packed = draw(st.booleans())
    length = st.integers(least, 24)
    pairs = st.lists(st.tuples(length, length), min_size=1, max_size=4 if packed else 1)
    return LinearDescription(
        batch=draw(st.integers(least, 3)),
        heads=draw(st.sampled_from(HEADS)),
        lengths=tuple(draw(pairs)),
        head_dim=draw(st.sampled_from(list(dims))),
        value_dim=draw(st.sampled_from(list(dims))),
        dtype=draw(st.sampled_from(list(dtypes))),
        packed=packed,
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom_right", "top_left"])),
        feature_map=draw(st.sampled_from(["elu+1", "relu", "exp"])),
        normalize=draw(st.sampled_from(NORMALIZERS)),
        eps=draw(st.sampled_from([0.5, 1e-2])),
        scale=draw(st.sampled_from([1.0, 0.3])),
        decay=draw(st.sampled_from(DECAYS)),
        state=draw(st.booleans()),
        padded=draw(st.booleans()),
        layout=draw(st.sampled_from(list(layouts))),
        seed=draw(st.integers(0, 2**16)),
    )


class TestEmpty:
    @pytest.mark.parametrize(
        "empty",
        [
            {"batch": 0},
            {"heads": (0, 0, 0)},
            {"lengths": ((0, 9),)},
            {"lengths": ((9, 0),)},
            {"lengths": ((0, 0),)},
            {"head_dim": 0},
            {"value_dim": 0},
            {"packed": True, "lengths": ((0, 0), (0, 0))},
        ],
        ids=str,
    )
    def test_zero_sized_dimensions(
        self, implementation: Implementation, empty: dict[str, Any]
    ) -> None:
        for dtype in implementation.dtypes_of(0):
            check(implementation, dtype=dtype, **empty)
            check(implementation, dtype=dtype, decay="rows", state=True, **empty)

    @pytest.mark.parametrize("eps", [0.0, 1e-6])
    @pytest.mark.parametrize("normalize", NORMALIZERS)
    def test_rows_that_see_nothing(
        self, implementation: Implementation, normalize: str, eps: float
    ) -> None:
        case = implementation.linear_case(lengths=((9, 4),), normalize=normalize, eps=eps)
        case.grads["output"][:, :, :5] = torch.nan  # nobody may listen to these rows
        results = case.run(implementation.name)
        assert not bool(results["output"][:, :, :5].any())
        assert not bool(results["grad_query"][:, :, :5].any())
        assert all(bool(result.isfinite().all()) for result in results.values())

    def test_keys_that_are_all_padding(self, implementation: Implementation) -> None:
        case = implementation.linear_case(lengths=((9, 9),), eps=0.0)
        case.key_lengths = torch.tensor([0, 9], device=implementation.device)
        case.tensors["key"][0], case.tensors["value"][0] = torch.nan, torch.inf
        case.grads["output"][0] = torch.nan
        results = case.run(implementation.name)
        for name, result in results.items():
            assert bool(result.isfinite().all()), name
        for name in ("output", "grad_query", "grad_key", "grad_value"):
            assert not bool(results[name][0].any()), name
            assert bool(results[name][1].any()), name


class TestHidden:
    @pytest.mark.parametrize("trash", [torch.nan, torch.inf])
    @pytest.mark.parametrize("nonfinite", ["key", "value"])
    @pytest.mark.parametrize("decay", ["none", "rows"])
    def test_rows_before_a_nonfinite_key_stay_clean(
        self, implementation: Implementation, decay: str, nonfinite: str, trash: float
    ) -> None:
        for config, dtype in itertools.product(
            implementation.configs_of(0), implementation.dtypes_of(len(nonfinite))
        ):
            case = implementation.linear_case(heads=(4, 2, 2), dtype=dtype, decay=decay)
            exact = linear_oracle(case)
            place = 20
            case.tensors[nonfinite][:, :, place] = trash
            more: dict[str, Any] = {} if config is None else {"config": config}
            results = case.run(implementation.name, **more)
            clean = results["output"][:, :, :place].double()
            torch.testing.assert_close(clean, exact["output"][:, :, :place], atol=0.05, rtol=0.05)
            assert not bool(results["output"][:, :, place:].isfinite().all(-1).any())
            assert bool(results["grad_query"][:, :, :place].isfinite().all())
            assert not bool(results["kv"].isfinite().all())

    def test_nonfinite_queries_do_not_reach_what_they_do_not_see(
        self, implementation: Implementation
    ) -> None:
        for config in implementation.configs_of(0):
            case = implementation.linear_case(heads=(4, 2, 2))
            case.tensors["query"][:, :, 7] = torch.nan
            more: dict[str, Any] = {} if config is None else {"config": config}
            results = case.run(implementation.name, **more)
            assert bool(results["output"][:, :, 7].isnan().all())
            assert bool(results["output"][:, :, 8:].isfinite().all())
            for name in ("grad_key", "grad_value"):
                assert bool(results[name][:, :, :8].isnan().any()), name
                assert bool(results[name][:, :, 8:].isfinite().all()), name

    def test_nan_behind_the_end_of_keys_values_and_decay(
        self, implementation: Implementation
    ) -> None:
        check(implementation, padded=True, decay="rows", state=True, seed=3)


class TestDecay:
    @pytest.mark.parametrize("normalize", ["none", "sum"])
    @pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
    def test_gradient_of_weak_and_strong_decay(
        self, implementation: Implementation, causal: bool, normalize: str
    ) -> None:
        for strength, (rows, keys) in itertools.product(
            (1e-3, 0.1, 1.0, 5.0, 20.0),
            [(40, 40)] if implementation.interpreted else [(40, 40), (9, 70)],
        ):
            torch.manual_seed(5)
            shapes = (rows, 16), (keys, 16), (keys, 8)
            given = [torch.randn(1, 2, *shape) for shape in shapes]
            given += [-strength * torch.rand(1, 2, keys), torch.randn(1, 2, rows, 8)]
            options = {"causal": causal, "normalize": normalize, "eps": 0.0}
            truth = _decay_gradient("reference", [each.double() for each in given], **options)
            subtracts = causal and implementation.name == "triton"
            bound = _decay_bound(given, causal, normalize, subtracts)
            on_device = [each.to(implementation.device) for each in given]
            for config in implementation.configs_of(0):
                found = _decay_gradient(implementation.name, on_device, config=config, **options)
                excess = (found.cpu().double() - truth).abs() - bound
                assert bool((excess <= 0).all()), (strength, float(excess.max()))


def _decay_gradient(name: str, given: list[Tensor], **options: Any) -> Tensor:
    *rows, decay, grad = given
    decay = decay.clone().requires_grad_()
    call: Any = saccade.linear_attention
    output = call(*rows, decay=decay, implementation=name, **options)
    return torch.autograd.grad(output, decay, grad)[0]


def _decay_bound(given: list[Tensor], causal: bool, normalize: str, subtracts: bool) -> Tensor:
    """How far rounding to float32 may carry the gradient: a part of what crosses each key.

    That is the sum of the shares of all pairs of a key before it and a row that sees it, each with
    the size of its terms: a product of features, e to a sum of decay, a product with the gradient,
    twice where sums are divided. Each operation on the way adds its unit roundoff, and a share has
    at most as many of them as rows, keys and channels together. `subtracts`: shares of all pairs
    are summed up and those that do not cross subtracted.
    """
    query, key, value, decay, grad = (each.double() for each in given)
    query, key = (torch.nn.functional.elu(rows) + 1 for rows in (query, key))
    rows, keys = query.shape[2], key.shape[2]
    last = torch.arange(rows) + keys - rows if causal else torch.full((rows,), keys - 1)
    sees = torch.arange(keys) <= last.unsqueeze(-1)
    upto = decay.cumsum(-1)
    gap = (upto[..., last].unsqueeze(-1) - upto.unsqueeze(-2)).masked_fill(~sees, -torch.inf)
    weights = query @ key.mT * gap.exp()
    if normalize == "sum":
        weights = weights / weights.sum(-1, keepdim=True)
        arriving = grad.abs() @ value.abs().mT
        arriving = arriving + (grad.abs() * (weights @ value.abs())).sum(-1, keepdim=True)
    else:
        arriving = grad.abs() @ value.abs().mT
    operations = rows + keys + 2 * (query.shape[-1] + value.shape[-1])
    shares = weights * arriving * (operations + gap.abs().masked_fill(~sees, 0))
    before = torch.nn.functional.pad(shares, (1, 0))[..., :-1].cumsum(-1)  # over keys before each
    crossing = before.masked_fill(~sees, 0).sum(2)
    if subtracts:
        crossing = shares.sum((2, 3)).unsqueeze(-1).expand_as(crossing)
    return torch.finfo(torch.float32).eps / 2 * crossing + torch.finfo(torch.float32).tiny


class TestResults:
    def test_gradients_come_in_any_layout(self, implementation: Implementation) -> None:
        case = implementation.linear_case(decay="rows")
        results = []
        for shape in ("expanded", "permuted", "contiguous"):
            leaves = case.leaves()
            output = case.call(leaves, implementation=implementation.name)["output"]
            grad = torch.full((), 0.5, device=output.device).expand(output.shape)
            if shape == "permuted":
                grad = grad.transpose(1, 3).contiguous().transpose(1, 3)
            elif shape == "contiguous":
                grad = grad.contiguous()
            results.append(torch.autograd.grad(output, list(leaves.values()), grad))
        for other in results[1:]:
            for first, second in zip(results[0], other, strict=True):
                torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("of", ["output", "kv", "key_sum"])
    def test_gradient_of_one_result_alone(self, implementation: Implementation, of: str) -> None:
        case = make_linear_case(decay="rows", state=True, device=implementation.device)
        leaves, exact = case.leaves(), case.leaves(F64)
        ours = case.call(leaves, implementation=implementation.name)[of]
        theirs = case.call(exact, implementation="reference")[of]
        grad = case.grads[of]
        found = torch.autograd.grad(ours, list(leaves.values()), grad.float(), allow_unused=True)
        truth = torch.autograd.grad(theirs, list(exact.values()), grad, allow_unused=True)
        for name, mine, wanted in zip(leaves, found, truth, strict=True):
            mine = torch.zeros_like(leaves[name]) if mine is None else mine
            wanted = torch.zeros_like(exact[name]) if wanted is None else wanted
            torch.testing.assert_close(mine.double(), wanted, atol=1e-4, rtol=1e-4, msg=name)

    def test_a_call_in_two_halves_is_the_whole_call(self, implementation: Implementation) -> None:
        case = make_linear_case(decay="rows", device=implementation.device)
        query, key, value, decay = (t.detach() for t in case.leaves().values())
        arguments: dict[str, Any] = {
            "implementation": implementation.name, "return_state": True
        }  # fmt: skip
        call: Any = saccade.linear_attention
        whole, last = call(query, key, value, decay=decay, **arguments)
        state, outputs = None, []
        for rows in (slice(0, 11), slice(11, 24)):
            parts: list[Tensor] = [rows_of[:, :, rows] for rows_of in (query, key, value)]
            output, state = call(*parts, decay=decay[:, :, rows], initial_state=state, **arguments)
            outputs.append(output)
        assert state is not None
        torch.testing.assert_close(torch.cat(outputs, 2), whole, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state.kv, last.kv, atol=1e-5, rtol=1e-4)

    def test_runs_are_bit_equal(self, implementation: Implementation) -> None:
        case = implementation.linear_case(lengths=((100, 100),), decay="rows")
        first, again = (case.run(implementation.name) for _ in range(2))
        assert all(torch.equal(first[name], again[name]) for name in first)

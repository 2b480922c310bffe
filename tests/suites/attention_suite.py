"""The one suite: what every implementation must do. See implementations.py for a new one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from answers import expected
from hypothesis import HealthCheck, Phase, given, settings
from implementations import BF16, F32, F64, IMPLEMENTATIONS, Implementation, fixture_of
from pairs import covering
from torch import Tensor

import saccade
from saccade.ops.attention import reference
from saccade.testing import Case, assert_exact, oracle, poisoned
from saccade.testing.cases import LAYOUTS, MASKS, SCORES, Description, descriptions
from saccade.testing.oracle import assert_within

implementation = fixture_of(IMPLEMENTATIONS)


def check(
    implementation: Implementation, number: int = 1, configs: Any = None, **description: Any
) -> None:
    """Compare one case with float64, in memory that holds NaN; small tiles too where there are."""
    case = implementation.case(**description)
    with poisoned():
        answer = expected(case.description)
        for config in configs or implementation.configs_of(number):
            given: dict[str, Any] = {} if config is None else {"config": config}
            assert_within(case.run(implementation.name, **given), *answer, str(case.description))


# Each mask with half of the scores and each score with half of the masks; the others are slow.
MASKS_AND_SCORES = [
    pytest.param(number, mask, score, marks=[pytest.mark.slow] * (number % 4 > 1))
    for number, (mask, score) in enumerate(product(MASKS, SCORES))
]
PACKED = ((24, 30), (5, 0), (0, 4), (7, 7), (7, 7))
MEAN_LENGTHS = ((48, 48), (0, 3), (20, 31))
TRASH = (torch.nan, torch.inf, -torch.inf)


class TestExactness:
    """Contract item 5: no further from float64 than the derived bound."""

    @pytest.mark.parametrize(("number", "mask", "score"), MASKS_AND_SCORES)
    def test_every_mask_with_every_score(
        self, implementation: Implementation, number: int, mask: str, score: str
    ) -> None:
        for dtype, config, packed in implementation.combinations_of(number, (False, True)):
            check(
                implementation,
                configs=[config],
                mask=mask,
                score=score,
                dtype=dtype,
                packed=packed,
                lengths=PACKED if packed else ((24, 30),),
                sinks=number % 2 == 0,
                dropout_p=0.3 if number % 5 == 0 else 0.0,
                poison_hidden=number % 3 == 0,
                seed=number,
                **implementation.sizes_of(2 * number + packed),
            )

    @pytest.mark.parametrize("masks", [list(MASKS)[n::4] for n in range(4)], ids=",".join)
    def test_random_problems(self, implementation: Implementation, masks: list[str]) -> None:
        @settings(
            max_examples=4 if implementation.slow else 15,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
            # Descriptions are small as they are; to shrink one would compile hundreds of kernels.
            phases=[Phase.explicit, Phase.generate],
        )
        @given(description=descriptions(implementation.dtypes, masks=masks, **implementation.draws))
        def run(description: Description) -> None:
            check(implementation, description.seed, **description.__dict__)

        run()

    @pytest.mark.parametrize("mask", ["none", "causal", "blocks"])
    def test_large_scores(self, implementation: Implementation, mask: str) -> None:
        for dtype in implementation.dtypes:  # scores of about 30: their error is a weight's
            sizes = {"lengths": ((19, 11),), "group": 3, "head_dim": 64, "scale": 1.0}
            check(implementation, mask=mask, dtype=dtype, seed=865198, **sizes)

    @pytest.mark.parametrize(
        ("scale", "score", "mask"),
        covering([0, -0.5, -0.0], ["none", "softcap", "bias"], ["none", "causal", "documents"]),
    )
    def test_scales_of_at_most_zero(
        self, implementation: Implementation, scale: float, score: str, mask: str
    ) -> None:
        for dtype in implementation.dtypes_of(len(score)):
            sizes = {"batch": 1} if implementation.interpreted else {}
            check(implementation, mask=mask, score=score, scale=scale, dtype=dtype, **sizes)

    def test_values_with_a_mean(self, implementation: Implementation) -> None:
        for dtype in implementation.dtypes:
            if dtype.itemsize == 2:
                sizes = {"batch": 1, "mean": 4.0, "sinks": True}
                check(implementation, mask="causal", dtype=dtype, dropout_p=0.3, **sizes)

    @pytest.mark.parametrize("mask", ["none", "causal", "window"])
    def test_equal_keys_give_queries_no_gradient(
        self, implementation: Implementation, mask: str
    ) -> None:
        """The gradients of a row's scores add up to 0, whatever the mean of the values is."""
        packings = (mask == "none",) if implementation.interpreted else (False, True)
        for dtype, packed in product(implementation.dtypes, packings):
            case = implementation.case(
                mask=mask, dtype=dtype, packed=packed, lengths=MEAN_LENGTHS, batch=1, mean=4.0,
                head_dim=32, value_dim=32,
            )  # fmt: skip
            key = case.tensors["key"]
            key.copy_((key[:1] if packed else key[:, :, :1]).clone().expand_as(key))
            case.grads["lse"].zero_()
            found = case.run(implementation.name)["grad_query"].double().abs()
            allowed = _of_equal_keys(case)
            assert bool((found <= allowed).all()), (dtype, packed, float((found / allowed).max()))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_strides(self, implementation: Implementation, layout: str) -> None:
        for dtype in implementation.dtypes:
            check(implementation, layout=layout, dtype=dtype, mask="causal", lengths=((17, 29),))

    @pytest.mark.parametrize("mask", ["none", "causal", "window", "documents", "own", "tensor"])
    @pytest.mark.parametrize("lengths", [(300, 300), (70, 1400), (600, 130)])
    def test_lengths_of_many_tiles(
        self, implementation: Implementation, mask: str, lengths: tuple[int, int]
    ) -> None:
        if implementation.interpreted:  # whose tiles are 32 rows at most: a quarter is many, too
            lengths = lengths[0] // 4, lengths[1] // 4
        case = implementation.case(mask=mask, lengths=(lengths,), batch=1, kv_heads=1)
        assert_exact(case, implementation.name)

    @pytest.mark.parametrize("sizes", [(64, 64), (128, 64), (16, 96), (1, 1), (512, 512)])
    def test_head_dims(self, implementation: Implementation, sizes: tuple[int, int]) -> None:
        for dtype in implementation.dtypes:
            check(implementation, head_dim=sizes[0], value_dim=sizes[1], dtype=dtype, mask="causal")


class TestEmpty:
    """Contract items 2 and 6: what has no rows, no keys or sees nothing."""

    @pytest.mark.parametrize(
        "empty",
        [
            {"batch": 0},
            {"kv_heads": 0},
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
        for dtype in implementation.dtypes_of(len(str(empty))):
            check(implementation, dtype=dtype, **empty)
            check(implementation, dtype=dtype, mask="causal", score="bias", sinks=True, **empty)

    def test_rows_that_see_nothing(self, implementation: Implementation) -> None:
        for dtype in implementation.dtypes:
            case = implementation.case(mask="nothing", dtype=dtype)
            with poisoned():
                results = case.run(implementation.name)
            assert bool((results.pop("lse") == -torch.inf).all())
            assert all(not bool(tensor.any()) for tensor in results.values())

    def test_a_sink_is_something_to_see(self, implementation: Implementation) -> None:
        case = implementation.case(mask="nothing", sinks=True)
        results = case.run(implementation.name)
        sinks = case.tensors["sinks"].view(1, -1, 1).to(results["lse"].dtype)
        assert not bool(results["output"].any())
        torch.testing.assert_close(results["lse"], sinks.expand_as(results["lse"]))

    def test_nan_gradients_of_rows_that_see_nothing(self, implementation: Implementation) -> None:
        case = implementation.case(mask="causal", lengths=((9, 4),))
        clean = case.run(implementation.name)
        blind = clean["lse"] == -torch.inf
        assert bool(blind.any())
        case.grads["lse"][blind] = torch.nan
        case.grads["output"][blind] = torch.nan
        nonfinite = case.run(implementation.name)
        for name, tensor in clean.items():
            torch.testing.assert_close(nonfinite[name], tensor, msg=name)


class TestHidden:
    """Contract item 3: what is hidden is never read as a number."""

    @pytest.mark.parametrize("trash", TRASH)
    @pytest.mark.parametrize("score", ["none", "softcap"])
    @pytest.mark.parametrize("nonfinite", ["key", "value"])
    def test_rows_before_a_nonfinite_key_stay_clean(
        self, implementation: Implementation, nonfinite: str, score: str, trash: float
    ) -> None:
        number = len(score) + len(nonfinite) + TRASH.index(trash)
        for dtype in implementation.dtypes_of(number):
            case = implementation.case(mask="causal", score=score, dtype=dtype)
            exact = oracle(case)
            place = 20
            case.tensors[nonfinite][:, :, place] = trash
            results = case.run(implementation.name)
            for name in ("output", "lse"):
                assert bool(results[name][:, :, :place].isfinite().all()), (dtype, name)
                seen = results[name][:, :, place:].isfinite()
                assert not bool(seen.flatten(3 if name == "output" else 2).all(-1).any())
            torch.testing.assert_close(
                results["output"][:, :, :place].double(),
                exact["output"][:, :, :place],
                atol=0.05,
                rtol=0.05,
            )
            # later keys are seen only by nonfinite rows, earlier ones by clean rows as well
            assert bool(results["grad_query"][:, :, :place].isfinite().all()), dtype

    def test_nonfinite_queries_do_not_reach_what_they_do_not_see(
        self, implementation: Implementation
    ) -> None:
        case = implementation.case(mask="causal")
        case.tensors["query"][:, :, 5] = torch.nan
        results = case.run(implementation.name)
        assert bool(results["output"][:, :, 5].isnan().all())
        assert bool(results["output"][:, :, 6:].isfinite().all())
        for name in ("grad_key", "grad_value"):
            assert bool(results[name][:, :, :6].isnan().any())
            assert bool(results[name][:, :, 6:].isfinite().all()), name


class TestResults:
    """Contract items 1, 4 and 6: dtypes, layouts, gradients."""

    @pytest.mark.parametrize("mask", ["none", "causal", "window", "tensor", "nothing"])
    def test_the_largest_score_of_each_head(
        self, implementation: Implementation, mask: str
    ) -> None:
        """Of every head and sequence, by float64; sinks and rows that see nothing do not count."""
        scores_of = {"causal": "softcap", "window": "bias"}
        packings = (mask == "window",) if implementation.interpreted else (False, True)
        for dtype, packed in product(implementation.dtypes_of(len(mask)), packings):
            case = implementation.case(
                mask=mask, dtype=dtype, packed=packed, lengths=((40, 37), (0, 3), (5, 0), (9, 9)),
                score=scores_of.get(mask, "none"), sinks=mask in ("none", "window"), seed=5,
            )  # fmt: skip
            named: dict[str, Any] = {"implementation": implementation.name}
            found = case.call(case.leaves(), return_max_logit=True, **named)
            alone = case.call(case.leaves(), **named)
            inputs, variant = case.prepared(case.leaves(torch.float64))
            exact = reference.max_logit(inputs, variant, alone[1].double())
            assert len(found) == 3 and not found[2].requires_grad
            assert found[2].dtype == found[1].dtype
            for result, wanted in zip(found[:2], alone, strict=True):
                torch.testing.assert_close(result, wanted, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(found[2].double(), exact, atol=1e-5, rtol=1e-5)

    def test_lse_is_natural_and_wide(self, implementation: Implementation) -> None:
        for dtype in implementation.dtypes:
            case = implementation.case(dtype=dtype)
            output, lse = case.call(case.leaves(), implementation=implementation.name)
            assert output.dtype == dtype
            assert lse.dtype == (F64 if dtype == F64 else F32)
            query, key = (case.tensors[name].double() for name in ("query", "key"))
            scores = query @ key.repeat_interleave(2, 1).mT / 4
            torch.testing.assert_close(
                lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5, check_dtype=False
            )

    def test_output_flattens_for_free(self, implementation: Implementation) -> None:
        case = implementation.case(batch=3, layout="permuted")
        output, _ = case.call(case.leaves(), implementation=implementation.name)
        if implementation.name != "reference":
            assert output.transpose(1, 2).is_contiguous()

    @pytest.mark.parametrize("of", ["output", "lse"])
    @pytest.mark.parametrize("score", ["none", "bias"])
    def test_gradient_of_one_result_alone(
        self, implementation: Implementation, of: str, score: str
    ) -> None:
        case = implementation.case(mask="causal", score=score, sinks=True)
        case.grads["lse" if of == "output" else "output"].zero_()
        assert_exact(case, implementation.name)
        wanted, leaves = case.run(implementation.name), case.leaves()
        result = case.call(leaves, implementation=implementation.name)[of == "lse"]
        grad = case.grads[of].to(result.dtype)
        found = torch.autograd.grad(result, list(leaves.values()), grad, allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            assert_alike(gradient, wanted[f"grad_{name}"])

    @pytest.mark.parametrize("name", ["query", "key", "value", "sinks", "bias"])
    def test_gradient_of_one_input_alone(self, implementation: Implementation, name: str) -> None:
        case = implementation.case(score="bias", sinks=True)
        wanted = case.run(implementation.name)[f"grad_{name}"]
        leaves = {key: leaf.requires_grad_(key == name) for key, leaf in _detached(case).items()}
        output, lse = case.call(leaves, implementation=implementation.name)
        results = [(output, case.grads["output"]), (lse, case.grads["lse"])]
        results = [(result, grad) for result, grad in results if result.requires_grad]
        grads = [grad.to(result.dtype) for result, grad in results]
        (found,) = torch.autograd.grad([result for result, _ in results], [leaves[name]], grads)
        assert_alike(found, wanted)

    def test_gradients_come_in_any_layout(self, implementation: Implementation) -> None:
        case = implementation.case(mask="causal")
        results = []
        for shape in ("expanded", "permuted", "contiguous"):
            leaves = case.leaves()
            output, _ = case.call(leaves, implementation=implementation.name)
            grad = torch.full((), 0.5, device=output.device).expand(output.shape)
            if shape == "permuted":
                grad = grad.transpose(1, 3).contiguous().transpose(1, 3)
            elif shape == "contiguous":
                grad = grad.contiguous()
            results.append(torch.autograd.grad(output, list(leaves.values()), grad))
        for other in results[1:]:
            for first, second in zip(results[0], other, strict=True):
                assert_alike(second, first)

    def test_runs_are_bit_equal(self, implementation: Implementation) -> None:
        for mask, score in (("causal", "none"), ("window", "bias"), ("own", "softcap")):
            length = 50 if implementation.interpreted else 300
            case = implementation.case(mask=mask, score=score, lengths=((length, length),))
            first = case.run(implementation.name, deterministic=True)
            for _ in range(1 if implementation.interpreted else 3):
                again = case.run(implementation.name, deterministic=True)
                assert all(torch.equal(first[name], again[name]) for name in first)

    def test_offsets_beyond_32_bits(self, implementation: Implementation) -> None:
        if implementation.interpreted:
            pytest.skip("the interpreter copies all of the memory, gigabytes, for every kernel")
        dtype = BF16 if BF16 in implementation.dtypes else implementation.dtypes[-1]
        step = 2**30 + 8  # three rows of keys further apart than 2^31 elements
        memory = torch.empty(2 * step + 64, dtype=dtype, device=implementation.device)
        key, value = (memory[i * 16 :].as_strided((1, 1, 3, 16), (0, 0, step, 1)) for i in (0, 1))
        key.copy_(torch.randn(1, 1, 3, 16))
        value.copy_(torch.randn(1, 1, 3, 16))
        query = torch.randn(1, 2, 4, 16, device=implementation.device).to(dtype)
        arguments: dict[str, Any] = {"implementation": implementation.name}
        far = saccade.attention(query, key, value, **arguments)
        near = saccade.attention(query, key.contiguous(), value.contiguous(), **arguments)
        assert torch.equal(far, near)


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    """The same sums, perhaps added up in another order and then rounded to their dtype."""
    rounding = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=max(1e-5, rounding))


def _of_equal_keys(case: Case) -> Tensor:
    """What rounding may leave of gradients of queries that are 0: six standard deviations, from
    weights and gradients of scores in the case's dtype, and from sums and row_dot in a wider one.
    """
    inputs, variant = case.prepared(case.leaves(torch.float64))
    dense, at, reachable = reference.lay_out(inputs)
    changed, _, value = reference.score_pairs(dense, variant, at, reachable)
    _, lse = reference.attend(dense, variant, at, reachable)
    weights = (changed - lse.nan_to_num(0, 0, 0).unsqueeze(-1)).exp()
    grad = case.grads["output"]
    grad = grad.transpose(0, 1)[None] if case.cu_seqlens else grad
    grad_weights = grad @ value.mT
    row_dot = (weights * grad_weights).sum(-1, keepdim=True)
    of_weights = (weights * grad_weights).square().sum(-1).sqrt()
    of_scores = (weights * (grad_weights - row_dot)).square().sum(-1).sqrt()
    unit = torch.finfo(case.tensors["query"].dtype).eps / 2
    sums = torch.finfo(F64 if case.tensors["query"].dtype == F64 else F32).eps
    sums *= sum(changed.shape[-2:]) ** 0.5
    terms = (weights * grad_weights.abs()).sum(-1) + (grad.abs() * (weights @ value).abs()).sum(-1)
    of_row_dot = (grad * (weights @ value)).square().sum(-1).sqrt()
    rows = 6 * (unit * (of_weights + of_scores + of_row_dot / 127) + sums * terms)
    key = dense.key[:, :, :1].repeat_interleave(case.description.group, 1).abs()
    found = abs(variant.scale) * rows.unsqueeze(-1) * key
    found = found + torch.finfo(torch.float32).tiny  # beside rows that see nothing
    return (found.squeeze(0).transpose(0, 1) if case.cu_seqlens else found).detach()


def _detached(case: Case) -> dict[str, Tensor]:
    return {name: leaf.detach() for name, leaf in case.leaves().items()}

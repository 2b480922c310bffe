"""The comparison itself: bounds are small, and a wrong implementation does not pass."""

from typing import Any

import pytest
import torch

from saccade.ops.attention.cpu import dense_tile, flash_tile, host
from saccade.testing import Case, assert_exact, make_case, oracle, tolerances
from saccade.testing.cases import MASKS

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def case_of(**changes: Any) -> Case:
    return make_case(**{"lengths": ((40, 48),), "seed": 5, **changes})


# ---- the oracle -------------------------------------------------------------------------------


def test_oracle_is_the_textbook_formula_in_float64():
    case = case_of(group=1, sinks=True)
    query, key, value = (case.tensors[name].double() for name in ("query", "key", "value"))
    scores = query @ key.mT / 4  # 16 channels
    sinks = case.tensors["sinks"].double().view(1, -1, 1, 1).expand(2, 2, 40, 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    exact = oracle(case)
    assert all(result.dtype == F64 for result in exact.values())
    torch.testing.assert_close(exact["output"], weights @ value, rtol=1e-12, atol=1e-13)
    lse = torch.cat([scores, sinks], -1).logsumexp(-1)
    torch.testing.assert_close(exact["lse"], lse, rtol=1e-12, atol=1e-13)
    grad_value = weights.mT @ case.grads["output"]
    torch.testing.assert_close(exact["grad_value"], grad_value, rtol=1e-12, atol=1e-13)


# ---- the bounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", list(MASKS))
def test_bounds_are_finite_positive_and_small(mask):
    case = case_of(mask=mask, score="bias", sinks=True)
    exact = oracle(case)
    allowed = tolerances(case, exact)
    assert allowed.keys() == exact.keys()
    for name, bound in allowed.items():
        assert bound.isfinite().all(), name
        assert (bound >= 0).all(), name
        largest = max(1.0, float(exact[name].nan_to_num(neginf=0).abs().max()))
        assert float(bound.max()) < 1e-4 * largest, name
        if name != "output" and mask != "nothing":
            assert float(bound.max()) > 0, name
    assert float(allowed["output"].max()) < 1e-4
    assert float(allowed["lse"].max()) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "largest"), [(F64, 1e-12), (F32, 1e-4), (F16, 0.05), (BF16, 0.4)]
)
def test_bounds_follow_the_dtype(dtype, largest):
    case = case_of(dtype=dtype, mask="causal")
    exact = oracle(case)
    for name, bound in tolerances(case, exact).items():
        scale = max(1.0, float(exact[name].nan_to_num(neginf=0).abs().max()))
        assert 0 < float(bound.max()) < largest * scale, name


@pytest.mark.parametrize("packed", [False, True])
def test_bounds_have_the_shapes_of_the_results(packed):
    case = case_of(packed=packed, lengths=((9, 5), (3, 8)), score="head_bias", sinks=True)
    exact = oracle(case)
    for name, bound in tolerances(case, exact).items():
        assert torch.broadcast_shapes(bound.shape, exact[name].shape) == exact[name].shape


# ---- what must not pass -----------------------------------------------------------------------


def change_results(monkeypatch: Any, module: Any, name: str, change: Any) -> None:
    """Let a function of the CPU path give changed results."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **more: change(original(*given, **more)))


def check_notices(case: Case, result: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_exact(case, "cpu")
    message = str(caught.value)
    assert message.startswith(f"{result}: ")
    assert "Description(" in message or "shape" in message


def poison_at(tensor: torch.Tensor, place: tuple[int, ...], change: Any) -> torch.Tensor:
    nonfinite = tensor.clone()
    nonfinite[place] = change(nonfinite[place])
    return nonfinite


PLAIN, CHANGED = {"mask": "window"}, {"mask": "window", "score": "softcap"}
FORWARD = {
    "output off by 1e-3": ("output", lambda o, lse: (o * (1 + 1e-3), lse)),
    "output off by 1e-4": ("output", lambda o, lse: (o * (1 + 1e-4), lse)),
    "one output row is off": (
        "output", lambda o, lse: (poison_at(o, (1, 2, 5), lambda row: row + 1e-3), lse),
    ),
    "one output is NaN": (
        "output", lambda o, lse: (poison_at(o, (0, 0, 0, 0), lambda x: x * torch.nan), lse),
    ),
    "one output is infinite": (
        "output", lambda o, lse: (poison_at(o, (0, 0, 0, 0), lambda x: x + torch.inf), lse),
    ),
    "heads swapped": ("output", lambda o, lse: (o.flip(1), lse)),
    "rows shifted": ("output", lambda o, lse: (o.roll(1, 2), lse)),
    "lse off by 1e-3": ("lse", lambda o, lse: (o, lse + 1e-3)),
    "lse of base 2": ("lse", lambda o, lse: (o, lse * 1.4426950408889634)),
    "one lse is -inf": (
        "lse", lambda o, lse: (o, poison_at(lse, (1, 1, 7), lambda x: x - torch.inf)),
    ),
    "one lse is NaN": (
        "lse", lambda o, lse: (o, poison_at(lse, (1, 1, 7), lambda x: x * torch.nan)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", FORWARD)
@pytest.mark.parametrize("description", [PLAIN, CHANGED], ids=["flash", "tile"])
def test_a_wrong_result_is_noticed(monkeypatch, wrong, description):
    result, change = FORWARD[wrong]
    change_results(monkeypatch, host, "attend", lambda found: change(*found))
    check_notices(case_of(**description), result)


def test_finite_numbers_in_place_of_nothing_are_noticed(monkeypatch):
    case = case_of(mask="nothing")
    change_results(monkeypatch, host, "attend", lambda found: (found[0], found[1].clamp_min(-1e30)))
    check_notices(case, "lse")


def test_a_dropped_key_tile_is_noticed(monkeypatch):
    original = flash_tile.forward

    def blind(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        return original(query, key[:, :, :-8], value[:, :, :-8], *rest, **more)

    monkeypatch.setattr(flash_tile, "forward", blind)
    check_notices(case_of(), "output")


def test_a_key_tile_visited_twice_is_noticed(monkeypatch):
    original = flash_tile.forward

    def twice(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        key, value = (torch.cat([rows, rows[:, :, -8:]], 2) for rows in (key, value))
        return original(query, key, value, *rest, **more)

    monkeypatch.setattr(flash_tile, "forward", twice)
    check_notices(case_of(), "output")


def test_a_missing_scale_in_plain_tiles_is_noticed(monkeypatch):
    change_results(
        monkeypatch, dense_tile, "backward", lambda shares: shares._replace(query=shares.query * 4)
    )
    check_notices(case_of(mask="window", score="softcap"), "grad_query")


def test_a_missing_scale_in_flash_is_noticed(monkeypatch):
    monkeypatch.setattr(Case, "with_gradients", _of_output_only)
    change_results(monkeypatch, flash_tile, "backward", lambda found: (found[0] * 4, *found[1:]))
    check_notices(case_of(mask="window"), "grad_query")


def _of_output_only(
    case: Case, leaves: dict[str, torch.Tensor], results: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Results whose loss does not use the lse, as in most models: flash serves the backward."""
    output = results["output"]
    found = torch.autograd.grad(
        output, list(leaves.values()), case.grads["output"].to(output.dtype)
    )
    gradients = {f"grad_{name}": part for name, part in zip(leaves, found, strict=True)}
    return {"output": output.detach(), "lse": results["lse"].detach(), **gradients}


def test_output_alone_is_exact_too(monkeypatch):
    monkeypatch.setattr(Case, "with_gradients", _of_output_only)
    for mask in ("none", "causal", "window", "key_lengths"):
        assert_exact(case_of(mask=mask, lengths=((40, 40),)), "cpu")


GRADIENTS = ["query", "key", "value", "sinks"]


@pytest.mark.parametrize("factor", [1 + 1e-3, 1 - 1e-4, 0.5, -1.0, 0.0])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_factor_in_a_gradient_is_noticed(monkeypatch, name, factor):
    change_results(
        monkeypatch,
        host,
        "differentiate",
        lambda found: found._replace(**{name: getattr(found, name) * factor}),
    )
    check_notices(case_of(mask="causal", sinks=True), f"grad_{name}")


@pytest.mark.parametrize("score", ["bias", "head_bias", "key_bias", "batch_bias"])
@pytest.mark.parametrize("factor", [1 + 1e-3, 0.5, 0.0])
def test_a_wrong_factor_in_the_gradient_of_a_bias_is_noticed(monkeypatch, score, factor):
    def change(found: host.DenseGradients) -> host.DenseGradients:
        return found._replace(tables={k: v * factor for k, v in found.tables.items()})

    change_results(monkeypatch, host, "differentiate", change)
    check_notices(case_of(mask="causal", score=score), "grad_bias")


def test_gradients_of_swapped_heads_are_noticed(monkeypatch):
    change_results(
        monkeypatch, host, "differentiate", lambda found: found._replace(key=found.key.flip(1))
    )
    check_notices(case_of(), "grad_key")


def test_a_missing_gradient_of_the_lse_is_noticed(monkeypatch):
    original = host.differentiate
    monkeypatch.setattr(
        host,
        "differentiate",
        lambda dense, results, wanted: original(dense, results._replace(grad_lse=None), wanted),
    )
    check_notices(case_of(), "grad_query")


def test_dropout_that_backward_forgets_is_noticed(monkeypatch):
    original: Any = dense_tile.backward

    def forgetful(*given: Any) -> Any:
        assert given[7] is not None  # the seed
        return original(*given[:7], None, *given[8:])

    monkeypatch.setattr(dense_tile, "backward", forgetful)
    check_notices(case_of(dropout_p=0.3), "grad_query")


def test_a_wrong_shape_is_noticed(monkeypatch):
    case = case_of()
    results = case.run("cpu")
    monkeypatch.setattr(Case, "run", _running(case.run, {**results, "lse": results["lse"][:1]}))
    check_notices(case, "lse")


def _running(original: Any, results: Any) -> Any:
    return lambda case, implementation, *rest, **more: (
        results if implementation == "cpu" else original(implementation, *rest, **more)
    )


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("packed", [False, True])
def test_right_ones_pass(dtype, packed):
    lengths = ((40, 48), (0, 3), (17, 9))
    for implementation in ("cpu", "reference"):
        case = case_of(dtype=dtype, packed=packed, lengths=lengths, mask="mixed", score="bias")
        assert_exact(case, implementation)

"""Each score change against its formula, chains in order, derivatives against autograd."""

import math
from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade import scores
from saccade.modifiers import evaluate
from saccade.modifiers.derivative import change_backward, change_with_slopes
from saccade.modifiers.evaluate import index_range
from saccade.modifiers.expression import Coordinates
from saccade.modifiers.modifier import expanded
from saccade.scores import Score

IMPLEMENTATIONS = ["reference", "cpu"]
BATCH, HEADS, QUERY_LEN, KV_LEN = 2, 3, 5, 7
SHAPE = (BATCH, HEADS, QUERY_LEN, KV_LEN)
Formula = Callable[[float, int, int, int, int], float]


def coordinates() -> Coordinates:
    rows = [index_range(0, size, dim) for dim, size in enumerate(SHAPE)]
    return Coordinates(*rows, shift=KV_LEN - QUERY_LEN)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def changed(score: Score, raw: torch.Tensor) -> torch.Tensor:
    captured = expanded(score.key, score.captured)
    return evaluate.change(score.key, captured, raw, coordinates())


def check(score: Score, formula: Formula) -> None:
    """Compare with a formula, pair by pair, on numbers and through the public call."""
    raw = 3 * normal(*SHAPE)
    expected = raw.clone()
    for at in torch.cartesian_prod(*map(torch.arange, SHAPE)).tolist():
        expected[tuple(at)] = formula(raw[tuple(at)].item(), *at)
    torch.testing.assert_close(changed(score, raw), expected, rtol=1e-12, atol=1e-12)

    # Keys are unit vectors, so that the query rows hold the raw scores.
    key = torch.eye(KV_LEN, dtype=raw.dtype).expand(BATCH, HEADS, KV_LEN, KV_LEN)
    weights = expected.softmax(-1)
    for implementation in IMPLEMENTATIONS:
        output, lse = saccade.attention(
            raw, key, key, score=score, scale=1.0, return_lse=True, implementation=implementation
        )
        torch.testing.assert_close(output, weights, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse, expected.logsumexp(-1), rtol=1e-10, atol=1e-12)


# ---- the built-in changes ---------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.3, 2.0, 1e6])
def test_softcap(cap):
    check(scores.softcap(cap), lambda s, b, h, i, j: cap * math.tanh(s / cap))


@pytest.mark.parametrize(
    ("align", "shift"), [("bottom_right", KV_LEN - QUERY_LEN), ("top_left", 0)]
)
def test_alibi(align, shift):
    slopes = torch.tensor([0.5, -0.25, 0.0], dtype=torch.float64)
    check(
        scores.alibi(slopes, align), lambda s, b, h, i, j: s - float(slopes[h]) * abs(i + shift - j)
    )
    shared = scores.alibi(slopes[:1], align)
    check(shared, lambda s, b, h, i, j: s - 0.5 * abs(i + shift - j))


def test_alibi_is_aligned_at_the_bottom_right():
    slopes = torch.tensor([1.0])
    assert scores.alibi(slopes).key == scores.alibi(slopes, "bottom_right").key


@pytest.mark.parametrize(
    "shape",
    [SHAPE, (HEADS, QUERY_LEN, KV_LEN), (QUERY_LEN, KV_LEN), (KV_LEN,), (), (BATCH, 1, 1, KV_LEN),
     (HEADS, 1, 1), (BATCH, 1, QUERY_LEN, 1)],
    ids=str,
)  # fmt: skip
def test_bias_broadcasts(shape):
    tensor = normal(*shape, seed=1)
    full = tensor.expand(SHAPE)
    check(scores.bias(tensor), lambda s, b, h, i, j: s + float(full[b, h, i, j]))


def test_bias_of_minus_infinity_hides_a_pair():
    tensor = torch.zeros(QUERY_LEN, KV_LEN, dtype=torch.float64)
    tensor[1:, 2] = tensor[0] = -torch.inf  # row 0 sees nothing
    rows, value = normal(1, 1, KV_LEN, 4), normal(1, 1, KV_LEN, 3, seed=1)
    visible = tensor == 0
    for implementation in IMPLEMENTATIONS:
        call = {"return_lse": True, "implementation": implementation}
        found = saccade.attention(
            rows[:, :, :QUERY_LEN], rows, value, score=scores.bias(tensor), **call
        )
        wanted = saccade.attention(rows[:, :, :QUERY_LEN], rows, value, mask=visible, **call)
        torch.testing.assert_close(found, wanted)
        assert (found[0][:, :, 0] == 0).all()


# ---- functions of one's own -------------------------------------------------------------------


@scores.function
def gain(score, batch, head, query_row, kv_row, gain):
    return score * gain


@scores.function(align="bottom_right")
def bend(score, batch, head, query_row, kv_row, table, step):
    grown = scores.exp(-scores.absolute(score))
    bent = scores.where(score > 0, 1 - grown, 0.5 * (grown - 1))
    distance = (query_row - kv_row) % step
    return bent * scores.take(table, head, kv_row) + distance


@scores.function
def between(score, batch, head, query_row, kv_row):
    return scores.minimum(score, scores.maximum(score * 0.5, score * 2))


def bend_formula(s: float, scale: float, distance: int) -> float:
    bent = 1 - math.exp(-s) if s > 0 else 0.5 * (math.exp(s) - 1)
    return bent * scale + distance


def test_own_function_with_captured_tensor_and_alignment():
    table, shift = normal(HEADS, KV_LEN, seed=2), KV_LEN - QUERY_LEN
    check(
        bend(table, 3),
        lambda s, b, h, i, j: bend_formula(s, float(table[h, j]), (i + shift - j) % 3),
    )


def test_own_function_of_extremes():
    check(between(), lambda s, b, h, i, j: min(s, max(s * 0.5, s * 2)))


def test_own_function_may_forget_the_score():
    @scores.function
    def by_distance(score, batch, head, query_row, kv_row):
        return -0.5 * (query_row - kv_row)

    check(by_distance(), lambda s, b, h, i, j: -0.5 * (i - j))


# ---- chains -----------------------------------------------------------------------------------


def test_the_left_change_comes_first():
    cap: Formula = lambda s, b, h, i, j: 2 * math.tanh(s / 2)  # noqa: E731
    grow: Formula = lambda s, b, h, i, j: 3 * s  # noqa: E731
    check(scores.softcap(2.0) >> gain(3), lambda s, *at: grow(cap(s, *at), *at))
    check(gain(3) >> scores.softcap(2.0), lambda s, *at: cap(grow(s, *at), *at))


def test_chains_group_either_way():
    parts = [gain(3), scores.bias(normal(KV_LEN)), scores.softcap(2.0), scores.alibi(normal(1))]
    raw = normal(*SHAPE)
    left = ((parts[0] >> parts[1]) >> parts[2]) >> parts[3]
    right = parts[0] >> (parts[1] >> (parts[2] >> parts[3]))
    assert torch.equal(changed(left, raw), changed(right, raw))


def test_chains_do_not_mix_with_other_things():
    change: Any = scores.softcap(1.0)
    for other in (2.0, saccade.masks.causal(), gain):
        with pytest.raises(TypeError):
            _ = change >> other


@st.composite
def chains(draw: Any) -> tuple[Score, list[torch.Tensor]]:
    """A random chain, and the tensors of its biases in order."""
    score, tensors = None, []
    for seed in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["softcap", "alibi", "bias", "gain", "bend"]))
        if kind == "bias":
            shape = [draw(st.sampled_from([1, size])) for size in SHAPE]
            tensors.append(normal(*shape, seed=seed).requires_grad_())
        step = {
            "softcap": lambda: scores.softcap(draw(st.sampled_from([0.5, 3.0]))),
            "alibi": lambda: scores.alibi(normal(HEADS)),
            "bias": lambda: scores.bias(tensors[-1]),
            "gain": lambda: gain(draw(st.sampled_from([-1.5, 0.0, 2.0]))),
            "bend": lambda: bend(normal(HEADS, KV_LEN), 2),
        }[kind]()
        score = step if score is None else score >> step
    assert score is not None
    return score, tensors


@settings(deadline=None, max_examples=80, derandomize=True)
@given(chains())
def test_change_backward_agrees_with_autograd(chain):
    score, tensors = chain
    raw = normal(*SHAPE, seed=9).requires_grad_()
    grad = normal(*SHAPE, seed=10)
    wanted = torch.autograd.grad(changed(score, raw), [raw, *tensors], grad)
    captured = expanded(score.key, score.captured)
    places = [k for k, t in enumerate(captured.tensors) if t.requires_grad]
    with torch.no_grad():
        _, values = change_with_slopes(
            score.key, captured, raw.detach().clone(), coordinates(), places
        )
        found, taken = change_backward(score.key, captured, grad.clone(), None, values, places)
    torch.testing.assert_close(found, wanted[0])
    assert sorted(share.slot for share in taken) == places
    for share, tensor_grad in zip(sorted(taken), wanted[1:], strict=True):
        total = torch.zeros_like(captured.tensors[share.slot])
        share.add_to(total)
        torch.testing.assert_close(total, tensor_grad)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(chains(), st.booleans())
def test_gradients_through_the_call_agree(chain, masked):
    score, tensors = chain
    mask = saccade.masks.causal() if masked else None
    results = []
    for implementation in IMPLEMENTATIONS:
        inputs = [normal(BATCH, HEADS, n, 4, seed=n).requires_grad_() for n in (QUERY_LEN, KV_LEN)]
        output, lse = saccade.attention(
            inputs[0], inputs[1], inputs[1], score=score, mask=mask, return_lse=True,
            implementation=implementation,
        )  # fmt: skip
        loss = (output * normal(*output.shape)).sum() + (lse * normal(*lse.shape)).sum()
        results.append(torch.autograd.grad(loss, [*inputs, *tensors]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-10)


def test_one_bias_used_twice_gets_both_gradients():
    results = []
    for implementation in IMPLEMENTATIONS:
        tensor = normal(HEADS, 1, KV_LEN).requires_grad_()
        score = scores.bias(tensor) >> scores.softcap(1.0) >> scores.bias(tensor)
        query, key = normal(BATCH, HEADS, QUERY_LEN, 4), normal(BATCH, HEADS, KV_LEN, 4)
        output = saccade.attention(query, key, key, score=score, implementation=implementation)
        assert isinstance(output, torch.Tensor)
        results.append(torch.autograd.grad(output.square().sum(), tensor)[0])
    torch.testing.assert_close(results[1], results[0])


# ---- what the constructors refuse -------------------------------------------------------------

CAP, FLOATS = "takes a number of 1e-30 to 1e+30", "takes a floating-point tensor"
REFUSED: list[tuple[Any, tuple[Any, ...], type[Exception], str, str]] = [
    (scores.softcap, ("30",), TypeError, "cap: got '30'", CAP),
    (scores.softcap, (True,), TypeError, "cap: got True", CAP),
    (scores.softcap, (None,), TypeError, "cap: got None", CAP),
    (scores.softcap, (torch.tensor(3.0),), TypeError, "cap: got tensor(3.)", CAP),
    (scores.softcap, (0,), ValueError, "cap: got 0", CAP),
    (scores.softcap, (-1.5,), ValueError, "cap: got -1.5", CAP),
    (scores.softcap, (math.nan,), ValueError, "cap: got nan", CAP),
    (scores.softcap, (math.inf,), ValueError, "cap: got inf", CAP),
    (scores.softcap, (1e300,), ValueError, "cap: got 1e+300", CAP),
    (scores.softcap, (1e-300,), ValueError, "cap: got 1e-300", CAP),
    (scores.alibi, (0.5,), TypeError, "slopes: got float", FLOATS),
    (scores.alibi, (torch.ones(3).int(),), TypeError, "slopes: got torch.int32", FLOATS),
    (scores.alibi, (torch.ones(1, 3),), ValueError, "slopes: got 2 dim", "takes 1: [query_heads]"),
    (scores.alibi, (torch.tensor(0.5),), ValueError, "slopes: got 0 dim", "takes 1: [query_heads]"),
    (
        scores.alibi,
        (torch.ones(3), "left"),
        ValueError,
        "align: got 'left'",
        "takes 'bottom_right'",
    ),
    (scores.bias, ([1.0],), TypeError, "tensor: got list", FLOATS),
    (scores.bias, (torch.ones(3).bool(),), TypeError, "tensor: got torch.bool", FLOATS),
    (scores.bias, (torch.ones((1,) * 5),), ValueError, "tensor: got 5 dim", "takes at most 4"),
    (gain, ("2",), TypeError, "got str", "must be tensors, ints or floats"),
    (gain, ([2.0],), TypeError, "got list", "must be tensors, ints or floats"),
]


@pytest.mark.parametrize(
    ("make", "arguments", "error", "got", "takes"),
    [pytest.param(*row, id=row[3].replace(": got ", "-")) for row in REFUSED],
)
def test_constructors_refuse(make, arguments, error, got, takes, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(error) as caught:
        make(*arguments)
    assert got in str(caught.value)
    assert takes in str(caught.value)


def test_function_refuses_an_alignment_that_does_not_exist():
    with pytest.raises(ValueError, match=r"align: got 'x', takes 'bottom_right' or 'top_left'"):
        scores.function(align="x")


def test_own_functions_of_one_name_stay_apart():
    def make(factor: float) -> Score:
        @scores.function
        def scaled(score, batch, head, query_row, kv_row):
            return score * factor

        return scaled()

    two, three = make(2.0), make(3.0)
    assert two.key == three.key  # one program serves both
    assert two != three
    raw = normal(*SHAPE)
    assert torch.equal(changed(two, raw), raw * 2)
    assert torch.equal(changed(three >> two, raw), raw * 3 * 2)

"""Gradients that scores carry back, and those of every captured tensor of real numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import coordinates
from torch import Tensor
from written_functions import SCORES, SHAPE

import saccade
from saccade import scores
from saccade.masks import as_mask
from saccade.modifiers import evaluate
from saccade.modifiers.derivative import change_backward, change_with_slopes
from saccade.modifiers.expression import Captured
from saccade.scores import as_score

BATCH, HEADS, QUERY_LEN, KV_LEN = 2, 2, 5, 7
LONGEST = 8
near = torch.tensor([2, 0, 1, 1, 0, 2, 2, 1])  # whole numbers that reads go through
in_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs in Triton's interpreter"
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def t5(table: Tensor) -> Callable[..., Any]:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = torch.abs(k - q)
        far = 2 + (torch.log(distance.float() / 2 + 1e-6) / math.log(4) * 2).to(torch.int64)
        bucket = torch.where(distance < 2, distance, torch.clamp(far, 0, 3))
        return s + table[bucket + (k > q).int() * 4, h]

    return score


# By name: the shapes of what is captured, and the score made of them.
SCORE: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "slopes": ([(HEADS,)], lambda t: lambda s, b, h, q, k: s - t[h] * (q - k).abs()),
    "gate": ([(HEADS,)], lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h]) + t[h] ** 2),
    "relative": (
        [(HEADS, 2 * LONGEST - 1)],
        lambda t: lambda s, b, h, q, k: s + t[h, q - k + LONGEST - 1],
    ),
    "relative, from the end": ([(2 * LONGEST,)], lambda t: lambda s, b, h, q, k: s * t[q - k]),
    "t5": ([(8, HEADS)], t5),
    "two steps": (
        [(HEADS,), (LONGEST,)],
        lambda t, u: lambda s, b, h, q, k: 3 * torch.tanh((s + u[k] * u[q]) / (t[h] ** 2 + 1)),
    ),
    "chain": (
        [(HEADS,), (HEADS, 1, 1), (HEADS,)],
        lambda t, u, v: as_score(lambda s, b, h, q, k: s * t[h])
        >> scores.bias(u) >> scores.softcap(2.0) >> scores.alibi(v),
    ),
    "temperature": ([(HEADS,)], lambda t: lambda s, b, h, q, k: s / torch.exp(t[h])),
    "learned number": ([()], lambda t: lambda s, b, h, q, k: s * torch.exp(t) - t * (q - k).abs()),
    "by batch and head": ([(BATCH, HEADS)], lambda t: lambda s, b, h, q, k: s + t[b, h] * k),
    "by query": ([(BATCH, LONGEST)], lambda t: lambda s, b, h, q, k: s + t[b, q] * k),
    "by key": ([(LONGEST, HEADS)], lambda t: lambda s, b, h, q, k: s + t[k][h]),
    "by pair": ([(HEADS, 8, 9)], lambda t: lambda s, b, h, q, k: s + t[h, q, k]),
    "through a table": ([(3, 3)], lambda t: lambda s, b, h, q, k: s * t[near[q], near[k]]),
    "guarded": (
        [(LONGEST,)],
        lambda t: lambda s, b, h, q, k: s + torch.where(q >= k, t[torch.clamp(q - k, min=0)], 0.5),
    ),
    "in blocks": ([(2, 3)], lambda t: lambda s, b, h, q, k: s + t[q // 4, k // 3] * s),
    "extremes": (
        [(HEADS,), (LONGEST,)],
        lambda t, u: lambda s, b, h, q, k: torch.maximum(s, t[h]) + torch.minimum(u[k], u[q]) * s,
    ),
    "taken": ([(1, 3)], lambda t: lambda s, b, h, q, k: s + scores.take(t, h, k - q) * s),
    "quotient": ([(LONGEST,)], lambda t: lambda s, b, h, q, k: s / (1 + t[k] ** 2) - t[q] / 3),
    "forgets": ([(HEADS,)], lambda t: lambda s, b, h, q, k: t[h] * (q - k) / 4),
    "one entry": ([(2,)], lambda t: lambda s, b, h, q, k: s * t[1] + 2 * t[0]),
}  # fmt: skip
FORMS = {
    "dense": {}, "masked": {"mask": saccade.masks.causal()}, "dropout": {"dropout_p": 0.3},
    "packed": {},
}  # fmt: skip


def captured_by(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = SCORE[name][0]
    return [normal(*shape, seed=9 + n, dtype=dtype) * 0.5 for n, shape in enumerate(shapes)]


def rows(form: str, dtype: torch.dtype, dim: int) -> list[Tensor]:
    if form == "packed":
        sizes: list[tuple[int, ...]] = [(9, HEADS, dim), (12, 1, dim), (12, 1, dim)]
    else:
        sizes = [(BATCH, HEADS, QUERY_LEN, dim), *[(BATCH, 1, KV_LEN, dim)] * 2]
    return [normal(*size, seed=n, dtype=dtype) for n, size in enumerate(sizes)]


def call(form: str, score: Any, given: list[Tensor], implementation: str, **more: Any) -> Tensor:
    torch.manual_seed(3)  # of dropout
    options = {"score": score, "implementation": implementation, **FORMS[form], **more}
    if form == "packed":  # two sequences of other lengths; the tables are long enough for both
        offsets = torch.tensor([0, 5, 9]).int(), torch.tensor([0, 5, 12]).int()
        output, lse = saccade.attention_varlen(*given, *offsets, return_lse=True, **options)  # pyright: ignore[reportCallIssue]
        return torch.cat([output.flatten(), lse.flatten()])
    output, lse = saccade.attention(*given, return_lse=True, **options)
    return torch.cat([output.flatten(), lse.masked_fill(lse == -torch.inf, 0).flatten()])


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("name", SCORE)
def test_gradients_are_those_of_differences(name, implementation):
    given = [tensor.requires_grad_() for tensor in rows("dense", torch.float64, 3)]
    tables = [tensor.requires_grad_() for tensor in captured_by(name)]

    def function(*tensors: Tensor) -> Tensor:
        return call("dense", SCORE[name][1](*tensors[3:]), list(tensors[:3]), implementation)

    assert torch.autograd.gradcheck(function, (*given, *tables), fast_mode=True)


def gradients(
    form: str, name: str, implementation: str, dtype: torch.dtype, **more: Any
) -> list[Tensor]:
    given = [tensor.requires_grad_() for tensor in rows(form, dtype, 16)]
    tables = [tensor.requires_grad_() for tensor in captured_by(name, dtype)]
    output = call(form, SCORE[name][1](*tables), given, implementation, **more)
    weights = normal(*output.shape, seed=77, dtype=dtype)
    loss, leaves = (output * weights).sum(), [*given, *tables]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("form", ["masked", "dropout", "packed"])
@pytest.mark.parametrize("name", SCORE)
def test_gradients_agree_on_the_cpu(name, form):
    found = gradients(form, name, "cpu", torch.float64)
    wanted = gradients(form, name, "reference", torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    tiny = gradients(form, name, "cpu", torch.float64, config=saccade.KernelConfig(2, 3))
    torch.testing.assert_close(tiny, wanted, rtol=1e-8, atol=1e-10)


def agree(name: str, form: str) -> None:
    found = gradients(form, name, "triton", torch.float32)
    wanted = gradients(form, name, "reference", torch.float64)
    for mine, exact in zip(found, wanted, strict=True):
        bound = 2e-5 * float(exact.abs().max()) + 1e-6
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=bound)


@in_interpreter
@pytest.mark.parametrize("name", SCORE)
def test_gradients_agree_in_kernels(name):
    agree(name, "dense")


@in_interpreter
@pytest.mark.parametrize("form", ["masked", "dropout", "packed"])
@pytest.mark.parametrize("name", ["relative", "two steps", "by query"])
def test_gradients_of_every_form_agree_in_kernels(name, form):
    agree(name, form)


@in_interpreter
def test_gradients_agree_where_tiles_are_many():
    length, table = 70, normal(HEADS, 139, seed=4) * 0.3
    results = []
    for implementation, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        given = [normal(1, HEADS, length, 16, seed=n, dtype=dtype) for n in range(3)]
        bias = table.to(dtype).requires_grad_()
        by_key = normal(length, seed=5, dtype=dtype).requires_grad_()
        score = as_score(lambda s, b, h, q, k: s + bias[h, q - k + 69] * by_key[k])  # noqa: B023
        output = saccade.attention(
            *given, score=score, mask=saccade.masks.window(20), implementation=implementation
        )
        weights = normal(*output.shape, seed=6, dtype=dtype)
        results.append(torch.autograd.grad((output * weights).sum(), [bias, by_key]))
    for exact, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_every_operation_is_carried_back(name):
    """As autograd does, to the scores and to all captured tensors of real numbers at once."""
    score = as_score(SCORES[name])
    tensors = [
        table.detach().double().requires_grad_() if table.is_floating_point() else table
        for table in score.captured.tensors
    ]
    captured = Captured(tensors, *score.captured[1:])
    raw = normal(*SHAPE, seed=5).requires_grad_()
    grad, at = normal(*SHAPE, seed=6), coordinates(SHAPE)
    wanted = [place for place, table in enumerate(tensors) if table.requires_grad]
    with torch.no_grad():
        _, values = change_with_slopes(score.key, captured, raw.detach().clone(), at, wanted)
        found, taken = change_backward(score.key, captured, grad.clone(), None, values, wanted)
    changed = evaluate.change(score.key, captured, raw, at)
    leaves = [raw, *(tensors[place] for place in wanted)]
    exact = (
        torch.autograd.grad(changed, leaves, grad, allow_unused=True, materialize_grads=True)
        if changed.requires_grad
        else [torch.zeros_like(leaf) for leaf in leaves]
    )
    torch.testing.assert_close(found, exact[0])
    totals = {place: torch.zeros_like(tensors[place]) for place in wanted}
    for share in taken:
        share.add_to(totals[share.slot])
    torch.testing.assert_close(list(totals.values()), list(exact[1:]))


def test_what_is_hidden_gives_no_gradient():
    """Where a mask hides pairs, what a derivative gives there, NaN perhaps, is left out."""
    table = torch.tensor([1.0, 4.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    score = as_score(lambda s, b, h, q, k: s * torch.sqrt(table[k]))
    query, key, value = (normal(1, 1, 4, 3, seed=n) for n in range(3))
    results = []
    for shown, mask in ((4, as_mask(lambda b, h, q, k: k < 2)), (2, None)):
        given = query, key[:, :, :shown], value[:, :, :shown]
        output = saccade.attention(*given, score=score, mask=mask, implementation="cpu")
        results.append(torch.autograd.grad(output.square().sum(), table)[0])
    torch.testing.assert_close(results[0], results[1])


@in_interpreter
def test_sums_without_an_order_are_refused_where_bits_must_be_equal():
    given = rows("dense", torch.float32, 16)
    slopes = torch.ones(HEADS, requires_grad=True)
    bias = normal(HEADS, QUERY_LEN, KV_LEN, dtype=torch.float32).requires_grad_()
    call = {"deterministic": True, "implementation": "triton"}
    score = as_score(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
    output = saccade.attention(*given, score=score, **call)
    with pytest.raises(NotImplementedError, match="deterministic: the gradient of a tensor that a"):
        output.sum().backward()
    saccade.attention(*given, score=scores.bias(bias), **call).sum().backward()
    assert bias.grad is not None
    detached = as_score(lambda s, b, h, q, k: s - slopes.detach()[h] * (q - k).abs())
    given[0].requires_grad_()
    saccade.attention(*given, score=detached, **call).sum().backward()
    assert given[0].grad is not None
    for implementation in ("cpu", "reference"):
        results = []
        for _ in range(2):
            output = saccade.attention(
                *given, score=score, deterministic=True, implementation=implementation
            )
            results.append(torch.autograd.grad(output.sum(), slopes)[0])
        assert torch.equal(*results)

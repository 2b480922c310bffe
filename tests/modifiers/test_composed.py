"""Functions of PyTorch's in scores: what they give, their derivatives, and what kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import coordinates, score_of_kernel

import saccade
from saccade import masks, scores
from saccade.modifiers.derivative import change_backward, change_with_slopes

SHAPE = (1, 2, 6, 7)
LEARNED = torch.tensor(0.7, dtype=torch.float64)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fmod": lambda s, b, h, q, k: torch.fmod(s, 0.7) + torch.fmod(q - k, 3),
    "fmod below 0": lambda s, b, h, q, k: s.fmod(-0.7) + torch.fmod(k - q, -4),
    "log1p": lambda s, b, h, q, k: torch.log1p(s.abs() / 100),
    "expm1": lambda s, b, h, q, k: torch.expm1(s) + torch.special.expm1(s / 1000),
    "sin": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(s / 4),
    "erf": lambda s, b, h, q, k: torch.erf(s),
    "gelu": lambda s, b, h, q, k: F.gelu(s) - F.gelu(s * 2, approximate="tanh"),
    "silu": lambda s, b, h, q, k: F.silu(s) + F.mish(s),
    "softplus": lambda s, b, h, q, k: F.softplus(s) - F.softplus(s, 3, 2) + F.logsigmoid(s * 40),
    "elu": lambda s, b, h, q, k: F.elu(s * 9) + F.elu(s, 0.3) + F.selu(s) + F.celu(s, 1.7),
    "relu": lambda s, b, h, q, k: F.relu(s) + F.leaky_relu(s, 0.1) + F.relu6(s * 4),
    "hard": lambda s, b, h, q, k: F.hardtanh(s) + F.hardsigmoid(s) + F.hardswish(s),
    "soft": lambda s, b, h, q, k: F.softsign(s) + F.tanhshrink(s) + F.threshold(s, 0.1, -2.0),
    "towards 0": lambda s, b, h, q, k: s * torch.div(q - k, 3, rounding_mode="trunc"),
    "towards 0, real": lambda s, b, h, q, k: s + torch.div(s, 0.3, rounding_mode="trunc"),
    "by below 0": lambda s, b, h, q, k: s * torch.div(q - k, -3, rounding_mode="trunc"),
    "by rows": lambda s, b, h, q, k: s * torch.div(q - 3, k - 9, rounding_mode="trunc"),
    "down": lambda s, b, h, q, k: s * torch.div(q - k, 3, rounding_mode="floor"),
    "remainder": lambda s, b, h, q, k: torch.remainder(s, 0.7) + torch.remainder(q - k, -3),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, min=-0.5) + s.clip(-1, 1).clamp_max(0.6),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) + torch.special.expit(s * 2),
    "log10": lambda s, b, h, q, k: torch.log10(s.abs() + 1) + torch.logit(torch.sigmoid(s)),
    "sign": lambda s, b, h, q, k: s * torch.sign(q - k) + torch.sgn(s),
    "finite": lambda s, b, h, q, k: torch.where(
        torch.isfinite(s / (q - k)) & ~torch.isnan(s) & ~torch.isinf(s), s, 0.0
    ),
    "round": lambda s, b, h, q, k: s * torch.round((q - k) / 2) + torch.frac(s * 3),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, 2 * s, 0.3) + torch.addcmul(s, s, s, value=0.5),
    "logaddexp": lambda s, b, h, q, k: torch.logaddexp(s, s * 2 - 1) + torch.hypot(s, s + 1),
    "alpha": lambda s, b, h, q, k: torch.add(s, s * s, alpha=2) - s.sub(q, alpha=3),
    "powers": lambda s, b, h, q, k: s.abs() ** 1.5 + (s.abs() + 1) ** -2 + s**3.0 + s**0,
    "powers of numbers": lambda s, b, h, q, k: s * 2**h + 0.9 ** (q - k).abs().double(),
    "in place": lambda s, b, h, q, k: s.mul_(2).add_(s).masked_fill_(q == k, 0.5),
    "operators by name": lambda s, b, h, q, k: torch.ops.aten.sin.default(s) + (+s),
    "of a number that learns": lambda s, b, h, q, k: s * F.softplus(LEARNED),
}


def drawn() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64) * 1.5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_derivatives_are_pytorchs(name: str) -> None:
    function, at = FUNCTIONS[name], coordinates(SHAPE)
    given = drawn().requires_grad_()
    wanted = function(given.clone(), at.batch, at.head, at.query_row, at.kv_row)
    slopes = torch.autograd.grad(wanted.sum(), given)[0]
    score = scores.as_score(function)
    found, values = change_with_slopes(score.key, score.captured, given.detach().clone(), at)
    # PyTorch has constants of selu and of hard functions in float32.
    close = dict.fromkeys(("rtol", "atol"), 1e-6 if name in ("elu", "hard") else 1e-12)
    torch.testing.assert_close(found, wanted.detach(), **close)
    grad, _ = change_backward(score.key, score.captured, torch.ones(SHAPE).double(), None, values)
    torch.testing.assert_close(grad, slopes, **close)
    if torch.cuda.is_available():
        return
    # Of one operation after another, each rounds by half a unit of the last place of what it gives,
    # exponents and quotients by four; numbers are below 64 on the way.
    allowed = 64 * 4 * len(score.key.split(";")) * torch.finfo(torch.float32).eps / 2
    single = given.detach().float()
    at_single = function(single.double(), at.batch, at.head, at.query_row, at.kv_row)
    changed, _ = score_of_kernel(score, single)
    apart = (changed.double() - at_single).abs()
    jumps = name in ("fmod", "fmod below 0", "towards 0, real", "remainder", "round")
    assert float((apart > allowed).double().mean()) <= (0.02 if jumps else 0)


SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 1e-4, -1e-4, 3.0, -3.0, 80.0, -80.0, 100.0, -100.0]


@pytest.mark.parametrize("name", ["log1p", "expm1", "sin", "cos", "erf"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_kernels_keep_digits(name: str) -> None:
    """Near 0 and where exponents end; NaN stays NaN."""
    function = getattr(torch, name)
    score = scores.as_score(lambda s, b, h, q, k: function(s))
    numbers = [*SPECIAL, torch.inf, -torch.inf, torch.nan, -1.0]
    given = torch.tensor(numbers).view(1, 1, 4, 4)
    found, slope = score_of_kernel(score, given)
    exact = given.double().requires_grad_()
    wanted = function(exact)
    slopes = torch.autograd.grad(wanted.sum(), exact)[0]
    largest = torch.finfo(torch.float32).max
    close = {"rtol": 1e-6, "atol": 1e-38, "equal_nan": True}
    wanted = torch.where(wanted.abs() > largest, wanted.sign() * torch.inf, wanted)
    torch.testing.assert_close(found.double(), wanted.detach(), **close)
    finite = slopes.isfinite() & (slopes.abs() < largest)
    torch.testing.assert_close(slope.double()[finite], slopes[finite], **{**close, "atol": 1e-6})


def test_masks_by_functions_that_turn_round_are_never_classified_wrongly() -> None:
    for function in (torch.sin, torch.cos, torch.erf, torch.log1p, torch.expm1):
        mask = masks.as_mask(lambda b, h, q, k, of=function: of((q - k) / 3.0) > 0.5)
        rows = torch.randn(3, 1, 1, 300, 16)
        found = saccade.attention(*rows, mask=mask)
        wanted = saccade.attention(*rows, mask=mask.to_dense(1, 1, 300, 300))
        torch.testing.assert_close(found, wanted)


def test_what_they_do_not_take_is_said() -> None:
    cases: dict[str, Callable[..., Any]] = {
        "gelu in a mask or score: gelu: got approximate='fast'": lambda s, b, h, q, k: F.gelu(
            s, approximate="fast"
        ),
        "takes a multiple of 0.5 from -8 to 8": lambda s, b, h, q, k: s**0.3,
        "any number above 0 to the power of a real one": lambda s, b, h, q, k: s * 3**h,
        "div_ would make a real number of a whole one": lambda s, b, h, q, k: s + q.div_(2),
        "takes 'floor', 'trunc' or none": lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="up"),
    }
    for problem, function in cases.items():
        with pytest.raises(TypeError, match=problem.replace("(", r"\(")):
            scores.as_score(function)

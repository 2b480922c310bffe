"""Scores: how the scaled score of a pair changes before the softmax.

A score change is a plain function of (score, batch, head, query_row, kv_row) with captured tensors
and numbers. Its derivatives, by the score and by what it reads of captured tensors, follow from it.
Changes chain with ``>>``: the left one comes first. Rows are numbered as in `saccade.masks`.

Examples:
    >>> change = scores.softcap(30.0) >> scores.alibi(torch.tensor([0.5, 0.25]))
    >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
    >>> output = saccade.attention(query, key, value, score=change)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from saccade.modifiers import expression
from saccade.modifiers.evaluate import absolute, exp, log, maximum, minimum, take, tanh, where
from saccade.modifiers.expression import Captured
from saccade.modifiers.form import ModifierFunction, form_of, kind_of
from saccade.modifiers.modifier import Modifier, is_plain_function, refuse_in_graphs
from saccade.runtime.arguments import LARGEST, SMALLEST, check_align, floats

__all__ = [
    "Score",
    "absolute",
    "alibi",
    "bias",
    "exp",
    "function",
    "log",
    "maximum",
    "minimum",
    "softcap",
    "take",
    "tanh",
    "where",
]


@dataclass(eq=False, repr=False)
class Score(Modifier):
    """A change of the scaled score: what a score function computes, and what it captured.

    Printed, it shows the expression. Scores are equal if they compute the same from equal values.

    Examples:
        >>> change = scores.softcap(30.0) >> scores.alibi(torch.tensor([0.5, 0.25]))
        >>> change
        Score(30.0 * tanh(score / 30.0) - slopes[head] * abs(query_row + shift - kv_row))
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> output = saccade.attention(query, key, value, score=change)
    """

    key: str
    captured: Captured = field(default_factory=Captured)

    def __rshift__(self, later: Score) -> Score:
        if not isinstance(later, Score):
            return NotImplemented
        found = expression.combined(">>", self.key, later.key)
        return Score(found.key, found.captured(self.captured, later.captured))


class ScoreFunction(ModifierFunction[Score]):
    """A function that `function` was given; called with the captured values it gives a `Score`."""

    makes = Score
    of_scores = True


@overload
def function(body: Callable[..., Any]) -> ScoreFunction: ...
@overload
def function(*, align: str = "top_left") -> Callable[[Callable[..., Any]], ScoreFunction]: ...


def function(body: Callable[..., Any] | None = None, *, align: str = "top_left") -> Any:
    """Turn a function into a score change of your own.

    The function is run once, on symbols, when the score is made, as `saccade.masks.function` says.
    A function that captures nothing by arguments may be given to an attention call as it is.
    Captured tensors of real numbers that require gradients get them.

    Args:
        body: a function of (score, batch, head, query_row, kv_row, *captured) that gives the new
            score; made of arithmetic, comparisons, ``torch.where``, ``torch.tanh``,
            ``torch.sigmoid``, ``torch.exp`` and the like; captured tensors are read by an index
            for each dimension, or by `take`. It cannot branch on a row or score.
        align: "top_left" (rows as they are) or "bottom_right" (query_row + kv_len - query_len).

    Returns:
        A callable: give it the captured values and it gives the `Score`.

    Raises:
        TypeError: if `body` is no function; when the score is made, if the function does what
            cannot be known without its rows, with the line and what to write instead.
        ValueError: if `align` is neither of the two.

    Examples:
        >>> @scores.function
        ... def amplify(score, batch, head, query_row, kv_row, gains):
        ...     return score * gains[head]
        >>> gains = torch.tensor([1.0, 1.5], requires_grad=True)
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> saccade.attention(query, key, value, score=amplify(gains)).sum().backward()
        >>> gains.grad.shape
        torch.Size([2])
    """
    check_align(align)
    if body is None:
        return functools.partial(ScoreFunction, align=align)
    return ScoreFunction(body, align)


def _built_in(body: Callable[..., Any], align: str, *captured: Any, kind: str = "") -> Score:
    """A score of this module, whose tensors have the names of its parameters.

    kind: of the only captured tensor, where it is read with more dimensions than it has.
    """
    kinds = (kind,) if kind else tuple(kind_of(value) for value in captured)
    form = form_of(body, align, kinds, score=True, built_in=True)
    return Score(form.key, form.captured(captured))


# ---- what they compute ----------------------------------------------------------------------


def _softcap(score, batch, head, query_row, kv_row, cap):
    return cap * tanh(score / cap)


def _alibi(score, batch, head, query_row, kv_row, slopes):
    return score - take(slopes, head) * absolute(query_row - kv_row)


def _bias(score, batch, head, query_row, kv_row, tensor):
    return score + take(tensor, batch, head, query_row, kv_row)


# ---- the public constructors ----------------------------------------------------------------


CAPS = "a number of 1e-30 to 1e+30"  # as scales: beyond, float32 has no quotient by it


def softcap(cap: float | int) -> Score:
    """Bend scores smoothly into (-cap, cap): cap · tanh(score / cap).

    Args:
        cap: 1e-30 to 1e+30, in units of the scaled score.

    Source: Gemma 2 (Gemma Team 2024), section 2.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> output = saccade.attention(query, key, value, score=scores.softcap(30.0))
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float, torch.SymFloat)):
        raise TypeError(f"cap: got {cap!r}, takes {CAPS}")
    if not SMALLEST <= cap <= LARGEST:
        raise ValueError(f"cap: got {cap}, takes {CAPS}")
    return _built_in(_softcap, "top_left", float(cap))


def alibi(slopes: Tensor, align: str = "bottom_right") -> Score:
    """Subtract a penalty that grows with distance: slopes[head] · |query_row - kv_row|.

    Args:
        slopes: [query_heads] or [1], floating point; differentiable.
        align: "bottom_right" or "top_left".

    Source: ALiBi (Press et al. 2022), section 3.

    Examples:
        >>> slopes = torch.tensor([0.5, 0.25])  # of two heads
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> output = saccade.attention(query, key, value, causal=True, score=scores.alibi(slopes))
    """
    check_align(align)
    slopes = floats("slopes", slopes)
    if slopes.dim() != 1:
        raise ValueError(f"slopes: got {slopes.dim()} dimensions, takes 1: [query_heads]")
    return _built_in(_alibi, align, slopes)


def bias(tensor: Tensor) -> Score:
    """Add a tensor to the scores; its gradient is computed, summed over broadcast dimensions.

    Args:
        tensor: floating point, broadcastable to [batch, query_heads, query_len, kv_len]. -inf
            gives a pair no weight; only a mask also keeps NaN in its key or value away.

    Examples:
        >>> added = torch.zeros(2, 8, 8, requires_grad=True)  # of two heads, for every batch entry
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> saccade.attention(query, key, value, score=scores.bias(added)).sum().backward()
        >>> added.grad.shape
        torch.Size([2, 8, 8])
    """
    tensor = floats("tensor", tensor)
    if tensor.dim() > 4:
        raise ValueError(f"tensor: got {tensor.dim()} dimensions, takes at most 4")
    return _built_in(_bias, "top_left", tensor, kind="f4")  # a call adds dimensions of size 1


NOTHING_CHANGED = Score("")


# What the `score` argument of a call takes.
AnyScore = Score | Callable[..., Any] | None


def _of_function(body: Callable[..., Any]) -> Score:
    """The score of a plain function, with the values that it reaches now."""
    refuse_in_graphs("score", body)
    name = getattr(body, "__name__", "")
    if name and globals().get(name) is body:
        raise TypeError(
            f"score: got the function saccade.scores.{name}, takes the score that it returns: "
            f"write score=saccade.scores.{name}(...)"
        )
    found = ScoreFunction(body, "top_left")()
    return NOTHING_CHANGED if found.key == "score" else found


def as_score(score: AnyScore) -> Score:
    """What the `score` argument of an attention call stands for.

    Raises:
        TypeError: for anything but a `Score`, a function of scores and rows, or None.
    """
    if score is None:
        return NOTHING_CHANGED
    if isinstance(score, Score):
        return score
    if isinstance(score, ScoreFunction):
        return score()
    if not isinstance(score, Tensor) and is_plain_function(score):
        if torch.compiler.is_dynamo_compiling():
            from saccade.modifiers.outside_graphs import score_of

            return score_of(_of_function, score)
        return _of_function(score)
    advice = "; a tensor to add: saccade.scores.bias(tensor)" if isinstance(score, Tensor) else ""
    raise TypeError(
        f"score: got {type(score).__name__}, takes a saccade Score such as "
        f"saccade.scores.softcap(30.0), or a function of (score, batch, head, query_row, kv_row)"
        f"{advice}"
    )

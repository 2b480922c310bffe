"""Scores: how the scaled score of a pair changes before the softmax.

A score change is a plain function of (score, batch, head, query_row, kv_row) with captured
tensors and numbers, and a second function for its derivative. Changes chain with ``>>``: the left
one comes first. Rows are numbered as in `saccade.masks`.

    >>> import saccade
    >>> change = saccade.scores.softcap(30.0) >> saccade.scores.alibi(slopes)
    >>> saccade.attention(query, key, value, score=change)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from saccade import expressions
from saccade.captures import Extents, check_align, floats, misfit
from saccade.expressions import Captured, Coordinates, Leaf
from saccade.functions import Function, named, register
from saccade.language import absolute, exp, log, maximum, minimum, take, tanh, where

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


@dataclass(unsafe_hash=True)  # torch.compile (2.11) makes no frozen one inside a graph
class Score:
    """A change of the scaled score: the key of an expression and what its functions captured."""

    key: str
    captured: Captured = field(default_factory=Captured)

    def __rshift__(self, later: Score) -> Score:
        if not isinstance(later, Score):
            return NotImplemented
        return Score(f"(>> {self.key} {later.key})", self.captured.joined(later.captured))


@dataclass(unsafe_hash=True)
class ScoreFunction:
    """A registered score function; calling it with the captured values gives a `Score`."""

    name: str
    align: str

    def __call__(self, *captured: Tensor | int | float) -> Score:
        key = expressions.leaf_key(self.name, self.align, captured)
        return Score(key, expressions.capture(captured))


@overload
def function(
    body: Callable[..., Any], *, derivative: Callable[..., Any] | None = None, align: str = ...
) -> ScoreFunction: ...
@overload
def function(
    *, derivative: Callable[..., Any] | None = None, align: str = ...
) -> Callable[[Callable[..., Any]], ScoreFunction]: ...


def function(
    body: Callable[..., Any] | None = None,
    *,
    derivative: Callable[..., Any] | None = None,
    align: str = "top_left",
) -> Any:
    """Turn a plain function into a score change of your own.

    Args:
        body: a function of (score, batch, head, query_row, kv_row, *captured) that gives the new
            score; made of operators, `take`, and this module's `tanh`, `exp`, `log`, `absolute`,
            `minimum`, `maximum` and `where`.
        derivative: d new score / d score, a function of the same arguments. Without it the
            change serves forward passes only.
        align: "top_left" (rows as they are) or "bottom_right" (query_row + kv_len - query_len).

    Returns:
        A callable: give it the captured values and it gives the `Score`.

    Raises:
        TypeError: if `body` or `derivative` is no plain function.
        ValueError: if `align` is neither of the two.

    >>> def slope(score, batch, head, query_row, kv_row, gain):
    ...     return gain
    >>> @saccade.scores.function(derivative=slope)
    ... def amplify(score, batch, head, query_row, kv_row, gain):
    ...     return score * gain
    >>> change = amplify(1.5)
    """
    check_align(align)
    if body is None:
        return lambda actual: function(actual, derivative=derivative, align=align)
    if derivative is not None:
        named(derivative, "derivative")
    registered = register(Function(named(body), body, derivative))
    return ScoreFunction(registered.name, align)


# ---- the functions -------------------------------------------------------------------------


def _one(score, batch, head, query_row, kv_row, *captured):
    return 1.0


def _softcap(score, batch, head, query_row, kv_row, cap):
    return cap * tanh(score / cap)


def _softcap_derivative(score, batch, head, query_row, kv_row, cap):
    capped = tanh(score / cap)
    return 1.0 - capped * capped


def _alibi(score, batch, head, query_row, kv_row, slopes):
    return score - take(slopes, head) * absolute(query_row - kv_row)


def _bias(score, batch, head, query_row, kv_row, table):
    return score + take(table, batch, head, query_row, kv_row)


def _check_slopes(data: list[Any], extents: Extents) -> str | None:
    return misfit("slopes", data[0], ("query_heads",), extents)


def _check_bias(data: list[Any], extents: Extents) -> str | None:
    return misfit("tensor", data[0], ("batch", "query_heads", "query_len", "kv_len"), extents)


SOFTCAP = register(Function("softcap", _softcap, _softcap_derivative)).name
ALIBI = register(Function("alibi", _alibi, _one, check=_check_slopes)).name
BIAS = register(Function("bias", _bias, _one, differentiable=True, check=_check_bias)).name


# ---- the public constructors ----------------------------------------------------------------


def softcap(cap: float | int) -> Score:
    """Bend scores smoothly into (-cap, cap): cap · tanh(score / cap).

    Args:
        cap: greater than 0, in units of the scaled score.

    Source: Gemma 2 (Gemma Team 2024), section 2.
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float, torch.SymFloat)):
        raise TypeError(f"cap: got {cap!r}, takes a finite number greater than 0")
    if not 0 < cap < math.inf:
        raise ValueError(f"cap: got {cap}, takes a finite number greater than 0")
    return ScoreFunction(SOFTCAP, "top_left")(float(cap))


def alibi(slopes: Tensor, align: str = "bottom_right") -> Score:
    """Subtract a penalty that grows with distance: slopes[head] · |query_row - kv_row|.

    Args:
        slopes: [query_heads] or [1], floating point. Not differentiable: a slope that requires
            gradients is refused.
        align: "bottom_right" or "top_left".

    Source: ALiBi (Press et al. 2022), section 3.
    """
    check_align(align)
    slopes = floats("slopes", slopes)
    if slopes.dim() != 1:
        raise ValueError(f"slopes: got {slopes.dim()} dimensions, takes 1: [query_heads]")
    return ScoreFunction(ALIBI, align)(slopes)


def bias(tensor: Tensor) -> Score:
    """Add a tensor to the scores; its gradient is computed, summed over broadcast dimensions.

    Args:
        tensor: floating point, broadcastable to [batch, query_heads, query_len, kv_len]. -inf
            gives a pair no weight; only a mask also keeps NaN in its key or value away.
    """
    tensor = floats("tensor", tensor)
    if tensor.dim() > 4:
        raise ValueError(f"tensor: got {tensor.dim()} dimensions, takes at most 4")
    full = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    return ScoreFunction(BIAS, "top_left")(full)


NOTHING_CHANGED = Score("")


def as_score(score: Score | None) -> Score:
    """What the `score` argument of an attention call stands for.

    Raises:
        TypeError: for anything but a `Score` or None.
    """
    if score is None:
        return NOTHING_CHANGED
    if isinstance(score, Score):
        return score
    if isinstance(score, ScoreFunction):
        raise TypeError(
            "score: got a score function, takes a Score: call it, with what it captures"
        )
    raise TypeError(f"score: got {type(score).__name__}, takes a saccade Score such as scores.bias")


# ---- evaluation on torch tensors -------------------------------------------------------------


def change(
    key: str,
    captured: Captured,
    score: Tensor,
    at: Coordinates,
    visible: Tensor | None = None,
) -> Tensor:
    """The changed scores of a tile, in the dtype of the scores.

    With `visible`, autograd carries nothing through hidden pairs from one function to another:
    where a captured number is NaN, so is the derivative, and 0 times that.
    """
    for leaf in expressions.leaves(expressions.parse(key)):
        if visible is not None:
            score = torch.where(visible, score, score.detach())
        score = _changed(leaf, (score, *leaf.place(at), *leaf.data(captured)))
    return score


def _changed(leaf: Leaf, arguments: tuple[Any, ...]) -> Tensor:
    """What one function makes of the scores, in their dtype and shape."""
    score = arguments[0]
    changed = torch.as_tensor(leaf.function(*arguments), device=score.device)
    return changed.to(score.dtype).expand(torch.broadcast_shapes(changed.shape, score.shape))


def change_backward(
    key: str, captured: Captured, score: Tensor, at: Coordinates, grad: Tensor
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Carry the gradient of the changed scores back through the chain.

    Returns:
        The gradient of the scores before the chain, and for each captured tensor that is
        differentiable its place among the captured tensors with the gradient of what was taken.
    """
    steps = []
    for leaf in expressions.leaves(expressions.parse(key)):
        arguments = (score, *leaf.place(at), *leaf.data(captured))
        steps.append((leaf, arguments))
        score = _changed(leaf, arguments)
    taken = []
    for leaf, arguments in reversed(steps):
        function = leaf.function
        if function.differentiable:
            taken += [(position, grad) for kind, position in leaf.slots if kind == "t"]
        grad = (grad * function.differentiate(*arguments)).to(grad.dtype)
    return grad, taken

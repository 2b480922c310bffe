"""Derivatives: of a score's result by the score and by the captured tensors that it reads.

Rules of differentiation, applied to the steps of an expression from the last to the first; the
derivative is an expression of the same variables and captured values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from saccade.modifiers.evaluate import as_scores, evaluate, inside, keep_, own, slices_of
from saccade.modifiers.expression import (
    READS,
    REAL,
    Captured,
    Coordinates,
    Expression,
    ExpressionBuilder,
    needed,
    parse,
)

LN_2 = math.log(2)


class Derivatives:
    """Derivatives of an expression's result, as further steps behind the expression's.

    Attributes:
        expression: the steps of the score, then those that its derivatives need besides.
        result: the number of the step that gives the changed score.
        of_score: the number of the step that gives the derivative by the score; None where the
            result does not depend on it.
        of_reads: by slot number of a captured tensor of real numbers, the number of the step that
            gives the derivative by the entry that is read, and that of the read itself.
    """

    def __init__(self, expression: Expression):
        builder = self._builder = _Calculus()
        self.result = builder.include(expression)
        # By the score's steps: numbers may differ where equal steps became one.
        slopes: dict[int, int] = {self.result: builder.literal(1.0)}
        for number in range(self.result, -1, -1):
            slope = slopes.get(number)
            if slope is None:
                continue
            for operand, by in builder.slopes(number, slope):
                known = slopes.get(operand)
                slopes[operand] = by if known is None else builder.add("+", known, by)
        steps = builder.steps
        self.of_score = next((n for i, n in slopes.items() if steps[i].op == "score"), None)
        self.of_reads = {
            steps[number].slot[1]: (slope, number)
            for number, slope in slopes.items()
            if steps[number].op in READS
        }
        self.expression = tuple(steps)


@functools.lru_cache(maxsize=1024)
def derivatives(key: str) -> Derivatives:
    """The derivatives of a score by its key."""
    return Derivatives(parse(key))


class _Calculus(ExpressionBuilder):
    """A builder that leaves out factors of one and what a product and a quotient undo."""

    def times(self, left: int, right: int) -> int:
        for one, other in ((left, right), (right, left)):
            if self.is_literal(one, 1.0):
                return other
            step = self.steps[other]
            if step.op == "/" and step.operands[1] == one:
                return step.operands[0]
        return self.add("*", left, right)

    def over(self, left: int, right: int) -> int:
        step = self.steps[left]
        if step.op == "*" and right in step.operands:
            return step.operands[1 - step.operands.index(right)]
        return self.add("/", left, right)

    def slopes(self, number: int, slope: int) -> list[tuple[int, int]]:
        """What a step's derivative adds to those of its operands that are real numbers."""
        step = self.steps[number]
        rule = RULES.get(step.op)
        if rule is None:
            return []
        found = zip(step.operands, rule(self, number, slope, *step.operands), strict=True)
        return [
            (operand, by)
            for operand, by in found
            if by is not None and self.steps[operand].kind == REAL
        ]


Rule = Callable[..., list[int | None]]


def _where(b: _Calculus, result: int, slope: int, test: int, yes: int, no: int) -> list[int | None]:
    zero = b.literal(0.0)
    return [None, b.add("where", test, slope, zero), b.add("where", test, zero, slope)]


def _quotient(b: _Calculus, result: int, slope: int, x: int, y: int) -> list[int | None]:
    return [b.over(slope, y), b.times(slope, b.add("neg", b.add("/", result, y)))]


def _tanh(b: _Calculus, result: int, slope: int, x: int) -> list[int | None]:
    return [b.times(slope, b.add("-", b.literal(1.0), b.add("*", result, result)))]


def _sigmoid(b: _Calculus, result: int, slope: int, x: int) -> list[int | None]:
    return [b.times(slope, b.add("*", result, b.add("-", b.literal(1.0), result)))]


def _erf(b: _Calculus, result: int, slope: int, x: int) -> list[int | None]:
    bell = b.add("exp", b.add("neg", b.add("*", x, x)))
    return [b.times(slope, b.add("*", b.literal(2 / math.sqrt(math.pi)), bell))]


def _sqrt(b: _Calculus, result: int, slope: int, x: int) -> list[int | None]:
    return [b.over(slope, b.add("*", b.literal(2.0), result))]


def _abs(b: _Calculus, result: int, slope: int, x: int) -> list[int | None]:
    zero, down = b.literal(0.0), b.add("neg", slope)
    above = b.add("where", b.add("<", zero, x), slope, zero)
    return [b.add("where", b.add("<", x, zero), down, above)]


def _extreme(b: _Calculus, result: int, slope: int, x: int, y: int) -> list[int | None]:
    zero, half = b.literal(0.0), b.times(slope, b.literal(0.5))  # equal ones share, as in PyTorch
    first, second = (x, y) if b.steps[result].op == "min" else (y, x)

    def chosen(one: int, other: int) -> int:
        equal = b.add("where", b.add("==", x, y), half, zero)
        return b.add("where", b.add("<", one, other), slope, equal)

    return [chosen(first, second), chosen(second, first)]


RULES: dict[str, Rule] = {
    "+": lambda b, result, slope, x, y: [slope, slope],
    "-": lambda b, result, slope, x, y: [slope, b.add("neg", slope)],
    "neg": lambda b, result, slope, x: [b.add("neg", slope)],
    "*": lambda b, result, slope, x, y: [b.times(slope, y), b.times(slope, x)],
    "/": _quotient,
    "%": lambda b, result, slope, x, y: [slope, b.times(slope, b.add("neg", b.add("//", x, y)))],
    "where": _where,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "exp": lambda b, result, slope, x: [b.times(slope, result)],
    "exp2": lambda b, result, slope, x: [b.times(slope, b.times(result, b.literal(LN_2)))],
    "expm1": lambda b, result, slope, x: [b.times(slope, b.add("+", result, b.literal(1.0)))],
    "log1p": lambda b, result, slope, x: [b.over(slope, b.add("+", b.literal(1.0), x))],
    "sin": lambda b, result, slope, x: [b.times(slope, b.add("cos", x))],
    "cos": lambda b, result, slope, x: [b.times(slope, b.add("neg", b.add("sin", x)))],
    "erf": _erf,
    "log": lambda b, result, slope, x: [b.over(slope, x)],
    "log2": lambda b, result, slope, x: [b.over(slope, b.times(x, b.literal(LN_2)))],
    "sqrt": _sqrt,
    "abs": _abs,
    "min": _extreme,
    "max": _extreme,
    "real": lambda b, result, slope, x: [slope],
}


# ---- gradient ------------------------------------------------------------------------------------
# Gradients of changed scores, carried back to the scores and to captured tensors.


class Taken(NamedTuple):
    """What the pairs of a tile give to the gradient of a captured tensor.

    Attributes:
        slot: the number of the captured tensor.
        gradient: of the entry that each pair reads.
        indices: which entry that is, for each dimension of the tensor, broadcastable to the pairs.
    """

    slot: int
    gradient: Tensor
    indices: list[Tensor]

    def add_to(self, total: Tensor) -> None:
        """Add to a tensor of the captured one's shape."""
        gradient = self.gradient
        slices = slices_of(total, self.indices)
        if slices is not None:
            part = total[tuple(slice(start, stop) for _, start, stop in slices)]
            alone = set(range(4)) - {dim for dim, _, _ in slices}
            gradient = gradient.sum(tuple(alone)) if alone else gradient
            part += gradient.reshape(part.shape)
            return
        for dim in range(gradient.dim()):  # where pairs read the same entry, they add up first
            if all(index.dim() <= dim or index.shape[dim] == 1 for index in self.indices):
                gradient = gradient.sum(dim, keepdim=True)
        if not self.indices:
            total += gradient.sum()
            return
        indices = tuple(index.expand(gradient.shape) for index in self.indices)
        total.index_put_(indices, gradient.to(total.dtype), accumulate=True)


def change_with_slopes(
    key: str, captured: Captured, score: Tensor, at: Coordinates, wanted: Collection[int] = ()
) -> tuple[Tensor, Sequence[Tensor]]:
    """The changed scores, and what `change_backward` will need: a step is computed once for both.

    The scores are written over; the changed ones may be.

    wanted: the slots of the captured tensors whose gradients will be needed.
    """
    found = derivatives(key)
    numbers = _numbers(found, wanted)
    needs = needed(found.expression, found.result, *numbers)
    values = evaluate(found.expression, captured, at, score, needs, read={found.result, *numbers})
    changed = as_scores(values[found.result], score)
    if found.result in numbers:  # exp is its own derivative
        changed = changed.clone()
    return own(found.expression[found.result], changed), values


def change_backward(
    key: str,
    captured: Captured,
    grad: Tensor,
    visible: Tensor | None,
    values: Sequence[Tensor] | None,
    wanted: Collection[int] = (),
) -> tuple[Tensor, list[Taken]]:
    """Carry the gradient of changed scores back; it is written over.

    Args:
        visible: which pairs are; what a derivative gives elsewhere, NaN perhaps, is left out.
        values: what `change_with_slopes` gave besides; None without a score.
        wanted: the slots of the captured tensors whose gradients are needed.

    Returns:
        The gradient of the scores before the change, and what wanted tensors get.
    """
    if values is None:
        return grad, []
    found = derivatives(key)

    def seen(product: Tensor) -> Tensor:
        return product if visible is None else keep_(product, visible)

    taken = []
    for slot, (slope, read) in _reads(found, wanted).items():
        step, table = found.expression[read], captured.tensors[slot]
        indices = [values[number] for number in step.operands]
        if slices_of(table, indices) is None:
            bound = _nearest if step.op == "take" else inside
            indices = [bound(i, size) for i, size in zip(indices, table.shape, strict=True)]
            indices = [index.view((1,) * (4 - index.dim()) + index.shape) for index in indices]
        taken.append(Taken(slot, seen((grad * values[slope]).to(grad.dtype)), indices))
    if found.of_score is None:
        return grad.zero_(), taken
    return seen(grad.mul_(values[found.of_score])), taken


def _reads(found: Derivatives, wanted: Collection[int]) -> dict[int, tuple[int, int]]:
    return {slot: found.of_reads[slot] for slot in wanted if slot in found.of_reads}


def _numbers(found: Derivatives, wanted: Collection[int]) -> list[int]:
    """The steps that gradients are made of."""
    numbers = [number for pair in _reads(found, wanted).values() for number in pair]
    return numbers if found.of_score is None else [*numbers, found.of_score]


def _nearest(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, max(size - 1, 0))

"""Division: which captured numbers divide, and rests computed of query rows and of keys apart.

Kernels are handed a number that divides with what makes a division by it a product
(`gpu/device_ops.py`), of some eight instructions. A dilated mask asks ``(q - k) % d == c`` of every
pair. It is the same as ``(q - c) % d == k % d``, if 0 <= c < d: then there is a rest for each row
and one for each key, and a comparison for each pair.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from saccade.modifiers.expression import (
    READS,
    WHOLE,
    Expression,
    ExpressionBuilder,
    mentions,
)

ROWS = ("query_row", "kv_row")
MOST_TERMS = 64  # of a sum that is looked at


@functools.lru_cache(maxsize=1024)
def divisors(expression: Expression) -> frozenset[tuple[str, int]]:
    """The slots of captured numbers by which whole numbers are divided."""
    return frozenset(
        expression[step.operands[1]].slot
        for step in expression
        if step.op in ("//", "%")
        and step.kind == WHOLE
        and expression[step.operands[1]].op == "number"
    )


@functools.lru_cache(maxsize=1024)
def block_sizes(expression: Expression) -> frozenset[tuple[str, int]]:
    """The slots of captured numbers whose quotients are indices of captured tensors."""
    indices = {number for step in expression if step.op in READS for number in step.operands}
    steps = [expression[number] for number in indices if expression[number].op == "//"]
    return frozenset(
        expression[step.operands[1]].slot
        for step in steps
        if expression[step.operands[1]].op == "number"
    )


@functools.lru_cache(maxsize=1024)
def with_rests_apart(
    expression: Expression, results: tuple[int, ...]
) -> tuple[Expression, tuple[int, ...]]:
    """The expression with comparisons of rests written so, and where these results are in it."""
    builder = _Apart(expression)
    found = tuple(builder.included(number) for number in results)
    return tuple(builder.steps), found


class _Sum(NamedTuple):
    """Terms that are added and terms that are subtracted, as steps of the builder."""

    plus: tuple[int, ...]
    minus: tuple[int, ...]

    def negated(self) -> _Sum:
        return _Sum(self.minus, self.plus)


class _Apart(ExpressionBuilder):
    """A copy of an expression, in which comparisons of rests are changed."""

    def __init__(self, expression: Expression):
        super().__init__()
        self.source = expression
        self.by = [mentions(expression, [name]) for name in ROWS]
        self.copies: dict[int, int] = {}
        for number, step in enumerate(expression):
            compared = self._compared(number) if step.op == "==" else None
            if compared is None:
                operands = (self.copies[of] for of in step.operands)
                compared = self.add(step.op, *operands, detail=step.detail)
            self.copies[number] = compared

    def included(self, number: int) -> int:
        """Where a step of the expression is."""
        return self.copies[number]

    def _compared(self, number: int) -> int | None:
        """The comparison of a rest with something, rows apart from keys; None where it is none."""
        for one, other in (operands := self.source[number].operands, operands[::-1]):
            step = self.source[one]
            if step.op != "%" or step.kind != WHOLE or self.source[other].kind != WHOLE:
                continue
            dividend, divisor = step.operands
            along_both = all(by[dividend] for by in self.by)
            if self.source[divisor].op != "number" or not along_both:
                continue
            sides = self._sides(dividend)
            if sides is None or all(by[other] for by in self.by):
                continue
            return self._apart(sides, other, divisor)
        return None

    def _sides(self, dividend: int) -> tuple[_Sum, _Sum] | None:
        """A sum as what depends on query rows, or on no row, and what depends on keys."""
        terms: dict[tuple[bool, bool], list[int]] = {}
        waiting = [(dividend, True)]
        while waiting:
            if len(waiting) + sum(map(len, terms.values())) > MOST_TERMS:
                return None
            term, added = waiting.pop()
            step = self.source[term]
            if step.op in ("+", "-", "neg") and step.kind == WHOLE:
                signs = {"+": (True, True), "-": (True, False), "neg": (False,)}[step.op]
                for of, sign in zip(step.operands, signs, strict=True):
                    waiting.append((of, added == sign))
            elif all(by[term] for by in self.by):
                return None
            else:
                terms.setdefault((self.by[1][term], added), []).append(self.copies[term])
        rows, keys = (
            _Sum(tuple(terms.get((side, True), ())), tuple(terms.get((side, False), ())))
            for side in (False, True)
        )
        return rows, keys

    def _apart(self, sides: tuple[_Sum, _Sum], other: int, divisor: int) -> int:
        """(rows + keys) % divisor == other."""
        moved = 0 if not self.by[1][other] else 1  # where the other number joins
        with_other, alone = sides[moved], sides[1 - moved]
        by, number = self.copies[divisor], self.copies[other]
        if alone.plus:  # other - with_other, and alone: numbers that are added are not turned over
            shifted, alone = _Sum((number, *with_other.minus), with_other.plus), alone
        else:
            shifted, alone = _Sum(with_other.plus, (number, *with_other.minus)), alone.negated()
        possible = self.add("&", self.add("<=", self.literal(0), number), self.add("<", number, by))
        rest = self.add("%", self._total(shifted), by)
        left = self.add("where", possible, rest, self.literal(-1))
        return self.add("==", left, self.add("%", self._total(alone), by))

    def _total(self, of: _Sum) -> int:
        if of.plus:
            total = functools.reduce(functools.partial(self.add, "+"), of.plus)
        else:
            total = self.add("neg", of.minus[0])
        for term in of.minus if of.plus else of.minus[1:]:
            total = self.add("-", total, term)
        return total

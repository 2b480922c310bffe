"""Rules of intervals: what a mask makes of whole tiles, from the first and last rows of each.

Each step of an expression becomes an interval, the smallest and largest number that it can give in
a tile, or for truths whether any pair can be true and whether every pair is. The verdict is
cautious: a step that the rules do not know makes a tile "perhaps", never "no" or "all". The rules
stand here once. `intervals` follows them on tensors, for plans on the CPU; `triton_source` writes
what follows from them as code, for programs that classify their own tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from saccade.modifiers.expression import (
    COMPARISONS,
    FUNCTIONS,
    READS,
    REAL,
    TRUTH,
    VARIABLES,
    WHOLE,
    Expression,
    Step,
)

LARGEST_SUMMAND = 2**61  # of whole numbers of 64 bits, beyond which a sum may pass their range
LARGEST_FACTOR = 2**31
OF_POSITIVE = ("log", "log2", "sqrt")


class Span(NamedTuple):
    """Numbers between low and high, both included.

    Attributes:
        known: low and high are one number, the same for all pairs of a tile.
        rows: the tile whose rows bound how many whole numbers there are ("": nothing does).
        step: 1 where neighbours differ by one row, 0 where whole blocks share a number.
    """

    low: Any
    high: Any
    known: bool = False
    rows: str = ""
    step: int = 1


class Truth(NamedTuple):
    """Can any pair be true, is every pair true."""

    possible: Any
    certain: Any


Value = Span | Truth | None  # None: not understood


class IntervalRules(ABC):
    """The rules, for numbers that `op` works on."""

    @abstractmethod
    def op(self, name: str, *values: Any) -> Any:
        """An operation on numbers or truths of tiles."""

    @abstractmethod
    def literal(self, value: Any) -> Any:
        """A number that stands in the code."""

    @abstractmethod
    def leaf(self, step: Step) -> Span:
        """A variable, or a captured number."""

    @abstractmethod
    def read(self, step: Step, indices: Sequence[Value]) -> Value:
        """The entries of a captured tensor between two indices along each dimension."""

    @abstractmethod
    def perhaps(self) -> Truth:
        """Possible and not certain."""

    def value(self, expression: Expression, step: Step, operands: Sequence[Value]) -> Value:
        """What one step gives, from what its operands give."""
        kinds = [expression[number].kind for number in step.operands]
        if step.op in VARIABLES or step.op == "number":
            return self.leaf(step)
        if step.op == "literal":
            value = self.literal(step.literal)
            return Truth(value, value) if step.kind == TRUTH else Span(value, value, True)
        if step.op in READS:
            found = self.read(step, operands)
            return self.perhaps() if found is None and step.kind == TRUTH else found
        if step.kind == TRUTH:
            return self._truth(step.op, operands, kinds) or self.perhaps()
        if step.op == "where":
            return self._chosen(operands[0], *self._spans(operands[1:], kinds[1:], step.kind))
        spans = self._spans(operands, kinds, step.kind)
        if None in spans:
            return None
        if step.op in ("//", "%") and expression[step.operands[1]].op not in ("number", "literal"):
            return None  # a divisor that may be 0 or less
        known = [span for span in spans if span is not None]
        if needs_width(expression, step):
            known = [self._each("widened", span) for span in known]
        return self._number(step, known, may_overflow(expression, step))

    # ---- truths -----------------------------------------------------------------------------

    def _truth(self, op: str, operands: Sequence[Value], kinds: list[str]) -> Truth | None:
        if set(kinds) == {TRUTH}:
            truths = [value for value in operands if isinstance(value, Truth)]
            return self._joined(op, truths)
        if op in COMPARISONS:
            kind = REAL if REAL in kinds else WHOLE
            left, right = self._spans(operands, kinds, kind)
            return self._compared(op, left, right, kind == REAL)
        return None

    def _joined(self, op: str, of: list[Truth]) -> Truth | None:
        if op == "~":
            return Truth(self.op("~", of[0].certain), self.op("~", of[0].possible))
        if op in ("&", "|"):
            return Truth(
                self.op(op, of[0].possible, of[1].possible),
                self.op(op, of[0].certain, of[1].certain),
            )
        if op == "where":
            test, yes, no = of
            no_test = Truth(self.op("~", test.certain), self.op("~", test.possible))
            either = [self._joined("&", [test, yes]), self._joined("&", [no_test, no])]
            found = self._joined("|", [truth for truth in either if truth is not None])
            assert found is not None
            both = self.op("&", yes.certain, no.certain)
            return Truth(found.possible, self.op("|", found.certain, both))
        if op in ("^", "=="):
            left, right = of
            same = self.op("&", left.certain, right.certain)
            none = self.op("&", self.op("~", left.possible), self.op("~", right.possible))
            equal = self.op("|", same, none)
            apart = self.op("|", self._excludes(left, right), self._excludes(right, left))
            found = Truth(self.op("~", apart), equal)
            return found if op == "==" else self._joined("~", [found])
        return None

    def _excludes(self, left: Truth, right: Truth) -> Any:
        return self.op("&", left.certain, self.op("~", right.possible))

    def _compared(self, op: str, a: Span | None, b: Span | None, real: bool) -> Truth | None:
        """A comparison. Of real numbers an end may be NaN, and then anything is possible."""
        if a is None or b is None:
            return None
        if op == "==":
            certain = self.op("&", self.op("==", a.low, b.high), self.op("==", a.high, b.low))
            if real:
                apart = self.op("|", self.op("<", b.high, a.low), self.op("<", a.high, b.low))
                return Truth(self.op("~", apart), certain)
            overlap = self.op("&", self.op("<=", a.low, b.high), self.op("<=", b.low, a.high))
            return Truth(overlap, certain)
        certain = self.op(op, a.high, b.low)
        if real:
            return Truth(self.op("~", self.op("<=" if op == "<" else "<", b.high, a.low)), certain)
        return Truth(self.op(op, a.low, b.high), certain)

    # ---- numbers ----------------------------------------------------------------------------

    def _spans(self, operands: Sequence[Value], kinds: list[str], kind: str) -> list[Span | None]:
        """Operands as numbers of one kind."""
        found: list[Span | None] = []
        for value, given in zip(operands, kinds, strict=True):
            if isinstance(value, Truth):  # True counts as 1
                one, zero = self.literal(1), self.literal(0)
                ends = [self.op("where", end, one, zero) for end in (value.certain, value.possible)]
                value = Span(*ends)
            if value is not None and kind == REAL and given != REAL:
                value = self._each("real", value)._replace(rows="")
            found.append(value)
        return found

    def _each(self, op: str, span: Span, *others: Any) -> Span:
        """An operation that grows with its operand, at both ends."""
        low = self.op(op, span.low, *others)
        high = low if span.known else self.op(op, span.high, *others)
        return Span(low, high, span.known, span.rows, span.step)

    def _number(self, step: Step, spans: list[Span], overflows: bool) -> Span | None:
        op, a, b = step.op, spans[0], spans[-1]
        if op in ("real", *FUNCTIONS):
            found = self._each(op, a)._replace(rows="")
            if op in OF_POSITIVE and not found.known:  # below 0 they give NaN, in the middle too
                ordered = self.op("==", found.low, found.low)
                found = found._replace(high=self.op("where", ordered, found.high, found.low))
            return found
        if op == "whole":  # beyond its range, and of NaN, any number
            return self._guarded(op, self._each(op, a)._replace(rows=""), spans, WHOLE)
        if op == "neg":
            found = Span(self.op("neg", a.high), self.op("neg", a.low), a.known, a.rows, a.step)
            return self._guarded(op, found, spans, step.kind) if overflows else found
        if op == "abs":
            found = self._absolute(a)
            return self._guarded(op, found, spans, step.kind) if overflows else found
        if op in ("min", "max"):
            low, high = self.op(op, a.low, b.low), self.op(op, a.high, b.high)
            rows = a.rows if b.known else b.rows if a.known else ""
            return Span(low, high, a.known and b.known, rows, min(a.step, b.step))
        if op in ("//", "%"):
            return self._divided(op, a, b) if step.kind == WHOLE else None
        if op == "/" and not b.known:
            return None
        found = self._arithmetic(op, a, b)
        if found is None or (step.kind == WHOLE and not overflows):
            return found
        return self._guarded(op, found, spans, step.kind)

    def _arithmetic(self, op: str, a: Span, b: Span) -> Span | None:
        if op not in ("+", "-", "*", "/"):
            return None
        if a.known and b.known:
            low = self.op(op, a.low, b.low)
            return Span(low, low, True)
        if op in ("+", "-"):
            ends = (b.low, b.high) if op == "+" else (b.high, b.low)
            rows, step = (a.rows, a.step) if b.known else (b.rows, b.step)
            rows = rows if a.known or b.known else ""
            return Span(
                self.op(op, a.low, ends[0]), self.op(op, a.high, ends[1]), False, rows, step
            )
        firsts = [a.low] if a.known else [a.low, a.high]
        seconds = [b.low] if b.known else [b.low, b.high]
        corners = [self.op(op, x, y) for x in firsts for y in seconds]
        low = high = corners[0]
        for corner in corners[1:]:
            low, high = self.op("min", low, corner), self.op("max", high, corner)
        return Span(low, high)

    def _guarded(self, op: str, found: Span, spans: list[Span], kind: str) -> Span:
        """Ends where rounding and overflow leave them in order.

        Infinite real numbers may meet as inf - inf, zeros as 0 / 0; whole numbers of 64 bits may
        wrap round.
        """
        if found.known:  # it is the number that every pair has
            return found
        if kind == REAL:  # NaN inside of an interval leaves no end of it finite
            limit, least, most, ends = float("inf"), float("nan"), float("nan"), found[:2]
        else:
            limit = LARGEST_FACTOR if op == "*" else LARGEST_SUMMAND
            limit = float(limit) if op == "whole" else limit
            least, most, ends = -(2**63), 2**63 - 1, [end for span in spans for end in span[:2]]
        safe = None
        for end in {id(end): end for end in ends}.values():
            below = self.op("<", end, self.literal(limit))
            here = self.op("&", below, self.op("<", self.literal(-limit), end))
            safe = here if safe is None else self.op("&", safe, here)
        return Span(
            self.op("where", safe, found.low, self.literal(least)),
            self.op("where", safe, found.high, self.literal(most)),
        )

    def _absolute(self, a: Span) -> Span:
        if a.known:
            return self._each("abs", a)
        turned = self.op("neg", a.high)
        low = self.op("max", self.op("max", a.low, turned), self.op("*", a.low, self.literal(0)))
        return Span(low, self.op("max", self.op("neg", a.low), a.high))

    def _divided(self, op: str, a: Span, b: Span) -> Span | None:
        """By a number greater than 0."""
        if not b.known:
            return None
        turns = self._each("//", a, b.low)
        if op == "//":
            return turns._replace(step=0)
        rests = self._each("%", a, b.low)
        if a.known:
            return rests
        same = self.op("==", turns.low, turns.high)
        zero, last = self.literal(0), self.op("-", b.low, self.literal(1))
        return Span(
            self.op("where", same, rests.low, zero), self.op("where", same, rests.high, last)
        )

    def _chosen(self, test: Value, yes: Span | None, no: Span | None) -> Span | None:
        if not isinstance(test, Truth) or yes is None or no is None:
            return None
        low, high = self.op("min", yes.low, no.low), self.op("max", yes.high, no.high)
        ends = []
        for both, one, other in ((low, yes.low, no.low), (high, yes.high, no.high)):
            known = self.op("where", test.possible, both, other)
            ends.append(self.op("where", test.certain, one, known))
        return Span(*ends)


def needs_width(expression: Expression, step: Step) -> bool:
    """Whether 32 bits may not hold what an operation gives, of operands that they hold."""
    if step.kind != WHOLE or step.op not in ("+", "-", "*", "<<", "neg", "abs"):
        return False
    operands = [expression[number] for number in step.operands]
    if step.op in ("*", "<<"):
        return not any(of.op == "literal" and abs(int(of.literal)) < 2**10 for of in operands)
    return any(of.op in READS for of in operands) or _num_numbers(expression, step) > 1


def may_overflow(expression: Expression, step: Step) -> bool:
    """Whether 64 bits may not hold it either."""
    if step.kind != WHOLE:
        return False
    if step.op == "*" and needs_width(expression, step):
        return True
    wide = any(is_wide(expression, number) for number in step.operands)
    return wide or _num_numbers(expression, step) > 1


def _num_numbers(expression: Expression, step: Step) -> int:
    """How many captured numbers, which may be large, are part of what a step adds up."""
    found, waiting = 0, list(step.operands)
    while waiting:
        of = expression[waiting.pop()]
        found += of.op == "number" and of.kind == WHOLE
        if of.kind == WHOLE and of.op not in READS and of.op not in ("//", "%"):
            waiting += of.operands
    return found


def is_wide(expression: Expression, number: int) -> bool:
    """Whether a whole number may have more than 32 bits, from a tensor of such or a product."""
    waiting = [number]
    while waiting:
        step = expression[waiting.pop()]
        if (step.op in READS and step.dtype == "l") or step.op in ("*", "whole", "<<"):
            return True
        if step.kind == WHOLE and step.op not in READS:
            waiting += step.operands
    return False

"""Intervals: classify whole tiles under a mask from the first and last rows of each.

Each step of an expression becomes an interval, the smallest and largest number that it can give in
a tile, or for truths whether any pair can be true and whether every pair is. The verdict is
cautious: a step that the rules do not know makes a tile "perhaps", never "no" or "all".

`IntervalRules` says what each step gives, in a few operations on numbers and truths of tiles.
`classify` computes these operations on tensors, for plans on the CPU; `triton_source` writes them
as code, for programs that classify their own tiles.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.modifiers.evaluate import OPERATIONS, inside
from saccade.modifiers.expression import (
    COMPARISONS,
    GROWING,
    READS,
    REAL,
    TRUTH,
    VARIABLES,
    WHOLE,
    Captured,
    Coordinates,
    Expression,
    Step,
    may_overflow,
    needs_width,
    never_negative,
    parse,
)

LARGEST_SUMMAND = 2**61  # of whole numbers of 64 bits, beyond which a sum may pass their range
LARGEST_FACTOR = 2**31
ANY_WHOLE, ANY_REAL = (-(2**63), 2**63 - 1), (float("nan"), float("nan"))
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


Value = Span | Truth | None  # None: nothing is known


class IntervalRules(ABC):
    """The intervals of an expression's steps, on whatever `op` works on.

    Attributes:
        most_spans: a read that varies in a tile along more dimensions, or farther than the tile's
            rows, is left unknown; None: no read is.
    """

    def __init__(self, expression: Expression, most_spans: int | None = None):
        self.expression, self.most_spans = expression, most_spans

    @abstractmethod
    def op(self, name: str, *values: Any) -> Any:
        """An operation on numbers or truths of tiles."""

    @abstractmethod
    def literal(self, value: Any) -> Any:
        """A number or truth that the code contains."""

    @abstractmethod
    def leaf(self, step: Step) -> Span:
        """A variable, or a captured number."""

    @abstractmethod
    def size(self, step: Step, dim: int) -> Any:
        """How many entries the tensor of a read has along one dimension."""

    @abstractmethod
    def entry(self, step: Step, indices: list[Span]) -> Any:
        """The one entry that a whole tile reads."""

    @abstractmethod
    def extremes(self, step: Step, indices: list[Span | None]) -> tuple[Any, Any]:
        """The smallest and largest entry between two indices along each dimension (None: of all),
        NaN where nothing bounds them; of truths whether all are true, and whether any is."""

    def verdict(self) -> Truth:
        """The truth of the last step."""
        found: list[Value] = []
        for step in self.expression:
            found.append(self._value(step, [found[number] for number in step.operands]))
        last = found[-1]
        return last if isinstance(last, Truth) else self._perhaps()

    def _perhaps(self) -> Truth:
        return Truth(self.literal(True), self.literal(False))

    def _value(self, step: Step, operands: Sequence[Value]) -> Value:
        """What one step gives, from what its operands give."""
        if step.op in VARIABLES or step.op == "number":
            return self.leaf(step)
        if step.op == "literal":
            value = self.literal(step.literal)
            return Truth(value, value) if step.kind == TRUTH else Span(value, value, True)
        if step.op in READS:
            found = self._read(step, operands)
        elif step.kind == TRUTH:
            found = self._truth(step, operands)
        else:
            found = self._number(step, operands)
        return self._perhaps() if found is None and step.kind == TRUTH else found

    # ---- reads ------------------------------------------------------------------------------

    def _read(self, step: Step, operands: Sequence[Value]) -> Value:
        """Entries of a captured tensor: exact where a tile reads one entry, else their extremes."""
        indices = [value if isinstance(value, Span) else None for value in operands]
        known = [index for index in indices if index is not None and index.known]
        if len(known) == len(indices):
            entry = self.entry(step, known)
            return Truth(entry, entry) if step.kind == TRUTH else Span(entry, entry, known=True)
        if self.most_spans is not None:
            bounded = all(index and (index.known or index.rows) for index in indices)
            if not bounded or len(indices) - len(known) > self.most_spans:
                return None
        wraps = None
        for dim, (index, number) in enumerate(zip(indices, step.operands, strict=True)):
            if index is None or index.known or step.op == "take" or self.natural[number]:
                continue
            indices[dim], here = self._from_the_end(index, self.size(step, dim))
            wraps = here if wraps is None else self.op("|", wraps, here)
        low, high = self.extremes(step, indices)
        if step.kind == TRUTH:
            if wraps is None:
                return Truth(high, low)
            return Truth(self.op("|", high, wraps), self.op("&", low, self.op("~", wraps)))
        found = Span(low, high)
        if wraps is None:
            return found
        wide = self._each("widened", found) if step.kind == WHOLE else found
        return self._bounded(self.op("~", wraps), wide, step.kind)

    @cached_property
    def natural(self) -> list[bool]:
        """For each step, whether it gives no number below 0."""
        return never_negative(self.expression)

    def _from_the_end(self, index: Span, size: Any) -> tuple[Span, Any]:
        """Indices that count from the end where they are below 0; and whether only some do."""
        zero = self.literal(0)
        below, some = self.op("<", index.high, zero), self.op("<", index.low, zero)
        low, high = (self.op("where", below, self.op("+", end, size), end) for end in index[:2])
        return index._replace(low=low, high=high), self.op("&", some, self.op("~", below))

    # ---- truths ----------------------------------------------------------------------------

    def _truth(self, step: Step, operands: Sequence[Value]) -> Truth | None:
        kinds = {self.expression[number].kind for number in step.operands}
        if kinds == {TRUTH}:
            return self._joined(step.op, [value for value in operands if isinstance(value, Truth)])
        if step.op in COMPARISONS:
            kind = REAL if REAL in kinds else WHOLE
            left, right = self._spans(step.operands, operands, kind)
            return self._compared(step.op, left, right, kind == REAL)
        return None

    def _joined(self, op: str, of: list[Truth]) -> Truth | None:
        if op == "~":
            return self._not(*of)
        if op in ("&", "|"):
            return self._both(op, *of)
        if op == "where":
            test, yes, no = of
            no_test = self._not(test)
            found = self._both("|", self._both("&", test, yes), self._both("&", no_test, no))
            alike = self.op("&", yes.certain, no.certain)
            return Truth(found.possible, self.op("|", found.certain, alike))
        if op in ("^", "=="):
            left, right = of
            same = self.op("&", left.certain, right.certain)
            none = self.op("&", self.op("~", left.possible), self.op("~", right.possible))
            equal = self.op("|", same, none)
            apart = self.op("|", self._excludes(left, right), self._excludes(right, left))
            found = Truth(self.op("~", apart), equal)
            return found if op == "==" else self._not(found)
        return None

    def _not(self, of: Truth) -> Truth:
        return Truth(self.op("~", of.certain), self.op("~", of.possible))

    def _both(self, op: str, left: Truth, right: Truth) -> Truth:
        return Truth(*(self.op(op, *ends) for ends in zip(left, right, strict=True)))

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

    def _spans(
        self, numbers: Sequence[int], operands: Sequence[Value], kind: str
    ) -> list[Span | None]:
        """Operands, by the numbers of their steps, as numbers of one kind."""
        found: list[Span | None] = []
        for number, value in zip(numbers, operands, strict=True):
            if isinstance(value, Truth):  # True counts as 1
                one, zero = self.literal(1), self.literal(0)
                value = Span(*(self.op("where", end, one, zero) for end in value[::-1]))
            if value is not None and kind == REAL and self.expression[number].kind != REAL:
                value = self._each("real", value)._replace(rows="")
            found.append(value)
        return found

    def _each(self, op: str, span: Span, *others: Any) -> Span:
        """An operation that grows with its operand, at both ends."""
        low = self.op(op, span.low, *others)
        high = low if span.known else self.op(op, span.high, *others)
        return Span(low, high, span.known, span.rows, span.step)

    def _number(self, step: Step, operands: Sequence[Value]) -> Span | None:
        if step.op == "where":
            chosen = self._spans(step.operands[1:], operands[1:], step.kind)
            return self._chosen(operands[0], *chosen)
        known = self._spans(step.operands, operands, step.kind)
        spans = [span for span in known if span is not None]
        if len(spans) < len(known):
            return None
        if step.op in ("//", "%"):
            if self.expression[step.operands[1]].op not in ("number", "literal"):
                return None  # a divisor that may be 0 or less
            return self._divided(step.op, *spans) if step.kind == WHOLE else None
        if needs_width(self.expression, step):
            spans = [self._each("widened", span) for span in spans]
        return self._computed(step, spans)

    def _computed(self, step: Step, spans: list[Span]) -> Span | None:
        """The numbers that an operation on numbers of one kind gives."""
        op, a, b = step.op, spans[0], spans[-1]
        if op in ("real", *GROWING):
            found = self._each(op, a)._replace(rows="")
            if op in OF_POSITIVE and not found.known:  # below 0 they give NaN, in the middle too
                ordered = self.op("==", found.low, found.low)
                found = found._replace(high=self.op("where", ordered, found.high, found.low))
            return found
        if op == "whole":  # beyond its range, and of NaN, any number
            return self._guarded(op, self._each(op, a)._replace(rows=""), spans, WHOLE)
        if op in ("min", "max"):
            low, high = self.op(op, a.low, b.low), self.op(op, a.high, b.high)
            rows = a.rows if b.known else b.rows if a.known else ""
            return Span(low, high, a.known and b.known, rows, min(a.step, b.step))
        guarded = may_overflow(self.expression, step)
        if op == "neg":
            found = Span(self.op("neg", a.high), self.op("neg", a.low), a.known, a.rows, a.step)
        elif op == "abs":
            found = self._absolute(a)
        else:
            found = self._arithmetic(op, a, b)
            guarded |= step.kind == REAL
        return self._guarded(op, found, spans, step.kind) if found and guarded else found

    def _arithmetic(self, op: str, a: Span, b: Span) -> Span | None:
        if op not in ("+", "-", "*", "/") or (op == "/" and not b.known):
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
            limit, ends = float("inf"), found[:2]
        else:
            limit = LARGEST_FACTOR if op == "*" else LARGEST_SUMMAND
            limit = float(limit) if op == "whole" else limit
            ends = [end for span in spans for end in span[:2]]
        safe = None
        for end in {id(end): end for end in ends}.values():
            if isinstance(limit, int):  # Triton 3.9 refuses a limit that an end of 32 bits lacks
                end = self.op("widened", end)
            below = self.op("<", end, self.literal(limit))
            here = self.op("&", below, self.op("<", self.literal(-limit), end))
            safe = here if safe is None else self.op("&", safe, here)
        return self._bounded(safe, found, kind)

    def _bounded(self, safe: Any, found: Span, kind: str) -> Span:
        """Ends that bound nothing where they are not safe."""
        least, most = ANY_REAL if kind == REAL else ANY_WHOLE
        return Span(
            self.op("where", safe, found.low, self.literal(least)),
            self.op("where", safe, found.high, self.literal(most)),
        )

    def _absolute(self, a: Span) -> Span:
        if a.known:
            return self._each("abs", a)
        negated = self.op("neg", a.high)
        low = self.op("max", self.op("max", a.low, negated), self.op("*", a.low, self.literal(0)))
        return Span(low, self.op("max", self.op("neg", a.low), a.high))

    def _divided(self, op: str, a: Span, b: Span) -> Span | None:
        """By a number greater than 0."""
        if not b.known:
            return None
        quotients = self._each("//", a, b.low)
        if op == "//":
            return quotients._replace(step=0)
        rests = self._each("%", a, b.low)
        if a.known:
            return rests
        same = self.op("==", quotients.low, quotients.high)
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


# ---- on tensors -------------------------------------------------------------------------------

MOST_ENTRIES = 2**24  # that the extremes of one read may copy, if they are more than the tensor has


def rows(start: int, stop: int, tile_size: int, dim: int) -> Span:
    """The tiles of the rows start … stop - 1 along one of four dimensions."""
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    low = torch.arange(start, stop, tile_size, device="cpu").view(shape)
    return Span(low, (low + tile_size).clamp_max(stop) - 1, rows="query" if dim == 2 else "kv")


def classify(key: str, captured: Captured, at: Coordinates, most_spans: int | None = None) -> Truth:
    """What a mask makes of tiles whose rows `at` gives as spans; batch and head are exact.

    Tensors that are made on the way lie on the CPU, whatever the default device is.
    """
    usual = torch.get_default_device().type == "cpu"
    with contextlib.nullcontext() if usual else torch.device("cpu"):
        if key:
            return _TensorRules(parse(key), captured, at, most_spans).verdict()
        everything = torch.ones((1, 1, 1, 1), dtype=torch.bool)
        return Truth(everything, everything)


class _TensorRules(IntervalRules):
    """Computes on tensors that broadcast to the tiles."""

    def __init__(
        self, expression: Expression, captured: Captured, at: Coordinates, most_spans: int | None
    ):
        super().__init__(expression, most_spans)
        self.captured, self.at = captured, at

    def op(self, name: str, *values: Any) -> Tensor:
        if name in ("real", "widened"):
            return values[0].to(torch.float32 if name == "real" else torch.int64)
        found = OPERATIONS[name](*values)
        return found.to(torch.int64) if name == "whole" else found

    def literal(self, value: bool | int | float) -> Tensor:
        return torch.tensor(value)

    def leaf(self, step: Step) -> Span:
        value = (
            getattr(self.at, step.op) if step.op in VARIABLES else self.captured.value(step.slot)
        )
        if isinstance(value, Span):
            return value
        value = torch.as_tensor(value)
        return Span(value, value, known=True)

    def size(self, step: Step, dim: int) -> Tensor:
        return torch.tensor(self.captured.value(step.slot).shape[dim])

    def entry(self, step: Step, indices: list[Span]) -> Tensor:
        return self.extremes(step, [*indices])[0]

    def extremes(self, step: Step, indices: list[Span | None]) -> tuple[Tensor, Tensor]:
        lows = highs = self.captured.value(step.slot).detach()
        picks: list[Any] = []
        for dim, index in enumerate(indices):
            size = lows.shape[dim]
            if size > 1 and index is not None and index.known:
                nearest = step.op == "take"
                picks.append(index.low.clamp(0, size - 1) if nearest else inside(index.low, size))
                continue
            entries, pick = _entries(index, lows, dim)
            picks.append(pick)
            ends = lows, highs
            lows = _folded(ends[0], dim, entries, largest=False)
            highs = _folded(ends[1], dim, entries, largest=True)
        low = _as_number(lows[tuple(picks)], step)
        if lows is highs:
            return low, low
        high = _as_number(highs[tuple(picks)], step)
        if step.kind == REAL:
            anything = (low == -torch.inf) & (high == torch.inf)
            low, high = (end.masked_fill(anything, torch.nan) for end in (low, high))
        return low, high


def _as_number(entries: Tensor, step: Step) -> Tensor:
    if step.kind == TRUTH:
        return entries
    return entries.to(torch.float32 if step.kind == REAL else torch.int64)


def _entries(index: Span | None, table: Tensor, dim: int) -> tuple[Tensor | None, Any]:
    """The entries between the ends of each interval along one dimension, [intervals, most], with
    repeats, which change no extreme, and where the intervals lie among them; None and 0 where all
    entries are one interval, or copies would take far more memory than the table."""
    last = table.shape[dim] - 1
    if index is None or last < 1:
        return None, 0
    low, high = torch.broadcast_tensors(index.low, index.high)
    if not low.numel():
        return None, 0
    first, end = low.flatten().clamp(0, last), high.flatten().clamp(0, last)
    width = int((end - first).max()) + 1
    copied = low.numel() * width * (table.numel() // table.shape[dim])
    if copied > max(MOST_ENTRIES, 4 * table.numel()):
        return None, 0
    entries = (first[:, None] + torch.arange(width)).minimum(end[:, None])
    return entries, torch.arange(low.numel()).view(low.shape)


def _folded(table: Tensor, dim: int, entries: Tensor | None, *, largest: bool) -> Tensor:
    """One dimension folded to the largest (or smallest) entry of each interval, or of all."""
    if entries is None:
        if table.shape[dim] == 1:
            return table
        if table.shape[dim] == 0:  # a table without entries is never read
            return table.new_zeros([1 if d == dim else s for d, s in enumerate(table.shape)])
        return table.amax(dim, keepdim=True) if largest else table.amin(dim, keepdim=True)
    spread = table.index_select(dim, entries.flatten()).unflatten(dim, entries.shape)
    return spread.amax(dim + 1) if largest else spread.amin(dim + 1)

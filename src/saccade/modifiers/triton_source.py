"""Source for Triton: masks and scores as the text of device functions.

A step of an expression becomes a line. Operators mean what they mean on PyTorch's tensors: ``//``
and ``%`` round down, real numbers are float32, and whole numbers that may have more than 32 bits
have 64. The same expression gives the same text in every process, so Triton's cache knows it again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from saccade.modifiers.division import ROWS, divisors, with_rests_apart
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
    mentions,
    needed,
    needs_width,
    never_negative,
    only_index,
)
from saccade.modifiers.intervals import IntervalRules, Span
from saccade.modifiers.normal_form import window_of

ARGUMENTS = "batch, head, query_row, kv_row, shift, data"
CLASSIFIED = "batch, head, query_low, query_high, kv_low, kv_high, shift, data"
TILES = "QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr"
COUNTED = ("batch", "head", "query_row", "kv_row")  # from 0 on
NAME = re.compile(r"\b(?:v|low|high)\d+\b")

# Operations that are functions of the device's language (gpu/device_ops.py); others are operators.
CALLS = {
    "min": "minimum", "max": "maximum", "abs": "absolute", "where": "where", "whole": "to_whole",
    "real": "to_real", "widened": "widened", "//": "floor_divide", "%": "floor_modulo",
    **{name: name for name in FUNCTIONS},
}  # fmt: skip


def function(
    name: str, expression: Expression, slots: list[tuple[str, int]], result: int, *, score: bool
) -> str:
    """A device function that computes one step of an expression for a tile of pairs.

    slots: the order of captured values in `data`. score: whether it is one of a score, and gives
    real numbers, or of a mask.
    """
    expression, (result,) = with_rests_apart(expression, (result,))
    writer = _PairWriter(expression, slots)
    for number in sorted(needed(expression, result)):
        writer.write(number, expression[number])
    answer = writer.names[result]
    answer = f"as_score({answer}, score)" if score else f"as_bool({answer}, kv_row)"
    parameters = f"score, {ARGUMENTS}" if score else ARGUMENTS
    return _text(name, parameters, [*writer.lines, f"return {answer}"])


def offset_function(
    name: str, expression: Expression, slots: list[tuple[str, int]], read: int
) -> str:
    """A device function: the offset of the entry that each pair reads, in a table with sizes and
    steps."""
    expression, (read,) = with_rests_apart(expression, (read,))
    writer = _PairWriter(expression, slots)
    step = expression[read]
    for number in sorted(needed(expression, *step.operands)):
        writer.write(number, expression[number])
    offset = writer.offset(step, "table")
    return _text(name, f"score, {ARGUMENTS}, table", [*writer.lines, f"return {offset}"])


def _text(name: str, parameters: str, lines: Sequence[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"@triton.jit\ndef {name}({parameters}):\n{body}"


class _PairWriter:
    """Writes steps as lines on tiles of pairs."""

    def __init__(self, expression: Expression, slots: list[tuple[str, int]]):
        self.expression, self.slots = expression, slots
        self.divisors = divisors(expression)
        self.natural = never_negative(expression)
        self.only_index = only_index(expression)
        self.apart = [mentions(expression, [name]) for name in ROWS]
        self.names: dict[int, str] = {}
        self.lines: list[str] = []

    def write(self, number: int, step: Step) -> None:
        """Add the line of a step, whose operands are written."""
        if step.op in VARIABLES:
            self.names[number] = step.op
        elif step.op in ("number", "literal"):
            self.names[number] = _constant(step, self.slots, self.divisors)
        else:
            name = self.names[number] = f"v{number}"
            self.lines.append(f"{name} = {self._code(number, step)}")

    def _code(self, number: int, step: Step) -> str:
        if step.op in READS:
            data = f"data[{self.slots.index(step.slot)}]"
            # An index of query and key rows in one: neighbours do not lie side by side.
            mixed = any(all(by[of] for by in self.apart) for of in step.operands)
            read = "gather" if mixed else "read"
            code = f"{read}({data}, {self.offset(step, data)}, {len(step.operands)})"
            return _of_dtype(code, step)
        op, kinds = step.op, [self.expression[number].kind for number in step.operands]
        if op in ("whole", "real", *FUNCTIONS):
            of = self._operand(step.operands[0], REAL)
            return of if op == "real" else _applied(op, of)
        if op == "where":
            chosen = (self._operand(number, step.kind) for number in step.operands[1:])
            return _applied(op, self.names[step.operands[0]], *chosen)
        if op == "&" and (ends := window_of(self.expression, *step.operands)):
            return f"within(kv_row, {self.names[ends[0]]}, {self.names[ends[1]]})"
        if op in ("<", "<=") and (ends := self._distance(*step.operands)):
            bound = self.names[step.operands[1]]
            return f"near({', '.join(ends)}, {bound}{' - 1' if op == '<' else ''})"
        kind = step.kind
        if op in COMPARISONS:
            kind = REAL if REAL in kinds else TRUTH if set(kinds) == {TRUTH} else WHOLE
        wide = needs_width(self.expression, step) and not self.only_index[number]
        operands = [self._operand(operand, kind, wide) for operand in step.operands]
        if wide and not any("widened" in operand for operand in operands):
            operands[0] = f"widened({operands[0]})"
        if op in ("//", "%"):
            dividend, divisor = step.operands
            if kind == REAL:
                return f"{CALLS[op]}_real({', '.join(operands)})"
            if self.expression[divisor].op == "number":
                by = f"data[{self.slots.index(self.expression[divisor].slot)}]"
                return _divided(op, operands[0], by, self.natural[dividend])
            if self.expression[divisor].op == "literal" and self.natural[dividend]:
                return f"{operands[0]} {op} {operands[1]}"
        return _applied(op, *operands)

    def _distance(self, distance: int, most: int) -> tuple[str, str] | None:
        """The two numbers of 32 bits whose distance is compared with a captured one, if it is."""
        of = self.expression[distance]
        if of.op != "abs" or of.kind != WHOLE or self.expression[most].op != "number":
            return None
        difference = self.expression[of.operands[0]]
        wide = any(needs_width(self.expression, each) for each in (of, difference))
        if difference.op != "-" or wide or self.expression[most].kind != WHOLE:
            return None
        first, second = (self._operand(number, WHOLE) for number in difference.operands)
        return first, second

    def _operand(self, number: int, kind: str, wide: bool = False) -> str:
        """An operand as a number of that kind."""
        step, name = self.expression[number], self.names[number]
        if step.op == "literal":
            return _literal(float(step.literal) if kind == REAL else step.literal)
        if kind == REAL and (step.kind != REAL):
            return f"to_real({name})"
        if kind == WHOLE and step.kind == TRUTH:
            return f"where({name}, 1, 0)"
        return f"widened({name})" if wide and step.op in READS else name

    def offset(self, step: Step, table: str) -> str:
        """Where the entries of a read lie in a table, in elements."""
        offsets = []
        for dim, number in enumerate(step.operands):
            found = "nearest" if step.op == "take" or self.natural[number] else "entry"
            if self.expression[number].op in COUNTED:
                found = "up_to_last"
            offsets.append(f"{found}({self.names[number]}, {table}, {dim})")
        return " + ".join(offsets) or "0"


def _applied(op: str, *operands: str) -> str:
    """An operation as it is written on the device."""
    if op in CALLS:
        return f"{CALLS[op]}({', '.join(operands)})"
    if len(operands) == 1:
        return f"{'-' if op == 'neg' else op}{operands[0]}"
    return f"{operands[0]} {op} {operands[1]}"


def _divided(op: str, dividend: str, divisor: str, natural: bool) -> str:
    """A whole number // or % a captured one."""
    function = "quotient" if op == "//" else "remainder"
    return f"{function}({dividend}, {divisor}, {natural})"


def _of_dtype(code: str, step: Step) -> str:
    """A read entry as a truth, a whole or a real number."""
    as_kind = {"f": "to_real", "i": "to_int32"}.get(step.dtype)
    return f"{as_kind}({code})" if as_kind else code


def _constant(
    step: Step, slots: list[tuple[str, int]], divisors: frozenset[tuple[str, int]]
) -> str:
    """A number: written out, or one that was captured."""
    if step.op == "literal":
        return _literal(step.literal)
    name = f"data[{slots.index(step.slot)}]"
    return f"{name}.number" if step.slot in divisors else name


def _literal(value: bool | int | float) -> str:
    text = repr(value)
    return text if text.lstrip("-")[0].isdigit() or isinstance(value, bool) else f'float("{text}")'


class Dependence(NamedTuple):
    """A batch entry or head on which a verdict depends: the slot and dimension of the captured
    tensor that is read at it; -1 where the number itself is used."""

    axis: str
    slot: int
    dim: int


class TileVerdict(NamedTuple):
    """The text of a function that classifies tiles, and what its classes need.

    Attributes:
        text: of a device function that gives possible and certain.
        spans_read: along how many row axes captured tensors are read.
        in_blocks: whether all that is read along two axes is read in blocks.
        dependences: what classes depend on beside rows.
    """

    text: str
    spans_read: int
    in_blocks: bool
    dependences: frozenset[Dependence]


def tile_function(
    name: str, expression: Expression, slots: list[tuple[str, int]], most_spans: int = 2
) -> TileVerdict:
    """A device function that classifies whole tiles.

    most_spans: reads along more row axes than that make a tile "perhaps".
    """
    writer = _TileWriter(expression, slots, most_spans)
    possible, certain = writer.verdict()
    lines = _live([*writer.lines, _Line("return", f"{possible}, {certain}")])
    text = _text(name, f"{CLASSIFIED}, {TILES}", [line.text for line in lines])
    return TileVerdict(
        text,
        max(line.spans_read for line in lines),
        all(line.in_blocks for line in lines),
        frozenset().union(*(line.dependences() for line in lines)),
    )


class _Line(NamedTuple):
    """A line of a device function, and what a read in it needs.

    Attributes:
        names: what it defines, or "return".
        read_at: the batch entry and head by which a read's offset varies; None: it is no read.
    """

    names: str
    code: str
    spans_read: int = 0
    in_blocks: bool = True
    read_at: frozenset[Dependence] | None = None

    @property
    def text(self) -> str:
        return (
            f"{self.names} {self.code}" if self.names == "return" else f"{self.names} = {self.code}"
        )

    def dependences(self) -> frozenset[Dependence]:
        """What a verdict depends on, if it uses this line."""
        if self.read_at is not None:
            return self.read_at
        axes = re.findall(r"\b(?:batch|head)\b", self.code)
        return frozenset(Dependence(axis, -1, -1) for axis in axes)


def _live(lines: list[_Line]) -> list[_Line]:
    """The lines that the last one needs: programs that make no plan must not hold other reads."""
    found, wanted = [], {"return"}
    for line in reversed(lines):
        if not wanted.isdisjoint(line.names.split(", ")):
            found.append(line)
            wanted |= set(NAME.findall(line.code))
    return found[::-1]


class _TileWriter(IntervalRules):
    """Writes operations on intervals as lines on vectors of tiles."""

    def __init__(self, expression: Expression, slots: list[tuple[str, int]], most_spans: int):
        super().__init__(expression, most_spans)
        self.slots = slots
        self.divisors = divisors(expression)
        self.lines: list[_Line] = []

    def op(self, name: str, *values: str) -> str:
        if name in ("//", "%") and values[1].endswith(".number"):
            divisor = values[1].removesuffix(".number")
            return self._line(_divided(name, values[0], divisor, False))
        if name in ("real", "widened") and values[0].lstrip("-").isdigit():
            return _literal(float(values[0])) if name == "real" else values[0]
        return self._line(_applied(name, *values))

    def literal(self, value: bool | int | float) -> str:
        if isinstance(value, bool):
            return f"(query_low {'<=' if value else '>'} query_high)"
        return _literal(value)

    def leaf(self, step: Step) -> Span:
        if step.op == "query_row":
            return Span("query_low", "query_high", rows="QUERY_TILE")
        if step.op == "kv_row":
            return Span("kv_low", "kv_high", rows="KV_TILE")
        number = step.op == "number"
        name = _constant(step, self.slots, self.divisors) if number else step.op
        return Span(name, name, known=True)

    def size(self, step: Step, dim: int) -> str:
        return f"data[{self.slots.index(step.slot)}][1][{dim}]"

    def entry(self, step: Step, indices: Sequence[Span]) -> str:
        data, offset, read_at = self._offset(step, indices)
        code = _of_dtype(f"read({data}, {offset}, {len(indices)})", step)
        return self._line(code, read_at=read_at)

    def extremes(self, step: Step, indices: Sequence[Span | None]) -> tuple[str, str]:
        data, offset, read_at = self._offset(step, indices)
        spans = [(dim, span) for dim, span in enumerate(indices) if span and not span.known]
        in_blocks = not any(span.step for _, span in spans)
        axes = ", ".join(f"{dim}, {span.low}, {span.high}, {span.rows}" for dim, span in spans)
        along = "along_one" if len(spans) == 1 else f"along_two{'_blocks' if in_blocks else ''}"
        low, high = (f"{end}{len(self.lines)}" for end in ("low", "high"))
        code = f"{along}({data}, {offset}, {axes})"
        needs = len(spans), in_blocks or len(spans) < 2, read_at
        self.lines.append(_Line(f"{low}, {high}", code, *needs))
        if step.kind == TRUTH:
            some = self._line(f"{high} != 0")
            return self._line(f"{low} != 0"), some
        return low, high

    def _offset(
        self, step: Step, indices: Sequence[Span | None]
    ) -> tuple[str, str, frozenset[Dependence]]:
        """A captured tensor, where the indices that are known lead in it, and what by."""
        slot = self.slots.index(step.slot)
        data, offset, read_at = f"data[{slot}]", "0", set()
        for dim, (index, number) in enumerate(zip(indices, step.operands, strict=True)):
            if index is None or not index.known:
                continue
            axis = self.expression[number].op
            if axis in ("batch", "head"):
                read_at.add(Dependence(axis, slot, dim))
            counted = "nearest" if step.op == "take" or self.natural[number] else "entry"
            offset += f" + {counted}({index.low}, {data}, {dim})"
        return data, offset, frozenset(read_at)

    def _line(self, code: str, **needs: Any) -> str:
        self.lines.append(_Line(f"v{len(self.lines)}", code, **needs))
        return f"v{len(self.lines) - 1}"

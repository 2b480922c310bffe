"""Judgement: a mask function's answer for whole tiles, as the source of a device function.

The function is read as `saccade.intervals` runs it: rows are intervals from the first to the last
row of a tile, tables give the smallest and largest entry that a tile can read, and what is not
understood makes a tile "perhaps".
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from saccade import language
from saccade.kernels.source import CannotCompile, Source


class Known(NamedTuple):
    """A number that is the same for all pairs of a tile. `axis`: "batch" or "head" as it came."""

    code: str
    axis: str = ""


class Span(NamedTuple):
    """Numbers between low and high. `rows` names the tile that bounds how many there are;
    `step` is 1 where neighbours differ by one row, 0 where whole blocks share a number."""

    low: str
    high: str
    rows: str = ""
    step: int = 1


class Truth(NamedTuple):
    """Can any pair be true, is every pair true."""

    possible: str
    certain: str


class Table(NamedTuple):
    """A captured tensor: its code, and its place among all that the expression captured."""

    code: str
    place: int


Value = Known | Span | Truth | Table
PERHAPS = Truth("(query_low <= query_high)", "(query_low > query_high)")


class Dependence(NamedTuple):
    """What a verdict depends on beside rows: captured tensors by place and dimension; a dimension
    of -1 means that the number itself is used."""

    axis: str
    place: int
    dim: int


class NotUnderstood(Exception):
    """Intervals do not know this operation."""


class Judge:
    """Reads mask functions on intervals, and collects lines of code and what they depend on.

    most_spans: tables that are read along more row axes than that are not understood.
    """

    def __init__(self, most_spans: int = 2) -> None:
        self.most_spans = most_spans
        self.lines: list[str] = []
        self.dependences: set[Dependence] = set()
        self.spans_read = 0  # along how many row axes some table is read, at most
        self.in_blocks = True  # whether all that is read along two axes is read in blocks
        self.count = 0

    def leaf(self, body: Callable[..., Any], arguments: Sequence[Value]) -> Truth:
        """The verdict of one function."""
        kept = len(self.lines), set(self.dependences), self.spans_read, self.in_blocks
        try:
            return self._truth(self._run(body, arguments))
        except (NotUnderstood, CannotCompile):
            del self.lines[kept[0] :]
            self.dependences, self.spans_read, self.in_blocks = kept[1:]
            return PERHAPS

    def both(self, combiner: str, left: Truth, right: Truth) -> Truth:
        """Two verdicts joined by & or |."""
        return Truth(
            self._keep(f"{left.possible} {combiner} {right.possible}"),
            self._keep(f"{left.certain} {combiner} {right.certain}"),
        )

    def inverse(self, truth: Truth) -> Truth:
        """The verdict of ~."""
        return Truth(self._keep(f"~{truth.certain}"), self._keep(f"~{truth.possible}"))

    def _keep(self, code: str) -> str:
        self.count += 1
        self.lines.append(f"v{self.count} = {code}")
        return f"v{self.count}"

    def _run(self, body: Callable[..., Any], arguments: Sequence[Value]) -> Value:
        source = Source(body, len(arguments))
        scope = dict(zip(source.parameters, arguments, strict=True))
        for statement in source.statements:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._value(statement.value, source, scope)
            if isinstance(statement, ast.Assign):
                value = self._value(statement.value, source, scope)
                for target in statement.targets:
                    if not isinstance(target, ast.Name):
                        raise NotUnderstood
                    scope[target.id] = value
            elif not isinstance(statement, ast.Expr):
                raise NotUnderstood
        raise NotUnderstood

    def _value(self, node: ast.expr, source: Source, scope: dict[str, Value]) -> Value:
        def of(part: ast.expr) -> Value:
            return self._value(part, source, scope)

        if isinstance(node, ast.Name) and node.id in scope:
            return scope[node.id]
        if isinstance(node, ast.Constant):
            return Known(ast.unparse(node))
        if isinstance(node, (ast.Name, ast.Attribute)):
            return Known(ast.unparse(source.constant(node)))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node.op, of(node.operand))
        if isinstance(node, ast.BinOp):
            return self._binary(node.op, of(node.left), of(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compare(node.ops[0], of(node.left), of(node.comparators[0]))
        if isinstance(node, ast.Call):
            callee = source.callee(node)
            values = [of(argument) for argument in node.args]
            if callee is language.take:
                return self._take(values[0], values[1:])
            if isinstance(callee, types.FunctionType):
                return self._run(callee, values)
        raise NotUnderstood

    # ---- operators: what saccade.intervals knows ---------------------------------------------

    def _unary(self, op: ast.unaryop, value: Value) -> Value:
        if isinstance(op, ast.Invert) and isinstance(value, (Truth, Span)):
            return self.inverse(self._truth(value))
        if isinstance(op, ast.USub):
            span = self._span(value)
            return Span(self._keep(f"-{span.high}"), self._keep(f"-{span.low}"))
        raise NotUnderstood

    def _binary(self, op: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(op, (ast.BitAnd, ast.BitOr)):
            combiner = "&" if isinstance(op, ast.BitAnd) else "|"
            return self.both(combiner, self._truth(left), self._truth(right))
        a, b = self._span(left), self._span(right)
        known = isinstance(right, Known)
        if isinstance(op, ast.Add):
            rows, step = (a.rows, a.step) if known else (b.rows, b.step)
            bounded = known or isinstance(left, Known)
            low, high = self._keep(f"{a.low} + {b.low}"), self._keep(f"{a.high} + {b.high}")
            return Span(low, high, rows if bounded else "", step)
        if isinstance(op, ast.Sub):
            low, high = self._keep(f"{a.low} - {b.high}"), self._keep(f"{a.high} - {b.low}")
            return Span(low, high, a.rows if known else "", a.step)
        if isinstance(op, ast.Mult):
            corners = [self._keep(f"{x} * {y}") for x in a[:2] for y in b[:2]]
            low, high = (self._extreme(which, corners) for which in ("minimum", "maximum"))
            return Span(low, high)
        if isinstance(op, (ast.FloorDiv, ast.Mod)) and known:
            return self._divided(op, a, right.code)
        raise NotUnderstood

    def _divided(self, op: ast.operator, a: Span, divisor: str) -> Span:
        turns = [self._keep(f"floor_divide({end}, {divisor})") for end in a[:2]]
        if isinstance(op, ast.FloorDiv):
            ends = [self._extreme(which, turns) for which in ("minimum", "maximum")]
            return Span(ends[0], ends[1], a.rows, 0)
        same = self._keep(f"{turns[0]} == {turns[1]}")
        rests = [self._keep(f"floor_modulo({end}, {divisor})") for end in a[:2]]
        low = f"tl.where({same}, {rests[0]}, tl.minimum(0, {divisor} + 1))"
        high = f"tl.where({same}, {rests[1]}, tl.maximum(0, {divisor} - 1))"
        return Span(self._keep(low), self._keep(high))

    def _extreme(self, which: str, codes: Sequence[str]) -> str:
        found = codes[0]
        for code in codes[1:]:
            found = self._keep(f"tl.{which}({found}, {code})")
        return found

    def _compare(self, op: ast.cmpop, left: Value, right: Value) -> Value:
        if isinstance(left, Truth) or isinstance(right, Truth):
            raise NotUnderstood
        a, b = self._span(left), self._span(right)
        if isinstance(op, (ast.Gt, ast.GtE)):
            a, b, op = b, a, ast.Lt() if isinstance(op, ast.Gt) else ast.LtE()
        if isinstance(op, (ast.Lt, ast.LtE)):
            sign = "<" if isinstance(op, ast.Lt) else "<="
            return Truth(
                self._keep(f"{a.low} {sign} {b.high}"), self._keep(f"{a.high} {sign} {b.low}")
            )
        if not isinstance(op, (ast.Eq, ast.NotEq)):
            raise NotUnderstood
        equal = Truth(
            self._keep(f"({a.low} <= {b.high}) & ({b.low} <= {a.high})"),
            self._keep(f"({a.low} == {b.high}) & ({a.high} == {b.low})"),
        )
        return equal if isinstance(op, ast.Eq) else self.inverse(equal)

    # ---- captured tensors ----------------------------------------------------------------------

    def _take(self, table: Value, indices: Sequence[Value]) -> Value:
        if not isinstance(table, Table):
            raise NotUnderstood
        offset, spans = "0", []
        for dim, index in enumerate(indices):
            if isinstance(index, Span):
                spans.append((dim, index))
                continue
            if not isinstance(index, Known):
                raise NotUnderstood
            if index.axis:
                self.dependences.add(Dependence(index.axis, table.place, dim))
            offset += f" + nearest({index.code}, {table.code}, {dim})"
        if len(spans) > self.most_spans or not all(span.rows for _, span in spans):
            raise NotUnderstood
        self.spans_read = max(self.spans_read, len(spans))
        if not spans:
            entry = self._keep(f"read({table.code}, {offset}, {len(indices)})")
            return Span(entry, entry)
        axes = ", ".join(
            f"{dim}, {span.low}, {span.high}, {span.rows}" for dim, span in sorted(spans)
        )
        in_blocks = not any(span.step for _, span in spans)
        self.in_blocks = self.in_blocks and (in_blocks or len(spans) < 2)
        along = "along_one" if len(spans) == 1 else f"along_two{'_blocks' if in_blocks else ''}"
        self.count += 1
        low, high = f"low{self.count}", f"high{self.count}"
        self.lines.append(f"{low}, {high} = {along}({table.code}, {offset}, {axes})")
        return Span(low, high)

    # ---- kinds ---------------------------------------------------------------------------------

    def _span(self, value: Value) -> Span:
        if isinstance(value, Known):
            if value.axis:
                self.dependences.add(Dependence(value.axis, -1, -1))
            return Span(value.code, value.code)
        if isinstance(value, Span):
            return value
        raise NotUnderstood

    def _truth(self, value: Value) -> Truth:
        """A verdict; the entries of a table of bools are numbers from 0 to 1."""
        if isinstance(value, Truth):
            return value
        if isinstance(value, Span):
            return Truth(self._keep(f"{value.high} != 0"), self._keep(f"{value.low} != 0"))
        raise NotUnderstood

"""Modifiers: masks and scores as values, and what they demand of a call.

A modifier is an expression with what it captured. It is compared by value and written as a person
would write it; its captured tensors must have the sizes of a call (`misfit`), and for a shard of
the call it is restricted to some of the batch entries and heads (`restricted`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.modifiers.expression import (
    READS,
    VARIABLES,
    WHOLE,
    Captured,
    Combination,
    ExpressionBuilder,
    constant,
    counts_of,
    mentions,
    parse,
)

BINDING = {
    "==": 0, "<": 0, "<=": 0, "|": 1, "^": 2, "&": 3, "<<": 6, ">>": 6, "+": 7, "-": 7,
    "*": 8, "/": 8, "//": 8, "%": 8, "~": 9, "neg": 9,
}  # fmt: skip
CALLS = {"min": "minimum", "max": "maximum", "whole": "trunc", "real": ""}
LONGEST = 4000  # characters; an expression that repeats its parts may be far longer


def written(key: str, captured: Captured | None = None) -> str:
    """The expression of a key, such as ``query_row - 7 <= kv_row``.

    captured: shows numbers as they are; without it they have the names of their slots.
    """
    found: list[tuple[str, int]] = []  # text and how tightly it holds together
    for step in parse(key):
        operands = [found[number] for number in step.operands]
        if step.op in VARIABLES:
            text = step.op, 10
        elif step.op == "literal":
            text = step.detail, 10
        elif step.op == "number":
            value = step.detail if captured is None else repr(captured.value(step.slot))
            text = value, 9 if value.startswith("-") else 10
        elif step.op in READS:
            name = step.label or f"tensor{step.slot[1]}"
            indices = ", ".join(operand for operand, _ in operands)
            text = (f"{name}[{indices}]" if indices else name), 10
        elif step.op in BINDING:
            text = _joined(step.op, operands)
        else:
            name = CALLS.get(step.op, step.op)
            text = f"{name}({', '.join(operand for operand, _ in operands)})", 10
        found.append(text if len(text[0]) <= LONGEST else ("…", 10))
    return found[-1][0] if found else ""


def _joined(op: str, operands: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Operands joined by an operator, in parentheses where they hold less tightly."""
    binding = BINDING[op]
    if len(operands) == 1:
        sign = "-" if op == "neg" else op
        return sign + _within(operands[0], binding), binding
    left, right = operands
    if op in ("+", "-") and right[0].startswith("-") and right[0][1:].isalnum():  # a - -1
        op, right = {"+": "-", "-": "+"}[op], (right[0][1:], 10)
    first = _within(left, binding if binding else 1)  # (a < b) < c is no chain
    second = _within(right, binding if op in "&|" else binding + 1)  # a - (b - c)
    return f"{first} {op} {second}", binding


def _within(operand: tuple[str, int], binding: int) -> str:
    text, inner = operand
    return text if inner >= binding else f"({text})"


Self = TypeVar("Self", bound="Modifier")


class Modifier:
    """An expression with what it captured: compared by value, and moved as tensors are."""

    key: str
    captured: Captured

    def to(self: Self, device: torch.device | str) -> Self:
        """This mask or score with its captured tensors on a device."""
        tensors = tuple(tensor.to(device) for tensor in self.captured.tensors)
        return type(self)(self.key, self.captured._replace(tensors=tensors))  # type: ignore[call-arg]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        these, those = self.captured, other.captured  # type: ignore[attr-defined]
        numbers = (self.key, tuple(these.ints), tuple(these.floats))
        if numbers != (other.key, tuple(those.ints), tuple(those.floats)):  # type: ignore[attr-defined]
            return False
        return all(
            one is another
            or (
                (one.device == another.device and one.dtype == another.dtype)
                and torch.equal(one, another)
            )
            for one, another in zip(these.tensors, those.tensors, strict=True)
        )

    def __hash__(self) -> int:
        shapes = tuple(tuple(tensor.shape) for tensor in self.captured.tensors)
        return hash((self.key, tuple(self.captured.ints), tuple(self.captured.floats), shapes))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({written(self.key, self.captured)})"


def refusal_in_graphs(argument: str) -> str:
    """Why a graph has no plain function for a mask or score, and what to write instead."""
    return (
        f"{argument}: got a function inside torch.compile, whose values a graph cannot follow; "
        f"write {argument} = saccade.{argument}s.function(the_function)() outside the compiled "
        f"function, or give values to what saccade.{argument}s.function makes"
    )


def refuse_in_graphs(argument: str, value: Any) -> None:
    """Refuse a plain function where a program is traced that must be whole, as by torch.export."""
    if torch.compiler.is_compiling() and is_plain_function(value):
        raise TypeError(refusal_in_graphs(argument))


def is_plain_function(value: Any) -> bool:
    """Whether a value is a function that a mask or score may be traced from."""
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(value, kinds) or (callable(value) and not isinstance(value, type))


AXES = {"batch": "batch", "head": "query_heads", "query_row": "query_len", "kv_row": "kv_len"}


class Extents(NamedTuple):
    """The sizes of a problem's four index axes.

    For packed sequences the lengths are those of the longest sequence (None: not known without
    reading the device), and a captured tensor may be longer.
    """

    batch: int
    query_heads: int
    query_len: int | None
    kv_len: int | None
    packed: bool = False


class Need(NamedTuple):
    """What a read demands of a captured tensor.

    Attributes:
        tensor: the number of its slot.
        label: the argument it came by, whose size is that of the axis or 1; "" for a tensor of a
            user's function, which must be long enough.
        axes: for each dimension the axis that it is read along, "" where it is read otherwise.
        divisors: for each dimension the slot of the number of rows that share an entry, or -1.
        nearest: whether an index outside of it means the nearest entry.
    """

    tensor: int
    label: str
    axes: tuple[str, ...]
    divisors: tuple[int, ...]
    nearest: bool


@constant
def needs(key: str) -> tuple[Need, ...]:
    """What an expression demands of the tensors that it reads along rows, batch and heads."""
    expression = parse(key)
    found = []
    for step in expression:
        if step.op not in READS:
            continue
        axes, divisors = [], []
        for number in step.operands:
            index, divisor = expression[number], -1
            if index.op == "//" and expression[index.operands[1]].op == "number":
                by = expression[index.operands[1]]
                if by.kind == WHOLE:
                    index, divisor = expression[index.operands[0]], by.slot[1]
            axes.append(AXES.get(index.op, ""))
            divisors.append(divisor)
        need = Need(step.slot[1], step.label, tuple(axes), tuple(divisors), step.op == "take")
        found.append(need)
    return tuple(found)


def misfit(key: str, captured: Captured, extents: Extents) -> str | None:
    """Say what is wrong with the size of a captured tensor, or None. Size 1 always broadcasts."""
    for need in needs(key):
        if need.nearest and not need.label:  # a function's own take: the nearest entry is meant
            continue
        complaint = _misfit(need, captured.tensors[need.tensor], captured, extents)
        if complaint is not None:
            return complaint
    return None


def _misfit(need: Need, table: Tensor, captured: Captured, extents: Extents) -> str | None:
    wanted = [getattr(extents, axis) if axis else None for axis in need.axes]
    for dim, divisor in enumerate(need.divisors):
        want = wanted[dim]
        if divisor >= 0 and want is not None:
            wanted[dim] = -(-want // captured.ints[divisor])
    longer = [
        not need.label or (extents.packed and axis in ("query_len", "kv_len")) for axis in need.axes
    ]
    if all(
        want is None or size == want or (size == 1 and need.nearest) or (may and size > want)
        for size, want, may in zip(table.shape, wanted, longer, strict=True)
    ):
        return None
    # Only now, as text of a size makes it a constant to torch.compile.
    sizes = [
        f"{axis} {want}" if want is not None else axis or "any"
        for axis, want in zip(need.axes, wanted, strict=True)
    ]
    name = need.label or f"captured tensor {need.tensor}"
    at_least = "" if need.label else " at least"
    ones = " or 1 there" if need.nearest else ""
    return f"{name}: got shape {tuple(table.shape)}, takes{at_least} [{', '.join(sizes)}]{ones}"


def expanded(key: str, captured: Captured) -> Captured:
    """The captured tensors with a dimension for each index, as they broadcast: from the right."""
    tensors = list(captured.tensors)
    for need in needs(key):
        table = tensors[need.tensor]
        missing = len(need.axes) - table.dim()
        if missing > 0:
            tensors[need.tensor] = table.reshape((1,) * missing + tuple(table.shape))
    return captured._replace(tensors=tuple(tensors))


class ShardRange(NamedTuple):
    """Which of all batch entries, or of all heads, a shard has."""

    start: int
    size: int
    of: int

    @property
    def whole(self) -> bool:
        """Whether it has all of them."""
        return self.size == self.of


def restricted(
    key: str, captured: Captured, batch: ShardRange, head: ShardRange
) -> tuple[str, Captured]:
    """The key and captured values by which a shard computes what the whole does.

    Its rows are numbered as ever, but its batch entries and heads are some of all. What a captured
    tensor holds for the others is cut off where it is read at the batch entry or head itself; else
    the expression reads at the number in the whole, and captures where the shard begins.
    """
    captured = expanded(key, captured)
    for variable, shard in (("batch", batch), ("head", head)):
        if shard.whole or not any(mentions(parse(key), [variable])):
            continue
        cuttable = _cuttable(key, captured, variable, shard)
        tensors = list(captured.tensors)
        if cuttable is not None:
            for tensor, dim in cuttable:
                if tensors[tensor].shape[dim] != 1:
                    tensors[tensor] = tensors[tensor].narrow(dim, shard.start, shard.size)
            captured = captured._replace(tensors=tuple(tensors))
            continue
        for need in needs(key):  # one entry for all is no longer read at 0
            table = tensors[need.tensor]
            for dim, axis in enumerate(need.axes):
                if need.label and axis == AXES[variable] and table.shape[dim] == 1:
                    table = table.expand(*table.shape[:dim], shard.of, *table.shape[dim + 1 :])
            tensors[need.tensor] = table
        found = _moved(key, variable)
        start = Captured((), (shard.start,), ())
        key, captured = found.key, found.captured(captured._replace(tensors=tensors), start)
    return key, captured


def _cuttable(
    key: str, captured: Captured, variable: str, shard: ShardRange
) -> set[tuple[int, int]] | None:
    """The tensors and dimensions that are read at the variable; None where it is used otherwise."""
    expression = parse(key)
    cuttable: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    for step in expression:
        for dim, number in enumerate(step.operands):
            at = expression[number].op == variable
            if step.op not in READS:
                if at:
                    return None
            elif at:
                size = captured.tensors[step.slot[1]].shape[dim]
                if size != shard.of and not (size == 1 and step.label):
                    return None
                cuttable.add((step.slot[1], dim))
            else:
                others.add((step.slot[1], dim))
    last = expression[-1].op == variable
    return None if last or cuttable & others else cuttable


@constant
def _moved(key: str, variable: str) -> Combination:
    """The expression with the number of the shard's first entry added to a variable."""
    expression, builder = parse(key), ExpressionBuilder()
    start = builder.add("number", detail=f"i{counts_of(expression)[1]}")
    moved = builder.add("+", builder.add(variable), start)
    return builder.combination(builder.include(expression, variables={variable: moved}))

"""Modifiers: what masks and scores have in common as values."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from saccade.modifiers.expression import READS, VARIABLES, Captured, parse

# ---- written -------------------------------------------------------------------------------------
# An expression as a person would write it.

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
    text, own = operand
    return text if own >= binding else f"({text})"


Self = TypeVar("Self", bound="Modifier")


class Modifier:
    """An expression with what it captured: compared by value, and moved as tensors are."""

    key: str
    captured: Captured

    def to(self: Self, device: torch.device | str) -> Self:
        """The same with its captured tensors on a device."""
        tensors = tuple(tensor.to(device) for tensor in self.captured.tensors)
        return type(self)(self.key, self.captured._replace(tensors=tensors))  # type: ignore[call-arg]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, others = self.captured, other.captured  # type: ignore[attr-defined]
        numbers = (self.key, tuple(mine.ints), tuple(mine.floats))
        if numbers != (other.key, tuple(others.ints), tuple(others.floats)):  # type: ignore[attr-defined]
            return False
        return all(
            one is another
            or (
                (one.device == another.device and one.dtype == another.dtype)
                and torch.equal(one, another)
            )
            for one, another in zip(mine.tensors, others.tensors, strict=True)
        )

    def __hash__(self) -> int:
        shapes = tuple(tuple(tensor.shape) for tensor in self.captured.tensors)
        return hash((self.key, tuple(self.captured.ints), tuple(self.captured.floats), shapes))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({written(self.key, self.captured)})"


def refuse_in_graphs(argument: str, value: Any) -> None:
    """Refuse a plain function while torch.compile traces: a graph cannot follow what it reaches.

    Raises:
        TypeError: saying where to make the mask or score.
    """
    if torch.compiler.is_compiling() and is_plain_function(value):
        raise TypeError(
            f"{argument}: got a function inside torch.compile, whose values a graph cannot follow; "
            f"make the {argument} before, or give values to what saccade.{argument}s.function makes"
        )


def is_plain_function(value: Any) -> bool:
    """Whether a value is a function that a mask or score may be traced from."""
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(value, kinds) or (callable(value) and not isinstance(value, type))

"""Renumbering: an expression for a call that holds some rows of a whole.

A call counts its rows from 0. Where they are rows of a longer sequence, dealt to several calls, an
expression must see the numbers that they have there. What a captured tensor holds for each row is
cut out where it is read at the row itself; elsewhere the row's number is read from a table, or is
the call's own plus where the rows start.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers.expression import (
    READS,
    Captured,
    Combination,
    Expression,
    ExpressionBuilder,
    constant,
    counts_of,
    parse,
)
from saccade.modifiers.graph_constants import constants, outside_graph
from saccade.modifiers.modifier import expanded


class RowNumbers:
    """The numbers that the rows of a call have in the whole, ascending or not.

    What is derived from them is kept, as every layer of a model asks for it.
    """

    def __init__(self, numbers: Tensor, batch: Tensor | None = None) -> None:
        """numbers: int64 [rows] on the CPU. batch: int64 [rows], the sequence of each row, where
        the whole is several laid end to end."""
        self.numbers: Tensor = numbers
        self.batch: Tensor | None = batch
        self._placed: dict[Any, Tensor] = {}

    @functools.cached_property
    @outside_graph
    def start(self) -> int | None:
        """The first number, where each is one more than the one before; else None."""
        if not self.numbers.numel():
            return 0
        first = int(self.numbers[0])
        ascending = torch.arange(first, first + self.numbers.numel())
        return first if torch.equal(self.numbers, ascending) else None

    def index(self, device: torch.device) -> Tensor:
        """The numbers on a device, to select by."""
        return self._on(device, self.numbers, torch.int64)

    def table(self, device: torch.device) -> Tensor:
        """The numbers as a table that an expression reads."""
        return self._on(device, self.numbers, torch.int32)

    def batches(self, device: torch.device) -> Tensor:
        """The sequences as a table that an expression reads."""
        assert self.batch is not None
        return self._on(device, self.batch, torch.int32)

    def _on(self, device: torch.device, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return constants(self._known_on(device, numbers, dtype))

    @outside_graph
    def _known_on(self, device: torch.device, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        key = device, dtype, numbers is self.batch
        if key not in self._placed:
            self._placed[key] = numbers.to(device, dtype)
        return self._placed[key]


def renumbered(
    key: str,
    captured: Captured,
    query: RowNumbers,
    kv: RowNumbers,
    device: torch.device | None = None,
) -> tuple[str, Captured]:
    """The key and captured values by which some rows compute what the whole does.

    The whole has as many keys as query rows, so that all ways to align them are one.

    device: of tables of numbers; where they are read beside captured tensors, theirs.
    """
    if not key:
        return key, captured
    captured = expanded(key, captured)
    expression, tensors = parse(key), list(captured.tensors)
    cut: list[tuple[int, int]] = []
    for variable, rows in (("query_row", query), ("kv_row", kv)):
        for tensor, dim in _read_at(expression, variable):
            if tensors[tensor].shape[dim] != 1:
                index = rows.index(tensors[tensor].device)
                tensors[tensor] = tensors[tensor].index_select(dim, index)
            cut.append((tensor, dim))
    device = tensors[0].device if tensors else device or torch.device("cpu")
    tables: list[Tensor] = []
    starts: list[int] = []
    sources: list[str] = []  # of query_row, kv_row and batch
    for rows in (query, kv):
        start = rows.start
        if start is None:
            tables.append(rows.table(device))
        elif start:
            starts.append(start)
        sources.append("table" if start is None else "start" if start else "")
    if query.batch is not None:
        tables.append(query.batches(device))
    sources.append("" if query.batch is None else "table")
    found = _with_sources(key, tuple(sorted(cut)), tuple(sources))
    return found.key, found.captured(
        captured._replace(tensors=tuple(tensors)), Captured(tuple(tables), tuple(starts), ())
    )


def interleaved(
    key: str, captured: Captured, shift: Tensor, ranks: int, rank: int
) -> tuple[str, Captured]:
    """The key and captured values for a call that holds every so many-th key of each sequence.

    shift: int32 [batch], how many keys of all come before each sequence's first query row.
    """
    if not key:
        return key, captured
    captured = expanded(key, captured)
    found = _with_every_key(key)
    return found.key, found.captured(captured, Captured((shift,), (ranks, rank), ()))


@constant
def _with_every_key(key: str) -> Combination:
    """The expression where key j is key ranks · j + rank of all, and rows are told their shift."""
    expression, builder = parse(key), ExpressionBuilder()
    num_tensors, num_ints, _ = counts_of(expression)
    ranks, rank = (builder.add("number", detail=f"i{num_ints + number}") for number in range(2))
    kv_row = builder.add("+", builder.add("*", builder.add("kv_row"), ranks), rank)
    shift = builder.add("take", builder.add("batch"), detail=f"t{num_tensors}:i")
    result = builder.include(expression, variables={"kv_row": kv_row, "shift": shift})
    return builder.combination(result)


def _read_at(expression: Expression, variable: str) -> list[tuple[int, int]]:
    """The tensors and dimensions that are read at a variable itself, and nowhere otherwise."""
    read: dict[tuple[int, int], set[bool]] = {}
    for step in expression:
        if step.op in READS:
            for dim, number in enumerate(step.operands):
                at = expression[number].op == variable
                read.setdefault((step.slot[1], dim), set()).add(at)
    return [where for where, found in read.items() if found == {True}]


@constant
def _with_sources(
    key: str, cut: tuple[tuple[int, int], ...], sources: Sequence[str]
) -> Combination:
    """The expression with numbers of rows from their sources, but for reads of tensors cut out."""
    expression, builder = parse(key), ExpressionBuilder()
    num_tensors, num_ints, _ = counts_of(expression)
    numbers: dict[str, int] = {"shift": builder.literal(0)}
    for variable, source in zip(("query_row", "kv_row", "batch"), sources, strict=True):
        row = builder.add("query_row" if variable == "batch" and source else variable)
        if source == "table":
            numbers[variable] = builder.add("take", row, detail=f"t{num_tensors}:i")
            num_tensors += 1
        elif source == "start":
            start = builder.add("number", detail=f"i{num_ints}")
            numbers[variable] = builder.add("+", row, start)
            num_ints += 1
        else:
            numbers[variable] = row
    added: list[int] = []
    for step in expression:
        if step.op in numbers:
            added.append(numbers[step.op])
            continue
        operands = [added[number] for number in step.operands]
        if step.op in READS:
            for dim, number in enumerate(step.operands):
                if (step.slot[1], dim) in cut:
                    operands[dim] = builder.add(expression[number].op)
        if step.op == "+" and numbers["shift"] in operands:  # rows as they are, aligned
            operands.remove(numbers["shift"])
            added.append(operands[0])
            continue
        added.append(builder.add(step.op, *operands, detail=step.detail))
    return builder.combination(added[-1])

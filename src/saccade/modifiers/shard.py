"""Shard: a mask or score of a whole call as a part of it sees it.

Rows of a part are numbered as ever, but its batch entries and heads are some of all. What a
captured tensor holds for the others is cut off where it is read at the batch entry or head itself;
else the expression reads at the number in the whole, of which it captures where the part begins.
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.modifiers.constant import constant
from saccade.modifiers.expression import (
    READS,
    Captured,
    Combination,
    ExpressionBuilder,
    counts_of,
    mentions,
    parse,
)
from saccade.modifiers.fit import expanded, needs


class ShardRange(NamedTuple):
    """Which of all batch entries, or of all heads, a part has."""

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
    """The key and captured values by which a part computes what the whole does."""
    captured = expanded(key, captured)
    for variable, part in (("batch", batch), ("head", head)):
        if part.whole or not any(mentions(parse(key), [variable])):
            continue
        places = _cuttable(key, captured, variable, part)
        tensors = list(captured.tensors)
        if places is None:
            for need in needs(key):  # one entry for all is no longer read at 0
                table = tensors[need.tensor]
                for dim, axis in enumerate(need.axes):
                    if need.label and _is_axis(axis, variable) and table.shape[dim] == 1:
                        table = table.expand(*table.shape[:dim], part.of, *table.shape[dim + 1 :])
                tensors[need.tensor] = table
            found = _moved(key, variable)
            start = Captured((), (part.start,), ())
            key, captured = found.key, found.captured(captured._replace(tensors=tensors), start)
            continue
        for tensor, dim in places:
            if tensors[tensor].shape[dim] != 1:
                tensors[tensor] = tensors[tensor].narrow(dim, part.start, part.size)
        captured = captured._replace(tensors=tuple(tensors))
    return key, captured


def _is_axis(axis: str, variable: str) -> bool:
    return axis == {"batch": "batch", "head": "query_heads"}[variable]


def _cuttable(
    key: str, captured: Captured, variable: str, part: ShardRange
) -> set[tuple[int, int]] | None:
    """The tensors and dimensions that are read at the variable; None where it is used otherwise."""
    expression = parse(key)
    places: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    for step in expression:
        for dim, number in enumerate(step.operands):
            at = expression[number].op == variable
            if step.op not in READS:
                if at:
                    return None
            elif at:
                size = captured.tensors[step.slot[1]].shape[dim]
                if size != part.of and not (size == 1 and step.label):
                    return None
                places.add((step.slot[1], dim))
            else:
                others.add((step.slot[1], dim))
    last = expression[-1].op == variable
    return None if last or places & others else places


@constant
def _moved(key: str, variable: str) -> Combination:
    """The expression with the number of the part's first entry added to a variable."""
    expression, builder = parse(key), ExpressionBuilder()
    start = builder.add("number", detail=f"i{counts_of(expression)[1]}")
    moved = builder.add("+", builder.add(variable), start)
    added: list[int] = []
    for step in expression:
        if step.op == variable:
            added.append(moved)
        else:
            operands = (added[number] for number in step.operands)
            added.append(builder.add(step.op, *operands, detail=step.detail))
    return builder.combination(added[-1])

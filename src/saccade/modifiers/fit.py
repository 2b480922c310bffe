"""Fit: whether what an expression captured has the sizes of a call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from saccade.modifiers.constant import constant
from saccade.modifiers.expression import READS, WHOLE, Captured, parse

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
    """What one dimension of a captured tensor must hold.

    Attributes:
        tensor: its place among the captured tensors.
        label: the argument it came by, whose size is that of the axis or 1; "" for a tensor of a
            function of one's own, which must be long enough.
        axes: for each dimension the axis that it is read along, "" where it is read otherwise.
        divisors: for each dimension the place of the number of rows that share an entry, or -1.
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
    wanted = [
        _wanted(axis, divisor, captured, extents)
        for axis, divisor in zip(need.axes, need.divisors, strict=True)
    ]
    fits = [
        want is None
        or size == want
        or (size == 1 and need.nearest)
        or (_may_be_longer(need, axis, extents) and size > want)
        for size, axis, want in zip(table.shape, need.axes, wanted, strict=True)
    ]
    if all(fits):
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


def _wanted(axis: str, divisor: int, captured: Captured, extents: Extents) -> int | None:
    """How many entries a dimension must hold; None: as many as it has."""
    want = getattr(extents, axis) if axis else None
    if want is None or divisor < 0:
        return want
    return -(-want // captured.ints[divisor])


def _may_be_longer(need: Need, axis: str, extents: Extents) -> bool:
    return not need.label or (extents.packed and axis in ("query_len", "kv_len"))


def expanded(key: str, captured: Captured) -> Captured:
    """The captured tensors with a dimension for each index, as they broadcast: from the right."""
    tensors = list(captured.tensors)
    for need in needs(key):
        table = tensors[need.tensor]
        missing = len(need.axes) - table.dim()
        if missing > 0:
            tensors[need.tensor] = table.reshape((1,) * missing + tuple(table.shape))
    return captured._replace(tensors=tuple(tensors))

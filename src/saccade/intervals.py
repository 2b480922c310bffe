"""Intervals: a mask function's answer for whole tiles at once.

Called on intervals of rows instead of rows, a mask function says of each tile whether every pair
in it is visible, whether any can be. The answer is cautious: an operation that is not understood
makes a tile "perhaps", never "no" or "all". So the one definition of a mask also decides which
tiles are skipped and which run without mask arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade import expressions
from saccade.expressions import Captured, Coordinates, Leaf


def classify(key: str, captured: Captured, at: Coordinates) -> Truth:
    """What a mask makes of tiles whose rows `at` gives as intervals.

    A function that does something which intervals do not understand answers "perhaps" everywhere:
    its tiles are then judged row by row when they are visited.
    """
    with _on_cpu():
        return _classify(key, captured, at)


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Tensors that are made on the way lie beside the intervals, whatever the default device is."""
    usual = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if usual else torch.device("cpu")


def _classify(key: str, captured: Captured, at: Coordinates) -> Truth:
    tree = expressions.parse(key)
    if tree is None:
        return as_truth(torch.ones((1, 1, 1, 1), dtype=torch.bool))

    def answer(leaf: Leaf) -> Truth:
        try:
            return as_truth(leaf.function.body(*leaf.place(at), *leaf.data(captured)))
        except Exception:  # a real mistake shows when the function runs on rows
            return Truth(torch.tensor(True), torch.tensor(False))

    return expressions.combine(tree, answer)


class Truth:
    """For each tile: can any pair be true (`possible`), is every pair true (`certain`)?"""

    def __init__(self, possible: Tensor, certain: Tensor):
        self.possible, self.certain = possible, certain

    def __and__(self, other: Any) -> Truth:
        other = as_truth(other)
        return Truth(self.possible & other.possible, self.certain & other.certain)

    def __or__(self, other: Any) -> Truth:
        other = as_truth(other)
        return Truth(self.possible | other.possible, self.certain | other.certain)

    def __invert__(self) -> Truth:
        return Truth(~self.certain, ~self.possible)

    def __xor__(self, other: Any) -> Truth:
        other = as_truth(other)
        return (self & ~other) | (~self & other)

    def __eq__(self, other: Any) -> Truth:  # type: ignore[override]
        return ~(self ^ other)

    def __ne__(self, other: Any) -> Truth:  # type: ignore[override]
        return self ^ other

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a tile of pairs has no single truth value")


def as_truth(value: Any) -> Truth:
    """A Truth as it is; an exact answer (a bool or a bool tensor) as one without doubt."""
    if isinstance(value, Truth):
        return value
    exact = torch.as_tensor(value)
    if exact.dtype != torch.bool:
        raise TypeError(f"a mask function must give a bool, got {exact.dtype}")
    return Truth(exact, exact)


class Interval:
    """Numbers known to lie between `low` and `high` (both included), one interval for each tile."""

    def __init__(self, low: Any, high: Any):
        self.low, self.high = low, high

    @staticmethod
    def rows(start: int, stop: int, tile_size: int, dim: int) -> Interval:
        """The tiles of the rows start … stop - 1 along one of four dimensions."""
        shape = [1, 1, 1, 1]
        shape[dim] = -1
        low = torch.arange(start, stop, tile_size, device="cpu").view(shape)
        return Interval(low, (low + tile_size).clamp_max(stop) - 1)

    def take_from(self, table: Tensor, indices: Sequence[Any]) -> Any:
        """The smallest and largest entries that each tile can read (a Truth for bool tables)."""
        if table.is_floating_point() and bool(table.isnan().any()):
            raise TypeError("NaN has no place between a smallest and a largest entry")
        if table.dtype == torch.bool:
            counts = table.to(torch.uint8)
            return Truth(
                _reduce(counts, indices, largest=True).bool(),
                _reduce(counts, indices, largest=False).bool(),
            )
        return Interval(
            _reduce(table, indices, largest=False), _reduce(table, indices, largest=True)
        )

    def __add__(self, other: Any) -> Interval:
        other = as_interval(other)
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Any) -> Interval:
        other = as_interval(other)
        return Interval(self.low - other.high, self.high - other.low)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __rsub__(self, other: Any) -> Interval:
        return as_interval(other) - self

    def __mul__(self, other: Any) -> Interval:
        other = as_interval(other)
        corners = [
            torch.as_tensor(a * b) for a in (self.low, self.high) for b in (other.low, other.high)
        ]
        corners = torch.broadcast_tensors(*corners)
        return Interval(torch.stack(corners).amin(0), torch.stack(corners).amax(0))

    def __floordiv__(self, other: Any) -> Interval:
        divisor = _positive_number(other)
        return Interval(self.low // divisor, self.high // divisor)

    def __mod__(self, other: Any) -> Interval:
        divisor = _positive_number(other)
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        whole = isinstance(divisor, int) and not low.is_floating_point()
        same_turn = low // divisor == high // divisor
        return Interval(
            torch.where(same_turn, low % divisor, 0),
            torch.where(same_turn, high % divisor, divisor - 1 if whole else divisor),
        )

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Any) -> Truth:
        other = as_interval(other)
        return Truth(_bool(self.low < other.high), _bool(self.high < other.low))

    def __le__(self, other: Any) -> Truth:
        other = as_interval(other)
        return Truth(_bool(self.low <= other.high), _bool(self.high <= other.low))

    def __gt__(self, other: Any) -> Truth:
        return as_interval(other) < self

    def __ge__(self, other: Any) -> Truth:
        return as_interval(other) <= self

    def __eq__(self, other: Any) -> Truth:  # type: ignore[override]
        other = as_interval(other)
        overlap = _bool(self.low <= other.high) & _bool(other.low <= self.high)
        return Truth(overlap, _bool(self.low == other.high) & _bool(self.high == other.low))

    def __ne__(self, other: Any) -> Truth:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a tile of rows has no single truth value")


def as_interval(value: Any) -> Interval:
    """An Interval as it is; a known number (or index tensor) as an interval of no width."""
    if isinstance(value, Interval):
        return value
    if isinstance(value, (int, float, Tensor)):
        return Interval(value, value)
    raise TypeError(f"not understood on tiles: {type(value).__name__}")


def _bool(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.bool)


def _positive_number(value: Any) -> int | float:
    if isinstance(value, (int, float)) and value > 0:
        return value
    raise TypeError("division of rows by anything but a positive number is not understood on tiles")


def _reduce(table: Tensor, indices: Sequence[Any], *, largest: bool) -> Tensor:
    """Fold a table to the largest (or smallest) entry that each tile of indices can read."""
    picks: list[Any] = []
    for dim, index in enumerate(indices):
        if table.shape[dim] == 1:
            picks.append(0)
        elif not isinstance(index, Interval):
            picks.append(index)
        else:
            table, pick = _fold(table, dim, index, largest)
            picks.append(pick)
    return table[tuple(picks)]


def _fold(table: Tensor, dim: int, index: Interval, largest: bool) -> tuple[Tensor, Any]:
    """Fold one dimension to one entry an interval; to a single one where intervals vary along
    several dimensions (a cautious answer)."""
    low, high = torch.broadcast_tensors(torch.as_tensor(index.low), torch.as_tensor(index.high))
    if max(low.shape, default=1) != low.numel():
        folded = table.amax(dim, keepdim=True) if largest else table.amin(dim, keepdim=True)
        return folded, 0
    last = table.shape[dim] - 1
    first, end = low.flatten().clamp(0, last), high.flatten().clamp(0, last)
    width = int((end - first).max()) + 1
    entries = (first[:, None] + torch.arange(width)).minimum(end[:, None])  # repeats change nothing
    spread = table.index_select(dim, entries.flatten()).unflatten(dim, (-1, width))
    folded = spread.amax(dim + 1) if largest else spread.amin(dim + 1)
    return folded, torch.arange(low.numel()).view(low.shape)

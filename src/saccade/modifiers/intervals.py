"""Intervals on tensors: a mask's classes on many tiles at once, for plans on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers.evaluate import OPERATIONS, inside
from saccade.modifiers.expression import TRUTH, VARIABLES, Captured, Coordinates, Step, parse
from saccade.modifiers.interval_rules import IntervalRules, Span, Truth, Value


def rows(start: int, stop: int, tile_size: int, dim: int) -> Span:
    """The tiles of the rows start … stop - 1 along one of four dimensions."""
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    low = torch.arange(start, stop, tile_size, device="cpu").view(shape)
    return Span(low, (low + tile_size).clamp_max(stop) - 1)


def classify(key: str, captured: Captured, at: Coordinates) -> Truth:
    """What a mask makes of tiles whose rows `at` gives as spans; batch and head are exact.

    Tensors that are made on the way lie on the CPU, whatever the default device is.
    """
    usual = torch.get_default_device().type == "cpu"
    with contextlib.nullcontext() if usual else torch.device("cpu"):
        if not key:
            everything = torch.ones((1, 1, 1, 1), dtype=torch.bool)
            return Truth(everything, everything)
        rules, expression = _Rules(captured, at), parse(key)
        found: list[Value] = []
        for step in expression:
            operands = [found[number] for number in step.operands]
            found.append(rules.value(expression, step, operands))
        verdict = found[-1]
        return verdict if isinstance(verdict, Truth) else rules.perhaps()


class _Rules(IntervalRules):
    def __init__(self, captured: Captured, at: Coordinates):
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

    def perhaps(self) -> Truth:
        return Truth(torch.tensor(True), torch.tensor(False))

    def read(self, step: Step, indices: Sequence[Value]) -> Value:
        table = self.captured.value(step.slot).detach()
        lows = _extreme(table, step, indices, largest=False)
        highs = _extreme(table, step, indices, largest=True)
        if step.kind == TRUTH:
            return Truth(highs, lows)
        wanted = torch.float32 if table.is_floating_point() else torch.int64
        return Span(lows.to(wanted), highs.to(wanted))


def _extreme(table: Tensor, step: Step, indices: Sequence[Value], *, largest: bool) -> Tensor:
    """The largest (or smallest) entry that each tile of indices can read."""
    picks: list[Any] = []
    for dim, index in enumerate(indices):
        size = table.shape[dim]
        if size <= 1 or not isinstance(index, Span):
            table, pick = _fold_all(table, dim, largest), 0
        elif index.known:
            nearest = index.low.clamp(0, size - 1)
            pick = nearest if step.op == "take" else inside(index.low, size)
        else:
            table, pick = _fold(table, dim, index, largest, step.op == "take")
        picks.append(pick)
    return table[tuple(picks)]


def _fold_all(table: Tensor, dim: int, largest: bool) -> Tensor:
    """One dimension folded to one entry; a table without entries is never read."""
    if table.shape[dim] == 1:
        return table
    if table.shape[dim] == 0:
        return table.new_zeros([1 if d == dim else s for d, s in enumerate(table.shape)])
    return table.amax(dim, keepdim=True) if largest else table.amin(dim, keepdim=True)


def _fold(table: Tensor, dim: int, index: Span, largest: bool, nearest: bool) -> tuple[Tensor, Any]:
    """Fold one dimension to one entry an interval; to a single one where intervals vary along
    several dimensions, or count from the end (a cautious answer)."""
    low, high = torch.broadcast_tensors(index.low, index.high)
    around = not nearest and low.numel() > 0 and bool((low < 0).any())
    if around or max(low.shape, default=1) != low.numel():
        return _fold_all(table, dim, largest), 0
    last = table.shape[dim] - 1
    first, end = low.flatten().clamp(0, last), high.flatten().clamp(0, last)
    width = int((end - first).max()) + 1
    entries = (first[:, None] + torch.arange(width)).minimum(end[:, None])  # repeats change nothing
    spread = table.index_select(dim, entries.flatten()).unflatten(dim, (-1, width))
    folded = spread.amax(dim + 1) if largest else spread.amin(dim + 1)
    return folded, torch.arange(low.numel()).view(low.shape)

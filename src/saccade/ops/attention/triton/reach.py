"""Visible keys: about how many a query row sees. Where they are few, other tiles are faster."""

from __future__ import annotations

import functools

from saccade.modifiers import intervals
from saccade.modifiers.expression import Captured, Coordinates
from saccade.modifiers.interval_rules import Span
from saccade.modifiers.ops import index_range

FEW = 1024
CELLS = 64  # along each side, at most: the answer may be rough
SMALLEST_CELL = 64


def is_short(mask: str, captured: Captured, query_len: int, kv_len: int) -> bool:
    """Whether rows see at most FEW keys on average, as far as intervals tell.

    A mask that captured tensors is not looked at: what they hold may change from call to call.
    """
    if not mask or captured.tensors or not query_len or not kv_len:
        return False
    return _is_short(mask, tuple(captured.ints), tuple(captured.floats), query_len, kv_len)


@functools.lru_cache(maxsize=4096)
def _is_short(
    mask: str, ints: tuple[int, ...], floats: tuple[float, ...], query_len: int, kv_len: int
) -> bool:
    at = Coordinates(
        batch=index_range(0, 1, 0),
        head=index_range(0, 1, 1),
        query_row=_cells(query_len, 2),
        kv_row=_cells(kv_len, 3),
        shift=kv_len - query_len,
    )
    truth = intervals.classify(mask, Captured((), ints, floats), at)
    return truth.possible.float().mean().item() * kv_len <= FEW


def _cells(length: int, dim: int) -> Span:
    return intervals.rows(0, length, max(SMALLEST_CELL, -(-length // CELLS)), dim)

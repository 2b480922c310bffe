"""Rules: what a kernel does to pairs, beside multiplying: one argument for all of it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Rules(NamedTuple):
    """Which pairs are visible, how scores change, which weights are dropped; the scores' scale."""

    mask: Any  # a Mask (tile_ranges.py)
    score: Any  # a Score (scores.py), or None
    dropout: Any  # a Dropout (runtime/dropout.py), or None
    scale: float

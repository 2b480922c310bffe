"""Stretches: masks under which the keys that a row sees follow each other without a hole.

What is said here holds for verdicts on whole tiles, too (`kernels/judgement.py`): for one tile of
queries, the tiles of keys that may hold a visible pair are neighbours, and for one tile of keys the
tiles of queries are. A verdict on a comparison of rows grows or shrinks with each of them; that on
`&` is the intersection of two stretches; that on `|` of two prefixes is the longer one.
"""

from __future__ import annotations

from saccade import expressions
from saccade.expressions import Leaf
from saccade.mask_functions import CAUSAL, KEY_LENGTHS, WINDOW

PREFIX = "prefix"  # all keys up to one of them
WITHIN = "within"  # all from one of them to another

_OF_LEAVES = {CAUSAL: PREFIX, KEY_LENGTHS: PREFIX, WINDOW: WITHIN}


def stretch_of(mask: str) -> str | None:
    """Which stretch of keys the rows see under a mask, by its key; None: perhaps it has holes."""
    tree = expressions.parse(mask)
    return PREFIX if tree is None else _stretch(tree)


def _stretch(tree: expressions.Leaf | expressions.Branch) -> str | None:
    if isinstance(tree, Leaf):
        return _OF_LEAVES.get(tree.name)
    parts = {_stretch(part) for part in tree.parts}
    if None in parts or tree.combiner not in "&|":
        return None
    if parts == {PREFIX}:
        return PREFIX
    return WITHIN if tree.combiner == "&" else None

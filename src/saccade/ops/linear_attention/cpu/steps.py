"""Steps: the order in which a call of linear attention visits its query rows and keys.

A query row sees the first so many keys, that is, the state after so many. So queries and keys are
walked together, in steps of at most a chunk: rows that see no key come first, then keys that no
row stops at, then rows and keys side by side, each row beside the last key that it sees; last the
rows that see everything.
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.runtime.linear_spec import LinearVariant


class Step(NamedTuple):
    """Query rows and key rows that are visited at once.

    With both, they are equally many, and a row sees the keys up to the one beside it. Rows alone
    read the state; keys alone are added to it.
    """

    queries: slice | None
    keys: slice | None


def steps_of(query_len: int, kv_len: int, variant: LinearVariant, chunk: int) -> list[Step]:
    """All steps of a call, in the order of the forward pass."""
    if not variant.causal:
        return [
            *(Step(None, keys) for keys in _cut(0, kv_len, chunk)),
            *(Step(queries, None) for queries in _cut(0, query_len, chunk)),
        ]
    shift = kv_len - query_len if variant.align == "bottom_right" else 0
    first = min(max(-shift, 0), query_len)  # the first row that sees a key
    last = max(min(kv_len - shift, query_len), first)  # the first row that sees no more than it
    beside = range(first, last)
    paired = [
        Step(queries, slice(queries.start + shift, queries.stop + shift))
        for queries in _cut(first, last, chunk)
    ]
    before = first + shift if beside else 0
    after = last + shift if beside else 0
    return [
        *(Step(queries, None) for queries in _cut(0, first, chunk)),
        *(Step(None, keys) for keys in _cut(0, before, chunk)),
        *paired,
        *(Step(None, keys) for keys in _cut(after, kv_len, chunk)),
        *(Step(queries, None) for queries in _cut(last, query_len, chunk)),
    ]


def _cut(start: int, stop: int, chunk: int) -> list[slice]:
    """A stretch of rows in chunks."""
    return [slice(at, min(at + chunk, stop)) for at in range(start, stop, chunk)]

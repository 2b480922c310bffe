"""Names: what masks are, found by what they compute.

A mask is a tree of &, | and ~ whose leaves compare rows or read a tensor of truths. `leaves` names
the leaves, by which implementations know what was measured and which tiles lie side by side.
"""

from __future__ import annotations

import functools

from saccade.modifiers.constant import constant
from saccade.modifiers.expression import READS, TRUTH, Expression, parse

CAUSAL, WINDOW, KEY_LENGTHS, DOCUMENTS, BLOCKS, DENSE, OTHER = (
    "causal", "window", "key_lengths", "documents", "blocks", "dense", "other",
)  # fmt: skip
PREFIX = "prefix"  # all keys up to one of them
WITHIN = "within"  # all from one of them to another

CAUSAL_KEYS = ("kv_row;query_row;shift;+ 1 2;<= 0 3", "kv_row;query_row;<= 0 1")
ROW_OPS = {"query_row", "shift", "kv_row", "number", "literal", "+", "-", "neg"}


def is_causal(key: str) -> bool:
    """Whether a mask is causal, aligned in either way, and nothing else."""
    return key in CAUSAL_KEYS


def leaves(expression: Expression) -> set[str]:
    """The names of what a mask joins; "other" for what has none, and where ~ turns one round."""
    found, waiting = set(), [len(expression) - 1]
    while waiting:
        step = expression[waiting.pop()]
        if step.op in ("&", "|"):
            waiting += step.operands
        else:
            found.add(_name(expression, step.op, step.operands))
    return found


def _name(expression: Expression, op: str, operands: tuple[int, ...]) -> str:
    """What one leaf is."""
    steps = [expression[number] for number in operands]
    if op in ("<", "<=") and set(_inside(expression, operands)) <= ROW_OPS:
        numbered = any(step.op == "number" for step in _below(expression, operands))
        plain = not numbered and steps[0].op == "kv_row"
        return CAUSAL if plain else WINDOW
    if op == "<" and steps[0].op == "kv_row" and steps[1].op in READS:
        return KEY_LENGTHS if _indices(expression, operands[1]) == ["batch"] else OTHER
    if op == "==" and all(step.op in READS for step in steps):
        read_at = [_indices(expression, number) for number in operands]
        return DOCUMENTS if read_at == [["batch", "query_row"], ["batch", "kv_row"]] else OTHER
    if op in READS:
        indices = [expression[number].op for number in operands]
        if indices == ["batch", "head", "//", "//"]:
            return BLOCKS
        return DENSE if set(indices) <= {"batch", "head", "query_row", "kv_row"} else OTHER
    return OTHER


def _below(expression: Expression, operands: tuple[int, ...]) -> list:
    found, waiting = [], list(operands)
    while waiting:
        step = expression[waiting.pop()]
        found.append(step)
        waiting += step.operands
    return found


def _inside(expression: Expression, operands: tuple[int, ...]) -> list[str]:
    return [step.op for step in _below(expression, operands)]


def _indices(expression: Expression, number: int) -> list[str]:
    return [expression[index].op for index in expression[number].operands]


@constant
def consists_of(key: str, names: frozenset[str]) -> bool:
    """Whether a mask is made of these by & and |. To a trace the answer is a constant."""
    return leaves(parse(key)) <= names


@functools.lru_cache(maxsize=1024)
def contiguity_of(key: str) -> str | None:
    """Which stretch of keys the rows see under a mask; None: perhaps it has holes.

    What is said holds for classes on whole tiles, too: for one tile of queries, the tiles of keys
    that may hold a visible pair are neighbours, and for one tile of keys the tiles of queries are.
    A verdict on a comparison of rows grows or shrinks with each of them; that on & is the
    intersection of two stretches; that on | of two prefixes is the longer one.
    """
    if not key:
        return PREFIX
    expression = parse(key)
    found: list[str | None] = []
    for step in expression:
        of = [found[number] for number in step.operands]
        if step.kind != TRUTH:
            found.append(None)
        elif step.op in ("&", "|"):
            joined = None if None in of else PREFIX if set(of) == {PREFIX} else WITHIN
            found.append(joined if step.op == "&" or joined == PREFIX else None)
        else:
            name = _name(expression, step.op, step.operands)
            upper = name == WINDOW and expression[step.operands[0]].op == "kv_row"
            prefix = name in (CAUSAL, KEY_LENGTHS) or upper
            found.append(PREFIX if prefix else WITHIN if name == WINDOW else None)
    return found[-1]

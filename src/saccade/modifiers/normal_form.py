"""Normal form: comparisons of rows written in one way, by which masks are recognised.

A row that sees keys up to one of them, or from one on, may be written ``q >= k``, ``k - q <= 0`` or
``q - k < window``. With p for the query's position (query_row, or query_row + shift where rows are
aligned at the bottom right), each becomes one of

    kv_row <= p        kv_row <= p + n        p - n <= kv_row

and of several that a mask joins by & the tightest are left, lower before upper: causal masks and
windows have the keys of `saccade.masks.causal` and `saccade.masks.window`, wherever they are from.

A mask is a tree of &, | and ~ whose leaves compare rows or read a tensor of truths. `leaves` names
the leaves, by which implementations know what was measured and which tiles lie side by side.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from torch import Tensor

from saccade.modifiers.expression import (
    FUNCTIONS,
    READS,
    TRUTH,
    WHOLE,
    Expression,
    ExpressionBuilder,
    constant,
    mentions,
    parse,
)

MOST_TERMS = 64  # of a sum that is looked at


class RowBound(NamedTuple):
    """A comparison of rows: kv_row <= p + number, or p - number <= kv_row.

    upper: which of the two. shifted: whether p is query_row + shift.
    """

    upper: bool
    shifted: bool
    number: int


class Lengths(NamedTuple):
    """Rows of a call, and how many keys come before the first query row's position."""

    query_len: int
    kv_len: int
    before: int


class RowBuilder(ExpressionBuilder):
    """A builder that knows what numbers are, and writes comparisons of rows in one way.

    Attributes:
        values: the value of a number, by its step; a number that may change has none.
        lengths: if the expression is for these alone.
    """

    def __init__(self, lengths: Lengths | None = None) -> None:
        super().__init__()
        self.values: dict[int, int | float] = {}
        self.lengths = lengths
        self._bounds: dict[int, RowBound] = {}

    def number(self, value: int) -> int:
        """The step of a captured number."""
        raise NotImplementedError

    def add(self, op: str, *operands: int, detail: str = "") -> int:
        """The number of a step; ~ of a comparison of rows is the opposite comparison."""
        if op == "~" and operands[0] in self._bounds:
            upper, shifted, number = self._bounds[operands[0]]
            return self._bound(RowBound(not upper, shifted, -number - 1))
        return super().add(op, *operands, detail=detail)

    def compare(self, op: str, left: int, right: int) -> int:
        """The step of a comparison by <, <=, > or >=."""
        if op in (">", ">="):
            op, left, right = {">": "<", ">=": "<="}[op], right, left
        terms = None
        if self.steps[left].kind == self.steps[right].kind == WHOLE:
            terms = self._sum((right, 1), (left, -1))
        if terms is None:
            return self.add(op, left, right)
        names, number = terms
        number -= op == "<"  # the comparison says that the sum is at least 0
        least, most = self._ends(names, number)
        if least >= 0 or most < 0:
            return self.literal(least >= 0)
        query, key, shift = (names.pop(name, 0) for name in ("query_row", "kv_row", "shift"))
        if names or {query, key} != {1, -1} or shift not in (0, query):
            return self.add(op, left, right)
        return self._bound(RowBound(key == -1, shift != 0, number))

    def _sum(self, *parts: tuple[int, int]) -> tuple[dict[str, int], int] | None:
        """A sum as coefficients of variables and a number; None for anything else."""
        names: dict[str, int] = {}
        number, waiting, terms = 0, list(parts), 0
        while waiting:
            term, factor = waiting.pop()
            step, terms = self.steps[term], terms + 1
            if terms > MOST_TERMS or step.kind != WHOLE:
                return None
            if term in self.values:
                number += factor * int(self.values[term])
            elif step.op == "literal":
                number += factor * int(step.detail)
            elif step.op in ("query_row", "kv_row", "shift"):
                names[step.op] = names.get(step.op, 0) + factor
            elif step.op in ("+", "-", "neg"):
                signs = {"+": (1, 1), "-": (1, -1), "neg": (-1,)}[step.op]
                waiting += [
                    (of, factor * sign) for of, sign in zip(step.operands, signs, strict=True)
                ]
            else:
                return None
        return {name: factor for name, factor in names.items() if factor}, number

    def _ends(self, names: dict[str, int], number: int) -> tuple[float, float]:
        """The least and the most that a sum can be."""
        last: dict[str, float] = dict.fromkeys(("query_row", "kv_row"), math.inf)
        shift = (-math.inf, math.inf)
        if self.lengths is not None:
            query_len, kv_len, _ = self.lengths
            last = {"query_row": query_len - 1, "kv_row": kv_len - 1}
            shift = (kv_len - query_len,) * 2
        least = most = number
        for name, factor in names.items():
            ends = shift if name == "shift" else (0, max(last[name], 0))
            least += min(factor * end for end in ends)
            most += max(factor * end for end in ends)
        return least, most

    def _bound(self, bound: RowBound) -> int:
        """The step of a comparison of rows."""
        upper, shifted, number = bound
        if self.lengths is not None:
            query_len, kv_len, before = self.lengths
            shift = kv_len - query_len
            number += (shift if upper else -shift) * shifted
            shifted = before == shift
            number -= (shift if upper else -shift) * shifted
            bound = RowBound(upper, shifted, number)
        step = self._written(bound, None if number == 0 else self.number(number))
        self._bounds[step] = bound
        return step

    def _written(self, bound: RowBound, number: int | None) -> int:
        query, key = self.add("query_row"), self.add("kv_row")
        if bound.shifted:
            query = self.add("+", query, self.add("shift"))
        if number is not None:
            query = self.add("+" if bound.upper else "-", query, number)
        return self.add("<=", key, query) if bound.upper else self.add("<=", query, key)

    def joined(self, result: int) -> int:
        """A mask with the tightest of the comparisons that it joins by &, windows first."""
        parts, waiting = [], [result]
        while waiting:
            part = waiting.pop()
            if self.steps[part].op == "&":
                waiting += self.steps[part].operands[::-1]
            elif part not in parts:
                parts.append(part)
        for shifted in (True, False):
            bounds = {
                part: self._bounds[part]
                for part in parts
                if part in self._bounds and self._bounds[part].shifted == shifted
            }
            if len(bounds) > 1:
                others = [part for part in parts if part not in bounds]
                parts = [*self._tightest([*bounds.values()], shifted), *others]
        if not parts:
            return self.literal(True)
        return functools.reduce(functools.partial(self.add, "&"), parts)

    def _tightest(self, found: list[RowBound], shifted: bool) -> list[int]:
        """One comparison, or the two of a window."""
        ends = {
            upper: min((r.number for r in found if r.upper == upper), default=None)
            for upper in (False, True)
        }
        both = None not in ends.values()
        steps = []
        for upper, number in ends.items():
            if number is not None:
                named = self.number(number) if both or number else None
                steps.append(self._written(RowBound(upper, shifted, number), named))
        if len(steps) == 2:
            steps = [self.add("&", *steps)]
        return steps

    def without_offsets(self, table: Tensor, indices: list[int]) -> tuple[Tensor, list[int]]:
        """A read that skips the first entries of a table, as a read of the entries behind them."""
        if self.lengths is None:
            return table, indices
        lengths = dict(zip(("query_row", "kv_row"), self.lengths[:2], strict=True))
        found = list(indices)
        for dim, index in enumerate(indices):
            terms = self._sum((index, 1))
            if terms is None or terms[1] <= 0 or list(terms[0].values()) != [1]:
                continue
            (name,), offset = terms[0], terms[1]
            if name in lengths and offset + lengths[name] <= table.shape[dim]:
                table = table.narrow(dim, offset, lengths[name])
                found[dim] = self.add(name)
        return table, found


CAUSAL, WINDOW, KEY_LENGTHS, DOCUMENTS, BLOCKS, DENSE, OTHER = (
    "causal", "window", "key_lengths", "documents", "blocks", "dense", "other",
)  # fmt: skip
PREFIX = "prefix"  # all keys up to one of them
WITHIN = "within"  # all from one of them to another

CAUSAL_KEYS = ("kv_row;query_row;shift;+ 1 2;<= 0 3", "kv_row;query_row;<= 0 1")
READ_BY_ROWS = (
    [["batch", "query_row"], ["batch", "kv_row"]],
    [["query_row"], ["kv_row"]],
)
ROW_OPS = {"query_row", "shift", "kv_row", "number", "literal", "+", "-", "neg"}


def is_causal(key: str) -> bool:
    """Whether a mask is causal, aligned in either way, and nothing else."""
    return key in CAUSAL_KEYS


@constant
def is_capped(key: str) -> bool:
    """Whether a score is a number times a tanh, whatever is capped so."""
    expression = parse(key)
    if not expression or expression[-1].op != "*":
        return False
    ops = sorted(_indices(expression, len(expression) - 1))
    return ops in (["literal", "tanh"], ["number", "tanh"])


@constant
def by_distance(key: str) -> bool:
    """Whether a mask asks alone how far a key is from a row, rows aligned at the bottom right."""
    expression = parse(key)
    waiting = [len(expression) - 1] if expression else []
    while waiting:
        step = expression[waiting.pop()]
        if step.op in ("&", "|"):
            waiting += step.operands
            continue
        if step.op not in ("<", "<=") or not set(_inside(expression, step.operands)) <= ROW_OPS:
            return False
        left, right = (_variables(expression, number) for number in step.operands)
        query, key_row, shift = (a - b for a, b in zip(left, right, strict=True))
        if query != shift or query != -key_row:
            return False
    return bool(expression)


def _variables(expression: Expression, number: int) -> tuple[int, int, int]:
    """How often a sum has query_row, kv_row and shift, those taken away below 0."""
    step = expression[number]
    if step.op in ("query_row", "kv_row", "shift"):
        query, key, shift = (int(step.op == name) for name in ("query_row", "kv_row", "shift"))
        return query, key, shift
    query, key, shift = 0, 0, 0
    signs = {"+": (1, 1), "-": (1, -1), "neg": (-1,)}.get(step.op, ())
    for operand, sign in zip(step.operands, signs, strict=True):
        inside = _variables(expression, operand)
        query, key, shift = (
            query + sign * inside[0],
            key + sign * inside[1],
            shift + sign * inside[2],
        )
    return query, key, shift


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


def described(key: str) -> str:
    """What a mask is known as, such as "documents & causal"; "" where nothing of it has a name."""
    expression = parse(key)
    if not expression or leaves(expression) <= {OTHER}:
        return ""
    return _described(expression, len(expression) - 1)


def _described(expression: Expression, number: int) -> str:
    step = expression[number]
    if step.op not in ("&", "|"):
        return _name(expression, step.op, step.operands)
    parts, waiting = [], [number]
    while waiting:
        part = waiting.pop()
        if expression[part].op == step.op:
            waiting += expression[part].operands[::-1]
        else:
            name = _described(expression, part)
            parts.append(f"({name})" if " " in name else name)
    names = list(dict.fromkeys(parts))  # a window is two comparisons
    if step.op == "|" and set(names) == {CAUSAL, KEY_LENGTHS}:
        return PREFIX
    return f" {step.op} ".join(names)


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
        return DOCUMENTS if read_at in READ_BY_ROWS else OTHER
    if op in READS:
        indices = [expression[number].op for number in operands]
        if indices == ["batch", "head", "//", "//"]:
            return BLOCKS
        return DENSE if set(indices) <= {"batch", "head", "query_row", "kv_row"} else OTHER
    return OTHER


def window_of(expression: Expression, lower: int, upper: int) -> tuple[int, int] | None:
    """The first and the last key of a window, of two comparisons; None where they are none."""
    ends = []
    for number, place in ((lower, 1), (upper, 0)):
        step = expression[number]
        if step.op != "<=" or expression[step.operands[place]].op != "kv_row":
            return None
        end = step.operands[1 - place]
        inside = [of.op for of in _below(expression, (end,))]
        if not set(inside) <= ROW_OPS - {"kv_row", "literal"}:
            return None
        if any(inside.count(op) > 1 for op in ("query_row", "shift", "number")):
            return None  # one of each cannot pass the bits that they have
        ends.append(end)
    return ends[0], ends[1]


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


@constant
def reads_along_rows(key: str) -> bool:
    """Whether a mask or score reads captured tensors at query rows or at keys."""
    expression = parse(key)
    by_row = mentions(expression, ["query_row", "kv_row"])
    return any(step.op in READS and any(by_row[of] for of in step.operands) for step in expression)


@constant
def reads_by_distance(key: str) -> bool:
    """Whether all captured tensors that are read along rows are read at what query rows and keys
    make together, such as their distance."""
    expression = parse(key)
    by = [mentions(expression, [row]) for row in ("query_row", "kv_row")]
    reads = [step.operands for step in expression if step.op in READS]
    along = [of for of in reads if any(each[number] for each in by for number in of)]
    mixed = [any(all(each[number] for each in by) for number in of) for of in along]
    return bool(along) and all(mixed)


@constant
def computes_functions(key: str) -> bool:
    """Whether a mask or score computes a function such as tanh for each pair."""
    return any(step.op in FUNCTIONS for step in parse(key))


@functools.lru_cache(maxsize=1024)
def contiguity_of(key: str) -> str | None:
    """Which range of keys the rows see under a mask; None: perhaps it has holes.

    The range holds for classes of whole tiles, too: for one tile of queries, the tiles of keys
    that may hold a visible pair are neighbours, and for one tile of keys the tiles of queries are.
    A verdict on a comparison of rows grows or shrinks with each of them; that on & is the
    intersection of two ranges; that on | of two prefixes is the longer one.
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

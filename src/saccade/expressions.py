"""Expressions: masks and scores as text plus captured data.

A mask or a score is a tree whose leaves are registered functions. It travels through PyTorch's
operators as a *key* (text that names functions and how they combine) beside what they captured.
The key alone says which program runs; a captured value can change without a new compilation.

    causal:bottom_right#                       a leaf: name, alignment, captured kinds (none)
    (& causal:bottom_right# window:bottom_right#ii)   two leaves, and'ed; the second has two ints

Kinds of captured data: t a tensor, i an int, f a float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.functions import Function, lookup

ALIGNMENTS = ("bottom_right", "top_left")
COMBINERS = {"&": 2, "|": 2, "~": 1, ">>": 2}


class Coordinates(NamedTuple):
    """Where the pairs of a tile lie: index tensors that broadcast against each other, or intervals.

    Rows are numbered within their sequence. ``shift`` is kv_len - query_len of the sequence: a
    function aligned at the bottom right sees query_row + shift, so that the last query row and
    the last key row have the same number.
    """

    batch: Any
    head: Any
    query_row: Any
    kv_row: Any
    shift: Any


class Captured(NamedTuple):
    """The tensors and numbers that the leaves of an expression captured, in the leaves' order."""

    tensors: Sequence[Tensor] = ()
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()

    def joined(self, other: Captured) -> Captured:
        """This, then the other."""
        return Captured(
            (*self.tensors, *other.tensors),
            (*self.ints, *other.ints),
            (*self.floats, *other.floats),
        )


def kind_of(value: object) -> str:
    """t, i or f for a value that a function may capture; ``TypeError`` for any other."""
    if isinstance(value, Tensor):
        return "t"
    if isinstance(value, (int, torch.SymInt)):
        return "i"
    if isinstance(value, (float, torch.SymFloat)):
        return "f"
    raise TypeError(f"captured data must be tensors, ints or floats, got {type(value).__name__}")


def leaf_key(name: str, align: str, data: Sequence[object]) -> str:
    """The key of one function with its captured data's kinds."""
    return f"{name}:{align}#{''.join(kind_of(value) for value in data)}"


def capture(data: Sequence[Any]) -> Captured:
    """Sort captured values by kind, keeping their order within a kind."""
    return Captured(
        tuple(value for value in data if kind_of(value) == "t"),
        tuple(
            int(value) if isinstance(value, bool) else value
            for value in data
            if kind_of(value) == "i"
        ),
        tuple(value for value in data if kind_of(value) == "f"),
    )


# ---- from key to tree ----------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """A function and the places of its captured values among those of its expression."""

    name: str
    align: str
    slots: tuple[tuple[str, int], ...]  # (kind, position within that kind)

    @property
    def function(self) -> Function:
        """The registered function of this name."""
        return lookup(self.name)

    def data(self, captured: Captured) -> list[Any]:
        """What this leaf captured, in the order of its function's arguments."""
        lists = {"t": captured.tensors, "i": captured.ints, "f": captured.floats}
        return [lists[kind][position] for kind, position in self.slots]

    def place(self, at: Coordinates) -> tuple[Any, Any, Any, Any]:
        """The four arguments (batch, head, query_row, kv_row) that the function sees."""
        aligned = at.query_row if self.align == "top_left" else at.query_row + at.shift
        return at.batch, at.head, aligned, at.kv_row


@dataclass(frozen=True)
class Branch:
    """Two (or, for ~, one) expressions combined."""

    combiner: str
    parts: tuple[Leaf | Branch, ...]


def leaves(tree: Leaf | Branch | None) -> list[Leaf]:
    """The leaves of a tree from left to right, which is the order of their captured data."""
    if tree is None:
        return []
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for part in tree.parts for leaf in leaves(part)]


def kinds(key: str) -> str:
    """The kinds of all that an expression captured, one letter each."""
    return "".join(kind for leaf in leaves(parse(key)) for kind, _ in leaf.slots)


_TREES: dict[str, Leaf | Branch] = {}


def parse(key: str) -> Leaf | Branch | None:
    """The tree of a key; the empty key has none."""
    if not key:
        return None
    if torch.compiler.is_compiling():  # a trace happens once, and must not depend on a cache
        return _read_tree(key)
    if key not in _TREES:
        _TREES[key] = _read_tree(key)
    return _TREES[key]


def _read_tree(key: str) -> Leaf | Branch:
    words = key.replace("(", "( ").replace(")", " )").split()
    used = {"t": 0, "i": 0, "f": 0}

    def read(position: int) -> tuple[Leaf | Branch, int]:
        if words[position] != "(":
            return read_leaf(words[position]), position + 1
        combiner = words[position + 1]
        parts, position = [], position + 2
        for _ in range(COMBINERS[combiner]):
            part, position = read(position)
            parts.append(part)
        return Branch(combiner, tuple(parts)), position + 1

    def read_leaf(word: str) -> Leaf:
        name, rest = word.rsplit(":", 1)
        align, kinds = rest.split("#")
        slots = []
        for kind in kinds:
            slots.append((kind, used[kind]))
            used[kind] += 1
        return Leaf(name, align, tuple(slots))

    tree, end = read(0)
    if end != len(words):
        raise ValueError(f"not the key of an expression: {key!r}")
    return tree


# ---- evaluation -----------------------------------------------------------------------------


def visible(key: str, captured: Captured, at: Coordinates) -> Any:
    """Which pairs a mask lets through: a bool tensor that broadcasts to the pairs of `at`.

    No mask ("") lets everything through.
    """
    tree = parse(key)
    if tree is None:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=at.batch.device)

    def answer(leaf: Leaf) -> Tensor:
        answer = leaf.function(*leaf.place(at), *leaf.data(captured))
        seen = torch.as_tensor(answer, device=at.batch.device)
        if seen.dtype != torch.bool:
            raise TypeError(f"mask: function {leaf.name!r} gave {seen.dtype}, takes a bool result")
        return seen.view((1,) * (4 - seen.dim()) + tuple(seen.shape))

    return combine(tree, answer)


def combine(tree: Leaf | Branch, answer: Callable[[Leaf], Any]) -> Any:
    """Combine the answers of a mask's leaves as its tree says."""
    if isinstance(tree, Leaf):
        return answer(tree)
    parts = [combine(part, answer) for part in tree.parts]
    if tree.combiner == "~":
        return ~parts[0]
    return parts[0] & parts[1] if tree.combiner == "&" else parts[0] | parts[1]

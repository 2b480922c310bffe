"""Compose: from the key of a mask or score to the device functions that kernels are given.

The functions of a key are written as one small module of text, which Triton then compiles like
any other. Equal keys give equal text in every process, so Triton's disk cache knows them again.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade import expressions
from saccade.expressions import Leaf
from saccade.kernels import extremes, tiles
from saccade.kernels import language as device_language
from saccade.kernels.judgement import PERHAPS, Dependence, Judge, Known, Span, Table, Truth
from saccade.kernels.translation import Translator

PLACE = "batch, head, query_row, kv_row"
JUDGED = "batch, head, query_low, query_high, kv_low, kv_high, shift, data"
TILES = "QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr"


class MaskFunctions(NamedTuple):
    """The device functions of a mask, and what its verdicts on tiles depend on."""

    visible: Any
    judge: Any
    skim: Any  # as judge, but tables read along both query rows and keys say "perhaps"
    spans_read: int  # along how many row axes captured tensors are read for a verdict
    in_blocks: bool  # whether all that is read along two axes is read in blocks
    dependences: frozenset[Dependence]


class ScoreFunctions(NamedTuple):
    """The device functions of a score. derivatives[i] is that of the functions from number i on;
    None where one of them has no derivative."""

    change: Any
    derivatives: tuple[Any, ...]


@functools.cache
def mask_functions(key: str) -> MaskFunctions:
    """Compose the functions of a mask.

    Raises:
        CannotCompile: naming the function, and what it does that a kernel cannot.
    """
    tree = expressions.parse(key)
    assert tree is not None, "no mask has no functions"
    leaves = expressions.leaves(tree)
    translator, judge = Translator(), Judge()
    names = _defined(translator, "visible", [(leaf, leaf.function.body) for leaf in leaves], 4)
    calls = {
        id(leaf): f"as_bool({name}({_place(leaf)}{_data(leaf, places)}), kv_row)"
        for leaf, name, places in zip(leaves, names, _places(leaves), strict=True)
    }
    answer = expressions.combine(tree, lambda leaf: _Code(calls[id(leaf)]))
    translator.texts.append(
        f"@triton.jit\ndef visible({PLACE}, shift, data):\n    return {answer.text}\n"
    )
    places = dict(zip(map(id, leaves), _places(leaves), strict=True))
    translator.texts.append(_judge("judge", judge, tree, places))
    if judge.spans_read > 1:
        translator.texts.append(_judge("skim", Judge(most_spans=1), tree, places))
    module = _executed("".join(translator.texts))
    return MaskFunctions(
        module["visible"],
        module["judge"],
        module["skim" if judge.spans_read > 1 else "judge"],
        judge.spans_read,
        judge.in_blocks,
        frozenset(judge.dependences),
    )


@functools.cache
def score_functions(key: str) -> ScoreFunctions:
    """Compose the functions of a score.

    Raises:
        CannotCompile: naming the function, and what it does that a kernel cannot.
    """
    leaves = expressions.leaves(expressions.parse(key))
    places = _places(leaves)
    translator = Translator()
    changes = _defined(translator, "step", [(leaf, leaf.function.body) for leaf in leaves], 5)
    slopes = [
        (leaf, leaf.function.derivative) for leaf in leaves if leaf.function.derivative is not None
    ]
    names = iter(_defined(translator, "slope", slopes, 5))
    of_leaf = [next(names) if leaf.function.derivative is not None else None for leaf in leaves]

    steps, products = ["score_0 = score"], []
    for n, (leaf, change, slope) in enumerate(zip(leaves, changes, of_leaf, strict=True)):
        arguments = f"(score_{n}, {_place(leaf)}{_data(leaf, places[n])})"
        steps.append(f"score_{n + 1} = as_score({change}{arguments}, score)")
        products.append(None if slope is None else f"as_score({slope}{arguments}, score)")
    body = "".join(f"    {step}\n" for step in steps)
    header = f"(score, {PLACE}, shift, data):\n{body}    return "
    texts = [f"@triton.jit\ndef change{header}score_{len(leaves)}\n"]
    derivatives: list[str | None] = []
    for n in range(len(leaves) + 1):
        factors = products[n:]
        known = all(factor is not None for factor in factors)
        derivatives.append(f"derivative_{n}" if known else None)
        if known:
            product = " * ".join(factor for factor in factors if factor is not None)
            texts.append(
                f"@triton.jit\ndef derivative_{n}{header}{product or 'as_score(1.0, score)'}\n"
            )
    module = _executed("".join([*translator.texts, *texts]))
    return ScoreFunctions(module["change"], tuple(name and module[name] for name in derivatives))


def captured_order(key: str) -> list[tuple[str, int]]:
    """The order in which kernels get what an expression captured: (kind, place in that kind)."""
    return [slot for leaf in expressions.leaves(expressions.parse(key)) for slot in leaf.slots]


class _Code:
    """Text of an expression that &, | and ~ combine as they combine masks."""

    def __init__(self, text: str):
        self.text = text

    def __and__(self, other: _Code) -> _Code:
        return _Code(f"({self.text} & {other.text})")

    def __or__(self, other: _Code) -> _Code:
        return _Code(f"({self.text} | {other.text})")

    def __invert__(self) -> _Code:
        return _Code(f"(~{self.text})")


def _places(leaves: list[Leaf]) -> list[range]:
    """Where each leaf's captured values stand among those of the whole expression."""
    places, end = [], 0
    for leaf in leaves:
        places.append(range(end, end + len(leaf.slots)))
        end += len(leaf.slots)
    return places


def _place(leaf: Leaf) -> str:
    row = "query_row" if leaf.align == "top_left" else "query_row + shift"
    return f"batch, head, {row}, kv_row"


def _data(leaf: Leaf, places: range) -> str:
    return "".join(
        f", {_value(kind, place)}" for (kind, _), place in zip(leaf.slots, places, strict=True)
    )


def _value(kind: str, place: int) -> str:
    """A captured value; whole numbers come with ADDED added, as those of Views do (tiles.py)."""
    return f"(data[{place}] - ADDED)" if kind == "i" else f"data[{place}]"


def _defined(
    translator: Translator,
    prefix: str,
    bodies: list[tuple[Leaf, Callable[..., Any]]],
    num_fixed: int,
) -> list[str]:
    names = []
    for leaf, body in bodies:
        names.append(f"{prefix}_{len(names)}")
        translator.define(names[-1], body, num_fixed + len(leaf.slots))
    return names


def _judge(name: str, judge: Judge, tree: Any, places: dict[int, range]) -> str:
    """The text of a function that judges whole tiles."""
    verdict = _verdict(judge, tree, places)
    lines = "".join(f"    {line}\n" for line in judge.lines)
    return (
        f"@triton.jit\ndef {name}({JUDGED}, {TILES}):\n{lines}"
        f"    return {verdict.possible}, {verdict.certain}\n"
    )


def _verdict(judge: Judge, tree: Any, places: dict[int, range]) -> Truth:
    """The verdict of a whole tree; its lines are collected by the judge."""
    if isinstance(tree, Leaf):
        shift = "" if tree.align == "top_left" else " + shift"
        captured = [
            Table(f"data[{place}]", place) if kind == "t" else Known(_value(kind, place))
            for (kind, _), place in zip(tree.slots, places[id(tree)], strict=True)
        ]
        rows = (
            Span(f"(query_low{shift})", f"(query_high{shift})", "QUERY_TILE"),
            Span("kv_low", "kv_high", "KV_TILE"),
        )
        truth = judge.leaf(
            tree.function.body, (Known("batch", "batch"), Known("head", "head"), *rows, *captured)
        )
        return PERHAPS if truth is PERHAPS else truth
    parts = [_verdict(judge, part, places) for part in tree.parts]
    if tree.combiner == "~":
        return judge.inverse(parts[0])
    return judge.both(tree.combiner, parts[0], parts[1])


@triton.jit
def as_bool(answer, kv_row):
    """A mask function's answer, which must be a bool, as a tensor (it may be a plain True)."""
    seen = answer & (kv_row == kv_row)
    tl.static_assert(seen.dtype == tl.int1, "a mask function must give bools")
    return seen


@triton.jit
def as_score(changed, score):
    """What a score function gives, in float32 and in the shape of the scores."""
    return tl.where(score == score, changed, changed).to(tl.float32)


def _executed(text: str) -> dict[str, Any]:
    """Run generated text as a module whose source Triton can read again."""
    filename = f"<saccade {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module: dict[str, Any] = {
        "__name__": "saccade.kernels.composed",
        "triton": triton,
        "tl": tl,
        "as_bool": as_bool,
        "as_score": as_score,
        "ADDED": tiles.ADDED,
    }
    for source in (device_language, extremes):
        module.update({k: v for k, v in vars(source).items() if hasattr(v, "fn")})
    exec(compile(text, filename, "exec"), module)  # the text is made above, of checked syntax trees
    return module

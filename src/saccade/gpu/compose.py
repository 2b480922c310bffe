"""Compose: from the key of a mask or score to the device functions that kernels are given.

The functions of a key are written as one small module of text, which Triton then compiles like
any other. Equal keys give equal text in every process, so Triton's disk cache knows them again.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any, NamedTuple

from saccade.gpu import device_ops, tile_ranges
from saccade.gpu.language import tl, triton
from saccade.modifiers import triton_source
from saccade.modifiers.derivative import derivatives
from saccade.modifiers.expression import mentions, parse, slots
from saccade.modifiers.triton_source import Dependence


class MaskFunctions(NamedTuple):
    """The device functions of a mask, and what its classes on tiles depend on."""

    visible: Any
    classify: Any
    # as classify, but tables read along both query rows and keys say "perhaps"
    coarse_classify: Any
    spans_read: int  # along how many row axes captured tensors are read for a tile class
    in_blocks: bool  # whether all that is read along two axes is read in blocks
    dependences: frozenset[Dependence]


class ReadFunctions(NamedTuple):
    """The device functions of one captured tensor of a score.

    Attributes:
        derivative: by what grows with an entry that is read, for each pair.
        place: where the entry of each pair lies, in a table of given sizes and steps.
        along_queries, along_keys: whether pairs of other query rows, or keys, read other entries.
        as_bias: whether it is read at (batch, head, query_row, kv_row), or broadcast there.
    """

    derivative: Any
    position: Any
    along_queries: bool
    along_keys: bool
    as_bias: bool


class ScoreFunctions(NamedTuple):
    """The device functions of a score; those of captured tensors by their place."""

    change: Any
    derivative: Any
    reads: dict[int, ReadFunctions]


@functools.cache
def mask_functions(key: str) -> MaskFunctions:
    """Compose the functions of a mask."""
    expression, order = parse(key), slots(key)
    classify = triton_source.tile_function("classify", expression, order)
    texts = [
        triton_source.function("visible", expression, order, len(expression) - 1, score=False),
        classify.text,
    ]
    if classify.spans_read > 1:
        texts.append(triton_source.tile_function("coarse_classify", expression, order, 1).text)
    module = _executed("".join(texts))
    coarse_classify = module["coarse_classify" if classify.spans_read > 1 else "classify"]
    return MaskFunctions(module["visible"], module["classify"], coarse_classify, *classify[1:])


@functools.cache
def score_functions(key: str) -> ScoreFunctions:
    """Compose the functions of a score."""
    found, order = derivatives(key), slots(key)
    expression, texts = found.expression, []

    def define(name: str, result: int) -> None:
        texts.append(triton_source.function(name, expression, order, result, score=True))

    define("change", found.result)
    if found.of_score is not None:
        define("derivative", found.of_score)
    for slot, (slope, read) in found.of_reads.items():
        define(f"derivative_{slot}", slope)
        texts.append(triton_source.offset_function(f"place_{slot}", expression, order, read))
    module = _executed("".join(texts))
    by_query, by_key = (mentions(expression, [name]) for name in ("query_row", "kv_row"))
    reads = {}
    for slot, (_, read) in found.of_reads.items():
        step = expression[read]
        indices = [expression[number].op for number in step.operands]
        reads[slot] = ReadFunctions(
            module[f"derivative_{slot}"],
            module[f"place_{slot}"],
            any(by_query[number] for number in step.operands),
            any(by_key[number] for number in step.operands),
            step.op == "take" and indices == ["batch", "head", "query_row", "kv_row"],
        )
    return ScoreFunctions(module["change"], module.get("derivative", _no_slope), reads)


@triton.jit
def _no_slope(score, batch, head, query_row, kv_row, shift, data):
    """The derivative of what does not depend on the score."""
    return tl.where(score == score, 0.0, 0.0)


@triton.jit
def as_bool(answer, kv_row):
    """A mask's answer as a tensor of truths (it may be the same for all keys, or plainly True)."""
    return answer & (kv_row == kv_row)


@triton.jit
def as_score(changed, score):
    """What a score gives, in float32 and in the shape of the scores."""
    return tl.where(score == score, changed, changed).to(tl.float32)


@functools.cache
def _executed(text: str) -> dict[str, Any]:
    """Run generated text as a module whose source Triton can read again."""
    filename = f"<saccade {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module: dict[str, Any] = {
        "__name__": "saccade.gpu.composed",
        "triton": triton,
        "tl": tl,
        "as_bool": as_bool,
        "as_score": as_score,
    }
    for source in (device_ops, tile_ranges):
        module.update({k: v for k, v in vars(source).items() if hasattr(v, "fn")})
    exec(compile(text, filename, "exec"), module)  # the text holds operations of expressions alone
    return module

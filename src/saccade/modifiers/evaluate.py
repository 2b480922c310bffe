"""Evaluation: compute an expression on tensors of rows, in plain PyTorch.

Whole numbers are int64. Real ones have the dtype of the scores; in a mask, which knows no scores,
they are float32, as in kernels. The functions that masks and scores may call beside operators are
here too: `take`, and functions of numbers with one meaning on every implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers.expression import (
    FUNCTIONS,
    READS,
    REAL,
    TRUTH,
    VARIABLES,
    WHOLE,
    Captured,
    Coordinates,
    Expression,
    Step,
    parse,
)


def index_range(start: int, stop: int, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """The numbers start … stop - 1 along one of four dimensions, known to `take` as a range."""
    shape = [1, 1, 1, 1]
    shape[dim] = stop - start
    rows = torch.arange(start, stop, device=device).view(shape)
    rows.saccade_range = (start, stop, dim)  # type: ignore[attr-defined]  # lost by arithmetic
    return rows


def take(table: Any, *indices: Any) -> Any:
    """Read a captured tensor at the given indices, one for each of its dimensions.

    A dimension of size 1 serves every index (it broadcasts); an index outside the table reads its
    nearest entry. The result has the broadcast shape of the indices. Inside a mask or score
    function this is how captured tensors are read, on every implementation.

    Examples:
        >>> ages = torch.tensor([3, 1, 2])
        >>> @masks.function
        ... def older(batch, head, query_row, kv_row, ages):
        ...     return masks.take(ages, kv_row) >= masks.take(ages, query_row)
        >>> print(older(ages).to_dense(1, 1, 3, 3)[0, 0].int())
        tensor([[1, 0, 0],
                [1, 1, 1],
                [1, 0, 1]], dtype=torch.int32)
    """
    for index in indices:
        if hasattr(index, "take_from"):  # a row of a mask or score that is traced
            return index.take_from(table, indices)
    if table.dim() != len(indices):
        raise ValueError(
            f"take: a table of {table.dim()} dimensions needs as many indices, got {len(indices)}"
        )
    sliced = take_by_slices(table, indices)
    if sliced is not None:
        return sliced
    nearest = [
        0 if size == 1 else torch.as_tensor(index, device=table.device).clamp(0, size - 1)
        for size, index in zip(table.shape, indices, strict=True)
    ]
    return table[tuple(nearest)]


def take_by_slices(table: Tensor, indices: Sequence[Any]) -> Tensor | None:
    """`take` without a gather, where the indices are ranges along dimensions that ascend."""
    slices = slices_of(table, indices)
    if slices is None:
        return None
    shape = [1, 1, 1, 1]
    for dim, start, stop in slices:
        if dim >= 0:
            shape[dim] = stop - start
    return table[tuple(slice(start, stop) for _, start, stop in slices)].reshape(shape)


def slices_of(table: Tensor, indices: Sequence[Any]) -> list[tuple[int, int, int]] | None:
    """For each dimension of a table the dimension of the pairs that it is read along, and the
    first and last entry that are read; -1 where it has one entry for all. None for other reads."""
    last_dim, found = -1, []
    for size, index in zip(table.shape, indices, strict=True):
        if size == 1:
            found.append((-1, 0, 1))
            continue
        known = getattr(index, "saccade_range", None)
        if known is None or known[2] <= last_dim or known[1] > size:
            return None
        start, stop, last_dim = known
        found.append((last_dim, start, stop))
    return found


# The functions of numbers that scores are made of, each with one meaning on every implementation.
absolute: Callable[[Any], Any] = torch.abs
"""The absolute value of a number, in a score function; `torch.abs` works there, too.

Examples:
    >>> near = scores.function(lambda s, b, h, q, k: s - scores.absolute(q - k))
    >>> near()
    Score(score - abs(query_row - kv_row))
"""
exp: Callable[[Any], Any] = torch.exp
"""e to the power of a number, in a score function; `torch.exp` works there, too.

Examples:
    >>> change = scores.function(lambda s, b, h, q, k: s * scores.exp((k - q) / 8))
    >>> change()
    Score(score * exp((kv_row - query_row) / 8))
"""
log: Callable[[Any], Any] = torch.log
"""The natural logarithm of a number, in a score function, as `torch.log`.

Examples:
    >>> change = scores.function(lambda s, b, h, q, k: s - scores.log(1.0 + scores.absolute(q - k)))
    >>> change()
    Score(score - log(1.0 + abs(query_row - kv_row)))
"""
tanh: Callable[[Any], Any] = torch.tanh
"""The hyperbolic tangent of a number, in a score function, as `torch.tanh`.

Examples:
    >>> change = scores.function(lambda s, b, h, q, k: 30.0 * scores.tanh(s / 30.0))
    >>> change()
    Score(30.0 * tanh(score / 30.0))
"""
minimum: Callable[[Any, Any], Any] = torch.minimum
"""The smaller of two numbers, in a score function, as `torch.minimum`.

Examples:
    >>> change = scores.function(lambda s, b, h, q, k: scores.minimum(s, 5.0 + 0.0 * s))
    >>> change()
    Score(minimum(score, 5.0 + 0.0 * score))
"""
maximum: Callable[[Any, Any], Any] = torch.maximum
"""The larger of two numbers, in a score function, as `torch.maximum`.

Examples:
    >>> change = scores.function(lambda s, b, h, q, k: scores.maximum(s, 0.5 * s))
    >>> change()
    Score(maximum(score, 0.5 * score))
"""
where: Callable[[Any, Any, Any], Any] = torch.where
"""The second argument where the first is true, else the third, as `torch.where`.

Examples:
    >>> change = scores.function(lambda s, b, h, q, k: scores.where(h == 0, s, 2.0 * s))
    >>> change()
    Score(where(head == 0, score, 2.0 * score))
"""


# What hidden pairs hold is put away, never multiplied away, by bits: 0 · NaN is NaN, and
# `torch.where` and `masked_fill` take ten to forty times as long as one operation on the bits of a
# tile does on a CPU, above all where pairs of many heads share what is visible.
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def keep_(tile: Tensor, visible: Tensor) -> Tensor:
    """Write 0 to a tile where pairs are hidden. `visible` broadcasts to it."""
    bits = BITS[tile.dtype]
    tile.view(bits).bitwise_and_(_ones(visible, bits))
    return tile


def hide_(scores: Tensor, visible: Tensor) -> Tensor:
    """Write -inf to scores where pairs are hidden. `visible` broadcasts to them."""
    bits = BITS[scores.dtype]
    seen = _ones(visible, bits)
    nothing = torch.tensor(-torch.inf, dtype=scores.dtype, device=scores.device).view(bits)
    hidden = seen.bitwise_not().bitwise_and_(nothing)
    scores.view(bits).bitwise_and_(seen).bitwise_or_(hidden)
    return scores


def _ones(visible: Tensor, bits: torch.dtype) -> Tensor:
    """All bits of a visible pair, and none of a hidden one; bytes are read faster than bools."""
    return visible.view(torch.int8).to(bits).neg_()


OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "%": torch.remainder,
    "//": functools.partial(torch.div, rounding_mode="floor"),  # floor_divide has no derivative
    "neg": torch.neg, "abs": torch.abs, "min": torch.minimum, "max": torch.maximum,
    "<": torch.lt, "<=": torch.le, "==": torch.eq, "&": torch.bitwise_and, "|": torch.bitwise_or,
    "^": torch.bitwise_xor, "~": torch.bitwise_not, "<<": torch.bitwise_left_shift,
    ">>": torch.bitwise_right_shift, "where": torch.where, "whole": torch.trunc,
    "real": torch.clone, **{name: getattr(torch, name) for name in FUNCTIONS},
}  # fmt: skip
# Those that can write over an operand: fresh memory costs a third of a pass over a tile.
OVERWRITING = frozenset(("+", "-", "*", "/", "neg", "abs", "min", "max", *FUNCTIONS))


def evaluate(
    expression: Expression,
    captured: Captured,
    at: Coordinates,
    score: Tensor | None = None,
    wanted: Container[int] | None = None,
    visible: Tensor | None = None,
    read: Collection[int] | None = None,
) -> list[Tensor]:
    """What each step gives, as tensors that broadcast to the pairs of `at`.

    visible: pairs through which autograd carries gradients; through others none, not even NaN.
    wanted: the steps to compute, with all that they are made of; None: all.
    read: the steps whose results will be read. Others, and the score, are written over once no
        step needs them; None: nothing is.

    Raises:
        IndexError: where a captured tensor is read outside of its entries.
    """
    device = at.batch.device
    real = torch.float32 if score is None else score.dtype
    values: list[Any] = []
    last_reader = {} if read is None else _last_readers(expression, wanted, read)
    for number, step in enumerate(expression):
        if wanted is not None and number not in wanted:
            values.append(None)
            continue
        operands = [values[of] for of in step.operands]
        if step.op == "score":
            assert score is not None, "a mask has no score"
            values.append(_through(visible, score))
        elif step.op in VARIABLES:
            values.append(torch.as_tensor(getattr(at, step.op), device=device))
        elif step.op in ("number", "literal"):
            value = captured.value(step.slot) if step.op == "number" else step.literal
            values.append(torch.tensor(value, dtype=dtype_of(step.kind, real), device=device))
        elif step.op in READS:
            entries = entries_of(step, captured.value(step.slot), operands)
            entries = entries.to(dtype_of(step.kind, real))
            values.append(_through(visible, entries) if step.kind == REAL else entries)
        else:
            free = [values[of] for of in step.operands if last_reader.get(of) == number]
            values.append(apply(step, operands, real, free))
    return values


def _last_readers(
    expression: Expression, wanted: Container[int] | None, read: Collection[int]
) -> dict[int, int]:
    """The last step that needs each result in memory of its own that the caller does not read."""
    last = {
        of: number
        for number, step in enumerate(expression)
        if wanted is None or number in wanted
        for of in step.operands
    }
    return {of: by for of, by in last.items() if of not in read and _is_own(expression[of])}


def _is_own(step: Step) -> bool:
    """Whether a step's result lies in memory that is no captured tensor's."""
    return step.op == "score" or step.op in OPERATIONS


def own(step: Step, result: Tensor) -> Tensor:
    """A step's result, to be written over: as it is, or a copy of what is seen elsewhere too."""
    return (
        result
        if _is_own(step) and result.is_contiguous()
        else result.clone(memory_format=torch.contiguous_format)
    )


def _through(visible: Tensor | None, numbers: Tensor) -> Tensor:
    """Numbers whose gradients are selected, not multiplied, where pairs are hidden."""
    return numbers if visible is None else torch.where(visible, numbers, numbers.detach())


def apply(
    step: Step, operands: Sequence[Tensor], real: torch.dtype, free: Sequence[Tensor] = ()
) -> Tensor:
    """One operation, on operands of one kind.

    free: operands that the result may be written over.
    """
    first = 1 if step.op == "where" else 0
    dtypes = {tensor.dtype for tensor in operands[first:]}
    if step.kind == REAL or step.op == "whole" or (step.kind == TRUTH and real in dtypes):
        wanted = real
    elif step.kind == WHOLE or len(dtypes) > 1:
        wanted = torch.int64
    else:
        wanted = next(iter(dtypes))
    operands = [*operands[:first], *(tensor.to(wanted) for tensor in operands[first:])]
    if step.op in OVERWRITING and step.kind == REAL:
        for each in free:
            held = each.dtype == real and each.is_contiguous()
            if held and all(_broadcasts(operand, each) for operand in operands):
                return OPERATIONS[step.op](*operands, out=each)
    return OPERATIONS[step.op](*operands).to(dtype_of(step.kind, real))


def _broadcasts(tensor: Tensor, to: Tensor) -> bool:
    """Whether a tensor broadcasts to another's shape; `torch.broadcast_shapes` takes ten passes."""
    if tensor.shape == to.shape:
        return True
    sides = zip(reversed(tensor.shape), reversed(to.shape), strict=False)
    return tensor.dim() <= to.dim() and all(size in (1, whole) for size, whole in sides)


def as_scores(changed: Tensor, score: Tensor) -> Tensor:
    """Changed scores for every pair."""
    if changed.shape == score.shape:
        return changed
    return changed.expand(torch.broadcast_shapes(changed.shape, score.shape))


def dtype_of(kind: str, real: torch.dtype) -> torch.dtype:
    """The dtype that numbers of a kind have."""
    return {TRUTH: torch.bool, WHOLE: torch.int64, REAL: real}[kind]


def entries_of(step: Step, table: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """The entries of a captured tensor."""
    if step.op == "take":
        return take(table, *indices)
    if not indices:
        return table
    if 1 not in table.shape:
        sliced = take_by_slices(table, indices)
        if sliced is not None:
            return sliced
    if table.device.type != "cpu":  # a GPU cannot say that an index is wrong; kernels do the same
        indices = [inside(index, size) for index, size in zip(indices, table.shape, strict=True)]
    try:
        return table[tuple(indices)]
    except IndexError as error:
        raise IndexError(
            f"a captured tensor of shape {tuple(table.shape)} is read outside of its entries: "
            f"{error}; bound the index, or read with saccade.masks.take, which takes the nearest"
        ) from None


def inside(index: Tensor, size: int) -> Tensor:
    """An index as Python counts, from the end where it is below 0, brought inside."""
    return index.where(index >= 0, index + size).clamp(0, max(size - 1, 0))


def visible(key: str, captured: Captured, at: Coordinates) -> Tensor:
    """Which pairs a mask lets through: a bool tensor that broadcasts to the pairs of `at`.

    No mask ("") lets everything through.
    """
    if not key:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=at.batch.device)
    seen = evaluate(parse(key), captured, at)[-1]
    return seen.view((1,) * (4 - seen.dim()) + tuple(seen.shape))


def change(
    key: str,
    captured: Captured,
    score: Tensor,
    at: Coordinates,
    visible: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """The changed scores of a tile, in the dtype and shape of the scores; `visible` as above.

    overwrite: whether the scores may be written over, and the changed ones are to be.
    """
    if not key:
        return score
    expression = parse(key)
    read = (len(expression) - 1,) if overwrite else None
    changed = evaluate(expression, captured, at, score, visible=visible, read=read)[-1]
    changed = as_scores(changed, score)
    return own(expression[-1], changed) if overwrite else changed

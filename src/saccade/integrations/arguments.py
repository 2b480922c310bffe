"""Arguments: what the calls of several libraries have in common, in saccade's terms.

Numbers as callers pass them, options that are refused by name, windows, scores one after another,
and rows [batch, length, heads, dim], where saccade's calls take heads before length.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from saccade import masks, scores

LARGEST_PAGE = 1024  # slots

# Further than any row lies from any other; the sum of two fits in 32 bits.
FAR = 2**30


def whole(name: str, value: Any) -> Any:
    """A whole number: Python's, NumPy's, or a tensor of one element.

    Raises:
        TypeError: for anything else.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {_described(value)}, takes a whole number") from None


def real(name: str, value: Any) -> Any:
    """A number: Python's, NumPy's, or a tensor of one element.

    Raises:
        TypeError: for anything else.
        ValueError: for a tensor that requires a gradient, which it would not get.
    """
    if type(value) in (int, float) or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: got a tensor that requires a gradient, takes a number")
        return value.item()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{name}: got {_described(value)}, takes a number")


def flag(name: str, value: Any) -> bool:
    """True or False; 1 and 0 count as these.

    Raises:
        TypeError: for anything else.
    """
    if type(value) is bool:
        return value
    one = getattr(value, "size", None) == 1 or (isinstance(value, Tensor) and value.numel() == 1)
    if (one or isinstance(value, int)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}: got {_described(value)}, takes True or False")


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Two whole numbers, from a tuple, a list, an array or a tensor.

    Raises:
        TypeError: for anything else.
    """
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {_described(value)}, takes two whole numbers") from None
    return whole(name, left), whole(name, right)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


def serve_only(served: object, where: str = "", **options: object) -> None:
    """Refuse options by name that have another value than the one that is served.

    Args:
        served: that value: None, False or a number.
        where: what restricts them, as in "with cu_seqlens_q".
        options: values by name.

    Raises:
        NotImplementedError: for the first of another value.
    """
    for name, value in options.items():
        if isinstance(value, Tensor) or value != served:
            got = type(value).__name__ if served is None else repr(value)
            raise NotImplementedError(f"{name}: got {f'{got} {where}'.rstrip()}, takes {served}")


def window(left: int | None, right: int | None, align: str = "bottom_right") -> masks.Mask | None:
    """The mask of the rows up to `left` before and `right` behind a row's position.

    A side that is None is open. None: nothing is hidden.
    """
    if left is None and right is None:
        return None
    if left is None and right == 0:
        return masks.causal(align)
    return masks.window(FAR if left is None else left, FAR if right is None else right, align)


@masks.function
def first_visible_key(batch: Any, head: Any, query_row: Any, kv_row: Any, start: Any) -> Any:
    """The mask of the keys from the start of each sequence on."""
    return kv_row >= masks.take(start, batch)


def sliding_window_mask(tokens: int | None, causal: bool) -> masks.Mask | None:
    """The mask of a sliding window as models count it: the row itself is one of its tokens.

    Args:
        tokens: None where there is no window.
        causal: whether the rows behind are hidden; else as many are visible as before.
    """
    left = None if tokens is None else tokens - 1
    return window(left, 0 if causal else left)


def chained(*changes: scores.Score | None) -> scores.Score | None:
    """Scores one after another; None where there are none."""
    found = [change for change in changes if change is not None]
    return functools.reduce(operator.rshift, found) if found else None


def heads_first(call: Callable[..., Any], *rows: Tensor, **options: Any) -> Any:
    """What `call` gives for rows [batch, length, heads, dim], with the output laid out like them.

    Args:
        call: takes [batch, heads, length, dim], and returns an output or a tuple that begins with
            one.
    """
    found = call(*(each.transpose(1, 2) for each in rows), **options)
    if isinstance(found, Tensor):
        return found.transpose(1, 2)
    output, *others = found
    return output.transpose(1, 2), *others


def in_autocast_dtype(*rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in autocast's dtype, where it is on, for calls over pages, which cast none of these.

    float64 stays, as in PyTorch's own operators.
    """
    kind = rows[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta knows none
        return rows
    dtype = torch.get_autocast_dtype(kind)
    narrowed = (each.is_floating_point() and each.dtype != torch.float64 for each in rows)
    return tuple(
        each.to(dtype) if narrow else each for each, narrow in zip(rows, narrowed, strict=True)
    )


def without_autocast(rows: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on the rows' device, for calls that compute in the dtype they are given."""
    kind = rows.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta knows none
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def broadcasts(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    if tensor.dim() > len(shape):
        return False
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return all(have in (1, want) for have, want in sizes)


def pages_of_slabs(name: str, entry: Tensor, *slabs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A page table, and slabs [entries, length, kv_heads, dim] as pages; nothing is copied.

    Up to 1024 slots of a slab are one page; a longer slab is several.

    Args:
        name: of the slabs, for errors.
        entry: int32 [batch], the slab of each sequence.

    Returns:
        int32 [batch, pages of a slab], and pages [pages, kv_heads, page_size, dim].
    """
    length = slabs[0].shape[1]
    largest = min(max(length, 1), LARGEST_PAGE)
    size = next(size for size in range(largest, 0, -1) if length % size == 0)
    count = length // size
    table = entry[:, None] * count + torch.arange(count, dtype=torch.int32, device=entry.device)
    try:
        pages = [slab.unflatten(1, (count, size)).view(-1, size, *slab.shape[2:]) for slab in slabs]
    except RuntimeError:
        strides = " and ".join(str(slab.stride()) for slab in slabs)
        raise ValueError(
            f"{name}: got strides {strides}, takes entries that lie one behind the other where "
            f"they are longer than {LARGEST_PAGE}"
        ) from None
    return table, tuple(page.transpose(1, 2) for page in pages)


def as_features(rows: Tensor) -> Tensor:
    """The feature map of rows that are features already."""
    return rows

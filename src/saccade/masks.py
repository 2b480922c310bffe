"""Masks: which pairs of a query row and a key row see each other.

A mask is a plain function of (batch, head, query_row, kv_row) made of operators and `take`, with
captured tensors and numbers. Masks combine with ``&``, ``|`` and ``~`` (inside torch.compile before
torch 2.14 with ``mask.__invert__()`` for ``~``). Every implementation uses the same definition.

Rows are numbered from 0 within their sequence. Aligned at the bottom right, the last query row
and the last key row stand side by side (what generation with a cache wants); aligned at the top
left, the first ones do (what PyTorch's ``is_causal`` means).

Examples:
    >>> local = masks.causal() & (masks.window(256) | masks.prefix(torch.tensor([32, 100])))
    >>> query, key, value = torch.randn(3, 2, 4, 128, 16)
    >>> output = saccade.attention(query, key, value, mask=local)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from saccade.modifiers import expression
from saccade.modifiers.evaluate import index_range, take, visible
from saccade.modifiers.expression import Captured, Coordinates, key_of
from saccade.modifiers.form import ModifierFunction, form_of, kind_of, traced_in_graph
from saccade.modifiers.modifier import Modifier, is_plain_function, refuse_in_graphs
from saccade.modifiers.normal_form import Lengths
from saccade.modifiers.trace import trace
from saccade.runtime.arguments import bools, check_align, check_whole_number, integers

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "dense",
    "documents",
    "function",
    "key_lengths",
    "of_positions",
    "prefix",
    "take",
    "tree",
    "tree_bits",
    "window",
]

WORD = 64  # bits of a tree mask in one number
EVERYTHING = "literal True"


@dataclass(eq=False, repr=False)
class Mask(Modifier):
    """Which pairs are visible: what a mask function computes, and what it captured.

    Printed, it shows the expression. Masks are equal if they compute the same from equal values.

    Examples:
        >>> mask = masks.causal("top_left") | masks.key_lengths(torch.tensor([2]))
        >>> mask
        Mask((kv_row <= query_row) | (kv_row < lengths[batch]))
        >>> print(mask.to_dense(1, 1, 4, 4)[0, 0].int())
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """

    key: str
    captured: Captured = field(default_factory=Captured)

    def __and__(self, other: Mask) -> Mask:
        return self._combined("&", other)

    def __or__(self, other: Mask) -> Mask:
        return self._combined("|", other)

    def __invert__(self) -> Mask:
        found = expression.combined("~", self.key)
        return Mask(found.key, found.captured(self.captured, Captured()))

    def _combined(self, combiner: str, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        found = expression.combined(combiner, self.key, other.key)
        return Mask(found.key, found.captured(self.captured, other.captured))

    def to_dense(self, batch: int, query_heads: int, query_len: int, kv_len: int) -> Tensor:
        """The mask written out for a call of these sizes, to look at it or to test it.

        Returns:
            bool [batch, query_heads, query_len, kv_len], True where a pair is visible, on the
            device of what the mask captured, else on the default device.

        Examples:
            >>> print(masks.window(1).to_dense(1, 1, 3, 3)[0, 0].int())
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [0, 1, 1]], dtype=torch.int32)
        """
        sizes = batch, query_heads, query_len, kv_len
        tensors = self.captured.tensors
        device = tensors[0].device if tensors else torch.get_default_device()
        rows = [index_range(0, size, dim, device) for dim, size in enumerate(sizes)]
        at = Coordinates(rows[0], rows[1], rows[2], rows[3], kv_len - query_len)
        return visible(self.key, self.captured, at).expand(sizes)

    @property
    def hides_nothing(self) -> bool:
        """Whether every pair is visible, whatever the call."""
        return self.key in ("", EVERYTHING)

    def __bool__(self) -> bool:
        raise TypeError("combine masks with &, | and ~, not with and, or and not")


class MaskFunction(ModifierFunction[Mask]):
    """A function that `function` was given; called with the captured values it gives a `Mask`."""

    makes = Mask


@overload
def function(body: Callable[..., Any]) -> MaskFunction: ...
@overload
def function(*, align: str = "top_left") -> Callable[[Callable[..., Any]], MaskFunction]: ...


def function(body: Callable[..., Any] | None = None, *, align: str = "top_left") -> Any:
    """Turn a function into a mask of your own.

    The function is run once, on symbols, when the mask is made. What it computes is kept, with the
    numbers and tensors that it reaches: arguments, closures, globals, attributes. A function that
    captures nothing by arguments may be given to an attention call as it is:
    ``mask=lambda batch, head, query_row, kv_row: query_row >= kv_row``.

    Args:
        body: a function of (batch, head, query_row, kv_row, *captured) that gives True where the
            pair is visible. It is made of comparisons, arithmetic, ``&``, ``|``, ``~``,
            ``torch.where``, ``torch.abs``, ``torch.minimum`` and the like; captured tensors are
            read by an index for each dimension, or by `take`. It cannot branch on a row.
        align: "top_left" (rows as they are) or "bottom_right" (query_row + kv_len - query_len).

    Returns:
        A callable: give it the captured values and it gives the `Mask`. Numbers are captured by
        value; tensors are read when a call is made, as they are then.

    Raises:
        TypeError: if `body` is no function; when the mask is made, if the function does what
            cannot be known without its rows, with the line and what to write instead.
        ValueError: if `align` is neither of the two.

    Examples:
        >>> @masks.function
        ... def strided(batch, head, query_row, kv_row, stride):
        ...     return (query_row - kv_row) % stride == 0
        >>> mask = masks.causal() & strided(8)
        >>> query, key, value = torch.randn(3, 1, 2, 32, 16)
        >>> output = saccade.attention(query, key, value, mask=mask)
    """
    check_align(align)
    if body is None:
        return functools.partial(MaskFunction, align=align)
    return MaskFunction(body, align)


# Rows are fewer than 2**31, so their sums with this one stay within 64 bits.
MOST_ROWS = 2**62 - 1


def _rows(name: str, number: int, least: int) -> int:
    """A number of rows; of more than there can be, such as `sys.maxsize`, it gives `MOST_ROWS`."""
    check_whole_number(name, number, least=least)
    return number if number < MOST_ROWS else MOST_ROWS


def _built_in(body: Callable[..., Any], align: str, *captured: Any) -> Mask:
    """A mask of this module, whose tensors have the names of its parameters."""
    check_align(align)
    form = form_of(body, align, tuple(kind_of(value) for value in captured), built_in=True)
    return Mask(form.key, form.captured(captured))


# ---- what they compute ----------------------------------------------------------------------


def _causal(batch, head, query_row, kv_row):
    return kv_row <= query_row


def _window(batch, head, query_row, kv_row, left, right):
    return (query_row - left <= kv_row) & (kv_row <= query_row + right)


def _key_lengths(batch, head, query_row, kv_row, lengths):
    return kv_row < take(lengths, batch)


def _documents(batch, head, query_row, kv_row, query_ids, kv_ids):
    return take(query_ids, batch, query_row) == take(kv_ids, batch, kv_row)


def _blocks(batch, head, query_row, kv_row, layout, query_block, kv_block):
    return take(layout, batch, head, query_row // query_block, kv_row // kv_block)


def _dense(batch, head, query_row, kv_row, tensor):
    return take(tensor, batch, head, query_row, kv_row)


def _drafted(batch, head, query_row, kv_row, bits, context_lens):
    draft = kv_row - take(context_lens, batch)  # before the drafts, any bit may be read
    return ((take(bits, batch, query_row, draft // WORD) >> (draft % WORD)) & 1) == 1


# ---- the public constructors ----------------------------------------------------------------


def causal(align: str = "bottom_right") -> Mask:
    """Each row sees itself and what came before it.

    Args:
        align: "bottom_right" or "top_left"; they differ where query and key lengths do.

    Examples:
        >>> print(masks.causal().to_dense(1, 1, 2, 4)[0, 0].int())
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
        >>> print(masks.causal("top_left").to_dense(1, 1, 2, 4)[0, 0].int())
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0]], dtype=torch.int32)
    """
    return _built_in(_causal, align)


def window(left: int, right: int = 0, align: str = "bottom_right") -> Mask:
    """Row i sees the key rows from i - left to i + right (a sliding window).

    Args:
        left: rows seen before a row's own place, at least 0.
        right: rows seen after it, at least 0.
        align: "bottom_right" or "top_left".

    Raises:
        TypeError, ValueError: if `left` or `right` is not a whole number of at least 0.

    Examples:
        >>> print(masks.window(1).to_dense(1, 1, 4, 4)[0, 0].int())
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    return _built_in(_window, align, _rows("left", left, 0), _rows("right", right, 0))


def prefix(lengths: Tensor, align: str = "bottom_right") -> Mask:
    """Everybody sees the first keys of the sequence; behind them the mask is causal (prefix LM).

    Args:
        lengths: [batch] or [1], integers: how many keys belong to the prefix.
        align: "bottom_right" or "top_left", for the causal part.

    Examples:
        >>> print(masks.prefix(torch.tensor([2])).to_dense(1, 1, 4, 4)[0, 0].int())
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    return causal(align) | key_lengths(lengths)


def key_lengths(lengths: Tensor) -> Mask:
    """Only the first keys of each sequence are visible (padding at the end).

    Args:
        lengths: [batch] or [1], integers.

    Examples:
        >>> mask = masks.key_lengths(torch.tensor([1, 3]))
        >>> print(mask.to_dense(2, 1, 1, 4)[:, 0, 0].int())
        tensor([[1, 0, 0, 0],
                [1, 1, 1, 0]], dtype=torch.int32)
    """
    return _built_in(_key_lengths, "top_left", integers("lengths", lengths, 1))


def documents(query_ids: Tensor, kv_ids: Tensor | None = None) -> Mask:
    """Rows see the keys of their own document (several documents laid in one row of a batch).

    Args:
        query_ids: [batch or 1, query_len], integers: each query row's document.
        kv_ids: [batch or 1, kv_len], integers; the same as `query_ids` where left out.

    Examples:
        >>> mask = masks.documents(torch.tensor([[0, 0, 1, 1]])) & masks.causal()
        >>> print(mask.to_dense(1, 1, 4, 4)[0, 0].int())
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    query_ids = integers("query_ids", query_ids, 2)
    kv_ids = query_ids if kv_ids is None else integers("kv_ids", kv_ids, 2)
    return _built_in(_documents, "top_left", query_ids, kv_ids)


def blocks(layout: Tensor, block_size: int | tuple[int, int]) -> Mask:
    """A block-sparse mask: whole blocks of pairs are visible or hidden.

    Args:
        layout: bool, broadcastable to [batch, query_heads, query blocks, key blocks].
        block_size: rows in a block, or (query rows, key rows).

    Source: FlashAttention (Dao et al. 2022), section 3.3, block-sparse attention.

    Examples:
        >>> layout = torch.tensor([[True, False], [True, True]])
        >>> print(masks.blocks(layout, 2).to_dense(1, 1, 4, 4)[0, 0].int())
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 1],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size: got {block_size!r}, takes one number or two")
    query_block, kv_block = (_rows("block_size", size, 1) for size in sizes)
    return _built_in(_blocks, "top_left", bools("layout", layout), query_block, kv_block)


def dense(tensor: Tensor) -> Mask:
    """The mask written out: a bool tensor broadcastable to [batch, query_heads, query_len, kv_len].

    True means visible. Saccade reads it tile by tile and skips the tiles that are all False.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> seen = torch.rand(8, 8) < 0.5
        >>> output = saccade.attention(query, key, value, mask=masks.dense(seen) | masks.causal())
    """
    return _built_in(_dense, "top_left", bools("tensor", tensor))


def tree(bits: Tensor, context_lens: Tensor) -> Mask:
    """Drafted tokens see their own branch of a tree and everything before the tree.

    Verifies several drafts at once: the last keys of each sequence are the drafted tokens, in the
    order of the query rows.

    Args:
        bits: int64 [batch, query_len], or [batch, query_len, words] for trees of more than 64
            tokens: bit j % 64 of word j // 64 says whether a query row sees drafted token j. Make
            it with `tree_bits`.
        context_lens: [batch] or [1], integers: how many keys come before the drafted tokens.

    Source: SpecInfer (Miao et al. 2024), section 4.2, tree attention.

    Examples:
        >>> bits = masks.tree_bits(torch.tensor([[-1, 0, 0]]))  # two ways to go on after a token
        >>> mask = masks.tree(bits, context_lens=torch.tensor([2]))
        >>> print(mask.to_dense(1, 1, 3, 5)[0, 0].int())
        tensor([[1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    if isinstance(bits, Tensor) and bits.dim() == 2:
        bits = bits.unsqueeze(2)
    bits = integers("bits", bits, 3)
    if bits.dtype != torch.int64:
        raise TypeError(f"bits: got {bits.dtype}, takes int64: 64 drafted tokens a number")
    if bits.shape[1] > WORD * bits.shape[2]:
        words = bits.shape[2]
        raise ValueError(f"bits: got {words} words for {bits.shape[1]} query rows, takes 64 a word")
    context_lens = integers("context_lens", context_lens, 1)
    return key_lengths(context_lens) | _built_in(_drafted, "top_left", bits, context_lens)


def tree_bits(parents: Tensor) -> Tensor:
    """The bits that `tree` takes, from each drafted token's parent.

    Args:
        parents: [batch, query_len], integers: the number of the drafted token that a token
            continues, smaller than its own; -1 for one that continues the text before the tree.

    Returns:
        int64 [batch, query_len, words]: a token sees itself and what it descends from.

    Raises:
        TypeError, ValueError: if `parents` is of another form, or a parent comes after its child.

    Examples:
        >>> masks.tree_bits(torch.tensor([[-1, 0, 0]])).flatten().tolist()
        [1, 3, 5]
    """
    parents = integers("parents", parents, 2)
    batch, length = parents.shape
    entries, ranks = (torch.arange(n, device=parents.device) for n in (batch, length))
    if bool(((parents >= ranks) | (parents < -1)).any()):
        raise ValueError("parents: got a token at or after its child, takes -1 or earlier tokens")
    sees = torch.zeros(batch, length + 1, length, dtype=torch.bool, device=parents.device)
    for token in range(length):  # the last row, which -1 means, sees nothing
        sees[:, token] = sees[entries, parents[:, token]]
        sees[:, token, token] = True
    words = -(-length // WORD)
    padded = torch.nn.functional.pad(sees[:, :length].long(), (0, words * WORD - length))
    shifts = torch.arange(WORD, device=parents.device)
    return (padded.unflatten(2, (words, WORD)) << shifts).sum(3)


def of_positions(
    function: Callable[..., Any],
    query_len: int,
    kv_len: int,
    query_start: Any = 0,
    kv_start: int = 0,
) -> Mask:
    """A mask function of positions, for rows that start at some of them.

    For masks that are made anew for each call, as models do that keep a cache: the mask is right
    for these lengths alone, and what it never hides in them falls away.

    Args:
        function: of (batch, head, query_position, kv_position); see `saccade.masks.function`.
        query_len, kv_len: rows of the call.
        query_start, kv_start: the positions of the first rows; in a graph a tensor, too.

    Raises:
        TypeError: if the function does what cannot be known without its rows.

    Examples:
        >>> mask = masks.of_positions(lambda b, h, q, k: k <= q, 2, 6, query_start=4)
        >>> print(mask.to_dense(1, 1, 2, 6)[0, 0].int())
        tensor([[1, 1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    if torch.compiler.is_compiling():  # lengths may be any there
        return Mask(*traced_in_graph(function, (query_start, kv_start)))
    lengths = Lengths(query_len, kv_len, query_start - kv_start)
    found, values = trace(function, offsets=(query_start, kv_start), lengths=lengths)
    return Mask(key_of(found), values)


NOTHING_HIDDEN = Mask("")

# What the `mask` argument of a call takes.
AnyMask = Mask | Tensor | Callable[..., Any] | None


def _of_function(body: Callable[..., Any]) -> Mask:
    """The mask of a plain function, with the values that it reaches now."""
    refuse_in_graphs("mask", body)
    name = getattr(body, "__name__", "")
    if name and globals().get(name) is body:
        raise TypeError(
            f"mask: got the function saccade.masks.{name}, takes the mask that it returns: "
            f"write mask=saccade.masks.{name}(...)"
        )
    return MaskFunction(body, "top_left")()


def as_mask(mask: AnyMask) -> Mask:
    """What the `mask` argument of an attention call stands for.

    Raises:
        TypeError: for anything but a `Mask`, a function of rows, a bool tensor or None.
    """
    if mask is None:
        return NOTHING_HIDDEN
    if isinstance(mask, Mask):
        return NOTHING_HIDDEN if mask.key == EVERYTHING else mask
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask: got a tensor of {mask.dtype}, takes torch.bool (True = visible); "
                "to add numbers to the scores use score=saccade.scores.bias(tensor)"
            )
        if mask.dim() > 4:
            raise ValueError(f"mask: got {mask.dim()} dimensions, takes at most 4")
        return dense(mask)
    if isinstance(mask, MaskFunction):
        return mask()
    if is_plain_function(mask):
        if torch.compiler.is_dynamo_compiling():
            from saccade.modifiers.outside_graphs import mask_of

            return mask_of(_of_function, mask)
        return _of_function(mask)
    advice = f"; write mask=saccade.masks.{mask}()" if mask == "causal" else ""
    raise TypeError(
        f"mask: got {type(mask).__name__} ({mask!r}), takes a saccade Mask such as "
        "saccade.masks.causal(), a function of (batch, head, query_row, kv_row), or a bool tensor "
        f"(True = visible){advice}"
    )

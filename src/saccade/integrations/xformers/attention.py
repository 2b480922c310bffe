"""Attention: xformers' calls, for rows in its layouts, under its biases.

A bias decides which call of saccade's answers: `attention` where sequences have one length,
`attention_varlen` where they lie one behind the other, `attention_paged` over pages. Keys in slabs
are pages, too, unless gradients or dropout are wanted, which pages do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade import masks, scores
from saccade.integrations.arguments import (
    FAR,
    broadcasts,
    first_visible_key,
    heads_first,
    in_autocast_dtype,
    pages_of_slabs,
    real,
)
from saccade.integrations.xformers.attn_bias import (
    AttentionBias,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LowerTriangularMaskWithTensorBias,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]

PackedKeys = BlockDiagonalMask | BlockDiagonalPaddedKeysMask | BlockDiagonalGappyKeysMask
PagedKeys = PagedBlockDiagonalPaddedKeysMask | PagedBlockDiagonalGappyKeysMask


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention as `xformers.ops.memory_efficient_attention` has it.

    Args:
        query: [B, M, H, K], [B, M, K] (one head), or [B, M, G, H, K] (H heads in each of G groups).
        key: of query's form, with rows of its own; heads that `expand` made of one are read once.
        value: of key's form, whose rows may have another width.
        attn_bias: None, a bias of `attn_bias`, or a tensor that is added to the scores and gets a
            gradient, broadcastable to [B, H, M, keys] ([B, M, keys], [B, G, H, M, keys]).
        p: the probability that a weight is dropped.
        scale: 1 / sqrt(K) where None.
        op: names a kernel of xformers', and is not needed.
        output_dtype: what the output, computed in query's dtype, is cast to.

    Returns:
        query's form, with value's width. A row that sees nothing gives 0.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it got and what it
            takes.

    Examples:
        >>> from saccade.integrations import xformers
        >>> query, key, value = torch.randn(3, 2, 16, 4, 32)  # [B, M, H, K]
        >>> bias = xformers.attn_bias.LowerTriangularMask()
        >>> xformers.memory_efficient_attention(query, key, value, bias).shape
        torch.Size([2, 16, 4, 32])
        >>> lengths = [10, 22]  # two sequences, one behind the other
        >>> query, key, value = torch.randn(3, 1, 32, 4, 32)
        >>> bias = xformers.attn_bias.BlockDiagonalMask.from_seqlens(lengths)
        >>> xformers.memory_efficient_attention(query, key, value, bias).shape
        torch.Size([1, 32, 4, 32])
    """
    output, _ = _attend(query, key, value, attn_bias, p, scale)
    return output if output_dtype is None else output.to(output_dtype)


memory_efficient_attention_forward: Callable[..., Tensor] = memory_efficient_attention
"""xformers' call without a gradient; ours has one where a tensor asks for it.

Examples:
    >>> from saccade.integrations import xformers
    >>> query, key, value = torch.randn(3, 2, 16, 4, 32)
    >>> xformers.memory_efficient_attention_forward(query, key, value).shape
    torch.Size([2, 16, 4, 32])
"""


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of each row's scores.

    Args:
        p: 0: what was dropped could not be told to the backward pass.
        others: as of `memory_efficient_attention`.

    Returns:
        output; and the lse [B, H, M] ([B, G, H, M] of groups), float32 (float64 for float64),
        natural logarithm, -inf where a row sees nothing. B is 1 where sequences lie one behind the
        other.

    Examples:
        >>> from saccade.integrations import xformers
        >>> query, key, value = torch.randn(3, 2, 16, 4, 32)
        >>> attend = xformers.memory_efficient_attention_forward_requires_grad
        >>> output, lse = attend(query, key, value)
        >>> lse.shape
        torch.Size([2, 4, 16])
    """
    _no_dropout(p)
    output, lse = _attend(query, key, value, attn_bias, p, scale)
    return output if output_dtype is None else output.to(output_dtype), lse


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys and its lse, which `merge_attentions` puts together.

    Args:
        output_dtype: float32 where None (float64 for float64), cast from query's dtype.
        others: as of `memory_efficient_attention_forward_requires_grad`.

    Examples:
        >>> from saccade.integrations import xformers
        >>> query, key, value = torch.randn(3, 2, 16, 4, 32)
        >>> parts = [
        ...     xformers.memory_efficient_attention_partial(query, key[:, rows], value[:, rows])
        ...     for rows in (slice(0, 8), slice(8, 16))
        ... ]
        >>> output, lse = xformers.merge_attentions(*zip(*parts))
        >>> whole = xformers.memory_efficient_attention(query, key, value)
        >>> torch.testing.assert_close(output, whole)
    """
    if output_dtype is None:
        output_dtype = torch.promote_types(query.dtype, torch.float32)
    return memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias, p, scale, output_dtype=output_dtype
    )


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from an output's.

    The output and lse may be those of more keys than the call's, of which these are a part: then
    the gradients are this part's. The forward pass is computed once more.

    Args:
        grad: of output.
        output, lse: as `memory_efficient_attention_forward_requires_grad` or `merge_attentions`
            gave them.
        others: as of `memory_efficient_attention_forward_requires_grad`.

    Examples:
        >>> from saccade.integrations import xformers
        >>> query, key, value, grad = torch.randn(4, 2, 16, 4, 32)
        >>> attend = xformers.memory_efficient_attention_forward_requires_grad
        >>> output, lse = attend(query, key, value)
        >>> of_query, of_key, of_value = xformers.memory_efficient_attention_backward(
        ...     grad, output, lse, query, key, value
        ... )
        >>> of_query.shape
        torch.Size([2, 16, 4, 32])
    """
    _no_dropout(p)
    query, key, value = (rows.detach().requires_grad_() for rows in (query, key, value))
    with torch.enable_grad():
        own_output, own_lse = _attend(query, key, value, attn_bias, p, scale)
    for name, got, wanted in (
        ("grad", grad, own_output), ("output", output, own_output), ("lse", lse, own_lse),
    ):  # fmt: skip
        if got.shape != wanted.shape:
            raise ValueError(f"{name}: got {list(got.shape)}, takes {list(wanted.shape)}")
    # Under `lse` these keys' weights are exp(own_lse - lse) times their own softmax. With that
    # factor, gradients of the own output and lse give those of the whole.
    wide = own_lse.dtype
    part = (own_lse - lse).exp().masked_fill(own_lse == -torch.inf, 0).detach()
    by_row = part.movedim(-1, 1).reshape(query.shape[:-1]).unsqueeze(-1)
    row_dot = (grad.to(wide) * (own_output.detach().to(wide) - output.to(wide))).sum(-1)
    grad_lse = part * row_dot.reshape(*query.shape[:2], *part.shape[1:-1]).movedim(1, -1)
    grad_output = (by_row * grad.to(wide)).to(own_output.dtype)
    outputs, tensors = (own_output, own_lse), (query, key, value)
    found = torch.autograd.grad(outputs, tensors, (grad_output, grad_lse))
    return found[0], found[1], found[2]


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Put together attention to parts of the keys, with gradients.

    Args:
        attn_split: outputs [B, M, H, K] or [B, M, G, H, K], in a sequence or stacked.
        lse_split: their lse [B, H, M] or [B, G, H, M].
        write_lse: whether the lse is returned.
        output_dtype: that of the outputs where None.

    Returns:
        The output and lse of all keys; None in place of the lse where it is not wanted.

    Examples:
        >>> from saccade.integrations import xformers
        >>> query, key, value = torch.randn(3, 2, 16, 4, 32)
        >>> parts = [
        ...     xformers.memory_efficient_attention_partial(query, key[:, rows], value[:, rows])
        ...     for rows in (slice(0, 8), slice(8, 16))
        ... ]
        >>> output, lse = xformers.merge_attentions(*zip(*parts))
        >>> whole = xformers.memory_efficient_attention(query, key, value)
        >>> torch.testing.assert_close(output, whole)
    """
    outputs, lses = list(attn_split), list(lse_split)
    if not outputs or len(outputs) != len(lses):
        raise ValueError(
            f"lse_split: got {len(lses)} parts for {len(outputs)} outputs, takes one each"
        )
    shape = outputs[0].shape
    for output, lse in zip(outputs, lses, strict=True):
        if output.dim() not in (4, 5) or output.shape != shape:
            raise ValueError(
                f"attn_split: got {list(output.shape)}, takes parts of one shape, [B, M, H, K] or "
                "[B, M, G, H, K]"
            )
        wanted = [shape[0], *shape[2:-1], shape[1]]
        if list(lse.shape) != wanted:
            raise ValueError(f"lse_split: got {list(lse.shape)}, takes {wanted}")
    output, lse = saccade.merge_states(
        [part.flatten(2, -2).transpose(1, 2) for part in outputs],
        [part.flatten(1, -2) for part in lses],
    )
    output = output.transpose(1, 2).reshape(shape).to(output_dtype or outputs[0].dtype)
    return output, lse.unflatten(1, shape[2:-1]) if write_lse else None


# ---- xformers' layouts ---------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Query, key and value with all heads in one dimension: [B, M, heads, K]."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> _Rows:
        """From any of the layouts; heads of keys that are views of one are one."""
        _check_rows(query, key, value)
        if query.dim() == 3:
            return cls(*(rows.unsqueeze(2) for rows in (query, key, value)))
        if _expanded(key) and _expanded(value):
            key, value = key[..., :1, :], value[..., :1, :]
        return cls(*(rows.flatten(2, -2) for rows in (query, key, value)))


def _expanded(rows: Tensor) -> bool:
    """Whether `expand` made all heads of a group of one.

    A leaf that looks so has a gradient for each head, which nothing adds up.
    """
    return rows.shape[-2] > 1 and rows.stride(-2) == 0 and not (rows.requires_grad and rows.is_leaf)


def _check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if not isinstance(rows, Tensor):
            raise TypeError(f"{name}: got {type(rows).__name__}, takes a tensor")
        if rows.dim() not in (3, 4, 5) or rows.dim() != query.dim():
            raise ValueError(
                f"{name}: got {list(rows.shape)}, takes [B, M, K], [B, M, H, K] or "
                "[B, M, G, H, K], as all three have it"
            )
    wanted = [query.shape[0], key.shape[1], *query.shape[2:]]
    if list(key.shape) != wanted:
        raise ValueError(
            f"key: got {list(key.shape)}, takes {wanted}; fewer heads are brought to query's by "
            "expand"
        )
    if value.shape[:-1] != key.shape[:-1]:
        takes = ", ".join(map(str, key.shape[:-1]))
        raise ValueError(f"value: got {list(value.shape)}, takes [{takes}, any width]")


# ---- which call answers --------------------------------------------------------------------------


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, p: Any, scale: Any
) -> tuple[Tensor, Tensor]:
    """Output in query's form, and the lse [B, heads..., M]."""
    rows = _Rows(
        *in_autocast_dtype(*_Rows.of(query, key, value))
    )  # pages are not cast by a call over them
    p = real("p", p)
    if not 0 <= p < 1:
        raise ValueError(f"p: got {p}, takes a probability of at least 0 and less than 1")
    scale = None if scale is None else real("scale", scale)
    if isinstance(attn_bias, AttentionBias):
        attn_bias.check()
    if isinstance(attn_bias, PagedKeys):
        _no_dropout(p)
        output, lse = _over_pages(rows, attn_bias, scale)
    elif isinstance(attn_bias, BlockDiagonalPaddedKeysMask) and not p and not _wants_grad(rows):
        output, lse = _over_slabs(rows, attn_bias, scale)
    elif isinstance(attn_bias, PackedKeys):
        output, lse = _packed(rows, attn_bias, p, scale)
    else:
        options = _dense_options(attn_bias, query, key)
        output, lse = heads_first(
            saccade.attention, *rows, **options, dropout_p=p, scale=scale, return_lse=True
        )
    heads = query.shape[2:-1] or (1,)
    return output.reshape(*query.shape[:-1], value.shape[-1]), lse.unflatten(1, heads)


def _no_dropout(p: float) -> None:
    if p != 0:
        raise NotImplementedError(f"p: got {p}, takes 0 where an lse is returned, and over pages")


def _wants_grad(rows: _Rows) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in rows)


def _dense_options(attn_bias: Any, query: Tensor, key: Tensor) -> dict[str, Any]:
    """The mask and score of a bias for sequences of one length."""
    if attn_bias is None:
        return {}
    if isinstance(attn_bias, Tensor):
        return {"score": _added(attn_bias, query, key)}
    if not isinstance(attn_bias, AttentionBias):
        got = type(attn_bias).__name__
        raise TypeError(f"attn_bias: got a {got}, takes a tensor, an AttentionBias or None")
    options: dict[str, Any] = {"mask": attn_bias.pairs()}
    if isinstance(attn_bias, LowerTriangularMaskWithTensorBias):
        options["score"] = _added(attn_bias._bias, query, key)
    return options


def _added(tensor: Tensor, query: Tensor, key: Tensor) -> scores.Score:
    """A tensor that is added to the scores, with all heads in one dimension."""
    shape = (query.shape[0], *query.shape[2:-1], query.shape[1], key.shape[1])
    if not tensor.is_floating_point():
        raise TypeError(f"attn_bias: got {tensor.dtype}, takes floating-point numbers to add")
    if not broadcasts(tensor, shape):
        raise ValueError(
            f"attn_bias: got {list(tensor.shape)}, takes what broadcasts to {list(shape)}"
        )
    tensor = tensor.reshape((1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape))
    if tensor.dim() == 3:
        return scores.bias(tensor.unsqueeze(1))
    if tensor.dim() == 5 and tensor.shape[1:3] != (1, 1):
        tensor = tensor.expand(-1, *shape[1:3], -1, -1)
    return scores.bias(tensor.flatten(1, -3))


@masks.function
def shifted_window(
    batch: Any, head: Any, query_row: Any, kv_row: Any, shift: Any, left: Any, right: Any
) -> Any:
    """The mask of a window around rows that stand `shift` rows further on in their sequence."""
    position = query_row + masks.take(shift, batch)
    return (position - left <= kv_row) & (kv_row <= position + right)


class _KeyRows(NamedTuple):
    """Where the keys of packed sequences lie: from a row on, one sequence behind the other."""

    first: int
    offsets: Tensor
    longest: int
    mask: masks.Mask | None

    @classmethod
    def of(cls, bias: PackedKeys) -> _KeyRows:
        """Where a bias says that they lie; rows between two sequences are the first's, and hidden.

        Raises:
            ValueError: where a sequence starts before the one before it ends.
        """
        info = bias.k_seqinfo
        if isinstance(bias, BlockDiagonalMask):
            return cls(0, info.seqstart, max(info.max_seqlen, 0), bias.pairs())
        starts = info.seqstart_py
        for (_, end), following in zip(info.intervals(), starts[1:], strict=True):
            if end > following:
                raise ValueError(
                    f"attn_bias: got keys that end at {end} where others start at {following}, "
                    "takes sequences one behind the other"
                )
        longest = max([0, *(end - start for start, end in pairwise(starts))])
        mask, reach = masks.key_lengths(bias.k_seqinfo.seqlen), bias.reach()
        if reach != (None, None):
            left, right = (FAR if side is None else side for side in reach)
            shift = bias.k_seqinfo.seqlen - bias.q_seqinfo.seqstart.diff()
            mask = mask & shifted_window(shift, left, right)
        return cls(starts[0], info.seqstart - starts[0], longest, mask)


def _packed(rows: _Rows, bias: PackedKeys, p: float, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention within sequences that lie one behind the other."""
    _check_packed(rows, bias, bias.k_seqinfo.seqstart_py[-1])
    keys = _KeyRows.of(bias)
    output, lse = saccade.attention_varlen(
        rows.query[0], rows.key[0, keys.first :], rows.value[0, keys.first :],
        bias.q_seqinfo.seqstart, keys.offsets, max_seqlen_q=max(bias.q_seqinfo.max_seqlen, 0),
        max_seqlen_k=keys.longest, mask=keys.mask, dropout_p=p, scale=scale, return_lse=True,
    )  # fmt: skip
    return output[None], lse[None]


def _over_slabs(
    rows: _Rows, bias: BlockDiagonalPaddedKeysMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention to the first keys of each slab, as pages of it."""
    _check_packed(rows, bias, bias.k_seqinfo.seqstart_py[-1])
    num_slabs, padding = len(bias.k_seqinfo.seqlen_py), bias.k_seqinfo.padding
    slabs = [tensor[0].unflatten(0, (num_slabs, padding)) for tensor in rows[1:]]
    entry = torch.arange(num_slabs, dtype=torch.int32, device=rows.key.device)
    table, (keys, values) = pages_of_slabs("key, value", entry, *slabs)
    output, lse = saccade.attention_paged(
        rows.query[0], keys, values, table, bias.k_seqinfo.seqlen,
        cu_seqlens_q=bias.q_seqinfo.seqstart, mask=bias.pairs(), scale=scale, return_lse=True,
    )  # fmt: skip
    return output[None], lse[None]


def _over_pages(rows: _Rows, bias: PagedKeys, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention to keys in pages, each sequence's from its start to its end."""
    size = bias.page_size
    if rows.key.shape[1] % size:
        raise ValueError(f"key: got {rows.key.shape[1]} rows, takes pages of {size}")
    _check_packed(rows, bias, rows.key.shape[1])
    longest, room = max([0, *bias.k_seqinfo.seqlen_py]), bias.block_tables.shape[1] * size
    if longest > room:
        raise ValueError(f"attn_bias: got a sequence of {longest} rows, and pages for {room}")
    if _wants_grad(rows):
        raise NotImplementedError(
            f"attn_bias: got a {type(bias).__name__} and tensors that require a gradient, takes "
            "tensors that do not: attention over pages is forward only"
        )
    keys, values = (tensor[0].unflatten(0, (-1, size)).transpose(1, 2) for tensor in rows[1:])
    mask = bias.pairs()
    if isinstance(bias, PagedBlockDiagonalGappyKeysMask):
        seen = first_visible_key(bias.k_seqinfo.seqstart[:-1])
        mask = seen if mask is None else mask & seen
    output, lse = saccade.attention_paged(
        rows.query[0], keys, values, bias.block_tables, bias.k_seqinfo.seqlen,
        cu_seqlens_q=bias.q_seqinfo.seqstart, mask=mask, scale=scale, return_lse=True,
    )  # fmt: skip
    return output[None], lse[None]


def _check_packed(rows: _Rows, bias: Any, kv_tokens: int) -> None:
    """Refuse by name rows that a bias was not made for."""
    lengths = {"query": bias.q_seqinfo.seqstart_py[-1], "key": kv_tokens}
    for name, tokens in lengths.items():
        shape = list(getattr(rows, name).shape)
        if shape[:2] != [1, tokens]:
            raise ValueError(
                f"{name}: got {shape[0]} x {shape[1]} rows, takes 1 x {tokens}, as attn_bias has"
            )
    device = bias.q_seqinfo.seqstart.device
    if device != rows.query.device:
        raise ValueError(
            f"attn_bias: got one on {device}, takes query's {rows.query.device}: "
            f"attn_bias.to({str(rows.query.device)!r})"
        )

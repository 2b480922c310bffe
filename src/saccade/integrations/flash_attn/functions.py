"""Functions: FlashAttention's calls, for sequences of one length and for packed ones; and what
pads and packs them.

Its calls over pages take queries that require a gradient, and fail when one is computed; so do
these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import saccade
from saccade import scores
from saccade.integrations.arguments import chained, flag, heads_first, pair, real, whole, window


def attention_options(
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any = None,
    sequences: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """The options that all calls share (see `flash_attn_func`), as `saccade.attention` has them.

    Args:
        sequences: how many there are, and how many heads of queries, where slopes are given.
    """
    scale = None if softmax_scale is None else real("softmax_scale", softmax_scale)
    causal = flag("causal", causal)
    left, right = (None if rows < 0 else rows for rows in pair("window_size", window_size))
    softcap = real("softcap", softcap)
    if softcap != softcap:
        raise ValueError("softcap: got nan, takes a number; 0: no cap")
    alibi = None
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, *sequences)
        by_head = alibi_slopes.dim() == 1
        alibi = scores.alibi(alibi_slopes) if by_head else alibi_by_batch(alibi_slopes)
    return {
        "mask": window(left, 0 if causal else right),
        "score": chained(scores.softcap(softcap) if softcap > 0 else None, alibi),
        "scale": scale,
    }


def _check_slopes(slopes: Any, batch: int, heads: int) -> None:
    """Refuse slopes of other sequences or heads than there are: the first would be taken."""
    takes = f"floating-point numbers [{heads}] or [{batch}, {heads}]"
    if not isinstance(slopes, Tensor):
        raise TypeError(f"alibi_slopes: got {type(slopes).__name__}, takes a tensor of {takes}")
    if not slopes.is_floating_point():
        raise TypeError(f"alibi_slopes: got {slopes.dtype}, takes {takes}")
    shape = tuple(slopes.shape)
    if shape != (heads,) and shape != (batch, heads):
        raise ValueError(f"alibi_slopes: got {list(shape)}, takes {takes}")


@scores.function(align="bottom_right")
def alibi_by_batch(
    score: Any, batch: Any, head: Any, query_row: Any, kv_row: Any, slopes: Any
) -> Any:
    """ALiBi with slopes [batch, heads]."""
    return score - scores.take(slopes, batch, head) * scores.absolute(query_row - kv_row)


def no_weights(return_attn_probs: Any, dropout_p: Any) -> tuple[float, bool]:
    """The probability of dropout, and whether the lse is returned too.

    Raises:
        NotImplementedError: for both, as FlashAttention then returns weights that show what was
            dropped.
    """
    dropout_p = float(real("dropout_p", dropout_p))
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError(
            f"return_attn_probs: got True with dropout_p = {dropout_p}; saccade never writes "
            "weights out. Ask for them with dropout_p = 0 (the lse comes with them)"
        )
    return dropout_p, return_attn_probs


def answer(output: Tensor, lse: Tensor, return_attn_probs: bool) -> Any:
    """What FlashAttention returns: the output alone, or with the lse and an empty tensor."""
    return (output, lse, output.new_empty(0)) if return_attn_probs else output


def without_gradient(name: str, outputs: tuple[Tensor, Tensor], *inputs: Any) -> Any:
    """Outputs that were computed under `torch.no_grad`, whose backward pass raises.

    Args:
        name: of the call.
        inputs: the call's arguments; if no tensor among them requires a gradient, the outputs
            require none either.
    """
    tensors = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    if not (tensors and torch.is_grad_enabled()):
        return outputs
    return _ForwardOnly.apply(name, *outputs, *tensors)


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, output: Tensor, lse: Tensor, *inputs: Tensor) -> Any:
        ctx.name = name
        return output.view_as(output), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: got a gradient to send back, takes none: attention over pages is forward "
            "only, as FlashAttention's is; take flash_attn_varlen_func without block_table"
        )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as `flash_attn.flash_attn_func` has it.

    Numbers may be Python's, NumPy's or tensors of one element, here and in all calls beside it.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k, v: (batch, seqlen_k, nheads_k, headdim); nheads_k divides nheads.
        dropout_p: the probability that a weight is dropped.
        softmax_scale: 1 / sqrt(headdim) where None.
        causal: whether rows behind a row are hidden from it; the last query row has the position
            of the last key row.
        window_size: (left, right): rows visible before and after a row's position; -1: all.
        softcap: greater than 0 bends scores into (-softcap, softcap).
        alibi_slopes: (nheads,) or (batch, nheads).
        deterministic: gradients with equal bits from run to run.
        return_attn_probs: also return the lse (batch, nheads, seqlen_q), and an empty tensor.

    Returns:
        (batch, seqlen_q, nheads, headdim).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> q, k, v = torch.randn(3, 2, 16, 4, 32)  # (batch, seqlen, nheads, headdim)
        >>> flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(8, 0), softcap=30.0).shape
        torch.Size([2, 16, 4, 32])
    """
    dropout_p, weights = no_weights(return_attn_probs, dropout_p)
    options = attention_options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, (q.shape[0], q.shape[-2])
    )
    output, lse = heads_first(
        saccade.attention, q, k, v, **options, dropout_p=dropout_p,
        deterministic=flag("deterministic", deterministic), return_lse=True,
    )  # fmt: skip
    return answer(output, lse, weights)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as `flash_attn_func` has it, with keys and values in one tensor.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        kv: (batch, seqlen_k, 2, nheads_k, headdim).
        others: as of `flash_attn_func`.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> q, kv = torch.randn(2, 16, 4, 32), torch.randn(2, 16, 2, 2, 32)
        >>> flash_attn.flash_attn_kvpacked_func(q, kv, causal=True).shape
        torch.Size([2, 16, 4, 32])
    """
    k, v = unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as `flash_attn_func` has it, with queries, keys and values in one.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim).
        others: as of `flash_attn_func`.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 32)).shape
        torch.Size([2, 16, 4, 32])
    """
    q, k, v = unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def unpacked(name: str, together: Tensor, parts: int, dims: int) -> tuple[Tensor, ...]:
    """Tensors that lie in one, side by side in its dimension before heads.

    Raises:
        ValueError: for another shape.
    """
    if together.dim() != dims or together.shape[-3] != parts:
        shape = ", ".join(["batch, seqlen"] * (dims - 4) + ["total"] * (5 - dims))
        raise ValueError(
            f"{name}: got {list(together.shape)}, takes ({shape}, {parts}, nheads, headdim)"
        )
    return together.unbind(-3)


def flash_attn_varlen_func(  # breaks function-length: most of it is the docstring
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention as `flash_attn.flash_attn_varlen_func` has it.

    Args:
        q: (total_q, nheads, headdim).
        k, v: (total_k, nheads_k, headdim), or with block_table (num_blocks, block_size, nheads_k,
            headdim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), from 0 to the number of tokens.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        block_table: int32 (batch, max_blocks): the pages of each sequence. Forward only (backward
            raises), and without dropout.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as of `flash_attn_func`; the lse is (nheads, total_q).

    Returns:
        (total_q, nheads, headdim).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> q, k, v = torch.randn(3, 10, 4, 32)
        >>> ends = torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 6, 6, causal=True).shape
        torch.Size([10, 4, 32])
    """
    dropout_p, weights = no_weights(return_attn_probs, dropout_p)
    options = attention_options(
        softmax_scale, causal, window_size, softcap, alibi_slopes,
        (len(cu_seqlens_q) - 1, q.shape[-2]),
    )  # fmt: skip
    longest = whole("max_seqlen_q", max_seqlen_q), whole("max_seqlen_k", max_seqlen_k)
    deterministic = flag("deterministic", deterministic)
    if block_table is None:
        output, lse = saccade.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], **options,
            dropout_p=dropout_p, deterministic=deterministic, return_lse=True,
        )  # fmt: skip
        return answer(output, lse, weights)
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p: got {dropout_p} with block_table, takes 0")
    with torch.no_grad():
        found = saccade.attention_paged(
            q, k.transpose(1, 2), v.transpose(1, 2), block_table, cu_seqlens_k.diff(),
            cu_seqlens_q=cu_seqlens_q, **options, return_lse=True,
        )  # fmt: skip
    name = "flash_attn_varlen_func with block_table"
    output, lse = without_gradient(name, found, q, k, v, alibi_slopes)
    return answer(output, lse, weights)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as `flash_attn_varlen_func` has it, with keys and values in one tensor.

    Args:
        q: (total_q, nheads, headdim).
        kv: (total_k, 2, nheads_k, headdim).
        others: as of `flash_attn_varlen_func`.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> q, kv = torch.randn(10, 4, 32), torch.randn(10, 2, 2, 32)
        >>> ends = torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 6, 6).shape
        torch.Size([10, 4, 32])
    """
    k, v = unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as `flash_attn_varlen_func` has it, with queries, keys and values in one.

    Args:
        qkv: (total, 3, nheads, headdim).
        others: as of `flash_attn_varlen_func`.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> ends = torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 4, 32), ends, 6).shape
        torch.Size([10, 4, 32])
    """
    q, k, v = unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# ---- padding -------------------------------------------------------------------------------------
# From padded to packed tokens and back, as `flash_attn.bert_padding` has it.


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows by their numbers.

    Args:
        rows: (total, ...). indices: (tokens,).

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> flash_attn.index_first_axis(torch.arange(5.0)[:, None], torch.tensor([4, 0])).tolist()
        [[4.0], [0.0]]
    """
    return rows.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows put at indices; zeros everywhere else.

    Args:
        values: (tokens, ...). indices: (tokens,), each once.
        first_axis_dim: rows of the result.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> flash_attn.index_put_first_axis(torch.ones(1, 1), torch.tensor([2]), 3).tolist()
        [[0.0], [0.0], [1.0]]
    """
    if tuple(indices.shape) != tuple(values.shape[:1]):
        raise ValueError(
            f"indices: got {list(indices.shape)}, takes [{len(values)}], one for each row"
        )
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows by their numbers, and all rows, for a residual connection.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> rows = torch.arange(3.0)[:, None]
        >>> chosen, all_rows = flash_attn.index_first_axis_residual(rows, torch.tensor([2]))
        >>> chosen.tolist(), all_rows.shape
        ([[2.0]], torch.Size([3, 1]))
    """
    return rows.index_select(0, indices), rows.view_as(rows)


class IndexFirstAxis:
    """`index_first_axis` by the name of FlashAttention's function with a gradient.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> rows = torch.arange(5.0)[:, None]
        >>> flash_attn.IndexFirstAxis.apply(rows, torch.tensor([4, 0])).tolist()
        [[4.0], [0.0]]
    """

    apply: Any = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """`index_put_first_axis` by the name of FlashAttention's function with a gradient.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> flash_attn.IndexPutFirstAxis.apply(torch.ones(1, 1), torch.tensor([2]), 3).tolist()
        [[0.0], [0.0], [1.0]]
    """

    apply: Any = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    """`index_first_axis_residual` by the name of FlashAttention's function with a gradient.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> rows = torch.arange(3.0)[:, None]
        >>> chosen, all_rows = flash_attn.IndexFirstAxisResidual.apply(rows, torch.tensor([2]))
    """

    apply: Any = staticmethod(index_first_axis_residual)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of padded sequences, laid end to end.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), 1 where there is a token.
        unused_mask: the same, 1 where there is room for a token that no token attends to.

    Returns:
        tokens (total, ...); their indices in the flattened batch; offsets int32 (batch + 1,); the
        longest length; and how many tokens each sequence has that are no unused ones. Reads the
        longest length from the device.

    Raises:
        ValueError: for masks of another shape, and such that are not of ones and zeros.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> padded, seen = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
        >>> tokens, indices, ends, longest, lengths = flash_attn.unpad_input(padded, seen)
        >>> tokens.shape, ends.tolist(), longest
        (torch.Size([5, 8]), [0, 2, 5], 3)
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    kept, names = attention_mask, "attention_mask"
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept, names = attention_mask + unused_mask, "attention_mask + unused_mask"
    used = attention_mask.sum(-1, dtype=torch.int32)
    lens = kept.sum(-1, dtype=torch.int32)
    return *_laid_out(hidden_states, kept, lens, names, "ones and zeros"), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of rows that hold several sequences each, laid end to end.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen): a row [2, 3, 0, 0, 0, 0] begins with sequences
            of 2 and 3 tokens.

    Returns:
        The same as `unpad_input`, without the last, of the sequences.

    Raises:
        ValueError: for lengths of another shape, and such that are longer than their row.

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> rows, lengths = torch.randn(1, 6, 8), torch.tensor([[2, 3, 0, 0, 0, 0]])
        >>> found = flash_attn.unpad_input_for_concatenated_sequences(rows, lengths)
        >>> found[2].tolist()  # offsets
        [0, 2, 5]
    """
    name = "attention_mask_in_length"
    _check_mask(name, attention_mask_in_length, hidden_states)
    total = attention_mask_in_length.sum(-1, keepdim=True)
    column = torch.arange(attention_mask_in_length.shape[-1], device=total.device)
    flat = attention_mask_in_length.flatten()
    lens = flat[flat.nonzero().flatten()].to(torch.int32)
    takes = "lengths that fit in their row"
    return _laid_out(hidden_states, column < total, lens, name, takes)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Padded sequences from packed tokens, with zeros where there is no token.

    Args:
        hidden_states: (total, ...). indices: as `unpad_input` gave them.

    Returns:
        (batch, seqlen, ...).

    Examples:
        >>> from saccade.integrations import flash_attn
        >>> padded, seen = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
        >>> tokens, indices, *_ = flash_attn.unpad_input(padded, seen)
        >>> torch.equal(flash_attn.pad_input(tokens, indices, 2, 4), padded * seen[..., None])
        True
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    """Refuse a mask of other rows: places in it would be those of other tokens."""
    if tuple(mask.shape) != tuple(hidden_states.shape[:2]):
        raise ValueError(
            f"{name}: got {list(mask.shape)}, takes {list(hidden_states.shape[:2])}, as "
            "hidden_states has"
        )


def _laid_out(
    hidden_states: Tensor, kept: Tensor, lens: Tensor, name: str, takes: str
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens that are kept, their indices, offsets of sequences of these lengths, the longest.

    Args:
        name, takes: of the mask, for the error where lengths are not of these tokens.
    """
    indices = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    longest, total = torch.stack((lens.max(), offsets[-1])).tolist()  # read at once
    if not torch.compiler.is_compiling() and total != len(indices):
        raise ValueError(f"{name}: got {total} in sum for {len(indices)} tokens, takes {takes}")
    return tokens, indices, offsets, longest

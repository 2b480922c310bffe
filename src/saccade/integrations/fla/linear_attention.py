"""fla's linear attention and simple GLA, by saccade.linear_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import saccade
from saccade.integrations.arguments import as_features, heads_first
from saccade.integrations.fla.arguments import (
    check_chunk,
    check_copy,
    check_flag,
    check_floats,
    check_offsets,
    check_rows,
    check_unknown,
)

EPS = 1e-10

State = Tensor | tuple[Tensor, Tensor] | None


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """Causal linear attention.

    Args:
        q, k: (B, T, H, K). v: (B, T, H, V).
        scale: of the scores; K ** -0.5 where None.
        initial_state: (N, H, K, V), or with `normalize` a pair of it and (N, 1, H, K).
        output_final_state: whether to return the last state, in the same form.
        normalize: whether to divide by the sum of scores.
        cu_seqlens: [N + 1] offsets of packed sequences.

    Returns:
        (B, T, H, V), and the last state or None.

    Examples:
        >>> from saccade.integrations.fla import chunk_linear_attn
        >>> q, k, v = torch.rand(3, 1, 32, 2, 16)  # (B, T, H, K)
        >>> output, state = chunk_linear_attn(q, k, v, output_final_state=True)
        >>> output.shape
        torch.Size([1, 32, 2, 16])
    """
    check_unknown(unknown, chunk_linear_attn)
    return _call([q, k, v], scale, initial_state, output_final_state, normalize, cu_seqlens)


fused_chunk_linear_attn = chunk_linear_attn
"""`chunk_linear_attn` by another of fla's names.

Examples:
    >>> from saccade.integrations.fla import fused_chunk_linear_attn
    >>> q, k, v = torch.rand(3, 1, 32, 2, 16)
    >>> fused_chunk_linear_attn(q, k, v)[0].shape
    torch.Size([1, 32, 2, 16])
"""


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """`chunk_linear_attn` with other defaults.

    Args:
        reverse: whether tokens see those behind them instead of those before.
        others: as in `chunk_linear_attn`.

    Examples:
        >>> from saccade.integrations.fla import fused_recurrent_linear_attn
        >>> q, k, v = torch.rand(3, 1, 32, 2, 16)
        >>> fused_recurrent_linear_attn(q, k, v, normalize=True)[0].shape
        torch.Size([1, 32, 2, 16])
    """
    check_unknown(unknown, fused_recurrent_linear_attn)
    return _call(
        [q, k, v], scale, initial_state, output_final_state, normalize, cu_seqlens, reverse
    )


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """Linear attention with decay and without a normaliser.

    Args:
        g: (B, T, H) logarithms of the factor at each token.
        g_gamma: (H,) logarithms of constant factors; at most one of the two.
        state_v_first: states are (N, H, V, K).
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which saccade does not need.
        chunk_size: a power of 2; saccade chooses its own, and results do not depend on it.
        others: as in `chunk_linear_attn`.

    Examples:
        >>> from saccade.integrations.fla import chunk_simple_gla
        >>> q, k, v = torch.rand(3, 1, 32, 2, 16)
        >>> decay = torch.nn.functional.logsigmoid(torch.randn(1, 32, 2))
        >>> output, state = chunk_simple_gla(q, k, v, g=decay, output_final_state=True)
        >>> state.shape
        torch.Size([1, 2, 16, 16])
    """
    check_unknown(unknown, chunk_simple_gla)
    check_rows(q, k, v)
    check_offsets(cu_seqlens, q)
    check_copy(cu_seqlens_cpu, cu_seqlens)
    check_chunk(chunk_size)
    return fused_recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """`chunk_simple_gla` with fewer options.

    Examples:
        >>> from saccade.integrations.fla import fused_chunk_simple_gla
        >>> q, k, v = torch.rand(3, 1, 32, 2, 16)
        >>> fused_chunk_simple_gla(q, k, v, g_gamma=torch.tensor([-0.1, -0.2]))[0].shape
        torch.Size([1, 32, 2, 16])
    """
    check_unknown(unknown, fused_chunk_simple_gla)
    return fused_recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """`chunk_simple_gla`, with `reverse` as in `fused_recurrent_linear_attn`.

    Examples:
        >>> from saccade.integrations.fla import fused_recurrent_simple_gla
        >>> q, k, v = torch.rand(3, 1, 32, 2, 16)
        >>> fused_recurrent_simple_gla(q, k, v, g_gamma=torch.tensor([-0.1, -0.2]))[0].shape
        torch.Size([1, 32, 2, 16])
    """
    check_unknown(unknown, fused_recurrent_simple_gla)
    check_rows(q, k, v)
    check_flag("state_v_first", state_v_first)
    if initial_state is not None:
        if not isinstance(initial_state, Tensor):
            got, form = type(initial_state).__name__, "V, K" if state_v_first else "K, V"
            raise TypeError(f"initial_state: got {got}, takes a tensor (N, H, {form})")
        initial_state = initial_state.mT if state_v_first else initial_state
    output, state = _call(
        [q, k, v], scale, initial_state, output_final_state, False, cu_seqlens, reverse,
        _decay(g, g_gamma, k, v),
    )  # fmt: skip
    return output, state.mT if state_v_first and isinstance(state, Tensor) else state


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_simple_gla` without states.

    Args:
        output_attentions: whether to return the decayed scores too: T · T numbers a head.
        others: as in `chunk_simple_gla`.

    Returns:
        (B, T, H, V), and (B, H, T, T) or None.

    Examples:
        >>> from saccade.integrations.fla import parallel_simple_gla
        >>> q, k, v = torch.rand(3, 1, 32, 2, 16)
        >>> output, weights = parallel_simple_gla(q, k, v, output_attentions=True)
        >>> weights.shape
        torch.Size([1, 2, 32, 32])
    """
    check_unknown(unknown, parallel_simple_gla)
    check_rows(q, k, v)
    check_offsets(cu_seqlens, q)
    check_flag("output_attentions", output_attentions)
    check_copy(cu_seqlens_cpu, cu_seqlens)
    if output_attentions and cu_seqlens is not None:
        raise ValueError("output_attentions: got True with cu_seqlens, takes False")
    output, _ = fused_recurrent_simple_gla(q, k, v, g, None, scale, cu_seqlens=cu_seqlens)
    if not output_attentions:
        return output, None
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    scores = scores * (max(q.shape[-1], 1) ** -0.5 if scale is None else scale)
    if g is not None:
        # In float64, and above where e^g is 0: a difference of sums has no more than they have.
        total = g.transpose(1, 2).double().clamp(min=-1000.0).cumsum(-1)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
        left = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf)
        scores = scores * left.exp().to(scores.dtype)
    return output, scores.tril()


def _call(
    tensors: list[Tensor],
    scale: float | None,
    initial_state: State,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
    decay: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention of features in fla's layout; decay is (B, T, H), (H,) or None."""
    q: Tensor = tensors[0]
    check_rows(*tensors)
    check_offsets(cu_seqlens, q)
    check_flag("output_final_state", output_final_state)
    check_flag("normalize", normalize)
    sums = _sums(initial_state, normalize)
    order = _Order(reverse, cu_seqlens, q.shape[1], q.device)
    rows = [order.rows(each) for each in tensors]
    if decay is not None and decay.dim() == 3:
        decay = order.rows(decay)
        decay = decay.transpose(1, 2) if cu_seqlens is None else decay.squeeze(0)
    arguments: dict[str, Any] = {
        "feature_map": as_features,
        "normalize": "sum" if normalize else "none",
        "return_state": True,
        "eps": EPS,
        "scale": max(q.shape[-1], 1) ** -0.5 if scale is None else scale,
        "decay": decay,
        "initial_state": sums and saccade.LinearState(*order.states(sums[:2])),
    }
    if cu_seqlens is None:
        output, state = heads_first(saccade.linear_attention, *rows, **arguments)
    else:
        offsets: Any = order.offsets
        if isinstance(offsets, Tensor):
            offsets = offsets.to(torch.int32)
        call: Any = saccade.linear_attention_varlen
        output, state = call(*(each.squeeze(0) for each in rows), offsets, **arguments)
        output = output.unsqueeze(0)
    last: State = (state.kv, state.key_sum.unsqueeze(1)) if normalize else state.kv
    return order.rows(output), order.states(last) if output_final_state else None


def _sums(state: State, normalize: bool) -> saccade.LinearState | None:
    """fla's state as saccade's."""
    if state is None:
        return None
    parts = state if isinstance(state, (tuple, list)) else (state,)
    pair = len(parts) == 2
    if (
        not all(isinstance(part, Tensor) for part in parts)
        or not (pair or len(parts) == 1)
        or (normalize and not pair)
    ):
        takes = "a pair (kv, z) with normalize=True" if normalize else "a tensor (N, H, K, V)"
        raise ValueError(f"initial_state: got {_kind(state)}, takes {takes}")
    kv = parts[0]
    if not pair:
        return saccade.LinearState(kv, kv.new_zeros(kv.shape[:3]))
    wanted = (kv.shape[0], 1, *kv.shape[1:3])
    if kv.dim() != 4 or parts[1].shape != wanted:
        got = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"initial_state: got {got}, takes (N, H, K, V) and (N, 1, H, K)")
    return saccade.LinearState(kv, parts[1].squeeze(1))


def _kind(state: Any) -> str:
    """What it is, and of a sequence what is in it."""
    if isinstance(state, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in state)})"
    return type(state).__name__


class _Order:
    """The order in which tokens are read: as they lie, or reversed.

    With offsets each sequence is reversed, and their order too; rows behind the last stay.
    """

    def __init__(self, reverse: bool, offsets: Tensor | None, length: int, device: torch.device):
        check_flag("reverse", reverse)
        self.reverse, self.offsets, self.packed = reverse, offsets, offsets is not None
        if reverse and offsets is not None:
            end, row = offsets[-1], torch.arange(length, device=device)
            self.offsets = end - offsets.flip(0)
            self.order = torch.where(row < end, end - 1 - row, row)

    def rows(self, rows: Tensor) -> Tensor:
        """Rows (B, T, ...) in this order, or back from it."""
        if not self.reverse:
            return rows
        return rows.index_select(1, self.order) if self.packed else rows.flip(1)

    def states(self, state: Any) -> Any:
        """States of the sequences in this order, or back from it."""
        if state is None or not (self.reverse and self.packed):
            return state
        if isinstance(state, (tuple, list)):
            return tuple(part.flip(0) for part in state)
        return state.flip(0)


def _decay(g: Tensor | None, g_gamma: Tensor | None, k: Tensor, v: Tensor) -> Tensor | None:
    """The decay of each token or of each head, of the right shape."""
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: got a tensor beside g, takes one of the two")
    heads = max(k.shape[2], v.shape[2])
    for name, decay, shape in (("g", g, (*k.shape[:2], heads)), ("g_gamma", g_gamma, (heads,))):
        if decay is None:
            continue
        check_floats(name, decay, "(B, T, H)" if name == "g" else "(H,)")
        if tuple(decay.shape) != tuple(shape):
            raise ValueError(f"{name}: got shape {tuple(decay.shape)}, takes {tuple(shape)}")
    return g_gamma if g is None else g

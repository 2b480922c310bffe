"""fla: the calls of flash-linear-attention that saccade answers, with its layouts and defaults.

Tensors are (B, T, H, K) and (B, T, H, V); with cu_seqlens, B is 1 and states are (N, H, K, V).
Queries and keys are features already. The normaliser's sum gets fla's eps of 1e-10. Arguments:
fla 0.6's. Differences: states only when asked for; any dtype, on a CPU too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import saccade

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
    """
    return _call([q, k, v], scale, initial_state, output_final_state, normalize, cu_seqlens, None)


fused_chunk_linear_attn = chunk_linear_attn


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
) -> tuple[Tensor, State]:
    """The same as `chunk_linear_attn`, with other defaults; `reverse` walks from the end."""
    packing = _Packing(reverse, cu_seqlens, q.shape[1], q.device)
    output, state = _call(
        [packing.rows(rows) for rows in (q, k, v)], scale, packing.states(initial_state),
        output_final_state, normalize, packing.offsets, None,
    )  # fmt: skip
    return packing.rows(output), packing.states(state)


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
) -> tuple[Tensor, State]:
    """Linear attention without a normaliser whose state fades.

    Args:
        g: (B, T, H) logarithms of the factor at each token.
        g_gamma: (H,) logarithms of constant factors; at most one of the two.
        state_v_first: states are (N, H, V, K).
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which saccade does not need.
        chunk_size: a power of 2; saccade chooses its own, and results do not depend on it.
        others: as in `chunk_linear_attn`.
    """
    _check_copy(cu_seqlens_cpu, cu_seqlens)
    _check_chunk(chunk_size)
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
) -> tuple[Tensor, State]:
    """The same as `chunk_simple_gla`, with fewer options."""
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
) -> tuple[Tensor, State]:
    """The same as `chunk_simple_gla`; `reverse` walks from the end."""
    _check_flag("output_final_state", output_final_state)
    _check_flag("state_v_first", state_v_first)
    packing = _Packing(reverse, cu_seqlens, q.shape[1], q.device)
    decay = _decay(g, g_gamma, k, v)
    if g is not None:
        decay = packing.rows(g).squeeze(0) if packing.packed else packing.rows(g).transpose(1, 2)
    state: Any
    if state_v_first and isinstance(initial_state, Tensor):
        initial_state = initial_state.mT
    output, state = _call(
        [packing.rows(rows) for rows in (q, k, v)], scale, packing.states(initial_state),
        output_final_state, False, packing.offsets, decay,
    )  # fmt: skip
    state = packing.states(state)
    return packing.rows(output), state.mT if state_v_first and state is not None else state


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same as `chunk_simple_gla` without states.

    Args:
        output_attentions: whether to return the faded scores too, which takes T · T numbers a head.
        others: as in `chunk_simple_gla`.

    Returns:
        (B, T, H, V), and (B, H, T, T) or None.
    """
    _check_flag("output_attentions", output_attentions)
    _check_copy(cu_seqlens_cpu, cu_seqlens)
    if output_attentions and cu_seqlens is not None:
        raise ValueError("output_attentions: got True with cu_seqlens, takes False")
    output, _ = fused_recurrent_simple_gla(q, k, v, g, None, scale, cu_seqlens=cu_seqlens)
    if not output_attentions:
        return output, None
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    scores = scores * (max(q.shape[-1], 1) ** -0.5 if scale is None else scale)
    if g is not None:
        total = g.transpose(1, 2).cumsum(-1)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
        left = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf)
        scores = scores * left.exp()
    return output, scores.tril()


def _call(
    tensors: list[Tensor],
    scale: float | None,
    initial_state: State,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    decay: Tensor | None,
) -> tuple[Tensor, State]:
    q: Tensor = tensors[0]
    call: Any = saccade.linear_attention if cu_seqlens is None else saccade.linear_attention_varlen
    arguments: dict[str, Any] = {
        "feature_map": _as_given,
        "normalize": "sum" if normalize else "none",
        "return_state": True,
        "eps": EPS,
        "scale": max(q.shape[-1], 1) ** -0.5 if scale is None else scale,
        "decay": decay,
        "initial_state": _sums(initial_state, normalize),
    }
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"q: got batch {q.shape[0]}, takes 1 with cu_seqlens")
        offsets = cu_seqlens.to(torch.int32) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        output, state = call(*(rows.squeeze(0) for rows in tensors), offsets, **arguments)
        output = output.unsqueeze(0)
    else:
        output, state = call(*(rows.transpose(1, 2) for rows in tensors), **arguments)
        output = output.transpose(1, 2)
    if not output_final_state:
        return output, None
    return output, (state.kv, state.key_sum.unsqueeze(1)) if normalize else state.kv


def _sums(state: State, normalize: bool) -> saccade.LinearState | None:
    """fla's state as saccade's."""
    if state is None:
        return None
    if isinstance(state, (tuple, list)):
        return saccade.LinearState(state[0], state[1].squeeze(1))
    if normalize or not isinstance(state, Tensor):
        got = type(state).__name__
        takes = "a pair (kv, z) with normalize=True" if normalize else "a tensor (N, H, K, V)"
        raise ValueError(f"initial_state: got {got}, takes {takes}")
    return saccade.LinearState(state, state.new_zeros(state.shape[:3]))


class _Packing:
    """The order of tokens: as they lie, or all but the rows behind the last offset turned round."""

    def __init__(self, reverse: bool, offsets: Tensor | None, length: int, device: torch.device):
        _check_flag("reverse", reverse)
        self.reverse, self.offsets, self.packed = reverse, offsets, offsets is not None
        if reverse and offsets is not None:
            end, place = offsets[-1], torch.arange(length, device=device)
            self.offsets = end - offsets.flip(0)
            self.order = torch.where(place < end, end - 1 - place, place)

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
    """The one that is given, of the right shape."""
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: got a tensor beside g, takes one of the two")
    heads = max(k.shape[2], v.shape[2])
    for name, given, shape in (("g", g, (*k.shape[:2], heads)), ("g_gamma", g_gamma, (heads,))):
        if given is not None and tuple(given.shape) != tuple(shape):
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, takes {tuple(shape)}")
    return g_gamma if g is None else g


def _check_flag(name: str, value: object) -> None:
    """Refuse what stands in a flag's place, as arguments in another version's order do."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a bool")


def _check_chunk(size: object) -> None:
    """Refuse a chunk_size that fla refuses."""
    if size is not None and (type(size) is not int or size < 1 or size & (size - 1)):
        raise ValueError(f"chunk_size: got {size!r}, takes a power of 2 or None")


def _check_copy(copy: object, offsets: Tensor | None) -> None:
    """Refuse a cu_seqlens_cpu that is no copy, as far as shows without reading from a GPU."""
    if copy is None:
        return
    if offsets is None:
        raise ValueError("cu_seqlens_cpu: got a value without cu_seqlens, takes None")
    if not isinstance(copy, Tensor) or copy.device.type != "cpu" or copy.shape != offsets.shape:
        got = f"{copy.device} {list(copy.shape)}" if isinstance(copy, Tensor) else repr(copy)
        raise ValueError(f"cu_seqlens_cpu: got {got}, takes a copy of cu_seqlens on the CPU")
    if offsets.device.type == "cpu" and offsets.tolist() != copy.tolist():
        raise ValueError(f"cu_seqlens_cpu: got {copy.tolist()}, takes {offsets.tolist()}")


def _as_given(rows: Tensor) -> Tensor:
    """The map of what are features already."""
    return rows

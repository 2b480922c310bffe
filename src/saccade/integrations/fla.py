"""fla: the calls of flash-linear-attention that saccade answers, with its layouts and defaults.

Tensors are (B, T, H, K) and (B, T, H, V); with cu_seqlens, B is 1 and states are (N, H, K, V).
Queries and keys are features already. The normaliser's sum gets fla's eps of 1e-10. Differences:
the state is returned only when asked for, in both forms; any dtype, on a CPU too.
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
    return _call(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, None)


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
    if reverse:
        q, k, v = (rows.flip(1) for rows in (q, k, v))
        cu_seqlens = None if cu_seqlens is None else cu_seqlens[-1] - cu_seqlens.flip(0)
        if cu_seqlens is not None and initial_state is not None:
            initial_state = _flipped(initial_state)
    output, state = _call(
        q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, None
    )
    if not reverse:
        return output, state
    if cu_seqlens is not None and state is not None:
        state = _flipped(state)
    return output.flip(1), state


def chunk_simple_gla(
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
    """Linear attention without a normaliser whose state fades.

    Args:
        g: (B, T, H) logarithms of the factor at each token.
        g_gamma: (H,) logarithms of constant factors; at most one of the two.
        others: as in `chunk_linear_attn`.
    """
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: got a tensor beside g, takes one of the two")
    heads = max(k.shape[2], v.shape[2])
    for name, given, shape in (("g", g, (*k.shape[:2], heads)), ("g_gamma", g_gamma, (heads,))):
        if given is not None and tuple(given.shape) != tuple(shape):
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, takes {tuple(shape)}")
    decay = g_gamma
    if g is not None:
        decay = g.squeeze(0) if cu_seqlens is not None else g.transpose(1, 2)
    return _call(q, k, v, scale, initial_state, output_final_state, False, cu_seqlens, decay)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: State,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    decay: Tensor | None,
) -> tuple[Tensor, State]:
    arguments: dict[str, Any] = {
        "feature_map": _as_given,
        "normalize": normalize,
        "eps": EPS,
        "scale": max(q.shape[-1], 1) ** -0.5 if scale is None else scale,
        "decay": decay,
        "initial_state": _sums(initial_state, normalize),
    }
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"q: got batch {q.shape[0]}, takes 1 with cu_seqlens")
        packed = [tensor.squeeze(0) for tensor in (q, k, v)]
        offsets = cu_seqlens.to(torch.int32) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        output, state = _with_state(saccade.linear_attention_packed, *packed, offsets, **arguments)
        output = output.unsqueeze(0)
    else:
        rows = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        output, state = _with_state(saccade.linear_attention, *rows, **arguments)
        output = output.transpose(1, 2)
    if not output_final_state:
        return output, None
    return output, (state.kv, state.key_sum.unsqueeze(1)) if normalize else state.kv


def _with_state(call: Any, *tensors: Tensor, **arguments: Any) -> tuple[Tensor, Any]:
    return call(*tensors, return_state=True, **arguments)


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


def _flipped(state: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    """States of sequences that were walked in the other order."""
    if isinstance(state, tuple):
        return state[0].flip(0), state[1].flip(0)
    return state.flip(0)


def _as_given(rows: Tensor) -> Tensor:
    """The map of what are features already."""
    return rows

"""Mamba-2's scan as layers of transformers' models call it, by linear attention with decay.

They are those of Mamba-2, Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2. A head's state takes
up a token as

    state    ← exp(dt_t · A) · state + B_t · (dt_t · x_t)ᵀ
    output_t = stateᵀ C_t + D · x_t

which is linear attention without a normaliser: queries are C, keys B, values dt · x, and the
logarithm of the decay is dt · A, at most 0. C and B have fewer heads (groups), which heads of x
share. States lie as [batch, heads, head_dim, state_size] here, so saccade's are their transposes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import saccade

Theirs = Callable[..., Any]

WIDEST = 256  # channels of linear attention's kernels; what is wider would be computed pair by pair
# e to it is 0 in every dtype, so what is less leaves as little of the state: -inf, which linear
# attention does not take.
FASTEST_DECAY = -1e4


def chunk_scan(
    theirs: Theirs,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    **options: Any,
) -> Any:
    """Outputs of whole sequences [batch, length, heads, head_dim], and the last state if asked for.

    Args:
        theirs: what was there before; it gets what saccade does not serve.
        hidden_states: x, [batch, length, heads, head_dim].
        dt: [batch, length, heads], to which dt_bias [heads] is added, then softplus applied.
        A, D: [heads].
        B, C: [batch, length, groups, state_size].
        chunk_size: saccade chooses its own.
        initial_states: [batch, heads, head_dim, state_size].
        seq_idx: [batch, length]: which of the sequences packed in a row a token belongs to.
        options: z, which gates the output, and what models hand through their layers.
    """
    packed = seq_idx is not None
    with_states = return_final_states or initial_states is not None
    served = is_served(hidden_states, B.shape[-1]) and (D is None or D.dim() == 1)
    served = served and options.get("z") is None and options.get("cu_seqlens") is None
    if not served or (packed and with_states):
        return theirs(
            hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias,
            initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit,
            return_final_states=return_final_states, seq_idx=seq_idx, **options,
        )  # fmt: skip
    dt, decay = _rates(dt, A, dt_bias, dt_softplus, dt_limit)
    value = (hidden_states * dt.unsqueeze(-1)).to(hidden_states.dtype)
    rows = C, B, value
    if seq_idx is not None:
        output = _packed(rows, decay, seq_idx)
        return _with_skip(output, hidden_states, D)
    initial = None if initial_states is None else _linear_state(initial_states)
    output, state = saccade.linear_attention(
        *(each.transpose(1, 2) for each in rows), feature_map="identity", normalize="none",
        decay=decay.transpose(1, 2), initial_state=initial, return_state=True,
    )  # fmt: skip
    output = _with_skip(output.transpose(1, 2), hidden_states, D)
    return (output, state.kv.mT) if return_final_states else output


def step(
    theirs: Theirs,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Output of one token of each sequence, [batch, heads, head_dim]; the state changes in place.

    Args:
        theirs: what was there before; it gets what saccade does not serve.
        state: [batch, heads, head_dim, state_size].
        hidden_states, dt: [batch, heads, head_dim]. B, C: [batch, groups, state_size].
        A: [heads, head_dim, state_size]. D, dt_bias: [heads, head_dim]. Models give one number a
            head, expanded; that is what saccade serves, as also for dt.
        options: what models hand through their layers.
    """
    of_heads = [_of_heads(each, dims) for each, dims in ((dt, 2), (A, 1), (D, 1), (dt_bias, 1))]
    served = is_served(hidden_states, B.shape[-1]) and z is None
    if not served or any(each is NotImplemented for each in of_heads):
        return theirs(
            state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
            **options,
        )  # fmt: skip
    dt, A, D, dt_bias = of_heads
    dt, decay = _rates(dt, A, dt_bias, dt_softplus)
    # A token's rows are little beside the state, which is read and written in this dtype.
    rows = [each.to(dt.dtype).unsqueeze(2) for each in (C, B, hidden_states * dt.unsqueeze(-1))]
    named: dict[str, Any] = {
        "feature_map": "identity", "normalize": "none", "decay": decay.unsqueeze(-1)
    }  # fmt: skip
    if torch.is_grad_enabled() and any(each.requires_grad for each in (*rows, decay, state)):
        before = _linear_state(state.clone())  # kept for the backward pass
        output, after = saccade.linear_attention(
            *rows, **named, initial_state=before, return_state=True
        )
        state.copy_(after.kv.mT)
    else:
        output = saccade.linear_attention_step(_linear_state(state), *rows, **named)
    return _with_skip(output.squeeze(2), hidden_states, D)


def split_conv_scan(
    theirs: Theirs,
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    headdim: int | None = None,
    ngroups: int = 1,
    **options: Any,
) -> Tensor | None:
    """None, for which a layer goes on to its convolution and the scan; see `chunk_scan`.

    Where saccade does not serve the layer's sizes, what a package does of all at once.

    Args:
        theirs: what was there before.
        conv1d_weight: [heads · headdim + 2 · ngroups · state_size, kernel].
        others: as transformers gives them to mamba-ssm's mamba_split_conv1d_scan_combined.
    """
    head_dim = D.shape[1] if headdim is None else headdim  # mamba-ssm's own rule
    state_size = (conv1d_weight.shape[0] - A.shape[0] * head_dim) // (2 * ngroups)
    if is_served(zxbcdt, state_size, head_dim):
        return None
    return theirs(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D=D, chunk_size=chunk_size,
        headdim=headdim, ngroups=ngroups, **options,
    )  # fmt: skip


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": chunk_scan,
    "mamba2_selective_state_update": step,
    "mamba2_split_conv1d_scan_combined": split_conv_scan,
}


def is_served(rows: Tensor, state_size: int, head_dim: int | None = None) -> bool:
    """Whether saccade has kernels for heads of these sizes, in this dtype and on this device."""
    widest = max(state_size, rows.shape[-1] if head_dim is None else head_dim)
    return widest <= WIDEST and (rows.dtype != torch.float64 or rows.device.type == "cpu")


def _rates(
    dt: Tensor,
    A: Tensor,
    bias: Tensor | None,
    softplus: bool,
    limit: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """How much of a token is taken up, and the logarithm of what it leaves of the state.

    Both float32, or float64 where dt is.
    """
    wide = torch.float64 if dt.dtype == torch.float64 else torch.float32
    dt = dt.to(wide)
    if bias is not None:
        dt = dt + bias.to(wide)
    if softplus:
        dt = torch.nn.functional.softplus(dt)
    if limit is not None:
        dt = dt.clamp(*limit)
    decay = (dt * A.to(wide)).clamp(min=FASTEST_DECAY)
    # Linear attention takes no NaN as decay: the token's value carries it to the same rows.
    broken = decay.isnan()
    return dt.masked_fill(broken, torch.nan), decay.masked_fill(broken, 0)


def _of_heads(tensor: Tensor | None, dims: int) -> Any:
    """A tensor's first dimensions, if the others only repeat it; else NotImplemented."""
    if tensor is None:
        return None
    repeats = all(
        size == 1 or stride == 0
        for size, stride in zip(tensor.shape[dims:], tensor.stride()[dims:], strict=True)
    )
    return tensor[(..., *[0] * (tensor.dim() - dims))] if repeats else NotImplemented


def _linear_state(state: Tensor) -> saccade.LinearState:
    """A layer's state as linear attention has it: a view, so that a step changes it in place.

    Without a normaliser sums of keys are nobody's; they are zeros here.
    """
    kv = state.mT
    return saccade.LinearState(kv, kv.new_zeros(kv.shape[:3]))


def _packed(rows: tuple[Tensor, ...], decay: Tensor, seq_idx: Tensor) -> Tensor:
    """Outputs of sequences that lie side by side in rows: one begins where the number changes."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(starts, (0, 1), value=seq_idx.numel()).to(torch.int32)
    query, key, value = (each.flatten(0, 1) for each in rows)
    output = saccade.linear_attention_varlen(
        query, key, value, offsets, feature_map="identity", normalize="none",
        decay=decay.flatten(0, 1),
    )  # fmt: skip
    return output.unflatten(0, seq_idx.shape)


def _with_skip(output: Tensor, hidden_states: Tensor, D: Tensor | None) -> Tensor:
    """The output with D · x added, as contiguous rows of x's dtype, of which layers make views."""
    if D is not None:
        output = torch.addcmul(output, hidden_states, D.unsqueeze(-1))
    return output.to(hidden_states.dtype).contiguous()

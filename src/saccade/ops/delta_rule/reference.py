"""The gated delta rule, written out twice: token by token, and in chunks.

    S̃_t = diag(e^{decay_t}) · S_{t-1}                      the state fades
    error_t = value_t − S̃_tᵀ key_t                         what it says of the key, and should not
    S_t = S̃_t + beta_t · key_t · error_tᵀ
    output_t = scale · S_tᵀ query_t

The first form is the specification, and what `implementation="reference"` computes; the second is
how kernels compute it. Both give the same numbers in exact arithmetic. Gradients are PyTorch's own.

Chunked: with `update_t = beta_t · error_t` and G the sums of decay from before a chunk's first
token, the updates of a chunk solve a unit lower triangular system,

    update_i + beta_i Σ_{j<i} (key_i · e^{G_i − G_j} key_j) update_j
        = beta_i (value_i − Sᵀ (e^{G_i} key_i))            S: the state before the chunk
    output_i = scale · (Sᵀ (e^{G_i} query_i) + Σ_{j≤i} (query_i · e^{G_i − G_j} key_j) update_j)
    S' = e^{G_last} S + Σ_j (e^{G_last − G_j} key_j) update_jᵀ

Source: Yang et al. 2024 (Parallelizing Linear Transformers with the Delta Rule), section 3; with
decay Yang et al. 2025 (Gated Delta Networks), section 3; by channel Kimi Team 2025 (Kimi Linear).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.runtime.delta_spec import NORM_EPS, DeltaInputs, DeltaResults, DeltaVariant
from saccade.runtime.spec import accumulate_dtype


class ReferenceRows(NamedTuple):
    """A dense call, normalised and scaled, with as many heads everywhere as the state has."""

    query: Float[Tensor, "batch heads length head_dim"]
    key: Float[Tensor, "batch heads length head_dim"]
    value: Float[Tensor, "batch heads length value_dim"]
    beta: Float[Tensor, "batch heads length"]
    decay: Float[Tensor, "batch heads length channels"]  # channels: head_dim, or 1 for all of them
    state: Float[Tensor, "batch heads head_dim value_dim"]  # before the first token


# ---- the two forms -------------------------------------------------------------------------------


def recurrent(rows: ReferenceRows) -> tuple[Tensor, Tensor]:
    """Output and last state, token by token."""
    state, outputs = rows.state, []
    for t in range(rows.key.shape[2]):
        query, key, value = rows.query[:, :, t], rows.key[:, :, t], rows.value[:, :, t]
        state = state * rows.decay[:, :, t].exp().unsqueeze(-1)
        error = value - (key.unsqueeze(-2) @ state).squeeze(-2)
        update = rows.beta[:, :, t, None] * error
        state = state + key.unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append((query.unsqueeze(-2) @ state).squeeze(-2))
    if not outputs:
        return rows.value[:, :, :0] + 0 * rows.query[:, :, :0, :1].sum(-1, keepdim=True), state
    return torch.stack(outputs, 2), state


class Rounding(NamedTuple):
    """What happens to numbers on the way, for a test that asks how rounding errors travel.

    `products`: to what products read and give; `exponents`: to sums of decay.
    """

    products: Callable[[Tensor], Tensor]
    exponents: Callable[[Tensor], Tensor]


EXACT = Rounding(lambda rows: rows, lambda rows: rows)


def chunked(rows: ReferenceRows, chunk: int, rounding: Rounding = EXACT) -> tuple[Tensor, Tensor]:
    """Output and last state, by a triangular system for each chunk of tokens."""
    rounded, state, outputs = rounding.products, rows.state, [rows.value[:, :, :0]]
    for start in range(0, rows.key.shape[2], chunk):
        query, key, value, beta, decay = (each[:, :, start : start + chunk] for each in rows[:5])
        query, key, beta = rounded(query), rounded(key), beta.unsqueeze(-1)
        total = decay.cumsum(2)
        of_rows, of_keys = rounding.exponents(total), rounding.exponents(total)
        gap = of_rows.unsqueeze(3) - of_keys.unsqueeze(2)  # from the second index to the first
        one = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
        later = torch.ones_like(one, dtype=torch.bool).triu(1)
        factor = gap.masked_fill(later.unsqueeze(-1), -torch.inf).exp()
        pairs = rounded((key.unsqueeze(3) * factor * key.unsqueeze(2)).sum(-1)).tril(-1)
        scores = rounded((query.unsqueeze(3) * factor * key.unsqueeze(2)).sum(-1))
        inverse = torch.linalg.solve_triangular(one + beta * pairs, one, upper=False)
        until, after = of_rows.exp(), (total[:, :, -1:] - of_keys).exp()
        read = rounded(state)
        error = rounded(value - rounded(until * key) @ read)
        update = rounded(rounded(inverse) @ rounded(beta * error))
        outputs.append(rounded(until * query) @ read + scores @ update)
        state = total[:, :, -1:].mT.exp() * state + rounded(after * key).mT @ update
    return rounded(torch.cat(outputs, 2)), rounded(state)


# ---- a call --------------------------------------------------------------------------------------


def attention(
    inputs: DeltaInputs, variant: DeltaVariant, sums: torch.dtype | None = None
) -> DeltaResults:
    """Output and last state of a dense or packed call.

    `sums` is the dtype of all arithmetic: float32, or float64 for float64 inputs, where None.
    """
    sums = sums or accumulate_dtype(inputs.query.dtype)
    dtype = inputs.query.dtype
    if inputs.cu_seqlens is None:
        output, state = recurrent(lay_out(inputs, variant, sums))
        return DeltaResults(output.to(dtype), state)
    outputs, states = [inputs.value[:0].to(sums)], []
    for one in sequences(inputs):
        output, state = recurrent(lay_out(one, variant, sums))
        outputs.append(output.squeeze(0).transpose(0, 1))
        states.append(state)
    output = torch.cat(outputs).to(dtype)
    padding = inputs.query.shape[0] - output.shape[0]
    output = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, padding))
    sizes = (0, inputs.value_heads, inputs.query.shape[-1], inputs.value.shape[-1])
    return DeltaResults(output, torch.cat([inputs.query.new_zeros(sizes, dtype=sums), *states]))


def sequences(inputs: DeltaInputs) -> list[DeltaInputs]:
    """The packed sequences as dense calls of one batch entry."""
    assert inputs.cu_seqlens is not None
    ends, found = inputs.cu_seqlens.tolist(), []
    for b in range(len(ends) - 1):
        rows: list[Any] = [
            None if each is None else each[ends[b] : ends[b + 1]].transpose(0, 1).unsqueeze(0)
            for each in inputs[:5]
        ]
        state = None if inputs.initial_state is None else inputs.initial_state[b : b + 1]
        found.append(DeltaInputs(*rows)._replace(initial_state=state))
    return found


def lay_out(inputs: DeltaInputs, variant: DeltaVariant, sums: torch.dtype) -> ReferenceRows:
    """The call in the dtype of its sums, with heads of keys repeated."""
    query, key, value, beta = (rows.to(sums) for rows in inputs[:4])
    if variant.normalize_qk:
        query, key = normalized(query), normalized(key)
    batch, heads, length, value_dim = value.shape
    decay, state = inputs.decay, inputs.initial_state
    decay = value.new_zeros(batch, heads, length) if decay is None else decay.to(sums)
    if state is None:
        state = value.new_zeros(batch, heads, key.shape[-1], value_dim)
    group = heads // max(key.shape[1], 1)
    return ReferenceRows(
        query.repeat_interleave(group, 1) * variant.scale,
        key.repeat_interleave(group, 1),
        value,
        beta,
        decay if decay.dim() == 4 else decay.unsqueeze(-1),
        state.to(sums),
    )


def normalized(rows: Tensor) -> Tensor:
    """Each row divided by its length."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + NORM_EPS)

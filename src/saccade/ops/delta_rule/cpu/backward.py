"""Backward pass of the gated delta rule on the CPU: states made again, blocks from the last on.

With U the updates of a chunk, R = value − new_key · S the errors before the system, A the system,
P the scores, S the state before the chunk, S' the one after it, and ∂ for gradients:

    ∂U = Pᵀ ∂O + old_key ∂S'           ∂(beta R) = (1 + A)⁻ᵀ ∂U       ∂A = −∂(beta R) Uᵀ
    ∂P = ∂O Uᵀ                         ∂old_key = U ∂S'ᵀ              ∂new_query = ∂O Sᵀ
    ∂value = ∂R = beta ∂(beta R)       ∂new_key = −∂R Sᵀ
    ∂S = whole · ∂S' + new_queryᵀ ∂O − new_keyᵀ ∂R

Only ∂S is a recurrence. A long sequence is cut into segments, at whose starts the state is kept;
inside one segment at a time, the states before all chunks are made again. So memory for states
grows with the square root of the length, and no more than one forward sweep is repeated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.ops.delta_rule.cpu.decay import NoDecay
from saccade.ops.delta_rule.cpu.forward import Block, DenseRows, Span, solve, states_before

SEGMENT = 64  # spans of a segment at least: so many states are no more than the call's tensors


class Leaving(NamedTuple):
    """Gradients to be written, on views [batch, heads, length, …]."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor | None


def differentiate(
    dense: DenseRows,
    spans: list[Span],
    initial: Tensor,
    grad_output: Tensor,
    grad_state: Tensor,
    leave: Leaving,
) -> None:
    """Write the gradients of rows; `grad_state` becomes that of the initial state, in place."""
    size = max(SEGMENT, math.isqrt(len(spans)))
    segments = [spans[at : at + size] for at in range(0, len(spans), size)]
    starts, state = [], initial.clone()
    for segment in segments[:-1]:
        starts.append(state.clone())
        for _ in states_before(dense, segment, state):
            pass
    starts.append(state)
    for segment, start in zip(reversed(segments), reversed(starts), strict=False):
        states = list(states_before(dense, segment, start))
        for at, before in zip(reversed(segment), reversed(states), strict=True):
            _differentiate_block(dense, Block(dense, at), before, grad_output, grad_state, leave)


def _differentiate_block(
    dense: DenseRows,
    block: Block,
    states: list[Tensor],
    grad_output: Tensor,
    grad_state: Tensor,
    leave: Leaving,
) -> None:
    at, decay, state = block.at, block.decay, torch.stack(states)
    grad = dense.chunks(grad_output, at).contiguous()
    beta, decays = block.beta.unsqueeze(-1), not isinstance(block.decay, NoDecay)
    new_key, new_query = block.new.unbind(2)
    error = block.value - new_key @ state
    update = solve(block.system, beta * error)
    of_update, from_query = block.pairs[:, :, 1].mT @ grad, new_query.mT @ grad
    later, grad_new = torch.empty_like(state), torch.empty_like(update)
    for n in reversed(range(at.chunks)):
        later[n] = grad_state
        arriving = torch.baddbmm(of_update[n], block.old_key[n], grad_state)
        grad_new[n] = solve(block.system[n], arriving, transposed=True)
        grad_error = grad_new[n] * beta[n]
        grad_state.mul_(block.whole[n]).add_(from_query[n])
        grad_state.baddbmm_(new_key[n].mT, grad_error, alpha=-1)
    grad_value = grad_new * beta
    of_rows = torch.stack([-grad_value, grad], 2)  # what reads the state before the chunk
    of_pairs = (of_rows.flatten(2, 3) @ update.mT).view(block.pairs.shape).tril_()
    of_pairs[:, :, 0].tril_(-1)
    of_new = (of_rows.flatten(2, 3) @ state.mT).view(block.rows.shape)
    of_old_key = update @ later.mT
    of_system = grad_new @ update.mT
    of_system.tril_(-1).mul_(block.pairs[:, :, 0])
    grad_beta = (grad_new * error).sum(-1) - of_system.sum(-1)

    grad_rows, grad_key = decay.through_pairs(of_pairs, block.pairs, block.rows, block.key)
    grad_rows.addcmul_(of_new, decay.until.unsqueeze(2))
    grad_key.add_(grad_rows[:, :, 0]).addcmul_(of_old_key, decay.after)
    dense.write(leave.value, grad_value, at)
    dense.write(leave.beta, grad_beta, at)
    if leave.decay is not None and decays:
        until = of_new.mul_(block.new).sum(2)
        whole = (later * state).sum(-1, keepdim=True).mul_(block.whole)
        after = of_old_key.mul_(block.old_key)
        dense.write(leave.decay, decay.gradient(until, after, whole), at)
    grad_query = grad_rows[:, :, 1] * dense.variant.scale
    for into, found, norm, rows in (
        (leave.query, grad_query, block.norms[1], dense.query),
        (leave.key, grad_key, block.norms[0], dense.key),
    ):
        dense.write(into, _through_norm(dense, found, norm, rows, at), at)


def _through_norm(
    dense: DenseRows, grad: Tensor, norm: Tensor | None, rows: Tensor, at: Span
) -> Tensor:
    """The gradient of queries or keys, by key head, through division by lengths."""
    if dense.group > 1:
        grad = grad.unflatten(1, (-1, dense.group)).sum(2)
    if norm is None:
        return grad
    divided = dense.chunks(rows, at) * norm
    along = (divided * grad).sum(-1, keepdim=True)
    return grad.addcmul(divided, along, value=-1) * norm

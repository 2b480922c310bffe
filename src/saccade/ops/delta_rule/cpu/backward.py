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
    at, state = block.at, torch.stack(states, 1)
    grad = dense.chunks(grad_output, at)
    beta = block.beta.unsqueeze(-1)
    error = block.value - block.new_key @ state
    update = solve(block.system, beta * error)
    of_update = block.scores.mT @ grad
    from_query = block.new_query.mT @ grad
    laters, grad_new, of_whole = torch.empty_like(state), torch.empty_like(error), []
    for n in reversed(range(at.chunks)):
        laters[:, n] = grad_state
        arriving = torch.baddbmm(of_update[:, n], block.old_key[:, n], grad_state)
        grad_new[:, n] = solve(block.system[:, n], arriving, transposed=True)
        grad_error = grad_new[:, n] * block.beta[:, n].unsqueeze(-1)
        grad_state.mul_(block.whole[:, n]).add_(from_query[:, n])
        grad_state.baddbmm_(block.new_key[:, n].mT, grad_error, alpha=-1)
    grad_value = grad_new * beta
    of_system = (grad_new @ update.mT).neg_().tril_(-1)
    grad_beta = (grad_new * error).sum(-1) + (of_system * block.pairs).sum(-1)
    of_pairs, of_scores = of_system.mul_(beta), (grad @ update.mT).tril_()
    of_new_key, of_old_key = (grad_value @ state.mT).neg_(), update @ laters.mT
    of_new_query = grad @ state.mT

    decay = block.decay
    rows, keys = decay.through_pairs(of_pairs, block.pairs, block.key, block.key)
    grad_key = rows.add_(keys)
    grad_query, keys = decay.through_pairs(of_scores, block.scores, block.query, block.key)
    grad_key.add_(keys).addcmul_(of_new_key, decay.until).addcmul_(of_old_key, decay.after)
    grad_query.addcmul_(of_new_query, decay.until)

    dense.write(leave.value, grad_value, at)
    dense.write(leave.beta, grad_beta, at)
    if leave.decay is not None and not isinstance(decay, NoDecay):
        until = of_new_key.mul_(block.new_key).addcmul_(of_new_query, block.new_query)
        after = of_old_key.mul_(block.old_key)
        of_whole = (laters * state).sum(-1, keepdim=True)
        if decay.until.shape[-1] == 1:
            until, after = until.sum(-1, keepdim=True), after.sum(-1, keepdim=True)
            of_whole = of_whole.sum(-2, keepdim=True)
        dense.write(leave.decay, decay.gradient(until, after, of_whole * block.whole), at)
    _write_rows(dense, leave.query, grad_query.mul_(block.scale), block.query_norm, dense.query, at)
    _write_rows(dense, leave.key, grad_key, block.key_norm, dense.key, at)


def _write_rows(
    dense: DenseRows, into: Tensor, grad: Tensor, norm: Tensor | None, rows: Tensor, at: Span
) -> None:
    """Write the gradient of queries or keys, through their division by their lengths."""
    if dense.group > 1:
        grad = grad.unflatten(0, (-1, dense.group)).sum(1)
    if norm is not None:
        divided = dense.chunks(rows, at) * norm
        along = (divided * grad).sum(-1, keepdim=True)
        grad = grad.addcmul(divided, along, value=-1) * norm
    whole = grad.unflatten(0, (dense.batch, into.shape[1])).flatten(2, 3)
    into[:, :, at.start : at.stop].copy_(whole[:, :, : at.stop - at.start])

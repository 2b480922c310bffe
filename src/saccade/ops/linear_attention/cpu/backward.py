"""Backward pass of linear attention on the CPU: two sweeps, no state stored for any token.

With ĝ = grad_output / divisor and δ = ĝ · output · ∂divisor/∂total, for one row i and one key j
(fading left out):

    grad_query_i = state_i ĝ_i − key_sum_i δ_i                         a sweep forwards
    grad_key_j   = later_j value_j − later_sum_j                       a sweep backwards
    grad_value_j = later_jᵀ key_j
    later_j      = Σ query_i ĝ_iᵀ,  later_sum_j = Σ δ_i query_i        over rows i that see key j

These equal the gradients of plain products with values [value, 1] and gradients [ĝ, −δ]. The
gradient of decay_t is what pairs of a key before t and a row that sees key t give to the result.
The functions under "decay" add them up; the first sweep keeps the states before chunks for this,
head_dim · value_dim numbers each, where there is a decay.

Of an output that was rounded to sixteen bits δ would be too far off, for grad_query is a small
difference of large sums where values have much in common. So the first sweep sums up δ again, from
output · divisor = Σ score · value, and keeps it for the second.

Source: Katharopoulos et al. 2020, equations 13 to 15; decay as in Yang et al. 2024 (Gated Linear
Attention), section C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.ops.linear_attention.cpu.forward import (
    ChunkState,
    DecayFactors,
    DenseRows,
    Keys,
    RowStep,
    divide_by,
    divided,
    lower_,
    nonfinite_rows,
    shared,
    through_map,
)


class Arriving(NamedTuple):
    """What the forward pass gave, and the gradients that come back."""

    output: Tensor | None  # None where it was rounded
    normaliser: Tensor | None
    grad_output: Tensor
    grad_kv: Tensor | None
    grad_key_sum: Tensor | None


class Leaving(NamedTuple):
    """Gradients to be written; `decay` [batch, state_heads, kv_len] is float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None


class _RowGradients(NamedTuple):
    """Of some query rows: ĝ and −δ (None without a normaliser), by head of the state."""

    weighted: Tensor  # [batch · state_heads, group · rows, value_dim]
    total: Tensor | None  # [batch · state_heads, group · rows, 1]


def differentiate(
    dense: DenseRows, steps: list[RowStep], come: Arriving, leave: Leaving
) -> ChunkState:
    """Write all gradients of rows; give those of the initial state."""
    totals, states = _forwards(dense, steps, come, leave)
    later = ChunkState.start(dense, (come.grad_kv, come.grad_key_sum))
    _backwards(dense, steps, come, leave, later, (totals, states))
    return later


def _forwards(
    dense: DenseRows, steps: list[RowStep], come: Arriving, leave: Leaving
) -> tuple[list[Tensor | None], list[ChunkState | None]]:
    """Gradients of queries.

    Returns:
        Of each step, −δ of its rows and, for the gradient of decay, the state before its keys.
    """
    state = ChunkState.start(dense, dense.initial or (None, None))
    totals: list[Tensor | None] = []
    states: list[ChunkState | None] = []
    for step in steps:
        keys = None if step.keys is None else dense.beside(step.keys)
        totals.append(None)
        states.append(None)
        if step.queries is not None:
            query = dense.queries(step.queries)
            rows, slope = _arriving(dense, come, step.queries)
            gradient, old, totals[-1] = _grad_query(dense, state, query, rows, slope, keys)
            if leave.decay is not None and step.keys is not None:
                dots = (query * old).double().sum(-1)
                _add_decay(leave, step.keys, from_state(dots, dense.group))
            _write_query(dense, leave.query, step.queries, query, gradient)
        if keys is not None:
            if leave.decay is not None:
                states[-1] = ChunkState(state.kv.clone(), state.key_sum.clone())
            state.add(keys)
    return totals, states


def _add_decay(leave: Leaving, keys: slice, contributions: Tensor) -> None:
    """Add contributions [batch · state_heads, keys] to the gradient of decay."""
    assert leave.decay is not None
    into = leave.decay[:, :, keys]
    into += contributions.view(into.shape)


def _arriving(dense: DenseRows, come: Arriving, rows: slice) -> tuple[_RowGradients, Tensor | None]:
    """ĝ and −δ of query rows, 0 for rows that have nothing to see, whatever arrives.

    Where −δ is to be summed up yet, what its sum is to be multiplied by comes instead of it.
    """
    grad, blind = come.grad_output[:, :, rows].to(dense.wide), dense.blind(rows)
    if blind is not None:
        grad = grad.masked_fill(blind, 0)
    grad = dense.by_query(grad)
    if come.normaliser is None:
        return _RowGradients(grad, None), None
    total = come.normaliser[:, :, rows].reshape(grad.shape[:2]).unsqueeze(-1)
    divisor, slope = divide_by(dense.variant, total)
    grad = divided(grad, divisor)
    if come.output is None:
        return _RowGradients(grad, None), divided(slope, divisor).neg_()
    dots = (grad * dense.by_query(come.output[:, :, rows])).sum(-1, keepdim=True)
    return _RowGradients(grad, _times(dots, slope.neg_())), None


def _times(dots: Tensor, slope: Tensor) -> Tensor:
    """The product, in place, and 0 where the slope is, whatever the other factor is."""
    return dots.mul_(slope).masked_fill_(slope == 0, 0)


def _grad_query(
    dense: DenseRows,
    state: ChunkState,
    query: Tensor,
    rows: _RowGradients,
    slope: Tensor | None,
    keys: Keys | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradient of scaled query features, the state's contribution in it, and −δ."""
    gradient = rows.weighted @ state.kv.mT
    products = None if keys is None else rows.weighted @ keys.value.mT
    until = None if keys is None or keys.decay_factors is None else keys.decay_factors.until_row()
    if until is not None:
        gradient.mul_(until)
    if slope is not None:
        dots = (query * gradient).sum(-1, keepdim=True)
        if keys is not None and products is not None:
            pairs = (query @ keys.key.mT).mul_(products)
            dots += lower_(pairs, keys.decay_factors, dense.group).sum(-1, keepdim=True)
        rows = rows._replace(total=_times(dots, slope))
    if rows.total is not None:
        sums = state.key_sum.unsqueeze(1)
        gradient.addcmul_(rows.total, sums if until is None else sums * until)
    if keys is None or products is None:
        return gradient, gradient, rows.total
    key, value, decay_factors = keys
    found = gradient.baddbmm(_grad_scores(dense, products, rows.total, decay_factors), key)
    if bool(found.sum().isfinite()):
        return found, gradient, rows.total
    nonfinite = nonfinite_rows(key, value)
    key, value = (tensor.masked_fill(nonfinite.unsqueeze(-1), 0) for tensor in (key, value))
    products = rows.weighted @ value.mT
    found = gradient + _grad_scores(dense, products, rows.total, decay_factors) @ key
    sees = (nonfinite.cumsum(-1) > 0).repeat(1, dense.group)
    return found.masked_fill(sees.unsqueeze(-1), torch.nan), gradient, rows.total


def _grad_scores(
    dense: DenseRows, products: Tensor, total: Tensor | None, decay_factors: DecayFactors | None
) -> Tensor:
    """ĝ · value − δ of all pairs within a chunk that are seen, from the products, in place."""
    if total is not None:
        products.add_(total)
    return lower_(products, decay_factors, dense.group)


def _write_query(
    dense: DenseRows, into: Tensor, rows: slice, query: Tensor, gradient: Tensor
) -> None:
    """From scaled features back to what the map was given."""
    scale, name = dense.variant.scale, dense.variant.feature_map
    mapped = query if scale == 1.0 or scale == 0.0 else query / scale
    gradient = through_map(name, gradient * scale if scale != 1.0 else gradient, mapped)
    into[:, :, rows].copy_(shared(dense.from_query(gradient), into.shape[1]))


def _backwards(
    dense: DenseRows,
    steps: list[RowStep],
    come: Arriving,
    leave: Leaving,
    later: ChunkState,
    kept: tuple[list[Tensor | None], list[ChunkState | None]],
) -> None:
    """Gradients of keys and values; `later` becomes the gradient of the initial state."""
    for step, total, state in zip(*map(reversed, (steps, *kept)), strict=True):
        query = rows = None
        if step.queries is not None:
            query = dense.queries(step.queries)
            rows = _arriving(dense, come, step.queries)[0]._replace(total=total)
        decay_factors = None
        if step.keys is not None:
            keys = key, value, decay_factors = dense.beside(step.keys)
            grad_key = value @ later.kv.mT
            grad_key += later.key_sum.unsqueeze(1)
            grad_value = key @ later.kv
            if decay_factors is not None:
                grad_key.mul_(decay_factors.from_key())
                grad_value.mul_(decay_factors.from_key())
            if state is not None:
                _add_decay(leave, step.keys, beyond(state, keys, later, grad_key))
            if query is not None and rows is not None:
                pairs = _add_beside(dense, query, rows, keys, (grad_key, grad_value))
                if state is not None:
                    _add_decay(leave, step.keys, within(pairs, dense.group))
            _write_keys(dense, leave, step.keys, key, grad_key, grad_value)
        if decay_factors is not None:
            later.decay_factors(decay_factors)
        if query is not None and rows is not None:
            old = query if decay_factors is None else query * decay_factors.until_row()
            later.kv.baddbmm_(old.mT, rows.weighted)
            if rows.total is not None:
                later.key_sum.add_((old.mT @ rows.total).squeeze(-1))


def _add_beside(
    dense: DenseRows,
    query: Tensor,
    rows: _RowGradients,
    keys: Keys,
    gradients: tuple[Tensor, Tensor],
) -> Tensor:
    """Add, in place, what the rows of the same chunk give to keys and values.

    Returns:
        The contribution of each pair in the result, for the gradient of decay; any number where
        hidden.
    """
    key, value, decay_factors = keys

    def contributions(query: Tensor, rows: _RowGradients) -> tuple[Tensor, Tensor, Tensor]:
        products = query @ key.mT
        weights = _grad_scores(dense, rows.weighted @ value.mT, rows.total, decay_factors)
        pairs = products if decay_factors is None else products * weights
        scores = lower_(products, decay_factors, dense.group)
        return weights.mT @ query, scores.mT @ rows.weighted, pairs

    of_key, of_value, pairs = contributions(query, rows)
    if not bool((of_key.sum() + of_value.sum()).isfinite()):
        parts = [query, rows.weighted] + ([] if rows.total is None else [rows.total])
        nonfinite = nonfinite_rows(*parts)
        finite = [part.masked_fill(nonfinite.unsqueeze(-1), 0) for part in parts]
        total = None if rows.total is None else finite[2]
        of_key, of_value, _ = contributions(finite[0], _RowGradients(finite[1], total))
        beside = nonfinite.unflatten(1, (dense.group, -1)).any(1)
        seen = (beside.flip(-1).cumsum(-1).flip(-1) > 0).unsqueeze(-1)  # by such a row
        of_key, of_value = (
            contribution.masked_fill(seen, torch.nan) for contribution in (of_key, of_value)
        )
    for gradient, contribution in zip(gradients, (of_key, of_value), strict=True):
        gradient += contribution
    return pairs


def _write_keys(
    dense: DenseRows, leave: Leaving, rows: slice, key: Tensor, grad_key: Tensor, grad_value: Tensor
) -> None:
    gradients = (through_map(dense.variant.feature_map, grad_key, key), grad_value)
    hidden = dense.hidden(rows)
    for into, gradient in zip((leave.key, leave.value), gradients, strict=True):
        gradient = gradient.view(dense.batch, dense.state_heads, *gradient.shape[1:])
        if hidden is not None:
            gradient = gradient.masked_fill(hidden.unsqueeze(-1), 0)
        into[:, :, rows].copy_(shared(gradient, into.shape[1]))


# ---- decay ---------------------------------------------------------------------------------------
# What flows over each key from the keys before it to the rows that see it.
#
# The gradient of decay_t sums what all pairs of a key before t and a row that sees key t contribute
# to the result. All that rows take from there on, less what keys from there on give, would
# be the same number; but of a strong decay little flows over a key, and a difference of large sums
# would leave of it no more than their rounding errors. So only what crosses is added up: pairs
# within a chunk, what its rows take from the state, what its keys give to later rows, and the
# product of the state before the chunk and of that state's gradient.


def beyond(state: ChunkState, keys: Keys, later: ChunkState, grad_key: Tensor) -> Tensor:
    """What later rows take, from keys before each one and from the state: [count, keys].

    Args:
        state: before the chunk.
        later: the gradient of the state behind it.
        grad_key: what `later` gives to keys.
    """
    assert keys.decay_factors is not None
    whole = (later.kv * state.kv).double().sum((1, 2))
    whole += (later.key_sum * state.key_sum).double().sum(1)
    dots = (keys.key * grad_key).double().sum(-1)
    return _sum_before(dots) + whole.unsqueeze(-1) * keys.decay_factors.whole().squeeze(-1)


def within(pairs: Tensor, group: int) -> Tensor:
    """What rows take from keys of their own chunk: [count, keys].

    pairs: each one's contribution in the result, [count, group · rows, keys]; any number where
    hidden.
    """
    pairs = pairs.unflatten(1, (group, -1)).tril()
    return _sum_before(pairs).tril().sum((1, 2), dtype=torch.float64)


def from_state(dots: Tensor, group: int) -> Tensor:
    """What rows of a chunk take from the state before it: [count, keys].

    dots: each row's contribution in the result, [count, group · rows].
    """
    of_rows = dots.unflatten(1, (group, -1)).sum(1)
    return of_rows.flip(-1).cumsum(-1).flip(-1)


def _sum_before(numbers: Tensor) -> Tensor:
    """For each key the sum over those before it."""
    return torch.nn.functional.pad(numbers, (1, 0))[..., :-1].cumsum(-1)

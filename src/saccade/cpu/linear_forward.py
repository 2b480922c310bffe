"""Forward pass of linear attention on the CPU: chunk by chunk, with one running state."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.cpu.linear_chunk import Dense, Fade, State, lower_, spoilt_rows
from saccade.cpu.linear_steps import Step
from saccade.linear.problem import LinearVariant


def attend(
    dense: Dense, steps: list[Step], state: State, output: Tensor, normaliser: Tensor | None
) -> None:
    """Write output [batch, heads, rows, value_dim] and, if wanted, normaliser; change the state."""
    for step in steps:
        key = value = fade = None
        if step.keys is not None:
            key, value = dense.keys(step.keys), dense.values(step.keys)
            fade = dense.fade(step.keys)
        if step.queries is not None:
            query = dense.queries(step.queries)
            weighted, total = _read(dense, state, query, key, value, fade)
            if total is not None:
                if normaliser is not None:
                    into = normaliser[:, :, step.queries]
                    into.copy_(total.view(into.shape))
                divisor, _ = divide_by(dense.variant, total)
                weighted = divided(weighted, divisor.unsqueeze(-1))
            output[:, :, step.queries].copy_(dense.from_query(weighted))
        if key is not None and value is not None:
            state.add(key, value, fade)


def _read(
    dense: Dense,
    state: State,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    fade: Fade | None,
) -> tuple[Tensor, Tensor | None]:
    """Weighted sums of values and of ones: from the state, and from the keys beside the rows."""
    normalised = dense.variant.normalize != "none"
    old = query if fade is None else query * fade.until_row()
    if key is None or value is None:
        weighted = old @ state.kv
        total = (old @ state.key_sum.unsqueeze(-1)).squeeze(-1) if normalised else None
        return weighted, total
    scores = query @ key.mT
    if fade is not None:
        scores.mul_(fade.pairs())
    lower_(scores, dense.group)
    weighted = (scores @ value).baddbmm_(old, state.kv)
    total = None
    if normalised:
        total = scores.sum(-1)
        total.add_((old @ state.key_sum.unsqueeze(-1)).squeeze(-1))
    if not bool(weighted.sum().isfinite()):
        return _with_care(dense, state, query, key, value, fade)
    return weighted, total


def _with_care(
    dense: Dense,
    state: State,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    fade: Fade | None,
) -> tuple[Tensor, Tensor | None]:
    """The same where some number is not finite: it must not reach rows that do not see it.

    A product would carry it there: a hidden score is 0, and 0 · NaN is NaN.
    """
    spoilt = spoilt_rows(key, value)
    key, value = (rows.masked_fill(spoilt.unsqueeze(-1), 0) for rows in (key, value))
    scores = query @ key.mT
    if fade is not None:
        scores.mul_(fade.pairs())
    lower_(scores, dense.group)
    old = query if fade is None else query * fade.until_row()
    sees = (spoilt.cumsum(-1) > 0).repeat(1, dense.group)
    weighted = (scores @ value + old @ state.kv).masked_fill(sees.unsqueeze(-1), torch.nan)
    if dense.variant.normalize == "none":
        return weighted, None
    total = scores.sum(-1) + (old @ state.key_sum.unsqueeze(-1)).squeeze(-1)
    return weighted, total.masked_fill(sees, torch.nan)


def divide_by(variant: LinearVariant, total: Tensor) -> tuple[Tensor, Tensor]:
    """What weighted sums are divided by, and its derivative by the sum of scores."""
    if variant.normalize == "sum":
        return total + variant.eps, torch.ones_like(total)
    size = total.abs() if variant.normalize == "abs" else total
    slope = (size >= variant.eps).to(total.dtype)
    if variant.normalize == "abs":
        slope *= total.sign()
    return size.clamp(min=variant.eps), slope


def divided(rows: Tensor, divisor: Tensor) -> Tensor:
    """rows / divisor, and 0 where the divisor is 0."""
    nothing = divisor == 0
    if bool(nothing.any()):
        return (rows / divisor.masked_fill(nothing, 1)).masked_fill_(nothing, 0)
    return rows / divisor

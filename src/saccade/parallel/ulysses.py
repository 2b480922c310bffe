"""Ulysses: each rank gets all rows of some heads, attends, and gives the outputs back.

Kernels see the whole sequence in its order, so a mask runs as fast as on one GPU. Where there are
fewer kv heads than ranks, several ranks get one of them, and its gradients are added in 32 bits.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.masks import Mask
from saccade.modifiers.graph_constants import constants, outside_graph
from saccade.parallel.costs import ulysses_unsupported
from saccade.parallel.exchange import Back, Permuted, Sending, Taken
from saccade.parallel.local import LocalCall, Offsets, heads_first, heads_of, joined
from saccade.parallel.planner import Plan
from saccade.runtime.dropout import Numbers


def attend(call: LocalCall) -> tuple[Tensor, Tensor | None]:
    """Output of this rank's rows, and their lse where it is asked for."""
    plan, sizes = call.plan, call.plan.sizes
    permuted: Any = Permuted.apply
    counts = [len(plan.rows_of(rank)) for rank in range(plan.ranks)]
    heads, rows = sizes.query_heads // plan.ranks, len(plan.rows)
    places, order = (constants(plan.on(call.query.device, name)) for name in ("places", "order"))
    assert not ulysses_unsupported(plan.ranks, sizes.query_heads, sizes.kv_heads)
    payload = torch.cat([_by_rank(call.query, plan.ranks), _keys_by_rank(call)], -1).flatten(0, 1)
    payload = call.compared(payload)
    arrived = _exchanged(call, payload, [rows] * plan.ranks, counts, "rows of heads")
    arrived = permuted(arrived, places, order)
    queries = sizes.batch * heads * sizes.head_dim
    query = arrived[:, :queries].reshape(-1, sizes.batch, heads, sizes.head_dim)
    width = sizes.head_dim + sizes.value_dim
    keys = arrived[:, queries:]
    keys = keys.reshape(len(keys), sizes.batch, keys.shape[1] // (sizes.batch * width or 1), width)
    output, lse = _attend_heads(
        call, query, keys[..., : sizes.head_dim], keys[..., sizes.head_dim :]
    )

    def back(given: Tensor, what: str) -> Tensor:
        """This rank's rows of all heads, of [rows, batch, heads, dim] of some."""
        sent = permuted(given, order, places).flatten(1)
        found = _exchanged(call, sent, counts, [rows] * plan.ranks, what)
        found = found.view(plan.ranks, rows, sizes.batch, heads, given.shape[-1])
        return found.permute(2, 0, 3, 1, 4).flatten(1, 2)

    whole = back(output, "outputs")
    return whole, back(lse, "lse").squeeze(-1) if call.return_lse else None


def _exchanged(
    call: LocalCall, rows: Tensor, send: list[int], receive: list[int], what: str
) -> Tensor:
    """What comes from all ranks for rows that lie in their order."""
    return Sending(call.plan, rows, None, receive, what, sizes=send).wait()


def _by_rank(rows: Tensor, ranks: int) -> Tensor:
    """[ranks, rows, batch · heads · dim] of [batch, heads, rows, dim]."""
    return rows.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4).flatten(2)


def _keys_by_rank(call: LocalCall) -> Tensor:
    """Keys and values of the heads that each rank's query heads share."""
    plan = call.plan
    keys = joined(call.key, call.value)
    if plan.sizes.kv_heads % plan.ranks == 0:
        return _by_rank(keys, plan.ranks)
    picks = constants(_heads_of_keys(plan, keys.device))
    taken = Taken.apply(keys.transpose(0, 1), picks, [None] * len(picks), Back())
    return _by_rank(taken.transpose(0, 1), plan.ranks)  # type: ignore[union-attr]


@outside_graph
def _heads_of_keys(plan: Plan, device: torch.device) -> tuple[Tensor, ...]:
    """The kv head that each rank's query heads share."""
    known = plan.memory.get(("heads", device))
    if known is None:
        heads = plan.sizes.query_heads // plan.ranks
        numbers = (
            torch.arange(plan.ranks) * heads // (plan.sizes.query_heads // plan.sizes.kv_heads)
        )
        known = plan.memory["heads", device] = numbers.to(device).split(1)
    return known


@outside_graph
def _mask_on(plan: Plan, device: torch.device) -> Mask:
    """The mask of the whole call on a device."""
    known = plan.memory.get(("mask", device))
    if known is None:
        known = plan.memory["mask", device] = plan.mask.to(device)
    return known


def _attend_heads(
    call: LocalCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """[rows, batch, heads, value_dim] and [rows, batch, heads, 1] of this rank's heads."""
    plan, heads = call.plan, query.shape[2]
    first = plan.rank * heads
    mask = constants(_mask_on(plan, query.device))
    mask, score = call.of_heads(mask, call.score, heads_of(first, heads, plan.sizes.query_heads))
    sinks = None if call.sinks is None else call.sinks.narrow(0, first, heads)
    numbers = None if call.seed is None else constants(_numbers(plan, first, query.device))
    if plan.cu_seqlens is None:
        rows = [heads_first(each) for each in (query, key, value)]
        output, lse = call.attend(rows[0], rows[1], rows[2], mask, score, sinks, numbers)
        return output.permute(2, 0, 1, 3), lse.permute(2, 0, 1).unsqueeze(-1)
    rows = [each.squeeze(1) for each in (query, key, value)]
    output, lse = call.attend_packed(rows, _offsets(call), mask, score, sinks, numbers)
    return output.unsqueeze(1), lse.transpose(0, 1)[:, None, :, None]


@outside_graph
def _numbers(plan: Plan, first_head: int, device: torch.device) -> Numbers:
    """What dropout calls the heads of this rank; rows are called what they are."""
    known = plan.memory.get(("dropout of heads", device))
    if known is None:
        known = plan.memory["dropout of heads", device] = Numbers.of_heads(first_head).to(device)
    return known


def _offsets(call: LocalCall) -> Offsets:
    """Those of all sequences."""
    offsets = call.plan.cu_seqlens
    assert offsets is not None
    there = constants(call.plan.on(call.query.device, "cu_seqlens"))
    longest = call.plan.longest
    return Offsets(there, there, longest, longest)

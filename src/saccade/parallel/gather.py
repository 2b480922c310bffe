"""Gather: each rank gets the keys and values that its rows see, and attends to them in one call.

Nothing is merged, so a rank computes as one process would. Keys of the second half of the heads are
on their way while the first half is computed, forwards, and their gradients backwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.parallel.exchange import Sending
from saccade.parallel.local import LocalCall, heads_first, heads_of, joined, rows_first


def attend(call: LocalCall) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows."""
    plan, (_, query_heads, kv_heads, head_dim, _, _) = call.plan, call.plan.sizes
    device = call.query.device
    routes = plan.memory.get(("routes", device))
    if routes is None:
        routes = plan.memory["routes", device] = plan.routes.to(device)
    groups = 2 if plan.ranks > 1 and kv_heads % 2 == 0 else 1
    keys = joined(call.key, call.value).chunk(groups, 1)
    sent = [
        Sending(
            plan, rows_first(some), routes.send, routes.receive, "keys", call.options.deterministic
        )
        for some in keys
    ]
    mask, score = call.mask_of(routes.arrived, "gather"), call.score_of(routes.arrived, "gather")
    size, outputs, lses = query_heads // groups, [], []
    for number, message in enumerate(sent):
        heads = heads_of(number * size, size, query_heads)
        rows = heads_first(message.wait().index_select(0, routes.order))
        output, lse = call.attend(
            call.query.narrow(1, heads.start, size), rows[..., :head_dim], rows[..., head_dim:],
            *call.of_heads(mask, score, heads),
            None if call.sinks is None else call.sinks.narrow(0, heads.start, size),
        )  # fmt: skip
        outputs.append(output)
        lses.append(lse)
    if groups == 1:
        return outputs[0], lses[0]
    return torch.cat(outputs, 1), torch.cat(lses, 1)

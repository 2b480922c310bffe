"""Large scores: what rounding took from the lse of some of the keys, where parts merge by it.

Scores of -1e9 and n keys, as a mask that is added makes them where it hides a whole row, have the
lse -1e9: float32 has no room for the log of n beside it. Within one call implementations know the
sum itself; to others they give the lse alone. So such rows are computed once more by the scores
less their lse, and the lse of these is what was lost. Parts merge by both (`merge.py: merged`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade import scores
from saccade.modifiers.graph_constants import in_graph
from saccade.scores import Score

# Rows whose lse is rounded by less than 2^-12 are left as they are: half of what backward passes
# call large, so that these never take the lse of all keys for that of some.
LARGE = 2.0**-11
NEGLIGIBLE = {torch.float32: 128.0, torch.float64: 1024.0}  # e to minus that is 0


class Lost(NamedTuple):
    """What rounding took from an lse.

    Attributes:
        rows: the rows of which it is known; others lost nothing that counts.
        number: log Σ exp(score - lse); 0 of other rows.
    """

    rows: Tensor
    number: Tensor


def lost_of(
    lse: Tensor,
    so_far: Tensor | None,
    changed: bool,
    again: Callable[[Tensor, Tensor | None], Tensor],
) -> Lost | None:
    """What rounding took from the lse of some keys; None where it took nothing that counts.

    On a GPU, and in a graph, numbers are not looked at: the second call is made each time, and
    sees no key of batch entries without such rows.

    Args:
        lse: [batch, query_heads, rows], or [query_heads, tokens] of packed rows.
        so_far: that of other keys, beside which an lse that is far smaller counts for nothing.
        changed: whether the caller changes scores. Products and nothing else, which are hardly
            ever alike, are left to their rounding on a GPU, as in any call.
        again: gives the lse of scores less a number of each row, of the same keys; its second
            argument says of which rows it is read, None: of any.
    """
    on_cpu = lse.device.type == "cpu"
    if not changed and not on_cpu:
        return None
    eps, size = torch.finfo(lse.dtype).eps, lse.abs()
    rows = (size * eps >= LARGE) & (size < torch.inf)
    if so_far is not None:
        rows &= lse >= so_far - (NEGLIGIBLE[lse.dtype] + 4 * eps * size)
    looked_at = on_cpu and not in_graph()
    if looked_at and not bool(rows.any()):
        return None
    number = again(lse.masked_fill(~rows, 0), None if looked_at else rows)
    return Lost(rows, number.where(rows & number.isfinite(), 0))


@scores.function
def _less_packed(score, batch, head, query_row, kv_row, base, offsets):
    return score - base[head, offsets[batch] + query_row]


def less(score: Score, base: Tensor, offsets: Tensor | None = None) -> Score:
    """A score less a number of each row, which lie as an lse does; offsets: of packed rows."""
    shift = scores.bias(-base.unsqueeze(-1)) if offsets is None else _less_packed(base, offsets)
    return score >> shift if score.key else shift


def entries_of(rows: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Which batch entries have any of some rows, int32 [batch]; rows as in `less`."""
    if offsets is None:
        return rows.flatten(1).any(1).to(torch.int32)
    before = F.pad(rows.any(0).cumsum(0), (1, 0))
    return (before[offsets.long()].diff() > 0).to(torch.int32)


def with_sinks(number: Tensor, sinks: Tensor, base: Tensor) -> Tensor:
    """The lse of scores less a base, once each head's sink less that base has joined them."""
    return torch.logaddexp(number, sinks.to(number.dtype).view(-1, 1) - base)

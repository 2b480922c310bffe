"""Max logit: from the largest score of each row to that of each head.

QK-clip (Kimi K2, 2025, section 2.1) shrinks the projections of heads whose scores grow too large;
these numbers tell which. Forward passes know the largest score of every row, and leave it in memory
for calls that ask (`return_max_logit`); here rows become heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_heads(rows: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """The largest score of each head, [batch, heads], or [sequences, heads] if packed.

    rows: those of each row, as the lse lies. A row whose lse is NaN makes its head's NaN: where
    scores are NaN, their maximum may not be. What is behind the last packed sequence is not looked
    at.
    """
    rows = rows.masked_fill(lse.isnan(), torch.nan)
    if cu_seqlens_q is None:
        if rows.shape[2] == 0:
            return rows.new_full(rows.shape[:2], -torch.inf)
        return rows.amax(2)
    heads, tokens = rows.shape
    sequences = cu_seqlens_q.shape[0] - 1
    # Padding counts for a sequence more, which is left out at the end.
    token = torch.arange(tokens, device=rows.device)
    of_token = torch.searchsorted(cu_seqlens_q[1:].long(), token, right=True)
    found = rows.new_full((sequences + 1, heads), -torch.inf)
    of_token = of_token.view(-1, 1).expand(tokens, heads)
    return found.scatter_reduce(0, of_token, rows.transpose(0, 1), "amax")[:-1].contiguous()

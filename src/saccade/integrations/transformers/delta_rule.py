"""The gated delta rule as layers of transformers' models call it.

They are those of Qwen3-Next, Qwen3.5 and OLMo-hybrid, with a decay a head, and of Kimi Linear, with
one a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from saccade.integrations import fla


def gated_delta_rule(
    theirs: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a layer asks one of `FUNCTIONS` for, in its layout [batch, length, heads, dim].

    theirs: what was there before; nothing is left to it.
    unused: what models hand through their layers, such as position_ids, and chunk_size.
    """
    by_channel = g.dim() == 4
    return fla.fused_recurrent_gated_delta_rule(
        query, key, value, None if by_channel else g, g if by_channel else None, beta=beta,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


# Of one decay a head, then of one a channel; prompts, then tokens.
FUNCTIONS: dict[str, Callable[..., Any]] = dict.fromkeys(
    (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
    ),
    gated_delta_rule,
)

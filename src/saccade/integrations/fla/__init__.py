"""fla: the calls of flash-linear-attention that saccade answers, with its layouts and defaults.

Tensors are (B, T, H, K) and (B, T, H, V); with cu_seqlens, B is 1 and states are (N, H, K, V).
Queries and keys of linear attention are features already; its normaliser's sum gets fla's eps of
1e-10. Arguments: fla 0.6's. Differences: states only when asked for; any dtype, on a CPU too.
"""

from saccade.integrations.fla.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from saccade.integrations.fla.linear_attention import (
    chunk_linear_attn,
    chunk_simple_gla,
    fused_chunk_linear_attn,
    fused_chunk_simple_gla,
    fused_recurrent_linear_attn,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_simple_gla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_simple_gla",
    "parallel_simple_gla",
]

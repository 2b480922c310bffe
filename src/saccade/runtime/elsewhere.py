"""Elsewhere: what other libraries call an option, and what to write here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

OPTIONS = (
    "mask", "score", "scale", "sinks", "dropout_p", "return_lse", "deterministic",
    "implementation", "config", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
)  # fmt: skip
CAUSAL = "mask=saccade.masks.causal()"
BIAS = "score=saccade.scores.bias(tensor) for numbers that are added, mask=tensor for bools"
WRITE = {
    "causal": CAUSAL,
    "is_causal": 'mask=saccade.masks.causal("top_left"), which is what PyTorch means by it',
    "attn_mask": BIAS,
    "attention_mask": BIAS,
    "attn_bias": BIAS,
    "bias": BIAS,
    "key_padding_mask": "mask=saccade.masks.key_lengths(lengths), or mask=~padding[:, None, None]",
    "mask_mod": "mask=the function",
    "block_mask": "mask=the function that it was made of",
    "score_mod": "score=the function",
    "window_size": "mask=saccade.masks.window(left, right)",
    "sliding_window": "mask=saccade.masks.window(left)",
    "softcap": "score=saccade.scores.softcap(cap)",
    "logits_soft_cap": "score=saccade.scores.softcap(cap)",
    "alibi_slopes": "score=saccade.scores.alibi(slopes)",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "dropout": "dropout_p=",
    "dropout_rate": "dropout_p=",
    "enable_gqa": "nothing: kv_heads that divide query_heads need no flag",
    "return_softmax_lse": "return_lse=True",
    "return_attn_probs": "return_lse=True; weights are never written out",
    "need_weights": "return_lse=True; weights are never written out",
    "backend": "implementation=",
    "s_aux": "sinks=",
}


def unknown_options(unknown: Mapping[str, Any]) -> TypeError:
    """The error for options that an attention call does not have, with what to write instead."""
    name = next(iter(unknown))
    near = difflib.get_close_matches(name, OPTIONS, 1)
    write = WRITE.get(name) or (f"{near[0]}=" if near else None)
    advice = f"write {write}" if write else f"takes {', '.join(OPTIONS[:9])}"
    return TypeError(f"{name}: an unknown option; {advice}")

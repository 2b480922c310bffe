"""Continuous batching: transformers' own `generate_batch`, whose cache saccade attends to.

The cache is private to transformers, and 5.17 and 5.23 have it in two forms; what both promise is
`update`, which keeps new keys and values and gathers all. Saccade attends to them as packed
sequences, so no mask is written out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import saccade

NAME = "saccade"


def attended(
    module: Any, query: Tensor, key: Tensor, value: Tensor, batch: Mapping[str, Any], **options: Any
) -> Tensor:
    """Attention of new tokens [1, heads, tokens, dim] to all that each sequence has in the cache.

    Args:
        module: the attention layer.
        batch: what continuous batching hands through the model: cache, cu_seq_lens_q,
            cu_seq_lens_k, read_index, write_index.
        options: of `saccade.attention_varlen`.

    Returns:
        [1, tokens, heads, value_dim].
    """
    if batch.get("block_table") is not None:
        raise NotImplementedError(
            "block_table: got one, which transformers' caches make for flash attention's decode "
            "kernel; takes None: continuous_batching_config.auto_switch_to_flash=False"
        )
    cache, layer = batch["cache"], module.layer_idx
    if "kwargs" in inspect.signature(cache.update).parameters:  # since 5.18 or so
        told = {name: batch[name] for name in (
            "cu_seq_lens_k", "max_length_k", "read_index", "write_index"
        )}  # fmt: skip
        key, value = cache.update(key, value, layer, told)
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
        offsets = told["cu_seq_lens_k"]
    else:
        key, value = cache.update(key, value, layer, batch["read_index"], batch["write_index"])
        offsets = batch["cu_seq_lens_k"]
        if isinstance(offsets, dict):
            sliding = getattr(module, "sliding_window", None)
            offsets = offsets["sliding_attention" if sliding else "full_attention"]
    cu_seqlens = batch["cu_seq_lens_q"].to(torch.int32), offsets.to(torch.int32)
    packed = query[0].transpose(0, 1)
    output: Tensor = saccade.attention_varlen(packed, key, value, *cu_seqlens, **options)
    return output.unsqueeze(0)


@functools.cache
def admit() -> bool:
    """Let continuous batching take saccade's attention, where it would refuse it.

    transformers 5.17 takes any attention of the name "paged|…"; later versions have a list, which
    nobody can add to, in one method.

    Returns:
        Whether there was a method to change.
    """
    try:
        from transformers.generation.continuous_batching import continuous_api
    except ImportError:  # it needs packages that transformers itself does not
        return False
    manager = continuous_api.ContinuousBatchingManager
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    if switch is None or "auto_switch_to_flash" not in inspect.signature(switch).parameters:
        return False

    @functools.wraps(switch)
    def switched(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        if model.config._attn_implementation != NAME:
            switch(self, model, *arguments, **options)

    manager.switch_to_cb_friendly_attn = switched
    return True

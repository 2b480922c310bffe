"""Registration: makes attn_implementation="saccade" known to transformers."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from saccade.integrations.transformers import continuous, interface
from saccade.integrations.transformers.attention import attention_forward, continuous_forward
from saccade.integrations.transformers.continuous import NAME
from saccade.integrations.transformers.masks import lazy_mask


def register() -> None:
    """Let transformers' models attend through saccade, by attn_implementation="saccade".

    Call it once, before a model is made or `model.set_attn_implementation("saccade")` is called;
    again does no harm. A model that does not ask transformers' AttentionInterface is refused by
    name when it is made.

    >>> saccade.integrations.transformers.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="saccade")
    """
    interface.guard()
    AttentionInterface.register(NAME, attention_forward)
    # Without a mask function of its own a model would attend without any mask, padding included.
    AttentionMaskInterface.register(NAME, lazy_mask)
    if not continuous.admit():  # then generate_batch puts "paged|" before a name
        AttentionInterface.register(f"paged|{NAME}", continuous_forward)

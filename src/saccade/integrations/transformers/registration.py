"""Registration: makes attn_implementation="saccade" known to a transformers that is new enough.

A model that attends by itself takes any name for its attention and goes on as before: at best
without saccade, at worst with a mask that it does not understand, or with a KeyError of its own
table of classes. transformers checks "sdpa" for each class of models and lets every registered name
pass; here the name "saccade" is checked in the same place, before a layer is made.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from saccade.integrations.transformers.attention import attention_forward, continuous_forward
from saccade.integrations.transformers.masks import lazy_mask

NAME = "saccade"


def register() -> None:
    """Let transformers' models attend through saccade, by attn_implementation="saccade".

    Call it once, before a model is made or `model.set_attn_implementation("saccade")` is called;
    again does no harm. A model that does not ask transformers' AttentionInterface is refused by
    name when it is made.

    >>> saccade.integrations.transformers.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="saccade")
    """
    guard()
    AttentionInterface.register(NAME, attention_forward)
    # Without a mask function of its own a model would attend without any mask, padding included.
    AttentionMaskInterface.register(NAME, lazy_mask)
    if not admit():  # then generate_batch puts "paged|" before a name
        AttentionInterface.register(f"paged|{NAME}", continuous_forward)


ATTENDS = re.compile(r"^class \w*Attention\w*\((nn\.)?Module\):", re.MULTILINE)
ASKS = re.compile(r"ALL_ATTENTION_FUNCTIONS|AttentionInterface")
# A table of classes, "eager" and "sdpa" among them, beside the interface or without it.
# Sparse attention, which hides keys from "eager" and "sdpa" and tells others their indices.
KNOWS_TWO = re.compile(r"_attn_implementation in \(([^)]*)\)")
HAS_A_TABLE = re.compile(r"\b(?!ALL_)[A-Z]\w*\[[\w.]*\._attn_implementation\]")


@functools.cache
def why_not(module: str) -> str | None:
    """Why the models of a Python module cannot attend through saccade; None where they can.

    A module whose source is nowhere (a notebook's) is let pass: its masks are still guarded.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None
    if ATTENDS.search(source) and not ASKS.search(source):
        return f"{module} does not ask transformers' AttentionInterface"
    if table := HAS_A_TABLE.search(source):
        return f"{module} looks it up in a table of its own ({table[0]})"
    if known := KNOWS_TWO.search(source):
        return f"{module} hides keys from {known[1]} alone"
    return None


def refuse_unless_asking(model: type[PreTrainedModel]) -> None:
    """Refuse a class of models that would not attend through saccade.

    Raises:
        ValueError: naming the class, and what it takes.
    """
    for kind in model.__mro__:
        if kind is PreTrainedModel or not issubclass(kind, PreTrainedModel):
            continue
        if (reason := why_not(kind.__module__)) is not None:
            takes = "'sdpa' or 'eager'" if model._supports_sdpa else "'eager'"
            raise ValueError(
                f"attn_implementation: got '{NAME}' for {model.__name__}, but {reason}; takes "
                f"{takes}. As one part of a model it can have its own: attn_implementation="
                "{'text_config': 'saccade', 'vision_config': 'eager'}, by the names of the parts"
            )


@functools.cache
def guard() -> bool:
    """Let transformers refuse "saccade" for models that don't ask which attention is chosen.

    Returns:
        Whether there was a method to change.
    """
    checked = getattr(PreTrainedModel, "get_correct_attn_implementation", None)
    if checked is None:
        return False

    @functools.wraps(checked)
    def checked_for_saccade(
        self: PreTrainedModel, requested_attention: str | None, *arguments: Any, **options: Any
    ) -> str:
        if requested_attention is not None and requested_attention.removeprefix("paged|") == NAME:
            refuse_unless_asking(type(self))
        return checked(self, requested_attention, *arguments, **options)

    PreTrainedModel.get_correct_attn_implementation = checked_for_saccade
    return True


@functools.cache
def admit() -> bool:
    """Let continuous batching take saccade's attention, where it would refuse it.

    transformers 5.17 takes any attention of the name "paged|…"; later versions have a fixed list
    in one method.

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

"""Attention of transformers by attn_implementation="saccade" or "saccade-fp8", and how these names
are registered.

A serving engine hands rows to it through a model's forward pass. A model that attends by itself
takes any name for its attention and goes on as before: at best without saccade, at worst with a
mask that it does not understand, or with a KeyError of its own table of classes. transformers
checks "sdpa" for each class of models and lets every registered name pass; here saccade's names are
checked in the same place, before a layer is made.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import saccade
from saccade import masks, scores
from saccade.integrations.arguments import chained, sliding_window_mask
from saccade.integrations.transformers.cache import PagedRows
from saccade.integrations.transformers.deferred import MaskTensor
from saccade.integrations.transformers.layer_functions import attach, attach_when_made
from saccade.integrations.transformers.masks import (
    GraphMask,
    LazyMask,
    Visible,
    conjunction,
    lazy_mask,
)

try:
    from transformers.utils import output_capturing
except ImportError:  # another version keeps it elsewhere
    output_capturing = None


class AttentionStep(Protocol):
    """One step of an engine that keeps keys and values itself.

    An engine calls ``model(input_ids, position_ids=…, saccade_step=step, use_cache=False)`` with
    the tokens of all its sequences laid side by side in one row. Every attention layer then calls
    `attend` instead of attending, and ignores the attention mask: only the step knows which tokens
    belong to which sequence.

    Examples:
        >>> from saccade.integrations.transformers import AttentionStep
        >>> class Alone(AttentionStep):
        ...     def attend(self, layer, query, key, value, **options):
        ...         return saccade.attention(query, key, value, causal=True)
    """

    def attend(
        self,
        layer: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: masks.Mask,
        score: scores.Score | None,
        scale: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Keep the new keys and values, and attend to all that each sequence has.

        Args:
            layer: the attention layer's number in the model, as the layer itself has it; one that
                is used in several places, and called several times in a pass, may have none.
            query: [1, query_heads, tokens, head_dim], turned by its rotary embedding already.
            key, value: [1, kv_heads, tokens, dim]: of the new tokens only.
            mask: `masks.causal()`, or `masks.window(left)` in a layer with a sliding window;
                rows are numbered within each sequence and aligned at the bottom right.
            score: `scores.softcap(cap)` where the layer has one, else None.
            scale: the factor of the scores; 1/sqrt(head_dim) where None.
            sinks: [query_heads] logits, where the layer has some, else None.

        Returns:
            [1, tokens, query_heads, value_dim].

        A step with a true attribute `layers_are_checked` has seen these layers before, so that
        they are not checked again. One with a true attribute `takes_dropout` is told `dropout_p`,
        the share of weights that a layer drops; before others such layers are refused.
        """
        ...


# Of a step's layer without a window.
CAUSAL = masks.causal()

# What layers may hide behind, by what a config's `layer_types` calls them, and say in arguments.
# A hybrid layer has a state beside attention (`StateLayers`).
TOLD_TO_STEPS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")

# What a few models pass to let a layer see some keys only, or to have scores of its own among them.
NOT_SERVED = ("indices", "block_indices", "sinks")

NO_WEIGHTS = (
    "output_attentions: got True, takes False: saccade never writes attention weights out; "
    "attn_implementation='eager' does"
)


def attention_forward(  # breaks function-length: most of it is the docstring
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | GraphMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    saccade_step: AttentionStep | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """One attention layer of a model of transformers.

    Args:
        module: the layer; its `is_causal` holds where the argument is None.
        query: [batch, query_heads, query_len, head_dim].
        key, value: [batch, kv_heads, kv_len, dim]; heads are not repeated. Pages of a
            `PagedGenerationCache` are read where they lie.
        attention_mask: what the mask function made, a bool tensor [batch, 1 or query_heads,
            query_len, kv_len] (True = visible), or a floating-point one, which is added to the
            scores. None: what `is_causal` and `sliding_window` say.
        dropout: the probability that a weight is dropped. scaling: the factor of the scores.
        sliding_window: tokens a row sees, itself included; only where there is no mask.
        softcap: bend scores into (-softcap, softcap).
        s_aux: [query_heads] sinks.
        position_bias: added to the scores, as a floating-point mask is.
        saccade_step: a serving engine's step, which does the layer's work (`AttentionStep`).
        options: what other implementations need; those of `NOT_SERVED` must be None.

    Returns:
        [batch, query_len, query_heads, value_dim], contiguous; and None, as there are no weights.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes, in particular
            for a mask that is not understood.

    Examples:
        >>> from saccade.integrations.transformers import attention_forward
        >>> layer = torch.nn.Module()
        >>> query, key, value = torch.randn(1, 4, 8, 16), *torch.randn(2, 1, 2, 8, 16)
        >>> output, _ = attention_forward(layer, query, key, value, None, is_causal=True)
        >>> output.shape
        torch.Size([1, 8, 4, 16])
    """
    _refuse_what_is_not_served(module, options)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    shared: dict[str, Any] = {
        "scale": scaling,
        "sinks": s_aux if s_aux is not None else getattr(module, "sinks", None),
    }
    cap = None if softcap is None else scores.softcap(softcap)
    if saccade_step is not None:
        takes_dropout = getattr(saccade_step, "takes_dropout", False)
        if not getattr(saccade_step, "layers_are_checked", False):
            refused = 0.0 if takes_dropout else dropout
            _check_told(module, causal, sliding_window, refused, position_bias)
            _check_mask(module, attention_mask, sliding_window)
        if takes_dropout:
            shared["dropout_p"] = float(dropout)
        windowed = sliding_window is not None
        shared["mask"] = sliding_window_mask(sliding_window, True) if windowed else CAUSAL
        layer: Any = module.layer_idx
        return saccade_step.attend(layer, query, key, value, score=cap, **shared), None
    if options.get("cache") is not None:  # transformers' own continuous batching
        window = _window_of_batch(module, sliding_window)
        _check_told(module, True, window, dropout, position_bias)
        _check_mask(module, attention_mask, window)
        shared |= {"mask": sliding_window_mask(window, causal=True), "score": cap}
        return attend_batch(module, query, key, value, options, **shared), None
    mask, bias = _mask_and_bias(attention_mask, query, key, causal, sliding_window)
    shared["mask"] = _within_packed(mask, query, key, options)
    biases = [scores.bias(each) for each in (position_bias, bias) if each is not None]
    shared["score"] = chained(cap, *biases)
    if isinstance(key, PagedRows) and isinstance(value, PagedRows):
        if dropout:
            raise ValueError(f"dropout: got {dropout}, takes 0 over a paged cache")
        output = key.attended(query, value, **shared)
    else:
        output = saccade.attention(query, key, value, dropout_p=float(dropout), **shared)
    return output.transpose(1, 2).contiguous(), None


def fp8_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | GraphMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`attention_forward` by `saccade.attention_fp8`, which quantises the rows of 16 bits.

    It is for inference: it has no gradient, no dropout and no pages, and a serving engine's steps
    and continuous batching do not reach it.

    Raises:
        NotImplementedError: where a gradient may be asked for, or no fp8 kernel serves the device.
        TypeError, ValueError: as `attention_forward`, and for what it does not serve.

    Examples:
        >>> from saccade.integrations.transformers import fp8_forward
        >>> layer = torch.nn.Module()
        >>> query, key, value = torch.randn(3, 1, 4, 8, 16, dtype=torch.bfloat16)
        >>> output, _ = fp8_forward(layer, query, key, value, None, is_causal=True)
        >>> output.shape
        torch.Size([1, 8, 4, 16])
    """
    _refuse_what_is_not_served(module, options)
    for name, given in (
        ("dropout", dropout or None), ("saccade_step", options.get("saccade_step")),
        ("cache", options.get("cache")), ("past_key_values", key if _in_pages(key) else None),
    ):  # fmt: skip
        if given is not None:
            got = given if name == "dropout" else type(given).__name__
            raise ValueError(
                f"{name}: got {got}, which attn_implementation='{FP8_NAME}' does not take; "
                f"'{NAME}' does"
            )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask, bias = _mask_and_bias(attention_mask, query, key, causal, sliding_window)
    cap = None if softcap is None else scores.softcap(softcap)
    biases = [scores.bias(each) for each in (position_bias, bias) if each is not None]
    output: Tensor = saccade.attention_fp8(
        query, key, value, mask=_within_packed(mask, query, key, options),
        score=chained(cap, *biases), scale=scaling,
        sinks=s_aux if s_aux is not None else getattr(module, "sinks", None),
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def _in_pages(key: Any) -> bool:
    return isinstance(key, PagedRows)


def _refuse_what_is_not_served(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse a layer that asks for weights, or hides keys by what is not looked at here."""
    if options.get("output_attentions") or _weights_are_collected():
        raise ValueError(NO_WEIGHTS)
    for name in NOT_SERVED:
        if options.get(name) is not None:
            raise ValueError(
                f"{name}: got some from {type(module).__name__}, takes None; "
                "attn_implementation='eager' serves them"
            )


def _weights_are_collected() -> bool:
    """Whether a model that is at work was asked for weights: some layers do not hand that on.

    What transformers collects of its layers is private to it. Graphs cannot look there.
    """
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():
        return False
    return any(name.endswith("attentions") for name in collector.get() or ())


def continuous_forward(*tensors: Any, **options: Any) -> tuple[Tensor, None]:
    """`attention_forward` for the name that transformers 5.17 gives it in continuous batching.

    Raises:
        ValueError: outside of it: under that name transformers makes no masks.
    """
    if options.get("cache") is None:
        raise ValueError(
            "attn_implementation: got 'paged|saccade' outside of generate_batch, takes 'saccade'"
        )
    return attention_forward(*tensors, **options)


def _window_of_batch(module: Any, sliding_window: int | None) -> int | None:
    """The window of a layer in `generate_batch`, whose cache keeps no more than that: as the layer
    says, or as the cache reads it off a config without layer types."""
    window = sliding_window or getattr(module, "sliding_window", None)
    config = getattr(module, "config", None)
    if window is None and getattr(config, "layer_types", None) is None:
        window = getattr(config, "sliding_window", None)
    return window


def attend_batch(
    module: Any, query: Tensor, key: Tensor, value: Tensor, batch: Mapping[str, Any], **options: Any
) -> Tensor:
    """Attention in transformers' own continuous batching (`generate_batch`).

    Its cache is private, and 5.17 and 5.23 have it in two forms; both have `update`, which keeps
    new keys and values and gathers all. They are attended to as packed sequences, without a mask.

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


def _mask_and_bias(
    attention_mask: Tensor | GraphMask | None,
    query: Tensor,
    key: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Visible, Tensor | None]:
    """What is hidden, and what is added to the scores."""
    takes = (
        "a bool tensor [batch, 1 or heads, query_len, kv_len] (True = visible), a floating-point "
        "one that is added to the scores, or what saccade's mask function made"
    )
    if attention_mask is None:
        return _unmasked(query.shape[2], key.shape[2], causal, window), None
    if not isinstance(attention_mask, (Tensor, GraphMask)):
        raise TypeError(f"attention_mask: got {type(attention_mask).__name__}, takes {takes}")
    if attention_mask.dim() != 4 or attention_mask.shape[2:] != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)} for {query.shape[2]} query "
            f"rows and {key.shape[2]} keys, takes {takes}"
        )
    if isinstance(attention_mask, (LazyMask, GraphMask)):
        return attention_mask.visible(), None
    if isinstance(attention_mask, MaskTensor):
        return masks.dense(attention_mask.written_out()), None
    if attention_mask.dtype == torch.bool:
        return masks.dense(attention_mask), None
    if attention_mask.is_floating_point():
        return None, attention_mask
    raise TypeError(f"attention_mask: got {attention_mask.dtype}, takes {takes}")


def _unmasked(query_len: int, kv_len: int, causal: bool, window: int | None) -> Visible:
    """What a layer hides when its model made no mask.

    Raises:
        ValueError: where the position of the first query row is not known: other implementations
            disagree about it.
    """
    if causal and query_len not in (1, kv_len):
        raise ValueError(
            f"attention_mask: got None for {query_len} query rows and {kv_len} keys of a causal "
            "layer, which does not say where the rows stand; takes a mask there"
        )
    hides = window is not None and window <= kv_len
    return sliding_window_mask(window if hides else None, causal)


def _within_packed(
    mask: Visible, query: Tensor, key: Tensor, options: Mapping[str, Any]
) -> Visible:
    """The mask, within the packed sequences that a collator for flash attention names.

    Such a collator may leave out position_ids, from which mask functions know the sequences.
    """
    offsets = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if offsets[0] is None:
        return mask
    ids = [
        torch.bucketize(
            torch.arange(rows.shape[2], device=rows.device),
            (offsets[0] if ends is None else ends)[1:].to(rows.device),
            right=True,
        )[None]
        for rows, ends in zip((query, key), offsets, strict=True)
    ]
    return conjunction([mask, masks.documents(*ids)])


def _check_told(
    module: Any, causal: bool, window: int | None, dropout: float, position_bias: Tensor | None
) -> None:
    """Refuse a layer that hides or adds something else than a step, or a packed cache, is told."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    # A layer that a model uses in several places has no number of its own: None, or -1.
    kind = None if types is None or number is None or number < 0 else types[number]
    if not causal:
        raise ValueError("saccade_step: got a layer that is not causal, takes causal ones")
    if dropout or position_bias is not None:
        raise ValueError("saccade_step: got dropout or a position_bias, takes a layer without them")
    if kind is not None and kind not in TOLD_TO_STEPS:
        raise ValueError(f"saccade_step: got a layer of {kind}, takes {' or '.join(TOLD_TO_STEPS)}")
    if kind in ("sliding_attention", "hybrid_sliding") and window is None:
        raise ValueError(
            "saccade_step: got a sliding layer that names no sliding_window, takes one"
        )


LONGEST = 2**20  # positions that a mask is asked for at most
# Layers whose masks are what they tell steps, by id: whether they equal others is theirs to say.
_as_told: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()


def _check_mask(module: torch.nn.Module, attention_mask: Any, window: int | None) -> None:
    """Refuse a layer whose mask hides or adds what a step is not told: it is asked once for a row
    behind all others.

    Raises:
        ValueError: for such a layer.
    """
    if not isinstance(attention_mask, LazyMask):
        if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
            raise ValueError(
                "saccade_step: got a layer with a floating-point mask of its own, takes layers "
                "that pass on what the mask function made"
            )
        return
    # A graph cannot look at numbers.
    if torch.compiler.is_compiling() or _as_told.get(id(module)) is module:
        return
    request = attention_mask.request
    named = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    last = min(named or LONGEST, LONGEST)
    keys = torch.arange(last, device=request.device)
    alone = torch.zeros((), dtype=torch.int64, device=request.device)
    try:
        seen = request.mask_function(alone, alone, keys[-1], keys)
    except Exception:  # packed rows, say, of which it has a table
        return
    told = torch.ones_like(keys, dtype=torch.bool) if window is None else keys >= last - window
    if isinstance(seen, Tensor) and not torch.equal(seen.expand_as(told), told):
        raise ValueError(
            f"saccade_step: got a layer of whose {last} tokens the last one sees {int(seen.sum())} "
            f"by the mask, and {int(told.sum())} by what it tells (sliding_window is {window}), "
            "takes one that tells what its mask is"
        )
    _as_told[id(module)] = module


NAME = "saccade"
FP8_NAME = "saccade-fp8"
NAMES = (NAME, FP8_NAME)


def register() -> None:
    """Let transformers' models attend through saccade, by attn_implementation="saccade"; or, for
    inference in bfloat16 and float16, in fp8, by "saccade-fp8".

    Their layers of the gated delta rule (Qwen3-Next, Qwen3.5, OLMo-hybrid, Kimi Linear) then take
    saccade's as well, and their layers of Mamba-2 (Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2)
    linear attention with decay.

    Call it once, before a model is made or `model.set_attn_implementation("saccade")` is called;
    again does no harm. A model that does not ask transformers' AttentionInterface is refused by
    name when it is made.

    Examples:
        >>> import transformers
        >>> saccade.integrations.transformers.register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=2, max_position_embeddings=64, attn_implementation="saccade",
        ... )
        >>> model = transformers.LlamaForCausalLM(config)  # in earnest: from_pretrained(folder)
        >>> model(torch.tensor([[1, 5, 9]])).logits.shape
        torch.Size([1, 3, 97])
    """
    guard()
    attach_when_made(NAMES)
    AttentionInterface.register(NAME, attention_forward)
    AttentionInterface.register(FP8_NAME, fp8_forward)
    # Without a mask function of its own a model would attend without any mask, padding included.
    for name in NAMES:
        AttentionMaskInterface.register(name, lazy_mask)
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


def refuse_unless_asking(model: type[PreTrainedModel], name: str = NAME) -> None:
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
                f"attn_implementation: got '{name}' for {model.__name__}, but {reason}; takes "
                f"{takes}. As one part of a model it can have its own: attn_implementation="
                f"{{'text_config': '{name}', 'vision_config': 'eager'}}, by the names of the parts"
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
        name = (requested_attention or "").removeprefix("paged|")
        if name in NAMES:
            refuse_unless_asking(type(self), name)
            attach(self, NAMES)  # a model that was made before has its layers already
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

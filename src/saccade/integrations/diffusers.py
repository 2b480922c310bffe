"""diffusers: its models' attention, answered by saccade.

After `register()`, `model.set_attention_backend("saccade")` and `with
attention_backend("saccade"):` take these calls. diffusers calls its list of backends experimental
and closes it, so `register` looks whether the parts that it needs are there.

Backends reach what asks `dispatch_attention_fn`: Flux, Qwen-Image, Wan, HunyuanVideo, LTX and other
transformers of recent years. UNets, Stable Diffusion 3, PixArt, CogVideoX and most autoencoders
call PyTorch's SDPA themselves, and diffusers says nothing; for those a warning names what was not
reached, and `saccade.integrations.sdpa.enable()` serves them.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

from torch import Tensor

from saccade.integrations.arguments import heads_first, serve_only
from saccade.integrations.sdpa import scaled_dot_product_attention

__all__ = ["register"]

NAME = "saccade"
DISPATCH = "diffusers.models.attention_dispatch"


def register() -> None:
    """Add the backend "saccade" to diffusers. Calling it twice changes nothing.

    `model.set_attention_backend("saccade")` then warns of attention that backends do not reach.

    Raises:
        ImportError: if diffusers is not installed, or keeps its backends in another way than
            0.42 does.

    Examples:
        >>> saccade.integrations.diffusers.register()
        >>> from diffusers.models.attention_dispatch import AttentionBackendName
        >>> AttentionBackendName("saccade").value
        'saccade'
    """
    try:
        dispatch = importlib.import_module(DISPATCH)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"saccade.integrations.diffusers takes diffusers 0.42 ({error})"
        ) from None
    names = getattr(dispatch, "AttentionBackendName", None)
    registry: Any = getattr(dispatch, "_AttentionBackendRegistry", None)
    if names is None or not callable(getattr(registry, "register", None)):
        version = importlib.import_module("diffusers").__version__
        raise ImportError(
            f"diffusers: got {version}, whose backends are kept in another way; takes 0.42"
        )
    registry.register(_member(names))(attention)
    _warn_when_set()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attention as diffusers' backends compute it.

    Args:
        query: (batch, length, heads, dim). key, value: the same, of their own length.
        attn_mask: (batch, kv_len), or broadcastable to (batch, heads, length, kv_len).
        dropout_p, is_causal, scale, enable_gqa: as of `saccade.scaled_dot_product_attention`.

    Returns:
        (batch, length, heads, dim).

    Raises:
        NotImplementedError: for the lse, and for context parallelism.
    """
    serve_only(False, return_lse=return_lse)
    if _parallel_config is not None:
        raise NotImplementedError("saccade's backend for diffusers has no context parallelism")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    return heads_first(
        scaled_dot_product_attention, query, key, value, attn_mask=attn_mask, dropout_p=dropout_p,
        is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def _member(names: Any) -> Any:
    """The member "saccade" of diffusers' enumeration of backends, made if it is not there."""
    if NAME in names._value2member_map_:
        return names(NAME)
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    return member


@functools.cache
def _warn_when_set() -> None:
    """Let diffusers' models say what of them "saccade" does not reach."""
    models: Any = importlib.import_module("diffusers.models.modeling_utils").ModelMixin
    set_before = models.set_attention_backend

    @functools.wraps(set_before)
    def set_attention_backend(self: Any, backend: str) -> None:
        set_before(self, backend)
        if backend.lower() == NAME and (problem := not_reached(self)):
            warnings.warn(problem, stacklevel=2)

    models.set_attention_backend = set_attention_backend


def not_reached(model: Any) -> str | None:
    """Which attention of a diffusers model its backends do not reach, in a sentence; else None."""
    holders = [getattr(module, "processor", None) or module for module in model.modules()]
    reached = sum(hasattr(holder, "_attention_backend") for holder in holders)
    others = [
        type(holder).__name__
        for holder, module in zip(holders, model.modules(), strict=True)
        if holder is not module and not hasattr(holder, "_attention_backend")
    ]
    if reached and not others:
        return None
    missed = f", and not {len(others)} through {', '.join(sorted(set(others)))}" if others else ""
    return (
        f"set_attention_backend: got 'saccade' for {type(model).__name__}, of which diffusers' "
        f"backends reach {reached} attention modules{missed}; "
        "saccade.integrations.sdpa.enable() serves what calls PyTorch's SDPA itself"
    )

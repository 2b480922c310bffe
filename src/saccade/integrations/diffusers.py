"""diffusers: its models' attention, answered by saccade.

After `register()`, `model.set_attention_backend("saccade")` and `with
attention_backend("saccade"):` take these calls; "saccade-fp8" computes them in fp8. diffusers calls
its list of backends experimental and closes it, so `register` looks whether the parts that it needs
are there.

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
from saccade.integrations.sdpa import scaled_dot_product_attention, translated

__all__ = ["register"]

NAME, FP8_NAME = "saccade", "saccade-fp8"
DISPATCH = "diffusers.models.attention_dispatch"


def register() -> None:
    """Add the backends "saccade" and "saccade-fp8" to diffusers. Calling it twice changes nothing.

    `model.set_attention_backend("saccade")` then warns of attention that backends do not reach.
    "saccade-fp8" is less exact, and for inference in bfloat16 and float16
    (`saccade.attention_fp8`).

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
    registry.register(_member(names, NAME))(attention)
    registry.register(_member(names, FP8_NAME))(fp8_attention)
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
    _refuse(return_lse, _parallel_config)
    return heads_first(
        scaled_dot_product_attention, query, key, value, attn_mask=_by_rows(attn_mask, query, key),
        dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def fp8_attention(
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
    """`attention` by `saccade.attention_fp8`, which quantises the rows of 16 bits.

    Raises:
        TypeError: for rows of other dtypes.
        NotImplementedError: as `attention`, for dropout, where a gradient may be asked for, and
            where no fp8 kernel serves the device.
    """
    _refuse(return_lse, _parallel_config)
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: got {dropout_p}, of which the backend {FP8_NAME!r} takes 0; {NAME!r} has "
            "dropout"
        )

    def in_fp8(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return translated(query, key, value, **options).in_fp8()

    return heads_first(
        in_fp8, query, key, value, attn_mask=_by_rows(attn_mask, query, key), is_causal=is_causal,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def _refuse(return_lse: bool, parallel: Any) -> None:
    """Refuse what neither backend has."""
    serve_only(False, return_lse=return_lse)
    if parallel is not None:
        raise NotImplementedError("saccade's backends for diffusers have no context parallelism")


def _by_rows(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask with dimensions for heads and rows, which diffusers' masks of keys lack."""
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        return attn_mask[:, None, None, :]
    return attn_mask


def _member(names: Any, name: str) -> Any:
    """A member of diffusers' enumeration of backends, made if it is not there."""
    if name in names._value2member_map_:
        return names(name)
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper().replace("-", "_"), name
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    return member


@functools.cache
def _warn_when_set() -> None:
    """Let diffusers' models say what of them our backends do not reach."""
    models: Any = importlib.import_module("diffusers.models.modeling_utils").ModelMixin
    set_before = models.set_attention_backend

    @functools.wraps(set_before)
    def set_attention_backend(self: Any, backend: str) -> None:
        set_before(self, backend)
        name = backend.lower()
        if name in (NAME, FP8_NAME) and (problem := not_reached(self, name)):
            warnings.warn(problem, stacklevel=2)

    models.set_attention_backend = set_attention_backend


def not_reached(model: Any, name: str) -> str | None:
    """Which attention of a diffusers model a backend does not reach, in a sentence; else None."""
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
    enable = "enable(fp8=True)" if name == FP8_NAME else "enable()"
    return (
        f"set_attention_backend: got {name!r} for {type(model).__name__}, of which diffusers' "
        f"backends reach {reached} attention modules{missed}; "
        f"saccade.integrations.sdpa.{enable} serves what calls PyTorch's SDPA itself"
    )

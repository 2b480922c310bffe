"""sdpa: PyTorch's `scaled_dot_product_attention`, answered by saccade.

`saccade.scaled_dot_product_attention` has its signature. After `enable()`, every call of
`torch.nn.functional.scaled_dot_product_attention` comes here; what saccade does not serve goes to
PyTorch as before, and `explain` says why. Modes and tensors with a `__torch_function__` see the
call as before. A name that was imported earlier (`from torch.nn.functional import
scaled_dot_product_attention`), TorchScript, exported programs and PyTorch's own C++ layers are not
reached; on a GPU `flash_kernels` reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import saccade
from saccade.integrations.sdpa.call import is_causal_bias, translated
from saccade.integrations.sdpa.patch import NAME, Patch

PLAIN = (Tensor, Parameter)  # types that nothing but PyTorch itself looks into


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as `torch.nn.functional.scaled_dot_product_attention` has it.

    Args:
        query: (N, ..., Hq, L, E). key: (N, ..., H, S, E). value: (N, ..., H, S, Ev). Dimensions
            before the rows broadcast.
        attn_mask: broadcastable to (N, ..., Hq, L, S): bool (True = visible), or of query's dtype,
            added to the scaled scores; the latter is differentiable. Or a `CausalBias` of
            `torch.nn.attention.bias`.
        dropout_p: the share of weights that is dropped, always.
        is_causal: a row sees the keys up to its own number, counted from the first on.
        scale: 1 / sqrt(E) where None.
        enable_gqa: H need only divide Hq.

    Returns:
        (N, ..., Hq, L, Ev). A row that sees nothing gives 0.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: where no implementation serves the call.

    >>> output = saccade.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    call = translated(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    output = saccade.attention(call.query, call.key, call.value, **call.options)
    assert isinstance(output, Tensor)  # a pair only with return_lse
    return output.reshape(*call.leading, *output.shape[-2:])


def enable() -> None:
    """Route `torch.nn.functional.scaled_dot_product_attention` through saccade, until `disable`.

    Calls that saccade does not serve go where they went before: nested tensors and other
    subclasses, devices without an implementation, and all calls while `sdpa_kernel` or one of its
    switches has turned a backend off, as somebody has chosen then. Calling it twice changes
    nothing.

    >>> saccade.integrations.sdpa.enable()
    """
    _patch.put()


def disable() -> None:
    """Give PyTorch its function back."""
    _patch.take_away()


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` on the way in, `disable` on the way out."""
    enable()
    try:
        yield
    finally:
        disable()


@dataclass(frozen=True)
class Route:
    """Where a call goes after `enable`; print it.

    Attributes:
        reason: why it stays with PyTorch, or None: saccade serves it.
        explanation: what `saccade.explain` says of it, where it can be said.
    """

    reason: str | None
    explanation: Any = None

    def __str__(self) -> str:
        if self.reason is None:
            return str(self.explanation)
        return f"attention: by PyTorch's own {NAME}, as saccade cannot serve it: {self.reason}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Route:
    """Whether saccade serves a call after `enable`, by which implementation, or why it does not.

    Args: as of `scaled_dot_product_attention`.
    """
    reason = _why_not(query, key, value, attn_mask)
    if reason is not None:
        return Route(reason)
    try:
        call = translated(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        found = saccade.explain(saccade.attention, call.query, call.key, call.value, **call.options)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Route(str(error))
    if found.chosen is None:
        return Route("; ".join(f"{name}: {reason}" for name, reason in found.reasons.items()))
    return Route(None, found)


def _served(*arguments: Any, **options: Any) -> Tensor | None:
    """The output of a call that came to PyTorch's function, or None: PyTorch is to serve it."""
    if _why_not(*arguments, *options.values()) is None:
        try:
            return scaled_dot_product_attention(*arguments, **options)
        except (TypeError, ValueError, NotImplementedError):
            pass  # PyTorch serves it, or finds its own words for what is wrong
    return None


def _why_not(*arguments: Any) -> str | None:
    """Why a call stays with PyTorch, as far as that shows before it is translated."""
    for tensor in arguments:
        if not isinstance(tensor, Tensor) or is_causal_bias(tensor):
            continue
        if type(tensor) not in PLAIN:
            return f"it takes plain tensors, not {type(tensor).__name__}"
        if tensor.is_nested:
            return "it takes plain tensors, not nested ones"
    if not _all_backends():
        return "one of PyTorch's backends is turned off, so that somebody has chosen another"
    return None


def _all_backends() -> bool:
    """Whether PyTorch may take any of its backends."""
    switches = torch.backends.cuda
    return (
        switches.flash_sdp_enabled()
        and switches.mem_efficient_sdp_enabled()
        and switches.math_sdp_enabled()
        and switches.cudnn_sdp_enabled()
    )


_all_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]  # to a trace


_patch = Patch(_served)

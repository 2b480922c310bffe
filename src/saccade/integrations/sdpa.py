"""sdpa: PyTorch's `scaled_dot_product_attention`, answered by saccade.

`saccade.scaled_dot_product_attention` has its signature. After `enable()`, every call of
`torch.nn.functional.scaled_dot_product_attention` comes here; what saccade does not serve goes to
PyTorch as before, and `explain` says why. A name that was imported earlier (`from
torch.nn.functional import scaled_dot_product_attention`) and PyTorch's own C++ layers are not
reached; on a GPU `flash_kernels` reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import saccade
from saccade import masks, scores

NAME = "scaled_dot_product_attention"
PLAIN = (Tensor, Parameter)  # types that nothing but PyTorch itself looks into

_before: list[Callable[..., Tensor]] = []  # PyTorch's own function, while ours stands in its place


class Call(NamedTuple):
    """A call in saccade's terms."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    leading: torch.Size  # of the output, before its rows


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
            added to the scaled scores; the latter is differentiable.
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
    call = _translated(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
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
    if not _before:
        _before.append(getattr(torch.nn.functional, NAME))
        setattr(torch.nn.functional, NAME, _routed)


def disable() -> None:
    """Give PyTorch its function back."""
    if _before:
        setattr(torch.nn.functional, NAME, _before.pop())


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
        call = _translated(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        found = saccade.explain(call.query, call.key, call.value, **call.options)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Route(str(error))
    if found.chosen is None:
        return Route("; ".join(f"{name}: {reason}" for name, reason in found.reasons.items()))
    return Route(None, found)


def _routed(*arguments: Any, **options: Any) -> Tensor:
    """Stands for PyTorch's function after `enable`."""
    if _why_not(*arguments, *options.values()) is None:
        try:
            return scaled_dot_product_attention(*arguments, **options)
        except (TypeError, ValueError, NotImplementedError):
            pass  # PyTorch serves it, or finds its own words for what is wrong
    return _before[0](*arguments, **options)


def _why_not(*arguments: Any) -> str | None:
    """Why a call stays with PyTorch, as far as that shows before it is translated."""
    for tensor in arguments:
        if not isinstance(tensor, Tensor):
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


def _translated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Call:
    """The call with four dimensions, a mask and a score."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes at least 2")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal: got True with attn_mask, takes one of the two")
    leading = _leading((query, key, value), enable_gqa)
    options: dict[str, Any] = {"dropout_p": float(dropout_p), "scale": scale}
    if is_causal:
        options["mask"] = masks.causal(align="top_left")
    if attn_mask is not None:
        shape = (*leading, query.shape[-2], key.shape[-2])
        if not _broadcasts(attn_mask, shape):
            raise ValueError(
                f"attn_mask: got {list(attn_mask.shape)}, takes what broadcasts to {list(shape)}"
            )
        mask = _four_dimensions(attn_mask, leading[:-1])
        if mask.dtype == torch.bool:
            options["mask"] = mask
        elif mask.dtype == query.dtype:
            options["score"] = scores.bias(mask)
        else:
            raise TypeError(f"attn_mask: got {mask.dtype}, takes bool or query's {query.dtype}")
    batch = leading[:-1]
    query, key, value = (
        _four_dimensions(rows.expand(*batch, *rows.shape[-3:]), batch)
        for rows in (query, key, value)
    )
    return Call(query, key, value, options, leading)


def _leading(tensors: tuple[Tensor, ...], enable_gqa: bool) -> torch.Size:
    """The output's dimensions before its rows: those of the batch, and the query heads."""
    query, key, value = ((1, *tensor.shape[:-2]) for tensor in tensors)
    heads = query[-1], key[-1], value[-1]
    grouped = enable_gqa and heads[1] == heads[2]
    if not grouped and any(count not in (1, heads[0]) for count in heads[1:]):
        raise ValueError(
            f"key, value: got {heads[1]} and {heads[2]} heads for query's {heads[0]}, takes as "
            "many; with enable_gqa=True a divisor"
        )
    try:
        batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    except RuntimeError:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"query, key, value: got {shapes}, takes batches that broadcast") from None
    return torch.Size((*batch, *tensors[0].shape[-3:-2]))


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    if tensor.dim() > len(shape):
        return False
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return all(have in (1, want) for have, want in sizes)


def _four_dimensions(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Rows or a mask with all dimensions before the last three as one; what is 1 may stay so."""
    missing = max(len(batch) + 3, 4) - tensor.dim()
    tensor = tensor.reshape((1,) * missing + tuple(tensor.shape))
    if len(batch) <= 1:
        return tensor
    return tensor.expand(*batch, *tensor.shape[-3:]).flatten(0, -4)

"""Flash kernels: saccade instead of PyTorch's own FlashAttention, by PyTorch's registry.

`scaled_dot_product_attention` chooses a backend in C++. After
`torch.nn.attention.activate_flash_attention_impl("saccade")` the backend called flash is saccade,
whoever calls: names that were imported before, and PyTorch's layers in C++. PyTorch calls this
registry a prototype. It has been tested on CPU tensors, where PyTorch has no such kernels; on a GPU
it has not run yet.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade import masks

__all__ = ["register"]

NAME = "saccade"
FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"


class Handle:
    """What PyTorch's registry keeps while these kernels are registered."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        """Give PyTorch its kernels back."""
        if self.library is not None:
            self.library._destroy()
            self.library = None


def register() -> None:
    """Let PyTorch's registry know the name "saccade"; nothing changes before it is activated.

    Raises:
        ImportError: if this PyTorch has no such registry.

    Examples:
        >>> saccade.integrations.flash_kernels.register()
        >>> "saccade" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(f"torch: got {torch.__version__}, takes 2.11 or newer") from error
    register_flash_attention_impl(NAME, register_fn=take_the_place)


def take_the_place(device: str = "CUDA") -> Handle:
    """Register both kernels for a device type; the handle removes them."""
    library = torch.library.Library("aten", "IMPL", device)
    library.impl(FORWARD, forward, device)
    library.impl(BACKWARD, backward, device)
    return Handle(library)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The kernel of the forward pass.

    Args:
        query: [batch, heads, length, dim]; key, value: the same, of their own length.
        is_causal: counted from the first key on.

    Returns:
        output, lse, and what the schema asks for beside them: nothing, or zeros.

    Raises:
        RuntimeError: for dropout and debug masks.
    """
    if dropout_p > 0 or return_debug_mask:
        raise RuntimeError(
            f"saccade's flash kernels: got dropout_p = {dropout_p} and return_debug_mask = "
            f"{return_debug_mask}, take neither; saccade.integrations.sdpa.enable() serves dropout"
        )
    output, lse = saccade.attention(
        query, key, value, mask=_mask(is_causal), scale=scale, return_lse=True
    )
    nothing, zero = query.new_empty(0), torch.zeros((), dtype=torch.int64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    return output, lse, nothing, nothing, *lengths, zero, zero, nothing


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The kernel of the backward pass: gradients of query, key and value."""
    dims = query.shape[-1], value.shape[-1]
    forward_by, backward_by = _implementations(query.device, query.dtype, is_causal, *dims)
    mask = _mask(is_causal)
    return tuple(
        torch.ops.saccade.attention_backward(
            grad_out, None, out, logsumexp, None, [], query, key, value, *[None] * 5, [],
            ints=[], floats=[], mask=mask.key if mask is not None else "", score="",
            scale=1 / math.sqrt(dims[0]) if scale is None else scale, dropout_p=0.0, config=[],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            residual=False, max_logit=False, grouped=False, forward_by=forward_by,
            backward_by=backward_by,
        )
    )  # fmt: skip


def _mask(is_causal: bool) -> masks.Mask | None:
    return masks.causal(align="top_left") if is_causal else None


@functools.cache
def _implementations(
    device: torch.device, dtype: torch.dtype, is_causal: bool, head_dim: int, value_dim: int
) -> tuple[str, str]:
    """The implementations of the two passes."""
    query, value = (
        torch.empty(1, 1, 1, n, dtype=dtype, device=device) for n in (head_dim, value_dim)
    )
    found = saccade.explain(saccade.attention, query, query, value, mask=_mask(is_causal))
    assert found.backward is not None  # attention has one
    forward_by, backward_by = found.forward.chosen, found.backward.chosen
    assert forward_by is not None and backward_by is not None  # the reference serves any call
    return forward_by, backward_by

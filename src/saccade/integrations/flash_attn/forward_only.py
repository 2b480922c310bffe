"""Forward only: what FlashAttention computes without gradients, where gradients are recorded.

Its calls over pages work with queries that require a gradient, and fail when one is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def without_gradient(name: str, outputs: tuple[Tensor, Tensor], *given: Any) -> Any:
    """Outputs that were computed under `torch.no_grad`, which refuse to give a gradient.

    Args:
        name: of the call.
        given: the call's tensors; where none of them waits for a gradient, nothing is refused.
    """
    waiting = [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.requires_grad]
    if not (waiting and torch.is_grad_enabled()):
        return outputs
    return _Refusing.apply(name, *outputs, *waiting)


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, output: Tensor, lse: Tensor, *waiting: Tensor) -> Any:
        ctx.name = name
        return output.view_as(output), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: got a gradient to send back, takes none: attention over pages is forward "
            "only, as FlashAttention's is; take flash_attn_varlen_func without block_table"
        )

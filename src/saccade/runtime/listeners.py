"""Listeners: who wants to see the operators that a call runs, and its gradients.

Dispatch and function modes, `torch.func` and tensor subclasses see the operator; where there is
none of them, eager calls go past PyTorch's dispatcher, which takes as long as a small problem does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

PLAIN = frozenset({Tensor, Parameter})  # types that nothing but PyTorch itself looks into
PLAIN_OR_ABSENT = PLAIN | {type(None)}


def wants_gradients(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a gradient or a forward-mode derivative may be asked for."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return any([tensor.requires_grad for tensor in tensors if tensor is not None])  # faster listed


def nobody_listens(tensors: Sequence[Tensor | None]) -> bool:
    """Whether no transform, mode or tensor subclass wants to see the operator."""
    return not somebody_listens() and PLAIN_OR_ABSENT.issuperset(map(type, tensors))


def somebody_listens() -> bool:
    """Whether a transform or mode wants to see every operator."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and _more_than_a_device())
    )


def _more_than_a_device() -> bool:
    """Whether a function mode is there that is not `torch.set_default_device`'s own."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())

"""State pools: checks of states that a step changes in place, and of the entries it names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.runtime.arguments import integers, values_readable


def check_own_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of which several numbers share their memory, or memory holds the negative."""
    if not torch.compiler.is_compiling() and tensor.is_neg():  # Dynamo does not follow it
        raise ValueError(
            f"{name}: got the negative of what its memory holds, as z.conj().imag is, takes a "
            "tensor that memory holds as it is, such as its clone"
        )
    if tensor.is_contiguous() or tensor.numel() == 0:
        return
    takes = "takes one whose numbers all have memory of their own"
    shape, strides = tensor.shape, tensor.stride()
    if any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True)):
        raise ValueError(f"{name}: got an expanded tensor, {takes}")
    if not _apart(shape, strides):
        raise ValueError(f"{name}: got strides {tuple(strides)} for {tuple(shape)}, {takes}")


def _apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each stride passes all that dimensions of smaller strides reach.

    So it is in all slices and permutations of memory of their own; where it is not, numbers
    overlap, but for layouts that nothing but `as_strided` makes.
    """
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        reach = 0
        for other, (length, step) in enumerate(zip(shape, strides, strict=True)):
            if step < stride or (step == stride and other > dim):
                reach += (length - 1) * step
        if size > 1 and stride <= reach:
            return False
    return True


def check_index(pool: Tensor, query: Tensor, state_index: Tensor | None) -> Tensor | None:
    """Refuse an index that is not one different entry of the pool for each batch entry."""
    if state_index is None:
        return None
    integers("state_index", state_index, 1)
    if isinstance(query, Tensor) and query.dim() and state_index.shape[0] != query.shape[0]:
        raise ValueError(
            f"state_index: got shape {tuple(state_index.shape)}, takes ({query.shape[0]},)"
        )
    if state_index.device != pool.device:
        raise ValueError(f"state_index: got {state_index.device}, takes state's {pool.device}")
    if state_index.numel() and pool.shape[0] == 0:
        raise ValueError("state_index: got entries of a state that has none, takes no entries")
    if values_readable(state_index) and state_index.numel():
        low, high = int(state_index.min()), int(state_index.max())
        if low < 0 or high >= pool.shape[0]:
            raise ValueError(f"state_index: got {low} to {high}, takes 0 to {pool.shape[0] - 1}")
        if state_index.unique().numel() != state_index.numel():
            raise ValueError("state_index: got an entry twice, takes different entries")
    return state_index.long().contiguous()

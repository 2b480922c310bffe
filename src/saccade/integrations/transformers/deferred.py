"""Deferred: tensors that are described, and written out only for those who must have them so.

Between the mask function or the cache and the attention function lies a model's own code, which
may pass tensors on, slice them, or compute with them. What saccade can use as a description goes
through it in the shape of a tensor. Code that only passes it on costs nothing; code that does
anything else gets what the description stands for, so nothing can go wrong in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Deferred(Tensor):
    """A tensor without memory; whatever is done to it is done to `written_out()`."""

    # Results of operations are plain tensors: nothing has to be turned back into this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def empty_shell(
        kind: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Any:
        """What `__new__` of a kind of deferred tensor returns."""
        return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do to the tensor that is meant what is asked.

        Raises:
            NotImplementedError: for a change in place, which the description would not show.
        """
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} changes its argument in place, and got a {cls.__name__}, which only "
                "describes a tensor: call .clone() first, and use the result"
            )
        args, kwargs = tree_map_only(
            Deferred, lambda deferred: deferred.written_out(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def written_out(self) -> Tensor:
        """The tensor that is meant."""
        raise NotImplementedError

    def __repr__(self) -> str:  # type: ignore[override]  # tensor_contents says nothing here
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

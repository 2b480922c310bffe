"""Deferred: tensors that are described, and written out only for those who must have them so.

Between the mask function or the cache and the attention function lies a model's own code, which
may pass tensors on, slice them, or compute with them. What saccade can use as a description goes
through it in the shape of a tensor. Code that only passes it on costs nothing; code that does
anything else gets what the description stands for, so nothing can go wrong in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import saccade


class Deferred(Tensor):
    """A tensor without memory; whatever is done to it is done to `written_out()`."""

    # Results of operations are plain tensors: nothing has to be turned back into this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def empty_shell(
        kind: type,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
    ) -> Any:
        """What `__new__` of a kind of deferred tensor returns; contiguous without strides."""
        return Tensor._make_wrapper_subclass(
            kind, tuple(shape), strides=strides, dtype=dtype, device=device
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do to the tensor that is meant what is asked.

        Raises:
            NotImplementedError: for a change in place, which the description would not show.
        """
        if changes_any(func, arguments_of(func, args, kwargs), Deferred):
            raise NotImplementedError(
                f"{func} changes its argument in place, and got a {cls.__name__}, which others "
                "rely on, too: call .clone() first, and use the result"
            )
        args, kwargs = tree_map_only(Deferred, Deferred.as_shown, (args, kwargs or {}))
        return func(*args, **kwargs)

    def as_shown(self) -> Tensor:
        """What is meant, with the strides that the shell shows.

        PyTorch has looked at them: of the shell it makes views that need them.
        """
        written = self.written_out()
        return written if written.stride() == self.stride() else written.contiguous()

    def written_out(self) -> Tensor:
        """The tensor that is meant."""
        raise NotImplementedError

    def __repr__(self) -> str:  # type: ignore[override]  # tensor_contents says nothing here
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def arguments_of(func: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    """What an operator is called with, by the names that its schema gives."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | (kwargs or {})


def changes_any(func: Any, given: dict[str, Any], kind: type) -> bool:
    """Whether an operator changes, in place, something of a kind."""
    return func._schema.is_mutable and any(
        argument.is_write and isinstance(given.get(argument.name), kind)
        for argument in func._schema.arguments
    )


@dataclass
class PagedStep:
    """New tokens of every sequence, which every layer writes at the same slots."""

    first: int  # position of the first new token
    count: int
    slots: Tensor
    table: Tensor
    lens: Tensor


class PagedRows(Deferred):
    """The keys or the values of one layer, [batch, kv_heads, length, dim], in their pages.

    Args:
        pages: [num_pages, kv_heads, page_size, dim]. scales: of eight-bit pages, else None.
        step: whose table and lengths hold.
        dtype: of the keys that were written.
    """

    pages: Tensor
    scales: Tensor | None
    step: PagedStep

    @staticmethod
    def __new__(
        cls, pages: Tensor, scales: Tensor | None, step: PagedStep, dtype: Any
    ) -> PagedRows:
        """Rows that are gathered when somebody computes with them."""
        shape = (step.table.shape[0], pages.shape[1], step.first + step.count, pages.shape[3])
        made = Deferred.empty_shell(cls, shape, dtype, pages.device)
        made.pages, made.scales, made.step = pages, scales, step
        return made

    def attended(self, query: Tensor, value: PagedRows, **options: Any) -> Tensor:
        """Attention of [batch, heads, length, dim] to these keys and their values."""
        if value.step is not self.step:
            raise ValueError("value: got pages of another step than the keys', takes the same")
        return saccade.attention_paged(
            query, self.pages, value.pages, self.step.table, self.step.lens,
            key_scales=self.scales, value_scales=value.scales, **options,
        )  # fmt: skip

    def written_out(self) -> Tensor:
        """The rows, gathered."""
        pages = self.step.table.long()
        rows = self.pages[pages].transpose(1, 2).flatten(2, 3).to(self.dtype)
        if self.scales is not None:
            rows = rows * self.scales[pages].transpose(1, 2).flatten(2, 3).unsqueeze(3)
        return rows[:, :, : self.shape[2]].to(self.dtype)


def paged_rows(pages: Any, step: PagedStep, dtype: Any) -> tuple[PagedRows, PagedRows]:
    """A layer's keys and values, of the dtype that was written."""
    return (
        PagedRows(pages.key_pages, pages.key_scales, step, dtype),
        PagedRows(pages.value_pages, pages.value_scales, step, dtype),
    )

"""Deferred: tensors that are described, and written out only where an operation needs numbers.

Between the mask function or the cache and the attention function lies a model's own code, which
may pass tensors on, slice them, or compute with them. What saccade can use as a description goes
through it in the shape of a tensor. Code that only passes it on costs nothing; any other code gets
the tensor that is described, so that nothing goes wrong in silence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only


class Deferred(Tensor):
    """A tensor without memory; whatever is done to it is done to `written_out()`."""

    # Results of operations are plain tensors: nothing has to be turned back into this class.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

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
        """Run the operation on the tensor that is described.

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


def changes_any(func: Any, arguments: dict[str, Any], of: type) -> bool:
    """Whether an operator changes an argument of a class in place."""
    return func._schema.is_mutable and any(
        argument.is_write and isinstance(arguments.get(argument.name), of)
        for argument in func._schema.arguments
    )


# ---- masks ---------------------------------------------------------------------------------------
# Masks in the shape of a bool tensor, which cannot be taken for numbers.
#
# transformers' own code asks each attention for a mask in a form of its choice, and passes the
# answer on. Models that never ask which attention is chosen add the answer to their scores: a bool
# mask then adds 1 where a key is visible, hides nothing, and trains a model to look ahead, with no
# error. So a mask may be reshaped, sliced, negated, combined with other masks, or choose between
# numbers (`torch.where`, `masked_fill` of what is hidden, an argument of SDPA), and stays a mask;
# anything else raises.

aten: Any = torch.ops.aten
# What gives another mask, where it gives bools from bools.
STAYS_A_MASK = {
    aten.alias, aten.detach, aten.clone, aten._to_copy, aten.lift_fresh, aten.slice, aten.select,
    aten.view, aten._unsafe_view, aten._reshape_alias, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.permute, aten.transpose, aten.t, aten.index, aten.index_select, aten.gather, aten.cat,
    aten.stack, aten.repeat, aten.split, aten.split_with_sizes, aten.unbind, aten.flip, aten.roll,
    aten.constant_pad_nd, aten.where, aten.masked_fill, aten.scatter, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not, aten.logical_and, aten.logical_or,
    aten.logical_xor, aten.logical_not, aten.any, aten.all,
}  # fmt: skip
# What chooses by a mask, and in which argument it takes one.
CHOOSES_BY = {
    aten.where: {"condition"}, aten.masked_fill: {"mask"}, aten.masked_fill_: {"mask"},
    aten.masked_select: {"mask"}, aten.index: {"indices"}, aten.index_put: {"indices"},
    aten.index_put_: {"indices"}, aten._index_put_impl_: {"indices"},
    aten._fused_sdp_choice: {"attn_mask"}, aten.scaled_dot_product_attention: {"attn_mask"},
    aten._scaled_dot_product_attention_math: {"attn_mask"},
    aten._scaled_dot_product_flash_attention_for_cpu: {"attn_mask"},
    aten._scaled_dot_product_efficient_attention: {"attn_bias"},
    aten._scaled_dot_product_cudnn_attention: {"attn_bias"},
}  # fmt: skip
PADS = aten.constant_pad_nd
MADE_OF = ("self", "other", "tensors", "value", "values", "src")  # in operators' arguments
FILLS = {aten.masked_fill, aten.masked_fill_}  # by a mask of what is hidden
LOOKS_ONLY = {aten.equal, aten._local_scalar_dense, aten.is_nonzero}


class MaskTensor(Deferred):
    """A bool tensor, True where a key is visible, that is no number."""

    owned = False
    says_visible = True  # or, turned around, what is hidden

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what can be done to a mask.

        Raises:
            ValueError: for what takes it for numbers, naming the model. (Of a TypeError Python's
                operators would make another message, and an answer of `==`.)
            NotImplementedError: for a change in place of memory that other tensors may share.
        """
        arguments = arguments_of(func, args, kwargs)
        masks = {name: found for name, value in arguments.items() if (found := masks_in(value))}
        packet = func.overloadpacket
        chooses = set(masks) <= CHOOSES_BY.get(packet, set())
        if packet in FILLS and chooses and arguments["mask"].says_visible:
            raise ValueError(complaint(f"torch.ops.{func} of what it shows"))
        if packet in LOOKS_ONLY or chooses:
            return super().__torch_dispatch__(func, types, args, kwargs)
        sound = _all_bool(packet, arguments)
        if changes_any(func, arguments, MaskTensor):
            if not (sound and arguments["self"].owned):
                return super().__torch_dispatch__(func, types, args, kwargs)  # which refuses
            super().__torch_dispatch__(func, types, (args[0].written, *args[1:]), kwargs)
            return args[0]
        if packet in STAYS_A_MASK and sound:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            return tree_map_only(Tensor, functools.partial(_made_of, func, masks), result)
        # In inference mode operators come here whole that are made of others (reshape, to, &).
        made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        raise ValueError(complaint(f"torch.ops.{func}"))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write truths: torch makes numbers of them (2.15), or of all numbers truths (before it).

        Raises:
            ValueError: for numbers that are no truths; -inf would become True.
        """
        if isinstance(value, int | float):
            if isinstance(value, float) or value not in (0, 1):
                raise ValueError(complaint(f"an entry of it that is set to {value}"))
            value = torch.tensor(bool(value))
        super().__setitem__(index, value)


class WrittenMask(MaskTensor):
    """A mask that is written out.

    Args:
        written: the bool tensor.
        owned: whether no other tensor shares its memory, so that it may be changed in place.
        says_visible: whether True is visible, and not hidden.
    """

    written: Tensor

    @staticmethod
    def __new__(cls, written: Tensor, owned: bool, says_visible: bool) -> WrittenMask:
        """A written mask, guarded."""
        strides = written.stride()
        made = Deferred.empty_shell(cls, written.shape, torch.bool, written.device, strides)
        made.written, made.owned, made.says_visible = written, owned, says_visible
        return made

    def written_out(self) -> Tensor:
        """The bool tensor."""
        return self.written


def _made_of(func: Any, masks: dict[str, list[MaskTensor]], written: Tensor) -> WrittenMask:
    """What an operator made of masks, as a mask."""
    sources = [each for found in masks.values() for each in found]
    is_view = any(returned.alias_info is not None for returned in func._schema.returns)
    owned = not is_view or all(each.owned for each in sources)
    says_visible = any(each.says_visible for each in sources)
    turned = func.overloadpacket in (aten.bitwise_not, aten.logical_not)
    return WrittenMask(written, owned, says_visible != turned)


def masks_in(value: Any) -> list[MaskTensor]:
    """The masks that an argument is, or lists."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, MaskTensor)]


def _all_bool(packet: Any, arguments: dict[str, Any]) -> bool:
    """Whether all that an operator's result is made of is bool: -inf would turn into True."""
    if arguments.get("dtype") not in (None, torch.bool):
        return False
    for value in tree_flatten([arguments.get(name) for name in MADE_OF])[0]:
        if isinstance(value, Tensor):
            sound = value.dtype == torch.bool
        else:  # padding turns False into 0 on the way here
            sound = isinstance(value, bool | None) or (packet is PADS and value == 0)
        if not sound:
            return False
    return True


def complaint(found: str) -> str:
    """The message for a model that computes with a mask: which module does, what to use instead."""
    layer, model = _who()
    return (
        f"attn_implementation: got 'saccade' for {model}, whose {layer} computes with an attention "
        f"mask as if it were numbers ({found}), and not through transformers' AttentionInterface; "
        "takes 'eager', or 'sdpa' where the model has it"
    )


def _who() -> tuple[str, str]:
    """The innermost and the outermost module that are at work."""
    found: list[nn.Module] = []
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.append(module)
        frame = frame.f_back
    if not found:
        return "code", "no model"
    return type(found[0]).__name__, type(found[-1]).__name__

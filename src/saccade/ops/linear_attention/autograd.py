"""Autograd: the ways into the operators of linear attention; see `ops/attention/autograd.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.ops.attention.autograd import enter, mapped
from saccade.ops.attention.custom_op import not_implemented
from saccade.ops.linear_attention.custom_op import (
    NUM_INPUTS,
    gradients_of,
    linear_backward_body,
    linear_backward_op,
    linear_body,
    linear_op,
    save_for_backward,
)
from saccade.runtime.call_cache import nobody_listens, wants_gradients
from saccade.runtime.linear_spec import LinearInputs, LinearResults


def attention(inputs: LinearInputs, plain: tuple[Any, ...]) -> LinearResults:
    """Results by the chosen implementation, through the door that fits."""
    if torch.compiler.is_compiling():
        return LinearResults(*linear_op(*inputs, *plain))
    if nobody_listens(inputs) and not wants_gradients(inputs):
        return LinearResults(*linear_body(*inputs, *plain))
    return LinearResults(*enter(_LinearAttention, plain, *inputs))


class _LinearAttention(torch.autograd.Function):
    """The operator with flat arguments: (plain values, *inputs)."""

    @staticmethod
    def forward(plain: tuple[Any, ...], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        if nobody_listens(inputs):
            return linear_body(*inputs, *plain)
        with torch._C._AutoDispatchBelowAutograd():  # gradients are this class's own
            return linear_op(*inputs, *plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plain, *tensors = inputs
        save_for_backward(ctx, (*tensors, *plain), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *gradients_of(ctx, _backward, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise not_implemented(ctx.plain[-1], "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        plain, *tensors = arguments
        return mapped(
            info.batch_size, in_dims[1:], tensors, lambda t: _LinearAttention.apply(plain, *t)
        )


NUM_TENSORS = 5 + NUM_INPUTS  # of the backward operator


def _backward(*arguments: Any) -> Any:
    """The backward pass, straight to the body unless somebody listens or will differentiate it."""
    tensors, plain = arguments[:NUM_TENSORS], arguments[NUM_TENSORS:]
    if not torch.is_grad_enabled() and nobody_listens(tensors):
        return linear_backward_body(*arguments)
    return enter(_LinearAttentionBackward, plain, *tensors)


class _LinearAttentionBackward(torch.autograd.Function):
    """The backward operator with flat arguments: (plain values, *tensors)."""

    @staticmethod
    def forward(plain: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(linear_backward_op(*tensors, *plain))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.implementation = inputs[0][-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise not_implemented(ctx.implementation, "double backward")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise not_implemented(ctx.implementation, "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        plain, *tensors = arguments
        return mapped(
            info.batch_size,
            in_dims[1:],
            tensors,
            lambda t: _LinearAttentionBackward.apply(plain, *t),
        )


def _linear_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    inputs, plain = arguments[:NUM_INPUTS], arguments[NUM_INPUTS:]
    dims = in_dims[:NUM_INPUTS]
    return mapped(info.batch_size, dims, inputs, lambda t: linear_op(*t, *plain))


def _linear_backward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    tensors, plain = arguments[:NUM_TENSORS], arguments[NUM_TENSORS:]
    dims = in_dims[:NUM_TENSORS]
    stacked, out_dims = mapped(
        info.batch_size, dims, tensors, lambda t: linear_backward_op(*t, *plain)
    )
    return list(stacked), list(out_dims)


torch.library.register_vmap("saccade::linear_attention", _linear_vmap)
torch.library.register_vmap("saccade::linear_attention_backward", _linear_backward_vmap)


def _step_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    raise NotImplementedError(
        "linear_attention_step: got tensors under vmap, takes plain ones: a step changes states "
        "where they lie; give all sequences in one batch, or call linear_attention with "
        "initial_state and return_state"
    )


torch.library.register_vmap("saccade::linear_attention_step", _step_vmap)

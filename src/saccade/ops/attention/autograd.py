"""Autograd: the ways into the operators, one for each kind of caller.

`torch.compile`, and whoever calls it by name, meets the operator itself with its registered
autograd. Eager calls and `torch.func` come through an `autograd.Function` around it: registered
autograd takes longer to enter, and torch.func's transforms do not reach it. Where
nobody listens to operators, eager calls go straight to the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade.ops.attention import reference
from saccade.ops.attention.custom_op import (
    NO_CHOICE,
    NUM_INPUTS,
    attention_backward_op,
    attention_op,
    call_backward,
    config_of,
    flatten,
    gradients_of,
    keep_for_backward,
    not_implemented,
    run_backward,
    split,
    variant_of,
)
from saccade.runtime.backend_modules import body_of
from saccade.runtime.call_cache import Recalled, nobody_listens, wants_gradients
from saccade.runtime.spec import Inputs, Variant
from saccade.runtime.validation import without_autocast


def attention(
    inputs: Inputs, found: Recalled, deterministic: bool, *, alone: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and lse by the chosen implementation, through the door that fits.

    A call that is recalled comes the same way as the first of its kind: whoever looks on
    (checkpoints, hooks, modes, profilers) sees no difference.

    alone: whether it is known already that nobody listens, as of every call that is recalled.
    """
    if found.chosen == "reference":  # plain PyTorch, with PyTorch's gradients
        with without_autocast(inputs.query.device):
            return reference.attention(inputs, found.variant)
    tensors = (*inputs, *found.tables) if found.tables else inputs
    tracing = not alone and torch.compiler.is_compiling()
    alone = alone or (not tracing and nobody_listens(tensors))
    if alone and not wants_gradients(tensors):
        return _straight(inputs, found, found.variant)
    plain = _plain(found, deterministic or torch.are_deterministic_algorithms_enabled())
    if tracing:
        return attention_op(*inputs, list(found.tables), *plain)
    apply = _apply_at_once if alone else _Attention.apply
    return apply((found, plain, alone), *tensors)


def _straight(inputs: Inputs, found: Recalled, variant: Variant) -> tuple[Tensor, Tensor]:
    """The body itself, by the forward pass that was prepared for such calls."""
    if found.forward is None:
        config = found.config or NO_CHOICE
        found.forward = body_of(found.chosen).prepared(inputs, variant, config)
    return found.forward(inputs, variant)


def _plain(found: Recalled, deterministic: bool) -> tuple[Any, ...]:
    """The plain arguments of the operator."""
    plain = found.plain.get(deterministic)
    if plain is None:
        _, plain = flatten(found.variant, found.config, deterministic, found.chosen)
        found.plain[deterministic] = plain
    return plain


class _Attention(torch.autograd.Function):
    """The operator with flat arguments: (a call, *inputs, *tables).

    The call is what was found, the operator's plain values, and whether nobody is known to listen.
    """

    @staticmethod
    def forward(
        call: tuple[Recalled, tuple[Any, ...], bool], *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        found, plain, alone = call
        inputs, tables = tensors[:NUM_INPUTS], tensors[NUM_INPUTS:]
        if alone or nobody_listens(tensors):
            variant = variant_of(tables, plain) if tables else found.variant
            return _straight(Inputs(*inputs), found, variant)
        with torch._C._AutoDispatchBelowAutograd():  # gradients are this class's own
            return attention_op(*inputs, list(tables), *plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        (found, plain, _), *tensors = inputs
        tables = tensors[NUM_INPUTS:]
        keep_for_backward(ctx, tensors[:NUM_INPUTS], tables, plain, output)
        # A variant that holds tables would keep them from hooks that put saved tensors elsewhere.
        ctx.variant = None if tables else found.variant

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *gradients_of(ctx, partial(_backward, ctx.variant), *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise not_implemented(ctx.plain[8], "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        call, *tensors = arguments
        return mapped(info.batch_size, in_dims[1:], tensors, lambda t: _Attention.apply(call, *t))


def _backward(
    variant: Variant | None, wanted: list[int], plain: tuple[Any, ...], *tensors: Any
) -> Sequence[Tensor]:
    """The backward pass, straight to the body unless somebody listens or will differentiate it."""
    if torch.is_grad_enabled() or not nobody_listens(tensors):
        return enter(_AttentionBackward, wanted, plain, *tensors)
    inputs = Inputs(*tensors[4 : 4 + NUM_INPUTS])
    variant = variant or variant_of(tensors[4 + NUM_INPUTS :], plain)
    return run_backward(variant, config_of(plain), wanted, plain, tensors[:4], inputs)


class _AttentionBackward(torch.autograd.Function):
    """The backward operator with flat arguments: (wanted tables, plain values, *tensors)."""

    @staticmethod
    def forward(
        wanted: list[int], plain: tuple[Any, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(call_backward(wanted, plain, *tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.implementation = inputs[1][8]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise not_implemented(ctx.implementation, "double backward")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise not_implemented(ctx.implementation, "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        wanted, plain, *tensors = arguments

        def call(parts: Sequence[Any]) -> Any:
            return _AttentionBackward.apply(wanted, plain, *parts)

        return mapped(info.batch_size, in_dims[2:], tensors, call)


def enter(door: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`door.apply`, without its look at the signature where no transform needs it."""
    if torch._C._are_functorch_transforms_active():
        return door.apply(*arguments)
    return past_the_look(door)(*arguments)


def past_the_look(door: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`door.apply` as PyTorch's engine has it."""
    above: Any = super(torch.autograd.Function, door)
    return above.apply


_apply_at_once = past_the_look(_Attention)


def mapped(size: int, in_dims: Sequence[Any], tensors: Sequence[Any], call: Any) -> Any:
    """vmap by a loop over the mapped dimension: exact whatever a mask makes of its batch index."""
    results = []
    for index in range(size):
        results.append(
            call(
                [
                    tensor if dim is None or tensor is None else tensor.select(dim, index)
                    for tensor, dim in zip(tensors, in_dims, strict=True)
                ]
            )
        )
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _attention_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    inputs, tables, plain = split(arguments)
    dims = (*in_dims[:NUM_INPUTS], *table_dims(in_dims[NUM_INPUTS], tables))
    return mapped(
        info.batch_size,
        dims,
        (*inputs, *tables),
        lambda t: attention_op(*t[:NUM_INPUTS], list(t[NUM_INPUTS:]), *plain),
    )


def _attention_backward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    wanted, (inputs, tables, plain) = arguments[4], split(arguments[5:])
    dims = (*in_dims[:4], *in_dims[5 : 5 + NUM_INPUTS])
    dims += tuple(table_dims(in_dims[5 + NUM_INPUTS], tables))
    stacked, out_dims = mapped(
        info.batch_size,
        dims,
        (*arguments[:4], *inputs, *tables),
        lambda t: attention_backward_op(
            *t[:4], wanted, *t[4 : 4 + NUM_INPUTS], list(t[4 + NUM_INPUTS :]), *plain
        ),
    )
    return list(stacked), list(out_dims)


def table_dims(dims: Any, tables: Sequence[Tensor]) -> list[Any]:
    """The mapped dimension of each table of an operator."""
    return list(dims) if dims is not None else [None] * len(tables)


torch.library.register_vmap("saccade::attention", _attention_vmap)
torch.library.register_vmap("saccade::attention_backward", _attention_backward_vmap)

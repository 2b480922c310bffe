"""Doors: the ways into the operators, one for each kind of caller.

`torch.compile`, and whoever calls it by name, meets the operator itself with its registered
autograd. Eager calls and `torch.func` come through an `autograd.Function` around it: registered
autograd takes longer to enter, and torch.func's transforms do not reach it. Where
nobody listens to operators, eager calls go straight to the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saccade.autocast import without_autocast
from saccade.bodies import body_of
from saccade.operators import (
    NUM_INPUTS,
    attention_backward_body,
    attention_backward_op,
    attention_body,
    attention_op,
    call_backward,
    flatten,
    gradients_of,
    keep_for_backward,
    not_implemented,
    split,
)
from saccade.problem import Config, Inputs
from saccade.recall import PLAIN_OR_ABSENT, Recalled
from saccade.reference import attention as reference

NO_CHOICE = Config()  # of tiles: the implementation's own


def attention(inputs: Inputs, found: Recalled, deterministic: bool) -> tuple[Tensor, Tensor]:
    """Output and lse by the chosen implementation, through the door that fits."""
    if found.chosen == "reference":  # plain PyTorch, with PyTorch's gradients
        with without_autocast(inputs.query.device):
            return reference.attention(inputs, found.variant)
    tracing = torch.compiler.is_compiling()
    tensors = (*inputs, *found.variant.score_captured.tensors)
    if not tracing and nobody_listens(tensors) and not wants_gradients(tensors):
        return _straight(inputs, found)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    plain = _plain(found, deterministic)
    if tracing:
        return attention_op(*inputs, found.tables, *plain)
    return enter(_Attention, plain, *inputs, *found.tables)


def attention_again(
    tensors: tuple[Tensor, ...], found: Recalled, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """The same for a call that is recalled: eager, and with no tensors but query, key and value,
    and the offsets of packed sequences, all of them plain.

    A small problem takes less time on a GPU than its way there, so this one has no detours.
    """
    if somebody_listens() or forward_ad._current_level >= 0 or found.chosen == "reference":
        return attention(_inputs_again(tensors), found, deterministic)
    query, key, value = tensors[:3]
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return _enter_again(found, deterministic, *tensors)
    return _straight(_inputs_again(tensors), found)


def _inputs_again(tensors: Sequence[Tensor]) -> Inputs:
    """The tensors of a call that is recalled, in their places."""
    query, key, value, *offsets = tensors
    return Inputs(query, key, value, None, None, *offsets)


def _straight(inputs: Inputs, found: Recalled) -> tuple[Tensor, Tensor]:
    """The body itself, by the forward pass that was prepared for such calls."""
    if found.forward is None:
        config = found.config or NO_CHOICE
        found.forward = body_of(found.chosen).prepared(inputs, found.variant, config)
    return found.forward(inputs, found.variant)


def _plain(found: Recalled, deterministic: bool) -> tuple[Any, ...]:
    """The plain arguments of the operator; its tables then lie in `found`."""
    if deterministic not in found.plain:
        flat = flatten(found.variant, found.config, deterministic, found.chosen)
        found.tables, found.plain[deterministic] = flat
    return found.plain[deterministic]


def wants_gradients(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a gradient or a forward-mode derivative may be asked for."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return any([tensor.requires_grad for tensor in tensors if tensor is not None])  # faster listed


def nobody_listens(tensors: Sequence[Tensor | None]) -> bool:
    """Whether no transform, mode or tensor subclass wants to see the operator: then the body may
    be called past PyTorch's dispatcher, which takes as long as a small problem does.
    """
    return not somebody_listens() and PLAIN_OR_ABSENT.issuperset(map(type, tensors))


def somebody_listens() -> bool:
    """Whether a transform or mode wants to see every operator."""
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


class _AttentionAgain(torch.autograd.Function):
    """The body itself with gradients: of calls that no transform, mode or subclass sees, and that
    have no tensors but three and offsets.
    """

    @staticmethod
    def forward(
        ctx: Any, found: Recalled, deterministic: bool, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        results = _straight(_inputs_again(tensors), found)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*results, *tensors)
        ctx.found = found
        ctx.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output, grad_lse = grads
        output, lse, *tensors = ctx.saved_tensors
        none = (None,) * (len(tensors) - 3)  # for offsets
        if grad_output is None and grad_lse is None:
            return (None,) * 5 + none
        found, deterministic, inputs = ctx.found, ctx.deterministic, _inputs_again(tensors)
        results = (grad_output, grad_lse, output, lse)
        if torch.is_grad_enabled() or not nobody_listens((*results, *tensors)):
            gradients = _backward([], _plain(found, deterministic), *results, *inputs)
            return (None, None, *gradients[:3], *none)
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        gradients = body_of(found.chosen).backward(
            inputs, found.variant, found.config or NO_CHOICE,
            output, lse, grad_output, grad_lse, (), deterministic,
        )  # fmt: skip
        return (None, None, *gradients[:3], *none)


class _Attention(torch.autograd.Function):
    """The operator with flat arguments: (plain values, *inputs, *tables)."""

    @staticmethod
    def forward(plain: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        tables = list(tensors[NUM_INPUTS:])
        if nobody_listens(tensors):
            return attention_body(*tensors[:NUM_INPUTS], tables, *plain)
        with torch._C._AutoDispatchBelowAutograd():  # gradients are this class's own
            return attention_op(*tensors[:NUM_INPUTS], tables, *plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        plain, *tensors = inputs
        keep_for_backward(ctx, tensors[:NUM_INPUTS], tensors[NUM_INPUTS:], plain, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *gradients_of(ctx, _backward, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise not_implemented(ctx.plain[8], "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        plain, *tensors = arguments
        return mapped(info.batch_size, in_dims[1:], tensors, lambda t: _Attention.apply(plain, *t))


def _backward(
    wanted: list[int], plain: tuple[Any, ...], *tensors: Tensor | None
) -> Sequence[Tensor]:
    """The backward pass, straight to the body unless somebody listens or will differentiate it."""
    if not torch.is_grad_enabled() and nobody_listens(tensors):
        return call_backward(wanted, plain, *tensors, through=attention_backward_body)
    return enter(_AttentionBackward, wanted, plain, *tensors)


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


_enter_again = past_the_look(_AttentionAgain)


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
    dims = (*in_dims[:NUM_INPUTS], *_table_dims(in_dims[NUM_INPUTS], tables))
    return mapped(
        info.batch_size,
        dims,
        (*inputs, *tables),
        lambda t: attention_op(*t[:NUM_INPUTS], list(t[NUM_INPUTS:]), *plain),
    )


def _attention_backward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    wanted, (inputs, tables, plain) = arguments[4], split(arguments[5:])
    dims = (*in_dims[:4], *in_dims[5 : 5 + NUM_INPUTS])
    dims += tuple(_table_dims(in_dims[5 + NUM_INPUTS], tables))
    stacked, out_dims = mapped(
        info.batch_size,
        dims,
        (*arguments[:4], *inputs, *tables),
        lambda t: attention_backward_op(
            *t[:4], wanted, *t[4 : 4 + NUM_INPUTS], list(t[4 + NUM_INPUTS :]), *plain
        ),
    )
    return list(stacked), list(out_dims)


def _table_dims(dims: Any, tables: Sequence[Tensor]) -> list[Any]:
    return list(dims) if dims is not None else [None] * len(tables)


torch.library.register_vmap("saccade::attention", _attention_vmap)
torch.library.register_vmap("saccade::attention_backward", _attention_backward_vmap)

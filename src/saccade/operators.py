"""Operators: attention and its gradient as PyTorch knows them (`torch.library`).

One body does the work and two doors lead to it: the operator itself, with autograd registered,
for eager calls, tracing and `torch.compile`; and an `autograd.Function` for `torch.func`, whose
transforms do not reach registered operators. Schemas hold tensors and plain values only; a mask
or score travels as its key beside what it captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saccade import expressions
from saccade.cpu import attention as cpu
from saccade.expressions import Captured
from saccade.problem import (
    Config,
    Gradients,
    Inputs,
    Variant,
    empty_gradients,
    empty_results,
)

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[] tables"
)
PLAIN_VALUES = (
    "SymInt[] ints, float[] floats, str mask, str score, float scale, float dropout_p, "
    "int[] config, bool deterministic, str implementation"
)
NUM_INPUTS = len(Inputs._fields)

# The implementations that run inside the operators; the reference is plain PyTorch outside them.
BODIES = {"cpu": cpu}


# ---- plain values there and back --------------------------------------------------------------


def _flatten(
    variant: Variant, config: Config | None, deterministic: bool, implementation: str
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """A variant as an operator's plain arguments: tables, then PLAIN_VALUES."""
    captured = variant.mask_captured.joined(variant.score_captured)
    plain = (
        list(captured.ints),
        list(captured.floats),
        variant.mask,
        variant.score,
        variant.scale,
        variant.dropout_p,
        [] if config is None else [config.query_tile, config.kv_tile],
        deterministic,
        implementation,
    )
    return list(captured.tensors), plain


def _variant(tables: Sequence[Tensor], plain: Sequence[Any]) -> Variant:
    """The inverse of `_flatten`, as far as the variant goes."""
    ints, floats, mask, score, scale, dropout_p = plain[:6]
    of_mask = "".join(k for leaf in expressions.leaves(expressions.parse(mask)) for k, _ in leaf.slots)
    t, i, f = (of_mask.count(kind) for kind in "tif")
    return Variant(
        mask,
        score,
        Captured(tables[:t], ints[:i], floats[:f]),
        Captured(tables[t:], ints[i:], floats[f:]),
        scale,
        dropout_p,
    )


def _config(plain: Sequence[Any]) -> Config:
    return Config(*plain[6])


def _first_score_table(plain: Sequence[Any]) -> int:
    """How many of the tables belong to the mask."""
    leaves = expressions.leaves(expressions.parse(plain[2]))
    return sum(kind == "t" for leaf in leaves for kind, _ in leaf.slots)


# ---- forward --------------------------------------------------------------------------------


@torch.library.custom_op(
    "saccade::attention",
    mutates_args=(),
    schema=f"({TENSORS}, {PLAIN_VALUES}) -> (Tensor, Tensor)",
)
def attention_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the named implementation; see `saccade.attention`."""
    inputs, tables, plain = _split(arguments)
    body = BODIES[plain[8]]
    return body.forward(inputs, _variant(tables, plain), _config(plain))


@attention_op.register_fake
def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, _, _ = _split(arguments)
    return empty_results(inputs)


def _split(arguments: Sequence[Any]) -> tuple[Inputs, Sequence[Tensor], Sequence[Any]]:
    """An operator's arguments as inputs, tables and plain values."""
    return Inputs(*arguments[:NUM_INPUTS]), arguments[NUM_INPUTS], arguments[NUM_INPUTS + 1 :]


# ---- backward -------------------------------------------------------------------------------


@torch.library.custom_op(
    "saccade::attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor? grad_output, Tensor? grad_lse, Tensor output, Tensor lse, int[] wanted_tables, "
        f"{TENSORS}, {PLAIN_VALUES}) -> Tensor[]"
    ),
)
def attention_backward_op(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    wanted_tables: list[int],
    *arguments: Any,
) -> list[Tensor]:
    """Gradients of query, key and value, of sinks where there are any, of the wanted tables."""
    inputs, tables, plain = _split(arguments)
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    body, first = BODIES[plain[8]], _first_score_table(plain)
    gradients = body.backward(
        inputs,
        _variant(tables, plain),
        _config(plain),
        output,
        lse,
        grad_output,
        grad_lse,
        [place - first for place in wanted_tables],
    )
    return _listed(gradients, [place - first for place in wanted_tables])


def _listed(gradients: Gradients, wanted: Sequence[int]) -> list[Tensor]:
    listed = [gradients.query, gradients.key, gradients.value]
    if gradients.sinks is not None:
        listed.append(gradients.sinks)
    return listed + [gradients.tables[place] for place in wanted]


@attention_backward_op.register_fake
def _attention_backward_fake(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    wanted_tables: list[int],
    *arguments: Any,
) -> list[Tensor]:
    inputs, tables, _ = _split(arguments)
    gradients = empty_gradients(inputs)
    wanted = {place: torch.empty_like(tables[place]) for place in wanted_tables}
    return _listed(gradients._replace(tables=wanted), wanted_tables)


# ---- autograd --------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call, tables, plain = _split(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call, *output, *tables)
    ctx.plain = plain
    first = _first_score_table(plain)
    ctx.wanted = [
        place
        for place, table in enumerate(tables)
        if place >= first and table.is_floating_point() and table.requires_grad
    ]


def _gradients(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> list[Any]:
    """Gradients of the inputs (None where there can be none), then those of every table."""
    everything = ctx.saved_tensors  # read once: checkpointing recomputes them for one reading
    *saved, output, lse = everything[: NUM_INPUTS + 2]
    tables = everything[NUM_INPUTS + 2 :]
    if grad_output is None and grad_lse is None:
        return [None] * (NUM_INPUTS + len(tables))
    gradients = _call_backward(
        ctx.wanted, ctx.plain, grad_output, grad_lse, output, lse, *saved, *tables
    )
    of_inputs = list(gradients[:3]) + [None] * (NUM_INPUTS - 3)
    rest = gradients[3:]
    if saved[3] is not None:
        of_inputs[3], rest = rest[0], rest[1:]
    of_tables: list[Tensor | None] = [None] * len(tables)
    for place, gradient in zip(ctx.wanted, rest, strict=True):
        of_tables[place] = gradient
    return of_inputs + of_tables


def _backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    gradients = _gradients(ctx, grad_output, grad_lse)
    # The registered form wants an empty list, not None, for every list argument that was empty.
    of_plain = [[] if value == [] else None for value in ctx.plain]
    return (*gradients[:NUM_INPUTS], gradients[NUM_INPUTS:], *of_plain)


attention_op.register_autograd(_backward, setup_context=_setup_context)

def _not_implemented(implementation: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"saccade: {what} is not implemented by {implementation!r}; pass "
        'implementation="reference", which is plain PyTorch and differentiates to any order'
    )


def _second_order_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.implementation = inputs[-1]


def _second_order(ctx: Any, *grads: Any) -> Any:
    raise _not_implemented(ctx.implementation, "double backward")


attention_backward_op.register_autograd(_second_order, setup_context=_second_order_setup)


# ---- the second door: torch.func --------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The operator for torch.func: flat arguments, (plain values, *inputs, *tables)."""

    @staticmethod
    def forward(plain: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return attention_op(*tensors[:NUM_INPUTS], list(tensors[NUM_INPUTS:]), *plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        plain, *tensors = inputs
        flat = (*tensors[:NUM_INPUTS], tensors[NUM_INPUTS:], *plain)
        _setup_context(ctx, flat, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *_gradients(ctx, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _not_implemented(ctx.plain[8], "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], plain: tuple[Any, ...], *tensors: Any) -> Any:
        return _mapped(info.batch_size, in_dims[1:], tensors, lambda t: _Attention.apply(plain, *t))


class _AttentionBackward(torch.autograd.Function):
    """The backward operator for torch.func: (wanted tables, plain values, *tensors)."""

    @staticmethod
    def forward(
        wanted: list[int], plain: tuple[Any, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        split = 4 + NUM_INPUTS
        return tuple(
            attention_backward_op(
                *tensors[:4], wanted, *tensors[4:split], list(tensors[split:]), *plain
            )
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.implementation = inputs[1][8]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise _not_implemented(ctx.implementation, "double backward")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _not_implemented(ctx.implementation, "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], wanted: Any, plain: Any, *tensors: Any) -> Any:
        def call(parts: Sequence[Any]) -> Any:
            return _AttentionBackward.apply(wanted, plain, *parts)

        return _mapped(info.batch_size, in_dims[2:], tensors, call)


def _transforms_are_active() -> bool:
    """Whether torch.func or dual numbers are at work, which registered autograd does not serve."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _call_backward(
    wanted: list[int], plain: tuple[Any, ...], *tensors: Tensor | None
) -> Sequence[Tensor]:
    """The backward operator, through the door that the transforms around the call need."""
    if _transforms_are_active():
        return _AttentionBackward.apply(wanted, plain, *tensors)  # type: ignore[no-any-return]
    return _AttentionBackward.forward(wanted, plain, *tensors)


def _mapped(size: int, in_dims: Sequence[Any], tensors: Sequence[Any], call: Any) -> Any:
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


@torch.library.register_vmap("saccade::attention")
def _attention_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    inputs, tables, plain = _split(arguments)
    dims = (*in_dims[:NUM_INPUTS], *_table_dims(in_dims[NUM_INPUTS], tables))
    return _mapped(
        info.batch_size,
        dims,
        (*inputs, *tables),
        lambda t: attention_op(*t[:NUM_INPUTS], list(t[NUM_INPUTS:]), *plain),
    )


@torch.library.register_vmap("saccade::attention_backward")
def _attention_backward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    wanted, (inputs, tables, plain) = arguments[4], _split(arguments[5:])
    dims = (*in_dims[:4], *in_dims[5 : 5 + NUM_INPUTS])
    dims += tuple(_table_dims(in_dims[5 + NUM_INPUTS], tables))
    stacked, out_dims = _mapped(
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


# ---- the call --------------------------------------------------------------------------------


def attention(
    inputs: Inputs,
    variant: Variant,
    config: Config | None,
    deterministic: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """Run an implementation, through the door that the transforms around the call need."""
    tables, plain = _flatten(variant, config, deterministic, implementation)
    if _transforms_are_active():
        return _Attention.apply(plain, *inputs, *tables)  # type: ignore[no-any-return]
    return attention_op(*inputs, tables, *plain)

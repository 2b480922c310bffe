"""Operators: linear attention and its gradient as PyTorch knows them (`torch.library`).

As in `saccade.ops.attention.custom_op`: schemas hold tensors and plain values only, calls come in
through `autograd.py`, one body does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.ops.attention.custom_op import EXACT_STRIDES, not_implemented
from saccade.runtime.backend_modules import linear_body_of
from saccade.runtime.linear_spec import (
    LinearGradients,
    LinearInputs,
    LinearVariant,
    empty_linear_gradients,
    empty_linear_results,
)
from saccade.runtime.spec import KernelConfig

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? key_lengths, "
    "Tensor? initial_kv, Tensor? initial_key_sum, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
PLAIN_VALUES = (
    "bool causal, str align, str feature_map, str normalize, float eps, float scale, "
    "int[] config, str implementation"
)
NUM_INPUTS = len(LinearInputs._fields)
NUM_VARIANT = len(LinearVariant._fields)
MAY_HAVE_GRADIENTS = (3, 5, 6)  # decay and the two sums, where a call has them

torch.library.define(
    "saccade::linear_attention",
    f"({TENSORS}, {PLAIN_VALUES}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=EXACT_STRIDES,
)
torch.library.define(
    "saccade::linear_attention_backward",
    "(Tensor? grad_output, Tensor? grad_kv, Tensor? grad_key_sum, Tensor output, "
    f"Tensor normaliser, {TENSORS}, {PLAIN_VALUES}) -> Tensor[]",
    tags=EXACT_STRIDES,
)
torch.library.define(
    "saccade::linear_attention_step",
    "(Tensor(a!) kv, Tensor(b!) key_sum, Tensor? state_index, "
    f"{TENSORS}, {PLAIN_VALUES}) -> Tensor",
    tags=EXACT_STRIDES,
)
linear_op = torch.ops.saccade.linear_attention.default
linear_backward_op = torch.ops.saccade.linear_attention_backward.default
linear_step_op = torch.ops.saccade.linear_attention_step.default


def flatten(
    variant: LinearVariant, config: KernelConfig | None, implementation: str
) -> tuple[Any, ...]:
    """A variant as an operator's PLAIN_VALUES."""
    return (*variant, [] if config is None else config.numbers(), implementation)


def split(arguments: Sequence[Any]) -> tuple[LinearInputs, Sequence[Any]]:
    """An operator's arguments as inputs and plain values."""
    return LinearInputs(*arguments[:NUM_INPUTS]), arguments[NUM_INPUTS:]


def unpack(plain: Sequence[Any]) -> tuple[LinearVariant, KernelConfig, str]:
    """Variant, config and implementation from PLAIN_VALUES."""
    numbers, implementation = plain[NUM_VARIANT:]
    config = KernelConfig.of_numbers(numbers) if numbers else KernelConfig()
    return LinearVariant(*plain[:NUM_VARIANT]), config, implementation


# ---- forward ---------------------------------------------------------------------------------


def linear_body(*arguments: Any) -> tuple[Tensor, ...]:
    """Run the named implementation; see `saccade.linear_attention`."""
    inputs, plain = split(arguments)
    variant, config, implementation = unpack(plain)
    return tuple(linear_body_of(implementation).forward(inputs, variant, config))


torch.library.impl("saccade::linear_attention", "CompositeExplicitAutograd", linear_body)


@torch.library.register_fake("saccade::linear_attention")
def _linear_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, plain = split(arguments)
    return tuple(empty_linear_results(inputs, unpack(plain)[0]))


# ---- a step ----------------------------------------------------------------------------------


def step_body(kv: Tensor, key_sum: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    """Change the states in place; see `saccade.linear_attention_step`."""
    inputs, plain = split(arguments)
    variant, _, implementation = unpack(plain)
    return linear_body_of(implementation).step(kv, key_sum, state_index, inputs, variant)


torch.library.impl("saccade::linear_attention_step", "CompositeExplicitAutograd", step_body)


@torch.library.register_fake("saccade::linear_attention_step")
def _step_fake(kv: Tensor, key_sum: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    inputs, plain = split(arguments)
    return empty_linear_results(inputs, unpack(plain)[0]).output


# ---- backward --------------------------------------------------------------------------------


def linear_backward_body(
    grad_output: Tensor | None,
    grad_kv: Tensor | None,
    grad_key_sum: Tensor | None,
    output: Tensor,
    normaliser: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    """Gradients of query, key and value, then of decay and the two sums where there are any."""
    inputs, plain = split(arguments)
    variant, config, implementation = unpack(plain)
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    return _listed(
        linear_body_of(implementation).backward(
            inputs, variant, config, output, normaliser, grad_output, grad_kv, grad_key_sum
        )
    )


torch.library.impl(
    "saccade::linear_attention_backward", "CompositeExplicitAutograd", linear_backward_body
)


def _listed(gradients: LinearGradients) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


@torch.library.register_fake("saccade::linear_attention_backward")
def _linear_backward_fake(
    grad_output: Tensor | None,
    grad_kv: Tensor | None,
    grad_key_sum: Tensor | None,
    output: Tensor,
    normaliser: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    return _listed(empty_linear_gradients(split(arguments)[0]))


# ---- autograd --------------------------------------------------------------------------------


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass needs: the inputs, the output, a number a row; no states."""
    call, plain = split(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*call, output[0], output[1])
    ctx.plain = tuple(plain)


def gradients_of(ctx: Any, call: Callable[..., Sequence[Tensor]], *grads: Any) -> list[Any]:
    """Gradients of the inputs, None where there can be none.

    `call` runs the backward operator on its flat arguments.
    """
    saved = ctx.saved_tensors  # read once: checkpointing recomputes them for one reading
    found: list[Any] = [None] * NUM_INPUTS
    grad_output, _, grad_kv, grad_key_sum = grads
    if grad_output is None and grad_kv is None and grad_key_sum is None:
        return found
    inputs, (output, normaliser) = saved[:NUM_INPUTS], saved[NUM_INPUTS:]
    rest = call(grad_output, grad_kv, grad_key_sum, output, normaliser, *inputs, *ctx.plain)
    found[:3], rest = rest[:3], list(rest[3:])
    for place in MAY_HAVE_GRADIENTS:
        if inputs[place] is not None:
            found[place] = rest.pop(0)
    return found


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return (*gradients_of(ctx, linear_backward_op, *grads), *[None] * len(ctx.plain))


torch.library.register_autograd(
    "saccade::linear_attention", _backward, setup_context=save_for_backward
)


def _second_order_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.implementation = inputs[-1]


def _second_order(ctx: Any, *grads: Any) -> Any:
    raise not_implemented(ctx.implementation, "double backward")


torch.library.register_autograd(
    "saccade::linear_attention_backward", _second_order, setup_context=_second_order_setup
)

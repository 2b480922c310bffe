"""The operators of linear attention, of its gradient, and of a step that changes states in place.

`runtime/custom_op.py` says how they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import EXACT_STRIDES, Arguments, Gradient, Operation
from saccade.runtime.spec import (
    KernelConfig,
    LinearGradients,
    LinearInputs,
    LinearResults,
    LinearVariant,
    empty_linear_gradients,
    empty_linear_results,
)

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? key_lengths, "
    "Tensor? initial_kv, Tensor? initial_key_sum, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
VARIANT = "bool causal, str align, str feature_map, str normalize, float eps, float scale"
PLAIN_VALUES = f"{VARIANT}, int[] config, str forward_by, str backward_by"
NUM_VARIANT = len(LinearVariant._fields)
CONFIG, FORWARD_BY, BACKWARD_BY = range(NUM_VARIANT, NUM_VARIANT + 3)  # among the plain values


def flatten(checked: CheckedCall, deterministic: bool = True) -> tuple[Any, ...]:
    """PLAIN_VALUES of a call; its gradients are always deterministic."""
    numbers = [] if checked.config is None else checked.config.numbers()
    return (*checked.variant, numbers, checked.forward_by, checked.backward_by)


def variant_of(tables: Sequence[Tensor], plain: Sequence[Any]) -> LinearVariant:
    """The variant that plain values stand for."""
    return LinearVariant(*plain[:NUM_VARIANT])


def config_of(plain: Sequence[Any]) -> KernelConfig:
    """The config that plain values stand for."""
    return KernelConfig.of_numbers(plain[CONFIG]) if plain[CONFIG] else KernelConfig()


def _prepare(
    inputs: LinearInputs, checked: CheckedCall
) -> Callable[[LinearInputs, LinearVariant], LinearResults]:
    forward = module_of("linear_attention", checked.forward_by).forward
    config = checked.config or KernelConfig()
    return lambda inputs, variant: forward(inputs, variant, config)


def _run(arguments: Arguments) -> tuple[Tensor, ...]:
    inputs, tables, plain = arguments
    module = module_of("linear_attention", plain[FORWARD_BY])
    return tuple(module.forward(inputs, variant_of(tables, plain), config_of(plain)))


def _empty(arguments: Arguments) -> tuple[Tensor, ...]:
    return tuple(empty_linear_results(arguments.inputs, variant_of((), arguments.plain)))


def _run_backward(
    arguments: Arguments,
    results: Sequence[Tensor | None],
    wanted: Sequence[int],
    variant: LinearVariant,
) -> list[Tensor]:
    """Gradients of query, key and value, then of decay and the two sums where there are any."""
    inputs, _, plain = arguments
    grad_output, grad_kv, grad_key_sum, output, normaliser = results
    assert output is not None and normaliser is not None
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    backward = module_of("linear_attention", plain[BACKWARD_BY], "backward").backward
    config = config_of(plain)
    return _listed(
        backward(inputs, variant, config, output, normaliser, grad_output, grad_kv, grad_key_sum)
    )


def _listed(gradients: LinearGradients) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


LINEAR = Operation(
    "linear_attention",
    LinearInputs,
    TENSORS,
    PLAIN_VALUES,
    num_results=4,
    variant_of=variant_of,
    flatten=flatten,
    prepare=_prepare,
    run=_run,
    empty=_empty,
    gradient=Gradient(
        schema=(
            "Tensor? grad_output, Tensor? grad_kv, Tensor? grad_key_sum, Tensor output, "
            "Tensor normaliser"
        ),
        results=(0, 2, 3),
        kept=(0, 1),
        inputs=(0, 1, 2, 3, 5, 6),
        run=_run_backward,
        empty=lambda arguments, wanted: _listed(empty_linear_gradients(arguments.inputs)),
    ),
)


# ---- a step -----------------------------------------------------------------------------------

torch.library.define(
    "saccade::linear_attention_step",
    "(Tensor(a!) kv, Tensor(b!) key_sum, Tensor? state_index, "
    f"{TENSORS}, {PLAIN_VALUES}) -> Tensor",
    tags=EXACT_STRIDES,
)
linear_step_op = torch.ops.saccade.linear_attention_step.default


def _run_step(kv: Tensor, key_sum: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    inputs, tables, plain = LINEAR.split(arguments)
    step = module_of("linear_attention", plain[FORWARD_BY], "step").step
    return step(kv, key_sum, state_index, inputs, variant_of(tables, plain))


def _empty_step(kv: Tensor, key_sum: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    return _empty(LINEAR.split(arguments))[0]


def _refuse_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    raise NotImplementedError(
        "linear_attention_step: got tensors under vmap, takes plain ones: a step changes states "
        "where they lie; give all sequences in one batch, or call linear_attention with "
        "initial_state and return_state"
    )


torch.library.impl("saccade::linear_attention_step", "CompositeExplicitAutograd", _run_step)
torch.library.register_fake("saccade::linear_attention_step", _empty_step)
torch.library.register_vmap("saccade::linear_attention_step", _refuse_vmap)

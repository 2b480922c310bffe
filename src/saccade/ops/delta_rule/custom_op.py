"""The operators of the gated delta rule, of its gradient, and of a step that changes states.

`runtime/custom_op.py` says how they are made. Calls on DTensors, of which each rank computes its
local part, come last; see `saccade.runtime.shards`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import EXACT_STRIDES, Arguments, Gradient, Operation
from saccade.runtime.delta_spec import (
    DeltaGradients,
    DeltaInputs,
    DeltaResults,
    DeltaVariant,
    empty_delta_gradients,
    empty_delta_results,
)
from saccade.runtime.shards import DENSE, OF_NEITHER, PACKED, Split, Where
from saccade.runtime.spec import KernelConfig

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor? decay, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
PLAIN_VALUES = "bool normalize_qk, float scale, int[] config, str forward_by, str backward_by"
NUM_VARIANT = len(DeltaVariant._fields)
CONFIG, FORWARD_BY, BACKWARD_BY = range(NUM_VARIANT, NUM_VARIANT + 3)  # among the plain values


def flatten(checked: CheckedCall, deterministic: bool = True) -> tuple[Any, ...]:
    """PLAIN_VALUES of a call; its gradients are always deterministic."""
    numbers = [] if checked.config is None else checked.config.numbers()
    return (*checked.variant, numbers, checked.forward_by, checked.backward_by)


def variant_of(tables: Sequence[Tensor], plain: Sequence[Any]) -> DeltaVariant:
    """The variant that plain values stand for."""
    return DeltaVariant(*plain[:NUM_VARIANT])


def config_of(plain: Sequence[Any]) -> KernelConfig:
    """The config that plain values stand for."""
    return KernelConfig.of_numbers(plain[CONFIG]) if plain[CONFIG] else KernelConfig()


def _prepare(
    inputs: DeltaInputs, checked: CheckedCall
) -> Callable[[DeltaInputs, DeltaVariant], DeltaResults]:
    forward = module_of("delta_rule", checked.forward_by).forward
    config = checked.config or KernelConfig()
    return lambda inputs, variant: forward(inputs, variant, config)


def _run(arguments: Arguments) -> tuple[Tensor, ...]:
    inputs, tables, plain = arguments
    module = module_of("delta_rule", plain[FORWARD_BY])
    return tuple(module.forward(inputs, variant_of(tables, plain), config_of(plain)))


def _empty(arguments: Arguments) -> tuple[Tensor, ...]:
    return tuple(empty_delta_results(arguments.inputs))


def _run_backward(
    arguments: Arguments,
    results: Sequence[Tensor | None],
    wanted: Sequence[int],
    variant: DeltaVariant,
) -> list[Tensor]:
    """Gradients of query, key, value and beta, then of decay and the state where there are any."""
    inputs, _, plain = arguments
    grad_output, grad_state = results
    if grad_output is None:
        grad_output = torch.zeros_like(empty_delta_results(inputs).output)
    backward = module_of("delta_rule", plain[BACKWARD_BY], "backward").backward
    return _listed(backward(inputs, variant, config_of(plain), grad_output, grad_state))


def _listed(gradients: DeltaGradients) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


DELTA = Operation(
    "gated_delta_rule",
    DeltaInputs,
    TENSORS,
    PLAIN_VALUES,
    num_results=2,
    variant_of=variant_of,
    flatten=flatten,
    prepare=_prepare,
    run=_run,
    empty=_empty,
    gradient=Gradient(
        schema="Tensor? grad_output, Tensor? grad_state",
        results=(0, 1),
        kept=(),
        inputs=(0, 1, 2, 3, 4, 5),
        run=_run_backward,
        empty=lambda arguments, wanted: _listed(empty_delta_gradients(arguments.inputs)),
    ),
)


# ---- a step --------------------------------------------------------------------------------------

STEP = "saccade::gated_delta_rule_step"
torch.library.define(
    STEP,
    f"(Tensor(a!) state, Tensor? state_index, {TENSORS}, {PLAIN_VALUES}) -> Tensor",
    tags=EXACT_STRIDES,
)
delta_step_op = torch.ops.saccade.gated_delta_rule_step.default


def _run_step(state: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    inputs, tables, plain = DELTA.split(arguments)
    step = module_of("delta_rule", plain[FORWARD_BY], "step").step
    return step(state, state_index, inputs, variant_of(tables, plain))


def _empty_step(state: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    return _empty(DELTA.split(arguments))[0]


def _refuse_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    raise NotImplementedError(
        "gated_delta_rule_step: got tensors under vmap, takes plain ones: a step changes states "
        "where they lie; give all sequences in one batch, or call gated_delta_rule with "
        "initial_state and return_state"
    )


torch.library.impl(STEP, "CompositeExplicitAutograd", _run_step)
torch.library.register_fake(STEP, _empty_step)
torch.library.register_vmap(STEP, _refuse_vmap)


# ---- DTensors ------------------------------------------------------------------------------------


def rule_on_shards(
    call: Callable[..., Any], tensors: dict[str, Any], offsets: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """`gated_delta_rule`, or with offsets `gated_delta_rule_varlen`, each rank on its part."""
    where = PACKED if offsets else DENSE
    split, rows = _rows(tensors, where)
    batch = offsets[0].shape[0] - 1 if offsets else tensors["query"].shape[0]
    for name, lies in (("decay", where), ("initial_state", DENSE)):
        options = options | {name: split.local(name, options.get(name), lies)}
    local_offsets = [split.local("cu_seqlens", each, OF_NEITHER) for each in offsets]
    wants_state = options.pop("return_state")
    output, state = call(*rows, *local_offsets, return_state=True, **options)
    heads = tensors["value"].shape[1]
    found = split.joined(output, where, tensors["query"].shape[0], heads)
    return (found, split.joined(state, DENSE, batch, heads)) if wants_state else found


def step_on_shards(
    call: Callable[..., Any], state: Any, tensors: dict[str, Any], options: dict[str, Any]
) -> Any:
    """`gated_delta_rule_step`, each rank on its part; states change where they lie."""
    split, rows = _rows(tensors, DENSE)
    if options.get("state_index") is not None:
        if split.by_batch:
            raise ValueError(
                "state_index: got entries of a pool for a query that is sharded by batch, takes "
                "None: another rank may hold them"
            )
        options["state_index"] = split.local("state_index", options["state_index"], OF_NEITHER)
    here = split.in_place("state", state, DENSE)
    decay = split.local("decay", options.get("decay"), DENSE)
    output = call(here, *rows, **options | {"decay": decay})
    value = tensors["value"]
    return split.joined(output, DENSE, value.shape[0], value.shape[1])


def _rows(tensors: dict[str, Any], where: Where) -> tuple[Split, list[Any]]:
    """The cut, and this rank's query, key, value and beta; key heads are cut with value heads."""
    split = Split(tensors["query"], where)
    return split, [split.local(name, each, where) for name, each in tensors.items()]

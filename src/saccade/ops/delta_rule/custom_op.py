"""The operators of the gated delta rule, of its gradient, and of a step that changes states.

`runtime/custom_op.py` says how they are made. Calls on DTensors, of which each rank computes its
local part, come last; see `saccade.runtime.shards`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import Arguments, Gradient, Operation, step_operator
from saccade.runtime.delta_spec import (
    DeltaInputs,
    DeltaVariant,
    empty_delta_gradients,
    empty_delta_results,
)
from saccade.runtime.plain_values import PLAIN_VALUES, PlainValues, listed
from saccade.runtime.shards import DENSE, OF_NEITHER, PACKED, Split, Where

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor? decay, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
VARIANT = "bool normalize_qk, float scale"
VALUES = PlainValues("delta_rule", DeltaVariant)


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
    backward = VALUES.module_of(plain, "backward").backward
    return listed(backward(inputs, variant, VALUES.config_of(plain), grad_output, grad_state))


DELTA = Operation(
    "gated_delta_rule",
    DeltaInputs,
    TENSORS,
    f"{VARIANT}, {PLAIN_VALUES}",
    num_results=2,
    variant_of=VALUES.variant_of,
    flatten=VALUES.flatten,
    prepare=VALUES.prepare,
    run=VALUES.run,
    empty=_empty,
    gradient=Gradient(
        schema="Tensor? grad_output, Tensor? grad_state",
        results=(0, 1),
        kept=(),
        inputs=(0, 1, 2, 3, 4, 5),
        run=_run_backward,
        empty=lambda arguments, wanted: listed(empty_delta_gradients(arguments.inputs)),
    ),
)


# ---- a step --------------------------------------------------------------------------------------


def _run_step(state: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    inputs, tables, plain = DELTA.split(arguments)
    step = VALUES.module_of(plain, "step").step
    return step(state, state_index, inputs, VALUES.variant_of(tables, plain))


def _empty_step(state: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    return _empty(DELTA.split(arguments))[0]


delta_step_op = step_operator(
    "gated_delta_rule",
    f"(Tensor(a!) state, Tensor? state_index, {TENSORS}, {VARIANT}, {PLAIN_VALUES}) -> Tensor",
    _run_step,
    _empty_step,
)


def step_at_once(
    state: Tensor, state_index: Tensor | None, inputs: DeltaInputs, checked: CheckedCall
) -> Tensor:
    """A step like one that was validated, which nothing observes: past PyTorch's dispatcher, whose
    note of what was changed in place is made here."""
    step = VALUES.module_of(VALUES.flatten(checked), "step").step
    output: Tensor = step(state, state_index, inputs, checked.variant)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)
    return output


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
    options = options | {"state_index": split.entries(options.get("state_index"))}
    here = split.in_place("state", state, DENSE)
    decay = split.local("decay", options.get("decay"), DENSE)
    output = call(here, *rows, **options | {"decay": decay})
    value = tensors["value"]
    return split.joined(output, DENSE, value.shape[0], value.shape[1])


def _rows(tensors: dict[str, Any], where: Where) -> tuple[Split, list[Any]]:
    """The cut, and this rank's query, key, value and beta; key heads are cut with value heads."""
    split = Split(tensors["query"], where)
    return split, [split.local(name, each, where) for name, each in tensors.items()]

"""Recurrences over ranks in graphs of torch.compile: calls whose arguments are plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.parallel.agreement import checked_plan
from saccade.parallel.agreement_op import GraphFault, agreed_in_graph
from saccade.parallel.planner import PLANS, Plan
from saccade.parallel.recurrence import Rows
from saccade.runtime.arguments import resolve_config
from saccade.runtime.spec import KernelConfig, LinearState

COMPUTED: dict[str, Callable[..., Any]] = {}  # what computes a call, by its name


def into_graph(
    name: str, tensors: Sequence[Tensor], plan: Plan, rows: Rows, options: Mapping[str, Any]
) -> Any:
    """A call that Dynamo traces: it puts `_traced` into its graph, whose arguments are plain."""
    checked_plan(plan)
    given = dict(options)
    _check_maps(given.get("feature_map"))
    initial, linear = given.pop("initial_state", None), False
    parts: list[Any] = [initial]
    if isinstance(initial, LinearState):
        parts, linear = list(initial), True
    first = tensors[0]
    where = first.device if isinstance(first, Tensor) else torch.device("cpu")
    config = resolve_config(given.pop("config", None), where)
    numbers = [] if config is None else config.numbers()
    found = _traced(
        name, plan.name, rows.packed, list(tensors), list(given), list(given.values()), linear,
        parts, numbers,
    )  # fmt: skip
    if name.startswith("linear") and given.get("return_state", False):
        return found[0], LinearState(*found[1:])
    return found


def _check_maps(maps: Any) -> None:
    for one in maps if isinstance(maps, tuple) else (maps,):
        if not (one is None or isinstance(one, str)):
            raise NotImplementedError(
                f"feature_map: got {type(one).__name__} inside torch.compile, takes a name there"
            )


@torch.compiler.allow_in_graph
def _traced(
    name: str, plan_name: str, packed: bool, tensors: list[Tensor], names: list[str],
    values: list[Any], linear: bool, parts: list[Any], numbers: list[int],
) -> Any:  # fmt: skip
    """A call in the graph of Dynamo, which does not look inside, as `calls._traced`."""
    plan, options = PLANS[plan_name], dict(zip(names, values, strict=True))
    for tensor in tensors:
        for size in tensor.shape if isinstance(tensor, Tensor) else ():
            int(size)  # a plan is for one size: none stays a symbol
    if linear or parts[0] is not None:
        options["initial_state"] = LinearState(*parts) if linear else parts[0]
    if numbers:
        options["config"] = KernelConfig.of_numbers(numbers)
    try:
        found = COMPUTED[name](name, tuple(tensors), plan, Rows(packed), options)
    except GraphFault as fault:
        return _failing(plan, fault, tensors, name, options)
    if isinstance(found, tuple) and isinstance(found[1], LinearState):
        return found[0], *found[1]
    return found


def _failing(
    plan: Plan, fault: GraphFault, tensors: Sequence[Tensor], name: str, options: Mapping[str, Any]
) -> Any:
    """What a graph computes that cannot begin: when it runs it tells other ranks, and fails."""
    query, _, value = tensors[:3]
    shape = *query.shape[:-1], value.shape[-1]
    output = agreed_in_graph(plan, fault.facts, fault.error, query.new_zeros(shape))
    if not options.get("return_state", False):
        return output
    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    return (output, state, state[..., 0], None) if name.startswith("linear") else (output, state)

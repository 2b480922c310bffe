"""The operators of linear attention, of its gradient, and of a step that changes states in place.

`runtime/custom_op.py` says how they are made. Calls on DTensors, of which each rank computes its
local part, come last; see `saccade.runtime.shards`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.runtime.custom_op import Arguments, Gradient, Operation, step_operator
from saccade.runtime.plain_values import PLAIN_VALUES, PlainValues, listed
from saccade.runtime.shards import (
    DENSE,
    OF_BATCH,
    OF_HEADS,
    OF_NEITHER,
    PACKED,
    Split,
    Where,
    any_sharded,
)
from saccade.runtime.spec import (
    LinearInputs,
    LinearState,
    LinearVariant,
    empty_linear_gradients,
    empty_linear_results,
)

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? key_lengths, "
    "Tensor? initial_kv, Tensor? initial_key_sum, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
VARIANT = "bool causal, str align, str feature_map, str normalize, float eps, float scale"
VALUES = PlainValues("linear_attention", LinearVariant)


def _empty(arguments: Arguments) -> tuple[Tensor, ...]:
    return tuple(empty_linear_results(arguments.inputs, VALUES.variant_of((), arguments.plain)))


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
    backward = VALUES.module_of(plain, "backward").backward
    config = VALUES.config_of(plain)
    return listed(
        backward(inputs, variant, config, output, normaliser, grad_output, grad_kv, grad_key_sum)
    )


LINEAR = Operation(
    "linear_attention",
    LinearInputs,
    TENSORS,
    f"{VARIANT}, {PLAIN_VALUES}",
    num_results=4,
    variant_of=VALUES.variant_of,
    flatten=VALUES.flatten,
    prepare=VALUES.prepare,
    run=VALUES.run,
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
        empty=lambda arguments, wanted: listed(empty_linear_gradients(arguments.inputs)),
    ),
)


# ---- a step -----------------------------------------------------------------------------------


def _run_step(kv: Tensor, key_sum: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    inputs, tables, plain = LINEAR.split(arguments)
    step = VALUES.module_of(plain, "step").step
    return step(kv, key_sum, state_index, inputs, VALUES.variant_of(tables, plain))


def _empty_step(kv: Tensor, key_sum: Tensor, state_index: Tensor | None, *arguments: Any) -> Tensor:
    return _empty(LINEAR.split(arguments))[0]


linear_step_op = step_operator(
    "linear_attention",
    "(Tensor(a!) kv, Tensor(b!) key_sum, Tensor? state_index, "
    f"{TENSORS}, {VARIANT}, {PLAIN_VALUES}) -> Tensor",
    _run_step,
    _empty_step,
)


# ---- DTensors ------------------------------------------------------------------------------------


def sharded(*tensors: Any, state: LinearState | None = None) -> bool:
    """Whether a DTensor is among the tensors or in the state."""
    # What is no state is refused by name later.
    return any_sharded(*tensors, *(state if isinstance(state, tuple) else ()))


def attention_on_shards(
    call: Callable[..., Any], tensors: dict[str, Any], offsets: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """`linear_attention`, or with offsets `linear_attention_varlen`, each rank on its part."""
    where = PACKED if offsets else DENSE
    split, rows, heads, state_heads = _rows(tensors, where, options.get("feature_map"))
    query = tensors["query"]
    batch = offsets[0].shape[0] - 1 if offsets else query.shape[0]
    options = options | {"decay": _decay(split, options.get("decay"), where)}
    if options.get("key_lengths") is not None:
        options["key_lengths"] = split.local("key_lengths", options["key_lengths"], OF_BATCH)
    if (state := options.get("initial_state")) is not None:
        fields = zip(state._fields, state, strict=True)
        parts = [split.local(f"initial_state.{name}", each, where) for name, each in fields]
        options["initial_state"] = LinearState(*parts)
    names = "cu_seqlens_q", "cu_seqlens_k"
    local_offsets = [split.local(*named, OF_NEITHER) for named in zip(names, offsets, strict=False)]
    wants_state = options.pop("return_state")
    output, state = call(*rows, *local_offsets, return_state=True, **options)
    found = split.joined(output, where, query.shape[0], heads)
    if not wants_state:
        return found
    sums: list[Any] = [each if each is None else split.joined(each, where, batch, state_heads)
                       for each in state]  # fmt: skip
    return found, LinearState(*sums)


def step_on_shards(
    call: Callable[..., Any], state: LinearState, tensors: dict[str, Any], options: dict[str, Any]
) -> Any:
    """`linear_attention_step`, each rank on its part; states change where they lie."""
    split, rows, heads, _ = _rows(tensors, DENSE, options.get("feature_map"))
    options = options | {"state_index": split.entries(options.get("state_index"))}
    fields = zip(state._fields, state, strict=True)
    here = LinearState(*(split.in_place(f"state.{name}", each, DENSE) for name, each in fields))
    decay = _decay(split, options.get("decay"), DENSE)
    output = call(here, *rows, **options | {"decay": decay})
    return split.joined(output, DENSE, tensors["query"].shape[0], heads)


def _rows(
    tensors: dict[str, Any], where: Where, feature_map: Any
) -> tuple[Split, list[Any], int, int]:
    """The cut, this rank's query, key and value, and the heads of the output and of the state."""
    for one in feature_map if isinstance(feature_map, tuple) else (feature_map,):
        if isinstance(one, torch.nn.Module) and any(True for _ in one.parameters()):
            raise NotImplementedError(
                f"feature_map: got {type(one).__name__}, which has parameters, with DTensors; "
                "takes a map without: each rank would have a part of their gradients"
            )
    split = Split(tensors["query"], where)
    numbers = {name: each.shape[1] for name, each in tensors.items()}
    state_heads = max(numbers["key"], numbers["value"])
    for name, number in numbers.items():
        if number % split.head_shards and (number != 1 or state_heads % split.head_shards):
            raise ValueError(
                f"{name}: got {number} heads on {split.head_shards} shards, takes a number that "
                f"{split.head_shards} divides (or 1 for one of key and value)"
            )
    rows = [
        split.local(name, each, where, whole_heads=bool(numbers[name] % split.head_shards))
        for name, each in tensors.items()
    ]
    return split, rows, max(numbers.values()), state_heads


def _decay(split: Split, decay: Any, where: Where) -> Any:
    constant = decay is not None and decay.dim() == 1
    return split.local("decay", decay, OF_HEADS if constant else where)

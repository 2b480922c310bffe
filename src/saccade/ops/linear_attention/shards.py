"""Shards: calls of linear attention on DTensors; see `saccade.runtime.shards`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
from saccade.runtime.spec import LinearState


def sharded(*tensors: Any, state: LinearState | None = None) -> bool:
    """Whether a DTensor is among the tensors or in the state."""
    return any_sharded(*tensors, *(state or ()))


def attention(
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
    if (given := options.get("initial_state")) is not None:
        fields = zip(given._fields, given, strict=True)
        parts = [split.local(f"initial_state.{name}", each, where) for name, each in fields]
        options["initial_state"] = LinearState(*parts)
    names = "cu_seqlens_q", "cu_seqlens_k"
    places = [split.local(*named, OF_NEITHER) for named in zip(names, offsets, strict=False)]
    wants_state = options.pop("return_state")
    output, state = call(*rows, *places, return_state=True, **options)
    found = split.joined(output, where, query.shape[0], heads)
    if not wants_state:
        return found
    sums: list[Any] = [each if each is None else split.joined(each, where, batch, state_heads)
                       for each in state]  # fmt: skip
    return found, LinearState(*sums)


def step(
    call: Callable[..., Any], state: LinearState, tensors: dict[str, Any], options: dict[str, Any]
) -> Any:
    """`linear_attention_step`, each rank on its part; states change where they lie."""
    split, rows, heads, _ = _rows(tensors, DENSE, options.get("feature_map"))
    if options.get("state_index") is not None:
        if split.by_batch:
            raise ValueError(
                "state_index: got entries of a pool for a query that is sharded by batch, takes "
                "None: another rank may hold them"
            )
        options["state_index"] = split.local("state_index", options["state_index"], OF_NEITHER)
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

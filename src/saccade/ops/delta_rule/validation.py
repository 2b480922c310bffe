"""Validation: check all arguments of the gated delta rule and make what backends take."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.runtime.arguments import (
    check_flag,
    check_floating_point,
    check_kinds,
    check_offsets,
    resolve_config,
    resolve_scale,
)
from saccade.runtime.delta_spec import DeltaInputs, DeltaProblem, DeltaVariant
from saccade.runtime.spec import KernelConfig
from saccade.runtime.state_pools import check_own_memory
from saccade.runtime.validation import cast, strides_fit_tma

DENSE_SHAPES = {
    "query": "[batch, key_heads, length, head_dim]",
    "key": "[batch, key_heads, length, head_dim]",
    "value": "[batch, value_heads, length, value_dim]",
    "beta": "[batch, value_heads, length]",
    "decay": "[batch, value_heads, length] or [batch, value_heads, length, head_dim]",
}
PACKED_SHAPES = {
    "query": "[tokens, key_heads, head_dim]",
    "key": "[tokens, key_heads, head_dim]",
    "value": "[tokens, value_heads, value_dim]",
    "beta": "[tokens, value_heads]",
    "decay": "[tokens, value_heads] or [tokens, value_heads, head_dim]",
}
STATE_SHAPE = "[batch, value_heads, head_dim, value_dim]"


class Prepared(NamedTuple):
    """A checked call."""

    inputs: DeltaInputs
    variant: DeltaVariant
    problem: DeltaProblem
    config: KernelConfig | None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    normalize_qk: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    state_name: str = "initial_state",
) -> Prepared:
    """Check every argument."""
    query, key, value = cast(query, key, value)
    packed = cu_seqlens is not None
    shapes = PACKED_SHAPES if packed else DENSE_SHAPES
    check_kinds(query, key, value, shapes)
    _check_sizes(query, key, value, packed)
    check_flag("normalize_qk", normalize_qk)
    check_flag("return_state", return_state)
    scale = resolve_scale(scale, query.shape[-1])
    config = resolve_config(config, query.device)
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, query.shape[0], query.device)
        cu_seqlens = cu_seqlens.contiguous()
    inputs = DeltaInputs(query, key, value, beta, decay, initial_state, cu_seqlens)
    wanted = (*value.shape[:-1],)
    _check_rows("beta", beta, [wanted], query, shapes)
    if decay is not None:
        _check_rows("decay", decay, [wanted, (*wanted, query.shape[-1])], query, shapes)
    check_state(state_name, initial_state, inputs)
    variant = DeltaVariant(normalize_qk, scale)
    return Prepared(inputs, variant, problem_of(inputs, variant, config), config)


def problem_of(
    inputs: DeltaInputs, variant: DeltaVariant, config: KernelConfig | None
) -> DeltaProblem:
    """The call's shape, by which implementations are chosen."""
    query, key, value = inputs[:3]
    by_channel = "channels" if inputs.decay_by_channel else "heads"
    return DeltaProblem(
        batch=inputs.num_sequences,
        key_heads=inputs.key_heads,
        value_heads=inputs.value_heads,
        length=query.shape[0 if inputs.packed else 2],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        device=query.device.type,
        decay="none" if inputs.decay is None else by_channel,
        normalize_qk=variant.normalize_qk,
        packed=inputs.packed,
        state=inputs.initial_state is not None,
        configured=config is not None,
        tma=all(map(strides_fit_tma, (query, key, value))),
    )


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, packed: bool) -> None:
    """Refuse queries, keys and values that do not fit together."""
    names = ("heads", "head_dim") if packed else ("batch", "heads", "rows", "head_dim")
    dims = (1, 2) if packed else (0, 1, 2, 3)
    if packed:
        names, dims = ("rows", *names), (0, *dims)
    for name, dim in zip(names, dims, strict=True):
        if key.shape[dim] != query.shape[dim]:
            raise ValueError(
                f"key: got {_counted(name, key.shape[dim])}, takes query's {query.shape[dim]}"
            )
        if name in ("batch", "rows") and value.shape[dim] != key.shape[dim]:
            raise ValueError(
                f"value: got {_counted(name, value.shape[dim])}, takes key's {key.shape[dim]}"
            )
    key_heads, value_heads = key.shape[1], value.shape[1]
    if key_heads != value_heads and (key_heads == 0 or value_heads % key_heads):
        raise ValueError(f"value: got {value_heads} heads, takes a multiple of key's {key_heads}")


def _counted(name: str, number: int) -> str:
    return f"{number} {name}" if name in ("heads", "rows") else f"{name} {number}"


def _check_rows(
    name: str,
    rows: object,
    shapes: list[tuple[int, ...]],
    query: Tensor,
    named: dict[str, str],
) -> None:
    """Refuse numbers of tokens that have none of these shapes."""
    takes = f"a floating-point tensor {named[name]}"
    check_floating_point(name, rows, takes)
    assert isinstance(rows, Tensor)
    fits = [
        rows.dim() == len(shape) and not any(map(operator.ne, rows.shape, shape))
        for shape in shapes
    ]
    if not any(fits):
        here = " or ".join([f"{tuple(shape)}" for shape in shapes])
        raise ValueError(f"{name}: got shape {tuple(rows.shape)}, takes {takes}, here {here}")
    if rows.device != query.device:
        raise ValueError(f"{name}: got {rows.device}, takes query's {query.device}")


def check_state(name: str, state: object, inputs: DeltaInputs) -> None:
    """Refuse a state that is not [batch, value_heads, head_dim, value_dim] numbers."""
    if state is None:
        return
    query, value = inputs.query, inputs.value
    wanted = (inputs.num_sequences, inputs.value_heads, query.shape[-1], value.shape[-1])
    takes = f"a floating-point tensor {STATE_SHAPE}, here {tuple(wanted)}"
    check_floating_point(name, state, takes)
    assert isinstance(state, Tensor)
    if state.dim() != 4 or any(map(operator.ne, state.shape, wanted)):
        raise ValueError(f"{name}: got shape {tuple(state.shape)}, takes {takes}")
    if state.device != query.device:
        raise ValueError(f"{name}: got {state.device}, takes query's {query.device}")


def check_wishes(*tensors: object) -> None:
    """Refuse gradients of a step, which changes states in place."""
    wanted = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and wanted:
        raise ValueError(
            "gated_delta_rule_step: got tensors that require gradients, takes none: call it under "
            "torch.no_grad(), or gated_delta_rule with initial_state and return_state"
        )


def check_pool(state: object) -> None:
    """Refuse states that are not one for each entry of the pool, in memory of its own."""
    takes = f"a floating-point tensor {STATE_SHAPE}"
    check_floating_point("state", state, takes)
    assert isinstance(state, Tensor)
    if state.dim() != 4:
        raise ValueError(f"state: got shape {tuple(state.shape)}, takes {takes}")
    check_own_memory("state", state)

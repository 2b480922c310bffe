"""Arguments: every check of what a caller of linear attention passed, before anything runs."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import torch
from torch import Tensor

from saccade import feature_maps
from saccade.runtime.arguments import (
    DENSE_SHAPES,
    PACKED_SHAPES,
    check_kinds,
    integers,
    values_readable,
)
from saccade.runtime.spec import FUSED_MAPS, NORMALIZERS, LinearInputs, LinearState

NAMED_MAPS = (*FUSED_MAPS, "softmax")
SIGNED_MAPS = ("identity",)

STATE_SHAPES = {
    "kv": "[batch, state_heads, feature_dim, value_dim]",
    "key_sum": "[batch, state_heads, feature_dim]",
    "log_scale": "[batch, state_heads]",
}


def check_rows(query: Tensor, key: Tensor, value: Tensor, *, packed: bool) -> None:
    """Refuse queries, keys and values that do not fit together; any may have fewer heads."""
    check_kinds(query, key, value, PACKED_SHAPES if packed else DENSE_SHAPES)
    if not packed:
        for name, tensor in (("key", key), ("value", value)):
            if tensor.shape[0] != query.shape[0]:
                raise ValueError(
                    f"{name}: got batch {tensor.shape[0]}, takes query's {query.shape[0]}"
                )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: got head_dim {key.shape[-1]}, takes query's {query.shape[-1]}")
    rows_dim = 0 if packed else 2
    if value.shape[rows_dim] != key.shape[rows_dim]:
        raise ValueError(
            f"value: got {value.shape[rows_dim]} rows, takes key's {key.shape[rows_dim]}"
        )
    state_heads = max(key.shape[1], value.shape[1])
    heads = max(query.shape[1], state_heads)
    for name, tensor, most in (
        ("key", key, state_heads),
        ("value", value, state_heads),
        ("query", query, heads),
        ("key and value", key if key.shape[1] == state_heads else value, heads),
    ):
        if most and (tensor.shape[1] == 0 or most % tensor.shape[1]):
            raise ValueError(f"{name}: got {tensor.shape[1]} heads, takes a divisor of {most}")


def resolve_map(feature_map: Any) -> tuple[Any, Any]:
    """The maps of queries and of keys: names of fused maps, or functions."""
    pair = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    takes = f"one of {NAMED_MAPS}, a function of [..., head_dim], or a pair (for queries, for keys)"
    if len(pair) != 2:
        raise ValueError(f"feature_map: got {len(pair)} maps, takes {takes}")
    for one in pair:
        if isinstance(one, str):
            if one not in NAMED_MAPS:
                raise ValueError(f"feature_map: got {one!r}, takes {takes}")
        elif not callable(one) or isinstance(one, type):
            got = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise TypeError(f"feature_map: got {got}, takes {takes}")
    pair = tuple(feature_maps.softmax if one == "softmax" else one for one in pair)
    scaled = [isinstance(one, feature_maps.ScaledMap) for one in pair]
    if scaled[0] != scaled[1]:
        raise ValueError("feature_map: got a pair of which one is a ScaledMap, takes two or none")
    return pair[0], pair[1]


def check_normalize(normalize: str) -> str:
    """Refuse a normaliser that does not exist."""
    if not isinstance(normalize, str) or normalize not in NORMALIZERS:
        spec = ValueError if isinstance(normalize, str) else TypeError
        raise spec(f"normalize: got {normalize!r}, takes one of {NORMALIZERS}")
    return normalize


def check_number(name: str, value: object, *, least: float = -math.inf) -> float:
    """Refuse what is not a finite number of at least `least`."""
    takes = "a finite number" + (f" of at least {least:g}" if least > -math.inf else "")
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        raise TypeError(f"{name}: got {value!r}, takes {takes}")
    if not (max(least, -sys.float_info.max) <= value <= sys.float_info.max):
        raise ValueError(f"{name}: got {value}, takes {takes}")
    return float(value)


def check_key_lengths(lengths: Tensor | None, key: Tensor) -> None:
    """Refuse lengths of keys that are not one for each batch entry, from 0 to kv_len."""
    if lengths is None:
        return
    integers("key_lengths", lengths, 1)
    if lengths.shape[0] != key.shape[0]:
        raise ValueError(f"key_lengths: got shape {tuple(lengths.shape)}, takes ({key.shape[0]},)")
    if lengths.device != key.device:
        raise ValueError(f"key_lengths: got {lengths.device}, takes query's {key.device}")
    if values_readable(lengths) and lengths.numel():
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > key.shape[2]:
            raise ValueError(f"key_lengths: got {low} to {high}, takes 0 to {key.shape[2]}")


def check_decay(inputs: LinearInputs) -> None:
    """Refuse decay that is not the logarithm of a factor in (0, 1], for each head or key row."""
    decay, heads = inputs.decay, inputs.state_heads
    if decay is None:
        return
    rows = inputs.key.shape[:1] if inputs.packed else (inputs.key.shape[0], heads)
    rows = (*rows, heads) if inputs.packed else (*rows, inputs.key.shape[2])
    takes = f"a tensor ({heads},) or {tuple(rows)} of logarithms of at most 0"
    if not isinstance(decay, Tensor):
        raise TypeError(f"decay: got {type(decay).__name__}, takes {takes}")
    if not decay.is_floating_point():
        raise TypeError(f"decay: got {decay.dtype}, takes {takes}")
    if decay.device != inputs.query.device:
        raise ValueError(f"decay: got {decay.device}, takes query's {inputs.query.device}")
    wanted = (heads,) if decay.dim() == 1 else rows  # a trace cannot compare tuples of sizes
    if decay.dim() != len(wanted) or any(map(operator.ne, decay.shape, wanted)):
        raise ValueError(f"decay: got shape {tuple(decay.shape)}, takes {takes}")
    if not values_readable(decay):
        return
    seen = decay.detach()
    if inputs.key_lengths is not None and seen.dim() == 3:
        row = torch.arange(inputs.key.shape[2], device=seen.device)
        seen = seen.masked_fill(row >= inputs.key_lengths.view(-1, 1, 1), 0)
    if inputs.cu_seqlens_k is not None and seen.dim() == 2:
        row = torch.arange(seen.shape[0], device=seen.device)
        seen = seen.masked_fill((row >= inputs.cu_seqlens_k[-1]).unsqueeze(-1), 0)  # padding
    wrong = ~((seen <= 0) & (seen > -torch.inf))
    if bool(wrong.any()):
        raise ValueError(f"decay: got {float(seen[wrong][0])}, takes finite logarithms up to 0")


def check_state(
    name: str, state: LinearState | None, wanted: tuple[int, ...], like: Tensor
) -> None:
    """Refuse a state whose sums are not [*wanted[:3], …] floats on the right device.

    `wanted` is (batch, state_heads, feature_dim, value_dim).
    """
    if state is None:
        return
    if not isinstance(state, LinearState):
        raise TypeError(f"{name}: got {type(state).__name__}, takes a LinearState or None")
    shapes = {"kv": wanted, "key_sum": wanted[:3], "log_scale": wanted[:2]}
    for field, shape in shapes.items():
        tensor = getattr(state, field)
        if tensor is None and field == "log_scale":
            continue
        takes = f"{STATE_SHAPES[field]}, here {tuple(shape)}"
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}.{field}: got {got}, takes a floating-point tensor {takes}")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}.{field}: got shape {tuple(tensor.shape)}, takes {takes}")
        if tensor.device != like.device:
            raise ValueError(f"{name}.{field}: got {tensor.device}, takes query's {like.device}")


def check_features(name: str, features: Any, rows: Tensor) -> Tensor:
    """Refuse what a caller's feature map gave, if it is not features of every row."""
    takes = f"a floating-point tensor {(*rows.shape[:-1], 'feature_dim')} from the feature map"
    if not isinstance(features, Tensor) or not features.is_floating_point():
        got = features.dtype if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"feature_map: got {got} for {name}, takes {takes}")
    if features.shape[:-1] != rows.shape[:-1]:
        raise ValueError(f"feature_map: got {tuple(features.shape)} for {name}, takes {takes}")
    return features

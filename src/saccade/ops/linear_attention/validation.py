"""Validation: check all arguments of linear attention and turn them into what backends take.

Feature maps that implementations do not apply themselves are applied here.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import feature_maps
from saccade.feature_maps import ScaledMap
from saccade.ops.linear_attention.feature_scaling import (
    Scaling,
    check_features,
    ends_of,
    hidden_keys,
    padding_of,
    scale_features,
    sequence_of,
)
from saccade.ops.linear_attention.reference import features
from saccade.runtime.arguments import (
    DENSE_SHAPES,
    PACKED_SHAPES,
    check_align,
    check_flag,
    check_floating_point,
    check_kinds,
    check_offsets,
    check_scale,
    contiguous,
    integers,
    resolve_config,
    values_readable,
)
from saccade.runtime.spec import (
    FUSED_MAPS,
    NORMALIZERS,
    KernelConfig,
    LinearInputs,
    LinearProblem,
    LinearState,
    LinearVariant,
)
from saccade.runtime.validation import cast, contiguous_pair, strides_fit_tma


class Prepared(NamedTuple):
    """A checked call; `scaling` says by what its features were divided, if they were."""

    inputs: LinearInputs
    variant: LinearVariant
    problem: LinearProblem
    config: KernelConfig | None
    scaling: Scaling | None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = True,
    align: str = "bottom_right",
    feature_map: Any = "elu+1",
    normalize: str = "sum",
    eps: float = 1e-6,
    scale: float = 1.0,
    decay: Tensor | None = None,
    key_lengths: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    state_name: str = "initial_state",
) -> Prepared:
    """Check every argument, apply the feature map unless the implementation does."""
    query, key, value = cast(query, key, value)
    check_rows(query, key, value, packed=cu_seqlens_q is not None)
    check_flag("causal", causal)
    check_flag("return_state", return_state)
    check_align(align)
    maps = resolve_map(feature_map)
    form = check_normalize(normalize)
    eps = check_number("eps", eps, least=0.0)
    scale = check_scale(scale)
    config = resolve_config(config, query.device)
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        _check_packing(query, key, cu_seqlens_q, cu_seqlens_k)
        cu_seqlens_q, cu_seqlens_k = contiguous_pair(cu_seqlens_q, cu_seqlens_k)
    check_key_lengths(key_lengths, key)
    key_lengths = contiguous(key_lengths)
    inputs = LinearInputs(query, key, value, decay, key_lengths)
    inputs = inputs._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_decay(inputs)
    _warn_of_signs(maps, form)
    inputs = _without_unseen_keys(inputs, align) if causal and not return_state else inputs
    inputs, fused, scaling = _mapped(inputs, maps, initial_state, causal and form != "none")
    sizes = (inputs.num_sequences, inputs.state_heads, inputs.query.shape[-1], value.shape[-1])
    check_state(state_name, initial_state, sizes, query)
    if initial_state is not None:
        if initial_state.log_scale is not None and scaling is None:
            raise ValueError(f"{state_name}.log_scale: got a tensor, takes None for this map")
        kv, key_sum = initial_state[:2]
        if scaling is not None:
            kv, key_sum = scaling.of_initial(kv, key_sum)
        inputs = inputs._replace(initial_kv=kv, initial_key_sum=key_sum)
    if scaling is not None:
        eps = 0.0  # in units that differ from row to row it would mean nothing
    variant = LinearVariant(causal, align, fused, form, eps, scale)
    return Prepared(inputs, variant, problem_of(inputs, variant, config), config, scaling)


def _check_packing(query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Refuse offsets that do not fit the tokens, or each other."""
    check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], query.device)
    check_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0], query.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: got shape {tuple(cu_seqlens_k.shape)}, takes cu_seqlens_q's "
            f"{tuple(cu_seqlens_q.shape)}"
        )


def _without_unseen_keys(inputs: LinearInputs, align: str) -> LinearInputs:
    """The inputs with 0 for keys behind the last row, which neither a row nor a state reads.

    Implementations multiply such keys by sums of no rows, and 0 · NaN is no 0. Aligned at the
    bottom right, the last row sees all keys.
    """
    ends_q, ends_k, decay = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.decay
    if align != "top_left":
        return inputs
    if ends_q is None or ends_k is None:
        if inputs.key.shape[2] <= inputs.query.shape[2]:
            return inputs
        row = torch.arange(inputs.key.shape[2], device=inputs.key.device)
        unseen = (row >= inputs.query.shape[2]).unsqueeze(-1)
    elif ends_q is ends_k:
        return inputs
    else:
        tokens = inputs.key.shape[0]
        starts = ends_of(ends_k, tokens)
        sequence = sequence_of(tokens, starts)
        row = torch.arange(tokens, device=starts.device) - starts[sequence]
        unseen = (row >= (ends_q[1:] - ends_q[:-1])[sequence]).view(-1, 1, 1)
    if decay is not None and decay.dim() > 1:
        decay = decay.masked_fill(unseen.squeeze(-1), 0)
    key, value = (rows.masked_fill(unseen, 0) for rows in (inputs.key, inputs.value))
    return inputs._replace(key=key, value=value, decay=decay)


def _mapped(
    inputs: LinearInputs, maps: tuple[Any, Any], state: LinearState | None, running: bool
) -> tuple[LinearInputs, str, Scaling | None]:
    """The inputs, the map that is left to the implementation, and how features were scaled."""
    if isinstance(maps[0], str) and maps[0] == maps[1]:
        return inputs, maps[0], None
    if inputs.key_lengths is not None:  # a hidden key must not be seen by the map either
        hidden = hidden_keys(inputs.key_lengths, inputs.key.shape[2])
        inputs = inputs._replace(key=inputs.key.masked_fill(hidden.unsqueeze(-1), 0))
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:  # nor padding
        of_query = padding_of(inputs.query.shape[0], inputs.cu_seqlens_q).view(-1, 1, 1)
        of_key = padding_of(inputs.key.shape[0], inputs.cu_seqlens_k).view(-1, 1, 1)
        inputs = inputs._replace(
            query=inputs.query.masked_fill(of_query, 0), key=inputs.key.masked_fill(of_key, 0)
        )
    scaling = None
    if isinstance(maps[0], ScaledMap):
        inputs, scaling = scale_features(inputs, maps, state, running=running)
    else:
        mapped = []
        for name, one, rows in zip(("query", "key"), maps, inputs[:2], strict=True):
            found = features(one, rows) if isinstance(one, str) else one(rows)
            mapped.append(check_features(name, found, rows).to(rows.dtype))
        inputs = inputs._replace(query=mapped[0], key=mapped[1])
    numbers = [rows.shape[-1] for rows in inputs[:2]]
    if numbers[0] != numbers[1]:
        raise ValueError(
            f"feature_map: got {numbers[1]} features for keys, takes as many as for queries, "
            f"{numbers[0]}"
        )
    return inputs, "identity", scaling


def _warn_of_signs(maps: tuple[Any, Any], form: str) -> None:
    """A sum of features of both signs may be near 0, and then it is no divisor."""
    if form != "sum" or torch.compiler.is_compiling():
        return
    signed = [one for one in maps if one in SIGNED_MAPS]
    if signed:
        warnings.warn(
            f"normalize: got 'sum' with the feature map {signed[0]!r}, whose features may be "
            "negative, so that their sum may be near 0; takes 'abs' or 'clamp' with a large eps, "
            "or 'none'",
            stacklevel=4,
        )


def problem_of(
    inputs: LinearInputs, variant: LinearVariant, config: KernelConfig | None
) -> LinearProblem:
    """The call's shape, by which implementations are chosen."""
    query, key, value = inputs.query, inputs.key, inputs.value
    rows = 0 if inputs.packed else 2
    return LinearProblem(
        batch=inputs.num_sequences,
        query_heads=query.shape[1],
        key_heads=key.shape[1],
        value_heads=value.shape[1],
        query_len=query.shape[rows],
        kv_len=key.shape[rows],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        device=query.device.type,
        causal=variant.causal,
        feature_map=variant.feature_map,
        normalize=variant.normalize,
        packed=inputs.packed,
        decay=inputs.decay is not None,
        state=inputs.initial_kv is not None,
        configured=config is not None,
        tma=all(map(strides_fit_tma, (query, key, value))),
    )


# ---- checks ----------------------------------------------------------------------------------


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
    check_floating_point("decay", decay, takes)
    if decay.device != inputs.query.device:
        raise ValueError(f"decay: got {decay.device}, takes query's {inputs.query.device}")
    wanted = (heads,) if decay.dim() == 1 else rows  # a trace cannot compare tuples of sizes
    if decay.dim() != len(wanted) or any(map(operator.ne, decay.shape, wanted)):
        raise ValueError(f"decay: got shape {tuple(decay.shape)}, takes {takes}")
    if not values_readable(decay):
        return
    seen = decay.detach()
    if inputs.key_lengths is not None and seen.dim() == 3:
        seen = seen.masked_fill(hidden_keys(inputs.key_lengths, inputs.key.shape[2]), 0)
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
        check_floating_point(f"{name}.{field}", tensor, f"a floating-point tensor {takes}")
        assert isinstance(tensor, Tensor)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}.{field}: got shape {tuple(tensor.shape)}, takes {takes}")
        if tensor.device != like.device:
            raise ValueError(f"{name}.{field}: got {tensor.device}, takes query's {like.device}")

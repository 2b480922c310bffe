"""Validation: check all arguments of linear attention and turn them into what backends take.

Feature maps that implementations do not apply themselves are applied here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.feature_maps import ScaledMap
from saccade.ops.linear_attention import arguments
from saccade.ops.linear_attention.feature_scaling import (
    Scaling,
    ends_of,
    padding_of,
    scale_features,
    sequence_of,
)
from saccade.ops.linear_attention.reference import features
from saccade.runtime.arguments import (
    check_align,
    check_flag,
    check_offsets,
    check_scale,
    resolve_config,
)
from saccade.runtime.spec import (
    KernelConfig,
    LinearInputs,
    LinearProblem,
    LinearState,
    LinearVariant,
)
from saccade.runtime.validation import cast, strides_fit_tma


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
    arguments.check_rows(query, key, value, packed=cu_seqlens_q is not None)
    check_flag("causal", causal)
    check_flag("return_state", return_state)
    check_align(align)
    maps = arguments.resolve_map(feature_map)
    form = arguments.check_normalize(normalize)
    eps = arguments.check_number("eps", eps, least=0.0)
    scale = check_scale(scale)
    config = resolve_config(config, query.device)
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], query.device)
        check_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0], query.device)
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                f"cu_seqlens_k: got shape {tuple(cu_seqlens_k.shape)}, takes cu_seqlens_q's "
                f"{tuple(cu_seqlens_q.shape)}"
            )
    arguments.check_key_lengths(key_lengths, key)
    inputs = LinearInputs(query, key, value, decay, key_lengths)
    inputs = inputs._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    arguments.check_decay(inputs)
    _warn_of_signs(maps, form)
    inputs = _without_unseen_keys(inputs, align) if causal and not return_state else inputs
    inputs, fused, scaling = _mapped(inputs, maps, initial_state, causal and form != "none")
    sizes = (inputs.num_sequences, inputs.state_heads, inputs.query.shape[-1], value.shape[-1])
    arguments.check_state(state_name, initial_state, sizes, query)
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
        row = torch.arange(inputs.key.shape[2], device=inputs.key.device)
        hidden = row >= inputs.key_lengths.view(-1, 1, 1)
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
            mapped.append(arguments.check_features(name, found, rows).to(rows.dtype))
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
    signed = [one for one in maps if one in arguments.SIGNED_MAPS]
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

"""The step of linear attention: a few tokens of decoding, which change states where they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.ops.linear_attention import custom_op
from saccade.ops.linear_attention.api import FeatureMap
from saccade.ops.linear_attention.custom_op import flatten, linear_step_op
from saccade.ops.linear_attention.feature_scaling import Scaling
from saccade.ops.linear_attention.validation import STATE_SHAPES, prepare
from saccade.runtime import backends
from saccade.runtime.arguments import integers, values_readable
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.spec import LinearInputs, LinearState


def linear_attention_step(  # breaks function-length: most of it is the docstring
    state: LinearState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    state_index: Tensor | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu+1",
    normalize: str = "sum",
    eps: float = 1e-6,
    scale: float = 1.0,
    decay: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """One token (or a few) of decoding: the state takes the new keys in, in place.

    Args:
        state: the states so far, as `return_state` gives them, changed in place: one for each
            batch entry, or a pool of them. The sums may be in any floating-point dtype; float32
            keeps them exact over long sequences. Maps that scale their features need
            log_scale, in float32 or float64.
        query: [batch, query_heads, tokens, head_dim], with as many tokens as keys.
        key, value: [batch, heads, tokens, dim].
        state_index: [batch] int32 or int64: which entry of the pool belongs to which batch entry,
            all of them different; None: they are the same, in order.
        feature_map, normalize, eps, scale: as in the `linear_attention` call before.
        decay: [state_heads] or [batch, state_heads, tokens].
        implementation: as in `linear_attention`; the reference has no step.

    Returns:
        output [batch, heads, tokens, value_dim].

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_attention`; also where gradients
            are wanted, which a step in place cannot give.

    >>> output = saccade.linear_attention_step(state, query, key, value)
    """
    _check_wishes(state, query, key, value, decay)
    if custom_op.sharded(query, key, value, state=state):
        options = {
            "state_index": state_index, "feature_map": feature_map, "normalize": normalize,
            "eps": eps, "scale": scale, "decay": decay, "implementation": implementation,
        }  # fmt: skip
        tensors = {"query": query, "key": key, "value": value}
        return custom_op.step_on_shards(linear_attention_step, state, tensors, options)
    _check_pools(state)
    index = _check_index(state, query, state_index)
    here = state if index is None else _picked(state, index)
    prepared = prepare(
        query, key, value,
        feature_map=feature_map, normalize=normalize, eps=eps, scale=scale, decay=decay,
        initial_state=here, state_name="state",
    )  # fmt: skip
    inputs, variant, problem, _, scaling = prepared
    _check_gradients("features", inputs.query, inputs.key)  # of a map with parameters
    if implementation == "reference":
        raise NotImplementedError(
            "implementation: reference: it changes nothing in place; call linear_attention with "
            "initial_state and return_state"
        )
    checked = CheckedCall(variant, None, backends.choose(problem, implementation, "step"))
    inputs = inputs._replace(initial_kv=None, initial_key_sum=None)
    if scaling is not None:
        _check_units(state.log_scale)
        inputs = _in_new_units(inputs, scaling)
    output = linear_step_op(state.kv, state.key_sum, index, *inputs, *flatten(checked))
    if scaling is None:
        return output
    if state.log_scale is not None and inputs.key.shape[2] > 0:
        into = slice(None) if index is None else index
        state.log_scale[into] = scaling.state.to(state.log_scale.dtype)
    return scaling.finished(output, inputs, variant.normalize)


def _picked(state: LinearState, index: Tensor) -> LinearState:
    """The batch's entries of a pool, as far as they are looked at before the step: no sums."""
    kv, key_sum = (rows.new_empty(()).expand(index.shape[0], *rows.shape[1:]) for rows in state[:2])
    return LinearState(kv, key_sum, None if state.log_scale is None else state.log_scale[index])


def _in_new_units(inputs: LinearInputs, scaling: Scaling) -> LinearInputs:
    """The inputs with one more factor by which the old state fades: that of its new units."""
    if scaling.initial is None or inputs.key.shape[2] == 0:
        return inputs
    log_decay = scaling.initial.new_zeros(*scaling.initial.shape, inputs.key.shape[2])
    if inputs.decay is not None:
        constant = inputs.decay.dim() == 1
        log_decay = log_decay + (inputs.decay.unsqueeze(-1) if constant else inputs.decay)
    log_decay[..., 0] += scaling.initial
    return inputs._replace(decay=log_decay)


def _check_wishes(
    state: LinearState, query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None
) -> None:
    """Refuse what a step in place cannot do."""
    if not isinstance(state, LinearState):
        raise TypeError(f"state: got {type(state).__name__}, takes a LinearState")
    _check_gradients("tensors", *state, query, key, value, decay)
    rows = [t.shape[2] for t in (query, key) if isinstance(t, Tensor) and t.dim() == 4]
    if len(rows) == 2 and rows[0] != rows[1]:
        raise ValueError(f"query: got {rows[0]} tokens, takes key's {rows[1]}")


def _check_gradients(what: str, *tensors: Any) -> None:
    """Refuse tensors that require gradients where these are recorded."""
    wanted = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and wanted:
        raise ValueError(
            f"linear_attention_step: got {what} that require gradients, takes none: call it under "
            "torch.no_grad(), or linear_attention with initial_state and return_state"
        )


def _check_pools(state: LinearState) -> None:
    """Refuse sums that are not one for each entry of the pool, in memory of its own."""
    sizes = []
    for field, tensor in zip(state._fields, state, strict=True):
        if tensor is None and field == "log_scale":
            continue
        takes = f"a tensor {STATE_SHAPES[field]}"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"state.{field}: got {type(tensor).__name__}, takes {takes}")
        if tensor.dim() != takes.count(",") + 1:
            raise ValueError(f"state.{field}: got shape {tuple(tensor.shape)}, takes {takes}")
        sizes.append(tensor.shape[0])
        if sizes[-1] != sizes[0]:
            raise ValueError(f"state.{field}: got {sizes[-1]} entries, takes kv's {sizes[0]}")
        if any(
            n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ValueError(
                f"state.{field}: got an expanded tensor, takes one whose numbers all have memory "
                "of their own"
            )


def _check_units(log_scale: Tensor | None) -> None:
    """Refuse a state that cannot hold the units that its sums will have."""
    takes = "float32 or float64, [batch, state_heads], for a map that scales its features"
    if log_scale is None:
        more = "zeros for sums as they are, -inf for none so far"
        raise ValueError(f"state.log_scale: got None, takes {takes}; {more}")
    if log_scale.dtype.itemsize < 4:  # an exponent of 40 with eight bits is off by 8 %
        raise TypeError(f"state.log_scale: got {log_scale.dtype}, takes {takes}")


def _check_index(state: LinearState, query: Tensor, state_index: Tensor | None) -> Tensor | None:
    """Refuse an index that is not one different entry of the pool for each batch entry."""
    if state_index is None:
        return None
    integers("state_index", state_index, 1)
    if isinstance(query, Tensor) and query.dim() and state_index.shape[0] != query.shape[0]:
        raise ValueError(
            f"state_index: got shape {tuple(state_index.shape)}, takes ({query.shape[0]},)"
        )
    if state_index.device != state.kv.device:
        raise ValueError(f"state_index: got {state_index.device}, takes state's {state.kv.device}")
    if state_index.numel() and state.kv.shape[0] == 0:
        raise ValueError("state_index: got entries of a state that has none, takes no entries")
    if values_readable(state_index) and state_index.numel():
        low, high = int(state_index.min()), int(state_index.max())
        if low < 0 or high >= state.kv.shape[0]:
            takes = f"0 to {state.kv.shape[0] - 1}"
            raise ValueError(f"state_index: got {low} to {high}, takes {takes}")
        if state_index.unique().numel() != state_index.numel():
            raise ValueError("state_index: got an entry twice, takes different entries")
    return state_index.long()

"""The linear attention calls: whole sequences, packed ones, and a step of decoding.

Each checks its arguments, chooses an implementation and gives the result. A step computes a few
tokens and changes states where they lie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from saccade.ops.linear_attention import custom_op, reference
from saccade.ops.linear_attention.custom_op import LINEAR, VALUES, linear_step_op
from saccade.ops.linear_attention.feature_scaling import Scaling
from saccade.ops.linear_attention.validation import (
    SIGNED_MAPS,
    STATE_SHAPES,
    Prepared,
    prepare,
)
from saccade.runtime import backends, call_cache
from saccade.runtime.arguments import OFFSETS, check_floating_point, options_of, unknown_options
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.spec import KernelConfig, LinearInputs, LinearResults, LinearState
from saccade.runtime.state_pools import check_index, check_own_memory
from saccade.runtime.validation import without_autocast

FeatureMap = Callable[[Tensor], Tensor] | str  # a function or a name


class LinearOptions(TypedDict, total=False):
    """The options that all calls share, for type checkers."""

    causal: bool
    align: str
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap]
    normalize: str
    eps: float
    scale: float
    decay: Tensor | None
    initial_state: LinearState | None
    implementation: str | None
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None


@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_lengths: Tensor | None = ...,
    return_state: Literal[False] = ...,
    **options: Unpack[LinearOptions],
) -> Tensor: ...
@overload
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_lengths: Tensor | None = ...,
    return_state: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, LinearState]: ...
def linear_attention(  # breaks function-length: most of it is the docstring
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    align: str = "bottom_right",
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu+1",
    normalize: str = "sum",
    eps: float = 1e-6,
    scale: float = 1.0,
    decay: Tensor | None = None,
    key_lengths: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, LinearState]:
    """Each query row becomes the average of the values, weighted by products of features.

    The work grows with the length, not with its square, and the past fits into a `LinearState`.

    Args:
        query: [batch, query_heads, query_len, head_dim], any strides.
        key: [batch, key_heads, kv_len, head_dim].
        value: [batch, value_heads, kv_len, value_dim]. The output has as many heads as the one of
            the three that has most; the others' numbers divide that. The state has as many as
            key or value, whichever has more (state_heads).
        causal: query rows see keys up to their own place only; else all keys.
        align: where rows and keys of unequal number meet: "bottom_right" (the last row sees the
            last key) or "top_left" (the first row sees the first key; rows beyond the last key
            see all keys).
        feature_map: "elu+1", "relu", "exp", "identity", "softmax" (over each row's channels), a
            function of [..., head_dim] such as those of `saccade.feature_maps`, or a pair
            (for queries, for keys).
        normalize: what weighted sums are divided by, given t, the sum of a row's scores:
            "sum": t + eps; "clamp": max(t, eps); "abs": max(|t|, eps); "none": 1.
        eps: see normalize; not negative. Taken as 0 with maps that scale their features
            (`feature_maps.Favor`): these are positive, and have no unit in common.
        scale: the factor of the scores.
        decay: logarithms, at most 0, of the factor by which the state fades as a key comes:
            [state_heads] constant ones, or [batch, state_heads, kv_len] one for each key row.
        key_lengths: [batch] int32 or int64: only the first so many keys are there; the rest is
            neither read nor counted, and fades nothing.
        initial_state: what came before the first key; every row sees it.
        return_state: also return the state after the last key.
        implementation: "cpu", "hopper", "triton" or "reference"; None takes the first that fits.
            A named one never falls back: it raises where it cannot serve.
        config: `kv_tile` is the number of rows in a chunk; or a mapping from (major, minor) GPU
            capabilities to such.

    Returns:
        output [batch, heads, query_len, value_dim] in query's dtype and memory order, with
        `return_state` also a `LinearState`, float32 (float64 for float64). Both are
        differentiable, by decay and initial_state too. A row whose divisor is 0, such as one
        that sees nothing while eps is 0, gives 0.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: where the named implementation cannot serve the call.

    Source: Katharopoulos et al. 2020, section 3.2 to 3.4; decay: Sun et al. 2023 (RetNet),
    section 2.1, and for each row Yang et al. 2024 (Gated Linear Attention), section 4.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 4, 100, 16)
        >>> output, state = saccade.linear_attention(query, key, value, return_state=True)
        >>> output.shape, state.kv.shape
        (torch.Size([1, 4, 100, 16]), torch.Size([1, 4, 16, 16]))
    """
    if unknown:
        raise unknown_options(unknown, options_of(linear_attention))
    options: dict[str, Any] = {
        "causal": causal, "align": align, "feature_map": feature_map, "normalize": normalize,
        "eps": eps, "scale": scale, "decay": decay, "key_lengths": key_lengths,
        "initial_state": initial_state, "return_state": return_state, "config": config,
    }  # fmt: skip
    return _call(linear_attention, (query, key, value), (), options, implementation)


@overload
def linear_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    return_state: Literal[False] = ...,
    **options: Unpack[LinearOptions],
) -> Tensor: ...
@overload
def linear_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    return_state: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, LinearState]: ...
def linear_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_state: bool = False,
    implementation: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, LinearState]:
    """Linear attention for sequences of unequal length laid end to end, with no padding.

    Args:
        query: [tokens, query_heads, head_dim], the sequences one after the other.
        key: [kv_tokens, key_heads, head_dim].
        value: [kv_tokens, value_heads, value_dim].
        cu_seqlens_q, cu_seqlens_k: as in `attention_varlen`.
        return_state, implementation, and all others but key_lengths: as in `linear_attention`;
            decay is [state_heads] or [kv_tokens, state_heads], and a state has one entry for each
            sequence.

    Returns:
        output [tokens, heads, value_dim]; with `return_state` also a `LinearState`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_attention`.

    Examples:
        >>> query, key, value = torch.randn(3, 10, 4, 16)
        >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> saccade.linear_attention_varlen(query, key, value, cu_seqlens).shape
        torch.Size([10, 4, 16])
    """
    if cu_seqlens_q is None:
        raise TypeError(f"cu_seqlens_q: got None, takes {OFFSETS}")
    check_options(options)
    offsets = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    options["return_state"] = return_state
    rows = query, key, value
    return _call(linear_attention_varlen, rows, offsets, options, implementation)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a packed call does not have."""
    shared = LinearOptions.__annotations__
    if unknown := [name for name in options if name not in shared]:
        raise unknown_options(unknown, options_of(linear_attention_varlen, shared))


def _call(
    function: Callable[..., Any],
    rows: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, ...],
    options: dict[str, Any],
    implementation: str | None,
) -> Any:
    """What a call returns; of DTensors, each rank calls the function on its part."""
    if custom_op.sharded(*rows, state=options.get("initial_state")):
        tensors: dict[str, Any] = dict(zip(TENSOR_NAMES, rows, strict=False))
        options["implementation"] = implementation
        return custom_op.attention_on_shards(function, tensors, offsets, options)
    output, state = _attend((*rows, *offsets), options, implementation)
    return (output, state) if options["return_state"] else output


def _attend(
    tensors: tuple[Tensor, ...], options: dict[str, Any], implementation: str | None
) -> tuple[Tensor, LinearState]:
    """Output and last state of a dense call, or of a packed one with both sides' offsets."""
    call_key = _key_of(tensors, options, implementation)
    checked, scaling = call_cache.lookup(call_key), None
    alone = checked is not None  # such calls are not observed
    if checked is not None:
        kv, key_sum = (options.get("initial_state") or NO_STATE)[:2]
        inputs = LinearInputs(
            **dict(zip(TENSOR_NAMES, tensors, strict=False)), decay=options.get("decay"),
            key_lengths=options.get("key_lengths"), initial_kv=kv, initial_key_sum=key_sum,
        )  # fmt: skip
    else:
        inputs, variant, problem, config, scaling = prepare(*tensors, **options)
        checked = CheckedCall(variant, config, *backends.choose_all(problem, implementation))
        if scaling is None and all(map(operator.is_, inputs[:3], tensors)):
            call_cache.keep(call_key, checked)
    if checked.forward_by == "reference":  # plain PyTorch, with PyTorch's gradients
        with without_autocast(inputs.query.device):  # inputs have been cast already
            found: LinearResults = reference.attention(inputs, checked.variant)
    else:
        found = LinearResults(*LINEAR(inputs, checked, alone=alone))
    if scaling is None:
        return found.output, LinearState(found.kv, found.key_sum)
    output = scaling.finished(found.output, inputs, checked.variant.normalize)
    return output, LinearState(found.kv, found.key_sum, scaling.state)


NAMES = ("causal", "align", "feature_map", "normalize", "eps", "scale", "return_state")
NO_STATE = (None, None)


def _key_of(
    tensors: tuple[Tensor, ...], options: dict[str, Any], implementation: str | None
) -> tuple[Any, ...] | None:
    """What validation of the call is kept under; None where it must be done each time."""
    state, read = options.get("initial_state"), [options.get("decay"), options.get("key_lengths")]
    if state is not None and (type(state) is not LinearState or state.log_scale is not None):
        return None
    if options.get("feature_map") in SIGNED_MAPS:  # may warn
        return None
    plain = (state is None, *[options.get(name, MISSING) for name in NAMES])
    return call_cache.key_of_any(
        "linear_attention", (*tensors, *read, *(state or NO_STATE)[:2]), plain,
        (*tensors[3:], *read), implementation=implementation, config=options.get("config"),
    )  # fmt: skip


MISSING = ""  # an option that was left out
TENSOR_NAMES = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")


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
    **unknown: Any,
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

    Examples:
        >>> prompt, token = torch.randn(3, 1, 4, 100, 16), torch.randn(3, 1, 4, 1, 16)
        >>> with torch.no_grad():
        ...     _, state = saccade.linear_attention(*prompt, return_state=True)
        ...     output = saccade.linear_attention_step(state, *token)  # the state takes it in
        >>> output.shape
        torch.Size([1, 4, 1, 16])
    """
    if unknown:
        raise unknown_options(unknown, options_of(linear_attention_step))
    _check_wishes(state, query, key, value, decay)
    if custom_op.sharded(query, key, value, state=state):
        options = {
            "state_index": state_index, "feature_map": feature_map, "normalize": normalize,
            "eps": eps, "scale": scale, "decay": decay, "implementation": implementation,
        }  # fmt: skip
        tensors = {"query": query, "key": key, "value": value}
        return custom_op.step_on_shards(linear_attention_step, state, tensors, options)
    index, prepared = prepare_step(
        state, query, key, value, state_index=state_index,
        feature_map=feature_map, normalize=normalize, eps=eps, scale=scale, decay=decay,
    )  # fmt: skip
    inputs, variant, problem, _, scaling = prepared
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
    output = linear_step_op(state.kv, state.key_sum, index, *inputs, *VALUES.flatten(checked))
    if scaling is None:
        return output
    if state.log_scale is not None and inputs.key.shape[2] > 0:
        into = slice(None) if index is None else index
        state.log_scale[into] = scaling.state.to(state.log_scale.dtype)
    return scaling.finished(output, inputs, variant.normalize)


def prepare_step(
    state: LinearState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    state_index: Tensor | None,
    **options: Any,
) -> tuple[Tensor | None, Prepared]:
    """Check the arguments of a step; gives the index of its states and the rest for the choice."""
    _check_wishes(state, query, key, value, options.get("decay"))
    _check_pools(state)
    index = check_index(state.kv, query, state_index)
    here = state if index is None else _picked(state, index)
    prepared = prepare(query, key, value, initial_state=here, state_name="state", **options)
    _check_gradients("features", *prepared.inputs[:2])  # of a map with parameters
    return index, prepared


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
        takes = f"a floating-point tensor {STATE_SHAPES[field]}"
        check_floating_point(f"state.{field}", tensor, takes)
        assert isinstance(tensor, Tensor)
        if tensor.dim() != takes.count(",") + 1:
            raise ValueError(f"state.{field}: got shape {tuple(tensor.shape)}, takes {takes}")
        sizes.append(tensor.shape[0])
        if sizes[-1] != sizes[0]:
            raise ValueError(f"state.{field}: got {sizes[-1]} entries, takes kv's {sizes[0]}")
        check_own_memory(f"state.{field}", tensor)


def _check_units(log_scale: Tensor | None) -> None:
    """Refuse a state that cannot hold the units that its sums will have."""
    takes = "float32 or float64, [batch, state_heads], for a map that scales its features"
    if log_scale is None:
        more = "zeros for sums as they are, -inf for none so far"
        raise ValueError(f"state.log_scale: got None, takes {takes}; {more}")
    if log_scale.dtype.itemsize < 4:  # an exponent of 40 with eight bits is off by 8 %
        raise TypeError(f"state.log_scale: got {log_scale.dtype}, takes {takes}")

"""The linear attention calls: check the arguments, choose an implementation, give the result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from saccade.ops.linear_attention import custom_op, reference
from saccade.ops.linear_attention.custom_op import LINEAR
from saccade.ops.linear_attention.validation import SIGNED_MAPS, prepare
from saccade.runtime import backends, call_cache
from saccade.runtime.arguments import OFFSETS
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.spec import KernelConfig, LinearInputs, LinearResults, LinearState
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

    >>> output, state = saccade.linear_attention(query, key, value, return_state=True)
    """
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
    """
    if cu_seqlens_q is None:
        raise TypeError(f"cu_seqlens_q: got None, takes {OFFSETS}")
    unknown = set(options) - set(LinearOptions.__annotations__)
    if unknown:
        raise TypeError(f"linear_attention_varlen: got the unknown arguments {sorted(unknown)}")
    offsets = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    options["return_state"] = return_state
    rows = query, key, value
    return _call(linear_attention_varlen, rows, offsets, options, implementation)


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
        inputs = LinearInputs(**dict(zip(TENSOR_NAMES, tensors, strict=False)))
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
TENSORS = ("decay", "key_lengths", "initial_state")


def _key_of(
    tensors: tuple[Tensor, ...], options: dict[str, Any], implementation: str | None
) -> tuple[Any, ...] | None:
    """What validation of the call is kept under; None where it must be done each time."""
    if any(options.get(name) is not None for name in TENSORS):
        return None
    if options.get("feature_map") in SIGNED_MAPS:  # may warn
        return None
    plain = tuple(options.get(name, MISSING) for name in NAMES)
    return call_cache.key_of_any(
        "linear_attention", tensors, plain, tensors[3:],
        implementation=implementation, config=options.get("config"),
    )  # fmt: skip


MISSING = ""  # an option that was left out
TENSOR_NAMES = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")

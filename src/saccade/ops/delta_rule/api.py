"""The gated delta rule's calls: whole sequences, packed ones, and a step of decoding.

Each checks its arguments, chooses an implementation and gives the result. A step computes a few
tokens and changes states where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from saccade.ops.delta_rule import custom_op, reference
from saccade.ops.delta_rule.custom_op import DELTA, VALUES, delta_step_op
from saccade.ops.delta_rule.validation import Prepared, check_pool, check_wishes, prepare
from saccade.runtime import backends, call_cache
from saccade.runtime.arguments import OFFSETS, options_of, unknown_options
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.delta_spec import DeltaInputs
from saccade.runtime.shards import any_sharded
from saccade.runtime.spec import KernelConfig
from saccade.runtime.state_pools import check_index
from saccade.runtime.validation import without_autocast


class DeltaOptions(TypedDict, total=False):
    """The options that all calls share, for type checkers."""

    decay: Tensor | None
    normalize_qk: bool
    scale: float | None
    initial_state: Tensor | None
    implementation: str | None
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None


@overload
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    return_state: Literal[False] = ...,
    **options: Unpack[DeltaOptions],
) -> Tensor: ...
@overload
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    return_state: Literal[True],
    **options: Unpack[DeltaOptions],
) -> tuple[Tensor, Tensor]: ...
def gated_delta_rule(  # breaks function-length: most of it is the docstring
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    decay: Tensor | None = None,
    normalize_qk: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each token corrects what a state says of its key, and reads the state with its query.

    The state is a matrix for each head that maps keys to values. At each token it fades by decay;
    then the error of what it says of the token's key, times beta, is written to it:

        state = diag(exp(decay_t)) · state
        state = state + beta_t · key_t · (value_t − stateᵀ key_t)ᵀ
        output_t = scale · stateᵀ query_t

    The work grows with the length, and memory does not.

    Args:
        query, key: [batch, key_heads, length, head_dim], any strides.
        value: [batch, value_heads, length, value_dim]; value_heads is a multiple of key_heads, and
            as many value heads in a row share a key head.
        beta: [batch, value_heads, length], from 0 (nothing is written) over 1 (the state then says
            value_t of key_t, if the key has length 1) to 2. Floating-point, of any dtype.
        decay: logarithms of at most 0 of what a token leaves of the state, [batch, value_heads,
            length] for all of a head's state (Gated DeltaNet), or [batch, value_heads, length,
            head_dim] for each of its rows (Kimi Delta Attention); None: it does not fade. Their
            values are not looked at: above 0 the state grows, and may overflow.
        normalize_qk: divide each row of query and key by its length, sqrt(Σ x² + 1e-6).
        scale: the factor of the output; None: 1/sqrt(head_dim).
        initial_state: [batch, value_heads, head_dim, value_dim] before the first token, of any
            floating-point dtype; None: zeros.
        return_state: also return the state after the last token.
        implementation: "cpu", "hopper", "triton" or "reference"; None takes the first that fits. A
            named one never falls back: it raises where it cannot serve.
        config: `kv_tile` is the number of tokens in a chunk (on a GPU 16, 32 or 64); or a mapping
            from (major, minor) GPU capabilities to such.

    Returns:
        output [batch, value_heads, length, value_dim] in query's dtype and memory order, with
        `return_state` also the last state in float32 (float64 for float64). Both are
        differentiable by all tensors.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: where the named implementation cannot serve the call.

    Source: Yang et al. 2025 (Gated Delta Networks), section 3; decay by channel: Kimi Team 2025
    (Kimi Linear), section 3.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 4, 100, 16)
        >>> beta, decay = torch.rand(1, 4, 100), -torch.rand(1, 4, 100)
        >>> options = {"decay": decay, "normalize_qk": True, "return_state": True}
        >>> output, state = saccade.gated_delta_rule(query, key, value, beta, **options)
        >>> output.shape, state.shape
        (torch.Size([1, 4, 100, 16]), torch.Size([1, 4, 16, 16]))
    """
    if unknown:
        raise unknown_options(unknown, options_of(gated_delta_rule))
    options: dict[str, Any] = {
        "decay": decay, "normalize_qk": normalize_qk, "scale": scale,
        "initial_state": initial_state, "return_state": return_state, "config": config,
    }  # fmt: skip
    return _call(gated_delta_rule, (query, key, value, beta), (), options, implementation)


@overload
def gated_delta_rule_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: Literal[False] = ...,
    **options: Unpack[DeltaOptions],
) -> Tensor: ...
@overload
def gated_delta_rule_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: Literal[True],
    **options: Unpack[DeltaOptions],
) -> tuple[Tensor, Tensor]: ...
def gated_delta_rule_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: bool = False,
    implementation: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule for sequences of unequal length laid end to end, with no padding.

    Args:
        query, key: [tokens, key_heads, head_dim], the sequences one after the other.
        value: [tokens, value_heads, value_dim].
        beta: [tokens, value_heads].
        cu_seqlens: int32 [sequences + 1], offsets as in `attention_varlen`; tokens behind the last
            are padding, of which the output is 0.
        return_state, implementation, and all others: as in `gated_delta_rule`; decay is
            [tokens, value_heads] or [tokens, value_heads, head_dim], and states are
            [sequences, value_heads, head_dim, value_dim].

    Returns:
        output [tokens, value_heads, value_dim]; with `return_state` also the last states.

    Raises:
        TypeError, ValueError, NotImplementedError: as `gated_delta_rule`.

    Examples:
        >>> query, key, value = torch.randn(3, 10, 4, 16)
        >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> beta = torch.rand(10, 4)
        >>> saccade.gated_delta_rule_varlen(query, key, value, beta, cu_seqlens).shape
        torch.Size([10, 4, 16])
    """
    if cu_seqlens is None:
        raise TypeError(f"cu_seqlens: got None, takes {OFFSETS}")
    check_options(options)
    options["return_state"] = return_state
    rows = query, key, value, beta
    return _call(gated_delta_rule_varlen, rows, (cu_seqlens,), options, implementation)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a packed call does not have."""
    shared = DeltaOptions.__annotations__
    if unknown := [name for name in options if name not in shared]:
        raise unknown_options(unknown, options_of(gated_delta_rule_varlen, shared))


def _call(
    function: Callable[..., Any],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, ...],
    options: dict[str, Any],
    implementation: str | None,
) -> Any:
    """What a call returns; of DTensors, each rank calls the function on its part."""
    if any_sharded(*rows, options.get("decay"), options.get("initial_state")):
        named: dict[str, Any] = dict(zip(TENSOR_NAMES, rows, strict=True))
        options["implementation"] = implementation
        return custom_op.rule_on_shards(function, named, offsets, options)
    cu_seqlens = offsets[0] if offsets else None
    tensors = DeltaInputs(*rows, options.get("decay"), options.get("initial_state"), cu_seqlens)
    call_key = call_cache.key_of_any(
        "delta_rule", tensors,
        (options.get("normalize_qk", False), options["return_state"]), offsets,
        scale=options.get("scale"), implementation=implementation, config=options.get("config"),
    )  # fmt: skip
    checked = call_cache.lookup(call_key)
    alone = checked is not None  # such calls are not observed
    if checked is not None:
        inputs = tensors
    else:
        inputs, variant, problem, config = prepare(*rows, *offsets, **options)
        checked = CheckedCall(variant, config, *backends.choose_all(problem, implementation))
        call_cache.keep(call_key, checked)
    if checked.forward_by == "reference":  # plain PyTorch, with PyTorch's gradients
        with without_autocast(inputs.query.device):  # inputs have been cast already
            output, state = reference.attention(inputs, checked.variant)
    else:
        output, state = DELTA(inputs, checked, alone=alone)
    return (output, state) if options["return_state"] else output


TENSOR_NAMES = ("query", "key", "value", "beta")


def gated_delta_rule_step(  # breaks function-length: most of it is the docstring
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    state_index: Tensor | None = None,
    decay: Tensor | None = None,
    normalize_qk: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
    **unknown: Any,
) -> Tensor:
    """One token (or a few) of decoding: the state takes the new tokens in, in place.

    Args:
        state: [batch, value_heads, head_dim, value_dim], the states so far, as `return_state`
            gives them, changed in place: one for each batch entry, or a pool of them. In any
            floating-point dtype; float32 keeps them exact over long sequences.
        query, key: [batch, key_heads, tokens, head_dim].
        value: [batch, value_heads, tokens, value_dim].
        beta: [batch, value_heads, tokens].
        state_index: [batch] int32 or int64: which entry of the pool belongs to which batch entry,
            all of them different; None: they are the same, in order.
        decay, normalize_qk, scale: as in the `gated_delta_rule` call before.
        implementation: as in `gated_delta_rule`; the reference has no step.

    Returns:
        output [batch, value_heads, tokens, value_dim].

    Raises:
        TypeError, ValueError, NotImplementedError: as `gated_delta_rule`; also where gradients are
            wanted, which a step in place cannot give.

    Examples:
        >>> pool = torch.zeros(8, 4, 16, 16)  # states of eight sequences
        >>> query, key, value = torch.randn(3, 2, 4, 1, 16)
        >>> beta, slots = torch.rand(2, 4, 1), torch.tensor([5, 2])
        >>> output = saccade.gated_delta_rule_step(
        ...     pool, query, key, value, beta, state_index=slots)
        >>> output.shape, pool.any(-1).any(-1).any(-1).nonzero().flatten()
        (torch.Size([2, 4, 1, 16]), tensor([2, 5]))
    """
    if unknown:
        raise unknown_options(unknown, options_of(gated_delta_rule_step))
    check_wishes(state, query, key, value, beta, decay)
    call_key = call_cache.key_of_any(
        "delta_rule_step", (query, key, value, beta, decay, state, state_index), (normalize_qk,),
        (state_index,), scale=scale, implementation=implementation,
    )  # fmt: skip
    checked = call_cache.lookup(call_key)
    if checked is not None:
        index = None if state_index is None else state_index.long()
        inputs = DeltaInputs(query, key, value, beta, decay)
        return custom_op.step_at_once(state, index, inputs, checked)
    options: dict[str, Any] = {"decay": decay, "normalize_qk": normalize_qk, "scale": scale}
    tensors = {"query": query, "key": key, "value": value, "beta": beta}
    if any_sharded(*tensors.values(), state):
        options |= {"state_index": state_index, "implementation": implementation}
        return custom_op.step_on_shards(gated_delta_rule_step, state, tensors, options)
    index, prepared = prepare_step(state, *tensors.values(), state_index=state_index, **options)
    if implementation == "reference":
        raise NotImplementedError(
            "implementation: reference: it changes nothing in place; call gated_delta_rule with "
            "initial_state and return_state"
        )
    forward_by = backends.choose(prepared.problem, implementation, "step")
    checked = CheckedCall(prepared.variant, None, forward_by)
    call_cache.keep(call_key, checked)
    inputs = prepared.inputs._replace(initial_state=None)
    return delta_step_op(state, index, *inputs, *VALUES.flatten(checked))


def prepare_step(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    state_index: Tensor | None,
    **options: Any,
) -> tuple[Tensor | None, Prepared]:
    """Check the arguments of a step; gives the index of its states and the rest for the choice."""
    check_wishes(state, query, key, value, beta, options.get("decay"))
    check_pool(state)
    index = check_index(state, query, state_index)
    # Its entries, as far as they are looked at before the step: no numbers.
    here = state if index is None else state.new_empty(()).expand(index.shape[0], *state.shape[1:])
    return index, prepare(
        query, key, value, beta, initial_state=here, state_name="state", **options
    )

"""The attention calls and their operator: check arguments, choose an implementation, give results.

`runtime/custom_op.py` says how operators are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from saccade.masks import AnyMask
from saccade.modifiers.expression import Captured, num_captured
from saccade.ops.attention import reference
from saccade.runtime import arguments, backends, call_cache, shards
from saccade.runtime.arguments import options_of, unknown_options
from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import Arguments, Gradient, Operation
from saccade.runtime.dropout import Numbers
from saccade.runtime.spec import (
    Gradients,
    Inputs,
    KernelConfig,
    Results,
    Variant,
    all_results,
    empty_all_results,
    empty_gradients,
)
from saccade.runtime.validation import prepare, with_causal, with_seed, without_autocast
from saccade.scores import AnyScore


class Options(TypedDict, total=False):
    """The options that `attention` and `attention_varlen` share, for type checkers."""

    mask: AnyMask
    causal: bool
    score: AnyScore
    scale: float | None
    sinks: Tensor | None
    dropout_p: float
    deterministic: bool
    implementation: str | None
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention(  # breaks function-length: most of it is the docstring
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: AnyMask = None,
    causal: bool = False,
    score: AnyScore = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Each query row becomes the average of the values, weighted by how well its keys match.

    Args:
        query: [batch, query_heads, query_len, head_dim], any strides.
        key: [batch, kv_heads, kv_len, head_dim]; kv_heads divides query_heads.
        value: [batch, kv_heads, kv_len, value_dim].
        mask: which pairs are visible: a `Mask` (`saccade.masks`), or a bool tensor broadcastable
            to [batch, query_heads, query_len, kv_len] (True = visible), or a function of
            (batch, head, query_row, kv_row). None: all of them.
        causal: also hide keys behind each query row's own place, the last query standing at the
            last key: the same as mask & `saccade.masks.causal()`.
        score: a change of the scaled scores (`saccade.scores`), a function of (score, batch, head,
            query_row, kv_row), or None.
        scale: the factor of the scores; 1/sqrt(head_dim) where None.
        sinks: [query_heads] logits that join the softmax's denominator and carry no value.
        dropout_p: the share of weights that is dropped, in [0, 1); the rest grows to make up.
        return_lse: also return the log-sum-exp of each row's scores (sinks included).
        return_max_logit: also return the largest score of each head, as QK-clip watches it: scaled
            and changed by `score`, without sinks, of visible pairs.
        deterministic: gradients are bit-equal from run to run. Forward passes always are.
        implementation: "cpu", "hopper", "triton" or "reference"; None takes the first that fits.
            A named one never falls back: it raises where it cannot serve.
        config: tile sizes, or a mapping from (major, minor) GPU capabilities to them.

    Returns:
        output [batch, query_heads, query_len, value_dim] in query's dtype and memory order (if
        query is [batch, length, heads, dim] in memory, ``output.transpose(1, 2).flatten(2)``
        copies nothing); with `return_lse` also the lse [batch, query_heads, query_len], natural
        logarithm, float32 (float64 for float64). A row that sees nothing gives 0 and -inf.
        With `return_max_logit`, last, also the largest scores [batch, query_heads], in the lse's
        dtype and without a gradient; -inf where nothing is visible, NaN beside a row whose lse is
        NaN.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: where the named implementation cannot serve the call.

    Source: Vaswani et al. 2017, section 3.2.1.

    Examples:
        >>> query = torch.randn(2, 8, 64, 32, requires_grad=True)
        >>> key, value = torch.randn(2, 2, 2, 64, 32)  # 2 kv heads serve 8 query heads
        >>> mask = masks.causal() & masks.window(16)
        >>> output, lse = saccade.attention(query, key, value, mask=mask, return_lse=True)
        >>> output.shape, lse.shape
        (torch.Size([2, 8, 64, 32]), torch.Size([2, 8, 64]))
        >>> output.sum().backward()
    """
    if unknown:
        raise unknown_options(unknown, options_of(attention))
    arguments.check_flag("return_lse", return_lse)
    arguments.check_flag("return_max_logit", return_max_logit)
    if causal is not False:
        mask = with_causal(mask, causal)
    call_key, checked = None, None
    if call_cache.plain_options(sinks, dropout_p, deterministic):
        call_key, checked = call_cache.find(
            query, key, value, mask, score, scale, implementation, config, return_max_logit
        )
    if checked is not None:
        results = _attend(Inputs(query, key, value), checked, deterministic, alone=True)
        return _returned(results, return_lse, return_max_logit)
    if call_key is None and shards.any_sharded(query, key, value):
        options = {
            "mask": mask, "score": score, "scale": scale, "sinks": sinks, "dropout_p": dropout_p,
            "return_lse": return_lse, "return_max_logit": return_max_logit,
            "deterministic": deterministic, "implementation": implementation,
            "config": config,
        }  # fmt: skip
        return shards.attention(attention, query, key, value, (), options)
    inputs, variant, problem, config = prepare(
        query, key, value, None, None, None, None,
        mask=mask, score=score, scale=scale, sinks=sinks, dropout_p=dropout_p,
        return_lse=return_lse, return_max_logit=return_max_logit, deterministic=deterministic,
        config=config,
    )  # fmt: skip
    checked = CheckedCall(variant, config, *backends.choose_all(problem, implementation))
    call_cache.keep(call_key, checked)
    alone = call_key is not None
    results = _attend(with_seed(inputs, variant), checked, deterministic, alone=alone)
    return _returned(results, return_lse, return_max_logit)


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention_varlen(  # breaks function-length: most of it is the docstring
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: AnyMask = None,
    causal: bool = False,
    score: AnyScore = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Attention for sequences of unequal length laid end to end, with no padding between them.

    Args:
        query: [tokens, query_heads, head_dim], the sequences one after the other.
        key: [kv_tokens, kv_heads, head_dim].
        value: [kv_tokens, kv_heads, value_dim].
        cu_seqlens_q: int32 [batch + 1]: sequence b's queries are the tokens from
            cu_seqlens_q[b] to cu_seqlens_q[b + 1]. Starts at 0, ascends, ends at the token
            count or below it: rows behind are padding (output 0, lse -inf, gradients 0).
        cu_seqlens_k: the same for keys and values; cu_seqlens_q where None.
        max_seqlen_q, max_seqlen_k: the longest lengths, if known; never read from a GPU.
        mask, causal, score, scale, sinks, dropout_p, return_lse, return_max_logit, deterministic,
        implementation, config: as in `attention`; masks and scores number rows within each
            sequence, `batch` is the sequence, and their tensors are as long as the longest
            sequence, or longer.

    Returns:
        output [tokens, query_heads, value_dim]; with `return_lse` also the lse
        [query_heads, tokens]; with `return_max_logit` also the largest scores
        [sequences, query_heads].

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention`.

    Examples:
        >>> query = torch.randn(10, 4, 16)  # three sequences of 3, 5 and 2 tokens
        >>> key, value = torch.randn(2, 10, 2, 16)
        >>> cu_seqlens = torch.tensor([0, 3, 8, 10], dtype=torch.int32)
        >>> output = saccade.attention_varlen(query, key, value, cu_seqlens, causal=True)
        >>> output.shape
        torch.Size([10, 4, 16])
    """
    if cu_seqlens_q is None:
        raise TypeError(f"cu_seqlens_q: got None, takes {arguments.OFFSETS}")
    if unknown:
        raise unknown_options(unknown, options_of(attention_varlen))
    arguments.check_flag("return_lse", return_lse)
    arguments.check_flag("return_max_logit", return_max_logit)
    if causal is not False:
        mask = with_causal(mask, causal)
    offsets = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    tensors, call_key, checked = (query, key, value, *offsets), None, None
    if call_cache.plain_options(sinks, dropout_p, deterministic):
        call_key, checked = call_cache.find_packed(
            query, key, value, offsets, (max_seqlen_q, max_seqlen_k),
            mask, score, scale, implementation, config, return_max_logit,
        )  # fmt: skip
    if checked is not None:
        inputs = Inputs(query, key, value, None, None, *offsets)
        results = _attend(inputs, checked, deterministic, alone=True)
        return _returned(results, return_lse, return_max_logit)
    if call_key is None and shards.any_sharded(*tensors):
        options = {
            "mask": mask, "score": score, "scale": scale, "sinks": sinks, "dropout_p": dropout_p,
            "return_lse": return_lse, "return_max_logit": return_max_logit,
            "deterministic": deterministic, "implementation": implementation, "config": config,
            "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        }  # fmt: skip
        return shards.attention(attention_varlen, query, key, value, offsets, options)
    inputs, variant, problem, config = prepare(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        mask=mask, score=score, scale=scale, sinks=sinks, dropout_p=dropout_p,
        return_lse=return_lse, return_max_logit=return_max_logit, deterministic=deterministic,
        config=config,
    )  # fmt: skip
    checked = CheckedCall(variant, config, *backends.choose_all(problem, implementation))
    call_cache.keep(call_key, checked)
    alone = call_key is not None
    results = _attend(with_seed(inputs, variant), checked, deterministic, alone=alone)
    return _returned(results, return_lse, return_max_logit)


def attention_of_rows(
    inputs: Inputs, longest: tuple[int | None, int | None], numbers: Numbers, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and lse of rows of a longer call, which drop what these rows of it drop.

    Args:
        inputs: with the seed of the whole call.
        longest: rows of the longest packed sequence, queries and keys.
        numbers: what heads, sequences and rows are called there.
        options: mask, score, scale, dropout_p, deterministic, implementation and config, as in
            `attention`.
    """
    query, key, value, sinks, seed, offsets_q, offsets_k, _ = inputs
    implementation = options.pop("implementation")
    inputs, variant, problem, config = prepare(
        query, key, value, offsets_q, offsets_k, *longest, sinks=sinks, return_lse=True, **options
    )
    inputs = inputs._replace(seed=seed, numbers=numbers.table)
    variant = variant._replace(grouped=numbers.grouped)
    checked = CheckedCall(variant, config, *backends.choose_all(problem, implementation))
    return _attend(inputs, checked, options["deterministic"])[:2]


def _attend(
    inputs: Inputs, checked: CheckedCall, deterministic: bool, *, alone: bool = False
) -> tuple[Any, ...]:
    """`Results` of a validated call; the reference is plain PyTorch with its gradients."""
    if checked.forward_by == "reference":
        with without_autocast(inputs.query.device):
            results = Results(*reference.attention(inputs, checked.variant))
            if not checked.variant.max_logit:
                return results
            largest = reference.max_logit(inputs, checked.variant, results.lse)
            return results._replace(max_logit=largest)
    return ATTENTION(inputs, checked, deterministic, alone=alone)


def _returned(
    results: tuple[Any, ...], return_lse: bool, return_max_logit: bool
) -> Tensor | tuple[Tensor, ...]:
    """What a call gives of its results."""
    if return_max_logit:
        return (*results[: 1 + return_lse], results[3])
    return (results[0], results[1]) if return_lse else results[0]


TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? numbers, Tensor[] tables"
)
MODIFIERS = "SymInt[] ints, float[] floats, str mask, str score, float scale, float dropout_p"
PLAIN_VALUES = (
    f"{MODIFIERS}, int[] config, bool deterministic, bool residual, bool max_logit, "
    "bool grouped, str forward_by, str backward_by"
)
MASK, CONFIG, DETERMINISTIC, FORWARD_BY, BACKWARD_BY = 2, 6, 7, 11, 12  # among the plain values
OF_VARIANT = slice(8, 11)  # residual, max_logit, grouped
NOTHING = Captured()
DEFAULT_CONFIG = KernelConfig()  # tiles of the backend's own choice


# ---- plain values there and back --------------------------------------------------------------


def modifier_values(variant: Variant, config: KernelConfig | None) -> tuple[Any, ...]:
    """MODIFIERS and the config of a call, as plain values."""
    captured = variant.mask_captured.joined(variant.score_captured)
    return (
        list(captured.ints),
        list(captured.floats),
        variant.mask,
        variant.score,
        variant.scale,
        variant.dropout_p,
        [] if config is None else config.numbers(),
    )


def flatten(checked: CheckedCall, deterministic: bool) -> tuple[Any, ...]:
    """PLAIN_VALUES of a call."""
    variant, config = checked.variant, checked.config
    others = variant.residual, variant.max_logit, variant.grouped
    chosen = checked.forward_by, checked.backward_by
    return (*modifier_values(variant, config), deterministic, *others, *chosen)


def variant_of(tables: Sequence[Tensor], plain: Sequence[Any]) -> Variant:
    """The variant that tables and plain values stand for."""
    residual, max_logit, grouped = plain[OF_VARIANT]
    return modified(tables, plain)._replace(residual=residual, max_logit=max_logit, grouped=grouped)


def modified(tables: Sequence[Tensor], plain: Sequence[Any]) -> Variant:
    """The variant that tables and MODIFIERS stand for."""
    ints, floats, mask, score, scale, dropout_p = plain[:6]
    if not (tables or ints or floats):
        return Variant(mask, score, NOTHING, NOTHING, scale, dropout_p)
    t, i, f = num_captured(mask)
    return Variant(
        mask,
        score,
        Captured(tables[:t], ints[:i], floats[:f]),
        Captured(tables[t:], ints[i:], floats[f:]),
        scale,
        dropout_p,
    )


def config_of(plain: Sequence[Any]) -> KernelConfig:
    """The config that plain values stand for."""
    return KernelConfig.of_numbers(plain[CONFIG]) if plain[CONFIG] else DEFAULT_CONFIG


# ---- the forward pass -------------------------------------------------------------------------


def _prepare(inputs: Inputs, checked: CheckedCall) -> Callable[[Inputs, Variant], Results]:
    module = module_of("attention", checked.forward_by)
    return module.prepared(inputs, checked.variant, checked.config or DEFAULT_CONFIG)


def _run(arguments: Arguments) -> tuple[Tensor, ...]:
    inputs, tables, plain = arguments
    module = module_of("attention", plain[FORWARD_BY])
    return all_results(module.forward(inputs, variant_of(tables, plain), config_of(plain)))


def _empty(arguments: Arguments) -> tuple[Tensor, ...]:
    inputs, tables, plain = arguments
    return empty_all_results(inputs, variant_of(tables, plain))


# ---- the backward pass ------------------------------------------------------------------------


def _run_backward(
    arguments: Arguments,
    results: Sequence[Tensor | None],
    wanted: Sequence[int],
    variant: Variant,
) -> list[Tensor]:
    """Gradients of query, key and value, of sinks where there are any, of the wanted tables."""
    inputs, _, plain = arguments
    grad_output, grad_lse, output, lse, residual = results
    assert output is not None and lse is not None
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    if wanted:
        first = _num_mask_tables(plain)
        wanted = [position - first for position in wanted]
    gradients = module_of("attention", plain[BACKWARD_BY], "backward").backward(
        inputs, variant, config_of(plain), Results(output, lse, residual), grad_output, grad_lse,
        wanted, plain[DETERMINISTIC],
    )  # fmt: skip
    return _listed(gradients, wanted)


def _compile_backward(arguments: Arguments, wanted: Sequence[int], variant: Variant) -> None:
    """Begin to compile the backward pass, where it is one that is compiled."""
    inputs, _, plain = arguments
    module = module_of("attention", plain[BACKWARD_BY], "backward")
    if hasattr(module, "compile_backward"):
        first = _num_mask_tables(plain)
        positions = [position - first for position in wanted]
        module.compile_backward(inputs, variant, config_of(plain), positions, plain[DETERMINISTIC])


def _listed(gradients: Gradients, wanted: Sequence[int]) -> list[Tensor]:
    listed = [gradients.query, gradients.key, gradients.value]
    if gradients.sinks is not None:
        listed.append(gradients.sinks)
    return listed + [gradients.tables[position] for position in wanted]


def _empty_backward(arguments: Arguments, wanted: Sequence[int]) -> list[Tensor]:
    found = {position: torch.empty_like(arguments.tables[position]) for position in wanted}
    return _listed(empty_gradients(arguments.inputs)._replace(tables=found), wanted)


def _wanted(tables: Sequence[Any], plain: Sequence[Any]) -> list[int]:
    """The score's tables whose gradients may be asked for."""
    first = _num_mask_tables(plain)
    return [
        position
        for position, table in enumerate(tables)
        if position >= first and table.is_floating_point() and table.requires_grad
    ]


def _num_mask_tables(plain: Sequence[Any]) -> int:
    """How many of the tables belong to the mask; the score's follow."""
    return num_captured(plain[MASK])[0]


ATTENTION = Operation(
    "attention",
    Inputs,
    TENSORS,
    PLAIN_VALUES,
    num_results=4,
    variant_of=variant_of,
    flatten=flatten,
    prepare=_prepare,
    run=_run,
    empty=_empty,
    gradient=Gradient(
        schema="Tensor? grad_output, Tensor? grad_lse, Tensor output, Tensor lse, "
        "Tensor? residual_of_output",
        results=(0, 1),
        kept=(0, 1, 2),
        inputs=(0, 1, 2, 3),
        run=_run_backward,
        empty=_empty_backward,
        wanted=_wanted,
        optional=(2,),
        compile_ahead=_compile_backward,
    ),
)

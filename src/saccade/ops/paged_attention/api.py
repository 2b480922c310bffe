"""The attention call over pages, and its operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from saccade.masks import AnyMask
from saccade.ops.attention.api import (
    DEFAULT_CONFIG,
    MODIFIERS,
    config_of,
    modified,
    modifier_values,
)
from saccade.ops.paged_attention import reference
from saccade.runtime import arguments, backends, call_cache, shards
from saccade.runtime.arguments import options_of, unknown_options
from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import Arguments, Operation, gradient_asked, not_implemented
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows
from saccade.runtime.validation import prepare_paged, with_causal, without_autocast
from saccade.scores import AnyScore


class PagedOptions(TypedDict, total=False):
    """The options of `attention_paged`, for type checkers."""

    cu_seqlens_q: Tensor | None
    query_scale: Tensor | None
    key_scales: Tensor | None
    value_scales: Tensor | None
    mask: AnyMask
    causal: bool
    score: AnyScore
    scale: float | None
    sinks: Tensor | None
    batch_invariant: bool
    implementation: str | None
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None


@overload
def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedOptions],
) -> Tensor: ...
@overload
def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...
def attention_paged(  # breaks function-length: most of it is the docstring
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    query_scale: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    mask: AnyMask = None,
    causal: bool = False,
    score: AnyScore = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens to sequences whose keys and values lie in pages.

    Row j of sequence b lies in page page_table[b, j // page_size], slot j % page_size. Decoding,
    chunks of a prompt and drafted tokens are the same call, and may be mixed in one. Forward only.

    Args:
        query: [batch, query_heads, query_len, head_dim], or with cu_seqlens_q packed:
            [tokens, query_heads, head_dim]. The last query row stands at the sequence's end.
            float8_e4m3fn over pages of it: products are of e4m3 numbers, as in `attention_fp8`.
        key_pages: [num_pages, kv_heads, page_size, head_dim], any strides, 1 to 1024 slots a page;
            of query's dtype, or float8_e4m3fn or int8.
        value_pages: [num_pages, kv_heads, page_size, value_dim], of key_pages' dtype. Where it is a
            view of their first channels (latent attention), GPUs read these once.
        page_table: int32 [batch, max_pages]; entries behind a sequence's last page are not read.
        kv_lens: int32 [batch]: tokens of each sequence in its pages, the new ones included.
        cu_seqlens_q: int32 [batch + 1], as in `attention_varlen`; None for a dense query.
        query_scale: of e4m3 queries, float32: one number or [batch, query_heads]; None: 1.
        key_scales, value_scales: [num_pages, kv_heads, page_size]: what numbers of eight bits are
            multiplied by; int8 needs them, float8_e4m3fn may go without.
        mask: a `saccade.masks` Mask or a bool tensor (True = visible); None shows every key.
            Drafted tokens want `masks.tree(...)`.
        causal: as in `attention`; a prompt wants it.
        score, scale, sinks, return_lse, implementation, config: as in `attention`.
        batch_invariant: cut the keys at fixed positions, so that a sequence's result has the same
            bits alone and in any batch, wherever its pages lie.

    Returns:
        output of query's shape with value_dim channels, bfloat16 of e4m3 queries; with `return_lse`
        also the lse [batch, query_heads, query_len] ([query_heads, tokens] if packed).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: if a gradient may be asked for (the reference has one), or no
            implementation can serve the call.

    Source: PagedAttention (Kwon et al. 2023), section 4.1.

    Examples:
        >>> key_pages, value_pages = torch.randn(2, 6, 2, 4, 16)  # 6 pages of 4 slots, 2 kv heads
        >>> page_table = torch.tensor([[4, 1], [2, -1]], dtype=torch.int32)
        >>> kv_lens = torch.tensor([5, 3], dtype=torch.int32)
        >>> query = torch.randn(2, 8, 1, 16)  # the next token of two sequences
        >>> output = saccade.attention_paged(query, key_pages, value_pages, page_table, kv_lens)
        >>> output.shape
        torch.Size([2, 8, 1, 16])
    """
    inputs = PagedInputs(
        query, key_pages, value_pages, page_table, kv_lens,
        cu_seqlens_q, sinks, key_scales, value_scales, query_scale,
    )  # fmt: skip
    if unknown:
        raise unknown_options(unknown, options_of(attention_paged))
    arguments.check_flag("return_lse", return_lse)
    if causal is not False:
        mask = with_causal(mask, causal)
    call_key = None
    if query_scale is None:  # validation lays one out for all heads, and looks at its numbers
        call_key = call_cache.key_of_any(
            "attention_paged", inputs, (batch_invariant,), (cu_seqlens_q,),
            mask=mask, score=score, scale=scale, implementation=implementation, config=config,
        )  # fmt: skip
    checked = call_cache.lookup(call_key)
    if call_key is None and shards.any_sharded(*inputs):
        options = {
            "mask": mask, "score": score, "scale": scale, "batch_invariant": batch_invariant,
            "return_lse": return_lse, "implementation": implementation, "config": config,
        }  # fmt: skip
        return shards.attention_paged(attention_paged, inputs, options)
    if checked is None:
        inputs, variant, problem, config = prepare_paged(
            inputs, mask=mask, score=score, scale=scale, batch_invariant=batch_invariant,
            return_lse=return_lse, config=config,
        )  # fmt: skip
        forward_by = backends.choose(problem, implementation)
        checked = CheckedCall(variant, config, forward_by, batch_invariant=batch_invariant)
        call_cache.keep(call_key, checked)
    elif checked.forward_by != "cpu":  # which looks at them itself
        arguments.check_page_values(inputs)
    if checked.forward_by == "reference":
        with without_autocast(inputs.query.device):
            output, lse = reference.attention_paged(inputs, checked.variant)
    else:
        output, lse = _attend(inputs, checked, alone=call_key is not None)
    return (output, lse) if return_lse else output


# ---- the operator -----------------------------------------------------------------------------
# It has no gradient. `runtime/custom_op.py` says how operators are made.

BATCH_INVARIANT, FORWARD_BY = 7, 8  # among the plain values
NO_GRADIENT = "a gradient of attention over pages (call it under torch.no_grad())"


def _flatten(checked: CheckedCall, deterministic: bool) -> tuple[Any, ...]:
    values = modifier_values(checked.variant, checked.config)
    return (*values, checked.batch_invariant, checked.forward_by)


def _prepare(
    inputs: PagedInputs, checked: CheckedCall
) -> Callable[[PagedInputs, Variant], tuple[Tensor, Tensor]]:
    module = module_of("paged_attention", checked.forward_by)
    config = checked.config or DEFAULT_CONFIG
    return module.prepared(inputs, checked.variant, config, checked.batch_invariant)


def _run(arguments: Arguments) -> tuple[Tensor, Tensor]:
    inputs, tables, plain = arguments
    module = module_of("paged_attention", plain[FORWARD_BY])
    variant, config = modified(tables, plain), config_of(plain)
    return module.forward(inputs, variant, config, plain[BATCH_INVARIANT])


def _empty(arguments: Arguments) -> tuple[Tensor, Tensor]:
    inputs = arguments.inputs
    packed = inputs.cu_seqlens_q is not None
    return empty_rows(inputs.query, inputs.value_pages.shape[-1], packed)


PAGED = Operation(
    "attention_paged",
    PagedInputs,
    "Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor kv_lens, "
    "Tensor? cu_seqlens_q, Tensor? sinks, Tensor? key_scales, Tensor? value_scales, "
    "Tensor? query_scale, Tensor[] tables",
    f"{MODIFIERS}, int[] config, bool batch_invariant, str forward_by",
    num_results=2,
    variant_of=modified,
    flatten=_flatten,
    prepare=_prepare,
    run=_run,
    empty=_empty,
    no_gradient=NO_GRADIENT,
)


def _attend(inputs: PagedInputs, checked: CheckedCall, *, alone: bool) -> tuple[Tensor, ...]:
    """Output and lse of a validated call; an error where a gradient may be asked for.

    alone: whether nothing observes the call, as of every call that has a key.
    """
    if gradient_asked(inputs, checked.variant):
        raise not_implemented(checked.forward_by, NO_GRADIENT)
    return PAGED(inputs, checked, alone=alone)

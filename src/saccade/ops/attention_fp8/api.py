"""The calls of fp8 attention: check arguments, choose an implementation, give results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from saccade.masks import AnyMask
from saccade.ops.attention_fp8 import reference
from saccade.ops.attention_fp8.custom_op import ATTENTION_FP8, check_no_gradient
from saccade.ops.attention_fp8.validation import Fp8Options, prepare
from saccade.runtime import arguments, backends, call_cache
from saccade.runtime.arguments import options_of, unknown_options
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.fp8_spec import Fp8Inputs
from saccade.runtime.shards import any_sharded
from saccade.runtime.spec import KernelConfig
from saccade.runtime.validation import with_causal, without_autocast
from saccade.scores import AnyScore


class Options(TypedDict, total=False):
    """The options that both calls share, for type checkers."""

    query_scale: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    quantize: str | None
    incoherent: bool | None
    smooth: bool | None
    out_dtype: torch.dtype | None
    mask: AnyMask
    causal: bool
    score: AnyScore
    scale: float | None
    sinks: Tensor | None
    implementation: str | None
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None


@overload
def attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def attention_fp8(  # breaks function-length: most of it is the docstring
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    quantize: str | None = None,
    incoherent: bool | None = None,
    smooth: bool | None = None,
    out_dtype: torch.dtype | None = None,
    mask: AnyMask = None,
    causal: bool = False,
    score: AnyScore = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose products are of fp8 numbers (e4m3): less exact, and forward only.

    Rows of 16 bits are quantised here; e4m3 rows come with the scales that they are to be
    multiplied by. Weights are rounded to e4m3 as well, and sums are float32.

    Args:
        query: [batch, query_heads, query_len, head_dim], bfloat16, float16 or float8_e4m3fn.
        key: [batch, kv_heads, kv_len, head_dim], of query's dtype; kv_heads divides query_heads.
        value: [batch, kv_heads, kv_len, value_dim], of query's dtype.
        query_scale, key_scale, value_scale: of e4m3 rows, float32: one number, [batch, heads], or
            [batch, heads, blocks] for blocks of 128 rows; query's may be for key's heads. None: 1.
        quantize: which 16-bit rows share a scale: "block" (None; 128 rows of a head), "head" or
            "tensor". This and the next two are not for e4m3 rows.
        incoherent: multiply 16-bit queries and keys by an orthogonal matrix (signs and Hadamard
            matrices of up to 128 channels), which spreads outliers and leaves products as they are;
            None: True.
        smooth: subtract each head's mean key from 16-bit keys, which leaves the weights as they
            are; None: True.
        out_dtype: of the output, bfloat16 or float16; None: query's, bfloat16 of e4m3 rows.
        mask, causal, score, scale, sinks, return_lse, config: as in `attention`. Tiles are of at
            most 128 rows.
        implementation: "cpu", "hopper", "triton" (GPUs from sm_89 on) or "reference";
            None takes the first that fits. A named one never falls back: it raises where it cannot
            serve.

    Returns:
        output [batch, query_heads, query_len, value_dim] in query's memory order; with `return_lse`
        also the lse [batch, query_heads, query_len] in float32, natural logarithm. A row that sees
        nothing gives 0 and -inf.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: where a gradient may be asked for (`attention` has them), or the named
            implementation, or without a name any that is faster than 16 bits, cannot serve.

    Source: Shah et al. 2024 (FlashAttention-3), section 3.3; Zhang et al. 2024 (SageAttention).

    Examples:
        >>> query, key, value = torch.randn(3, 1, 4, 256, 64, dtype=torch.bfloat16)
        >>> output = saccade.attention_fp8(query, key, value, causal=True)
        >>> exact = saccade.attention(query, key, value, causal=True)
        >>> bool((output - exact).square().mean().sqrt() < 0.1)
        True
        >>> rows = [rows.to(torch.float8_e4m3fn) for rows in (query, key, value)]
        >>> saccade.attention_fp8(*rows, key_scale=torch.tensor(2.0)).dtype
        torch.bfloat16
    """
    if unknown:
        raise unknown_options(unknown, options_of(attention_fp8))
    fp8 = Fp8Options(
        query_scale, key_scale, value_scale, quantize, incoherent, smooth, out_dtype
    )  # as they were given
    options = {
        "mask": mask, "score": score, "scale": scale, "sinks": sinks, "return_lse": return_lse,
        "config": config,
    }  # fmt: skip
    packing = None, None, None, None
    return _call((query, key, value), packing, fp8, causal, options, implementation)


@overload
def attention_fp8_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_fp8_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def attention_fp8_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """fp8 attention for sequences of unequal length laid end to end, with no padding between them.

    Args:
        query: [tokens, query_heads, head_dim], the sequences one after the other.
        key, value: [kv_tokens, kv_heads, head_dim] and [kv_tokens, kv_heads, value_dim].
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `attention_varlen`.
        return_lse, implementation, and all others: as in `attention_fp8`; scales are one number,
            [sequences, heads], or [1, heads, tokens // 128 + sequences], where block n of 128 rows
            of sequence b has the number cu_seqlens[b] // 128 + b + n.

    Returns:
        output [tokens, query_heads, value_dim]; with `return_lse` also the lse
        [query_heads, tokens].

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention_fp8`.

    Examples:
        >>> query = torch.randn(10, 4, 16, dtype=torch.bfloat16)  # two sequences
        >>> key, value = torch.randn(2, 10, 2, 16, dtype=torch.bfloat16)
        >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> saccade.attention_fp8_varlen(query, key, value, cu_seqlens, causal=True).shape
        torch.Size([10, 4, 16])
    """
    if cu_seqlens_q is None:
        raise TypeError(f"cu_seqlens_q: got None, takes {arguments.OFFSETS}")
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    causal, fp8, rest = split_options(options)
    rest["return_lse"] = return_lse
    return _call((query, key, value), packing, fp8, causal, rest, implementation)


DEFAULTS: dict[str, Any] = {
    "query_scale": None, "key_scale": None, "value_scale": None, "quantize": None,
    "incoherent": None, "smooth": None, "out_dtype": None, "causal": False, "mask": None,
    "score": None, "scale": None, "sinks": None, "config": None,
}  # fmt: skip


def split_options(options: Mapping[str, Any]) -> tuple[Any, Fp8Options, dict[str, Any]]:
    """The option `causal`, those of fp8 and the others; an error for what is none of them."""
    if unknown := [name for name in options if name not in DEFAULTS]:
        raise unknown_options(unknown, options_of(attention_fp8_varlen, Options.__annotations__))
    rest = {**DEFAULTS, **options}
    fp8 = Fp8Options(*[rest.pop(name) for name in Fp8Options._fields])
    return rest.pop("causal"), fp8, rest


def _call(
    rows: tuple[Tensor, Tensor, Tensor],
    packing: tuple[Any, Any, Any, Any],
    fp8: Fp8Options,
    causal: Any,
    options: dict[str, Any],
    implementation: str | None,
) -> Any:
    """What a call returns."""
    if any_sharded(*rows):
        raise NotImplementedError("query, key, value: got DTensors, takes plain tensors")
    options["mask"] = with_causal(options["mask"], causal)
    offsets = packing[0], packing[0] if packing[1] is None else packing[1]
    tensors = Fp8Inputs(*rows, *fp8[:3], options["sinks"], *offsets)
    call_key = _key_of(tensors, fp8, packing, options, implementation)
    checked, inputs = call_cache.lookup(call_key), tensors
    alone = checked is not None
    if checked is None:
        inputs, variant, quantisation, problem, config = prepare(
            *rows, *packing, fp8=fp8, **options
        )
        forward_by = backends.choose(problem, implementation)
        checked = CheckedCall(variant, config, forward_by, quantisation=quantisation)
        call_cache.keep(call_key, checked)
    check_no_gradient(inputs, checked)
    if checked.forward_by == "reference":
        assert checked.quantisation is not None
        with without_autocast(inputs.query.device):
            output, lse = reference.attention(inputs, checked.variant, checked.quantisation)
    else:
        output, lse = ATTENTION_FP8(inputs, checked, alone=alone)
    return (output, lse) if options["return_lse"] else output


def _key_of(
    tensors: Fp8Inputs,
    fp8: Fp8Options,
    packing: tuple[Any, ...],
    options: dict[str, Any],
    implementation: str | None,
) -> Any:
    """The key of a call in the call cache; None for one that must be validated.

    Validation changes the form of scales with fewer dimensions than theirs, or for key's heads.
    """
    scales = [scale for scale in fp8[:3] if scale is not None]
    if scales and not _as_validated(tensors, scales):
        return None
    return call_cache.key_of_any(
        "attention_fp8", tensors,
        (*fp8[3:6], str(fp8.out_dtype), *packing[2:], options["return_lse"]),
        (*scales, *tensors[7:]), mask=options["mask"], score=options["score"],
        scale=options["scale"], implementation=implementation, config=options["config"],
    )  # fmt: skip


def _as_validated(tensors: Fp8Inputs, scales: list[Any]) -> bool:
    """Whether validation leaves the scales of a call as they are."""
    if not all(isinstance(scale, Tensor) and scale.dim() != 1 for scale in scales):
        return False
    if any(isinstance(each, Tensor) and each.is_nested for each in (tensors.query, *scales)):
        return False  # they have no sizes to compare
    of_query = tensors.query_scale
    if of_query is None or of_query.dim() == 0 or not isinstance(tensors.query, Tensor):
        return True
    return tensors.query.dim() > 1 and of_query.shape[1] == tensors.query.shape[1]

"""Validation: check all arguments of fp8 attention and make the values that backends take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.masks import AnyMask
from saccade.runtime import arguments
from saccade.runtime.fp8_spec import (
    BLOCK_ROWS,
    E4M3,
    GIVEN,
    MODES,
    Fp8Inputs,
    Quantisation,
    num_slots,
)
from saccade.runtime.spec import KernelConfig, Problem, Variant
from saccade.runtime.validation import (
    cast,
    check_packing,
    contiguous_pair,
    problem_of,
    variant_for,
)
from saccade.scores import AnyScore

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (E4M3, *HALVES)


class Fp8Options(NamedTuple):
    """The options of a call beside those of attention."""

    query_scale: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    quantize: str | None  # None, and of the next two: as they are by default
    incoherent: bool | None
    smooth: bool | None
    out_dtype: torch.dtype | None


class Prepared(NamedTuple):
    """A checked call."""

    inputs: Fp8Inputs
    variant: Variant
    quantisation: Quantisation
    problem: Problem
    config: KernelConfig | None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *,
    fp8: Fp8Options,
    mask: AnyMask,
    score: AnyScore,
    scale: float | None,
    sinks: Tensor | None,
    return_lse: bool,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None,
) -> Prepared:
    """Check every argument of a dense or packed call; give its values."""
    packed = cu_seqlens_q is not None
    shapes = arguments.PACKED_SHAPES if packed else arguments.DENSE_SHAPES
    if not (isinstance(query, Tensor) and query.dtype == E4M3):
        query, key, value = cast(query, key, value)
    arguments.check_tensors(query, key, value, shapes, DTYPES)
    arguments.check_sinks(sinks, query)
    arguments.check_flag("return_lse", return_lse)
    scale = arguments.resolve_scale(scale, query.shape[-1])
    config = arguments.resolve_config(config, query.device)
    longest, sequences = None, None
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        longest = check_packing(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        cu_seqlens_q, cu_seqlens_k = contiguous_pair(cu_seqlens_q, cu_seqlens_k)
        sequences = cu_seqlens_q.shape[0] - 1
    quantisation = _quantisation(query, fp8)
    kv_heads = key.shape[1]
    scales = (
        check_scale("query_scale", fp8.query_scale, query, sequences, kv_heads),
        check_scale("key_scale", fp8.key_scale, key, sequences),
        check_scale("value_scale", fp8.value_scale, value, sequences),
    )
    _check_score_range(scales[0], scales[1], scale, query.shape[-1])
    sinks = arguments.contiguous(sinks)
    inputs = Fp8Inputs(query, key, value, *scales, sinks, cu_seqlens_q, cu_seqlens_k)
    extents = arguments.extents_of(inputs, longest)  # type: ignore[arg-type]
    variant = variant_for(mask, score, scale, 0.0, extents, query.device)
    problem = problem_of(inputs, variant, config)  # type: ignore[arg-type]
    return Prepared(
        inputs, variant, quantisation, problem._replace(quantize=quantisation.mode), config
    )


def _quantisation(query: Tensor, fp8: Fp8Options) -> Quantisation:
    """How rows become e4m3 numbers, and the output's dtype."""
    if fp8.quantize not in (None, *MODES):
        raise ValueError(f"quantize: got {fp8.quantize!r}, takes one of {MODES}")
    for name in ("incoherent", "smooth"):
        if getattr(fp8, name) is not None:
            arguments.check_flag(name, getattr(fp8, name))
    given = query.dtype == E4M3
    dtype = fp8.out_dtype
    if dtype is None:
        dtype = torch.bfloat16 if given else query.dtype
    if dtype not in HALVES:
        raise ValueError(f"out_dtype: got {dtype}, takes torch.bfloat16, torch.float16 or None")
    if given:
        for name in ("quantize", "incoherent", "smooth"):
            if getattr(fp8, name) is not None:
                raise ValueError(
                    f"{name}: got {getattr(fp8, name)!r} for {query.dtype}, takes None: "
                    "these rows are quantised already"
                )
        return Quantisation(GIVEN, False, False, dtype)
    for name, each in zip(fp8._fields[:3], fp8[:3], strict=True):
        if each is not None:
            raise ValueError(
                f"{name}: got a scale for {query.dtype}, takes None: rows of 16 bits are quantised "
                "here, with scales of their own"
            )
    incoherent, smooth = fp8.incoherent is not False, fp8.smooth is not False
    return Quantisation(fp8.quantize or MODES[0], incoherent, smooth, dtype)


def _check_score_range(
    query_scale: Tensor | None, key_scale: Tensor | None, scale: float, head_dim: int
) -> None:
    """Refuse scales by which scores may leave float32, where they may be read."""
    given = [each for each in (query_scale, key_scale) if each is not None]
    if not given or not all(each.numel() and arguments.values_readable(each) for each in given):
        return
    named = {"query_scale": query_scale, "key_scale": key_scale}
    scales = {name: float(each.max()) for name, each in named.items() if each is not None}
    products = scales.get("key_scale", 1.0) * arguments.LARGEST_PRODUCT * head_dim
    # At least 1: kernels multiply `scale` by scales of queries before they do by those of keys.
    largest = abs(scale) * scales.get("query_scale", 1.0) * max(products, 1.0)
    arguments.check_score_range(scales, scale, head_dim, largest)


def check_scale(
    name: str,
    scale: object,
    rows: Tensor,
    sequences: int | None,
    kv_heads: int | None = None,
) -> Tensor | None:
    """Refuse what is no scale for these rows; queries may have one for each key head.

    sequences: of packed rows; None for dense ones.
    """
    if scale is None:
        return None
    heads, packed = rows.shape[1], sequences is not None
    batch = rows.shape[0] if sequences is None else sequences
    slots = num_slots(rows.shape[0] if packed else rows.shape[2], sequences)
    blocks = "slots" if packed else "blocks"
    by_blocks = (1 if packed else batch, heads, slots)
    takes = (
        f"a float32 tensor of one number, [batch, heads], here {(batch, heads)}, or "
        f"[{'1' if packed else 'batch'}, heads, {blocks} of {BLOCK_ROWS} rows], here {by_blocks}"
    )
    arguments.check_tensor(name, scale, takes, dtypes=(torch.float32,), device=rows.device)
    assert isinstance(scale, Tensor)
    fits = [(), (1,), (batch, heads), by_blocks]
    repeats = kv_heads is not None and kv_heads != heads and scale.dim() > 1
    if repeats:
        fits += [(batch, kv_heads), (by_blocks[0], kv_heads, slots)]
    if tuple(scale.shape) not in fits:
        raise ValueError(f"{name}: got shape {tuple(scale.shape)}, takes {takes}")
    of_values = name == "value_scale"
    largest = arguments.LARGEST_VALUE_FACTOR if of_values else arguments.LARGEST_FACTOR
    arguments.check_factors(name, scale, takes, largest)
    if repeats and scale.shape[1] == kv_heads and kv_heads:
        return scale.repeat_interleave(heads // kv_heads, 1)
    return scale.reshape(()) if scale.dim() == 1 else scale

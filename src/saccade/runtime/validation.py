"""Validation: check every argument of a call and make the values that implementations take."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from saccade.masks import NOTHING_HIDDEN, AnyMask, Mask, as_mask, causal
from saccade.modifiers.expression import Captured
from saccade.modifiers.modifier import Extents, expanded
from saccade.runtime import arguments
from saccade.runtime.arguments import check_paged
from saccade.runtime.spec import Inputs, KernelConfig, PagedInputs, Problem, Variant
from saccade.scores import AnyScore, Score, as_score

# ---- autocast ------------------------------------------------------------------------------------
# Inputs take its dtype once, when they are checked. After that it is off: implementations widen
# what they multiply, and autocast would narrow it again.

P = ParamSpec("P")
R = TypeVar("R")

CPU = torch.device("cpu")


def cast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs in autocast's dtype, where it is on; float64 stays, as in PyTorch's own operators."""
    first = inputs[0]
    if not isinstance(first, Tensor) or not _is_on(first.device):
        return inputs
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple([tensor.to(dtype) if _is_narrowed(tensor) else tensor for tensor in inputs])


def _is_narrowed(tensor: object) -> bool:
    """Whether autocast changes it; what is no tensor is left for the checks to refuse."""
    if not isinstance(tensor, Tensor):
        return False
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast off, for what must be as exact as its inputs are."""
    if not _is_on(device):
        return contextlib.nullcontext()
    # A new one each time: threads that shared one would restore each other's.
    return torch.autocast(device.type, enabled=False)


def computed_without(function: Callable[P, R]) -> Callable[P, R]:
    """Make a pass on the CPU run with autocast off."""

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        with without_autocast(CPU):
            return function(*arguments, **keywords)

    return call


def _is_on(device: torch.device) -> bool:
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # meta knows none


CAUSAL = causal()


def with_causal(mask: AnyMask, causal: bool) -> AnyMask:
    """The mask of a call with the option `causal`: pairs that both of them show."""
    arguments.check_flag("causal", causal)
    if not causal:
        return mask
    return CAUSAL if mask is None else as_mask(mask) & CAUSAL


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *,
    mask: AnyMask,
    score: AnyScore,
    scale: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    deterministic: bool,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None,
    return_max_logit: bool = False,
) -> tuple[Inputs, Variant, Problem, KernelConfig | None]:
    """Check every argument of a dense or packed call; give its values and its config."""
    packed = cu_seqlens_q is not None
    shapes = arguments.PACKED_SHAPES if packed else arguments.DENSE_SHAPES
    query, key, value = cast(query, key, value)
    arguments.check_tensors(query, key, value, shapes)
    arguments.check_sinks(sinks, query)
    arguments.check_flag("return_lse", return_lse)
    arguments.check_flag("return_max_logit", return_max_logit)
    arguments.check_flag("deterministic", deterministic)
    scale = arguments.resolve_scale(scale, query.shape[-1])
    dropout_p = arguments.check_dropout(dropout_p)
    config = arguments.resolve_config(config, query.device)
    longest = None
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        longest = check_packing(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        cu_seqlens_q, cu_seqlens_k = contiguous_pair(cu_seqlens_q, cu_seqlens_k)
    sinks = arguments.contiguous(sinks)
    inputs = Inputs(query, key, value, sinks, None, cu_seqlens_q, cu_seqlens_k)

    extents = arguments.extents_of(inputs, longest)
    variant = variant_for(mask, score, scale, dropout_p, extents, query.device)
    variant = variant._replace(max_logit=return_max_logit)
    return inputs, variant, problem_of(inputs, variant, config), config


def variant_for(
    mask: AnyMask,
    score: AnyScore,
    scale: float,
    dropout_p: float,
    extents: Extents,
    device: torch.device,
    batch_invariant: bool = False,
) -> Variant:
    """Mask and score by key, with captured tensors that fit the call.

    Where results must have the same bits in any batch, a causal mask of one row is kept: lengths
    on a GPU cannot tell whether other sequences of the batch have more.
    """
    mask, score = as_mask(mask), as_score(score)
    if extents.query_len == 1 and mask.key == CAUSAL.key and not batch_invariant:
        mask = NOTHING_HIDDEN  # the last row sees all; kernels without a mask are faster
    of_mask = _fitting("mask", mask, extents, device)
    of_score = _fitting("score", score, extents, device)
    return Variant(mask.key, score.key, of_mask, of_score, scale, dropout_p)


def _fitting(
    argument: str, modifier: Mask | Score, extents: Extents, device: torch.device
) -> Captured:
    """The captured tensors of a mask or score, checked, with a dimension for each index."""
    if not modifier.captured.tensors:
        return modifier.captured
    captured = expanded(modifier.key, modifier.captured)
    arguments.check_captured(argument, modifier.key, captured, extents, device)
    return captured


def prepare_paged(
    inputs: PagedInputs,
    *,
    mask: AnyMask,
    score: AnyScore,
    scale: float | None,
    batch_invariant: bool,
    return_lse: bool,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None,
) -> tuple[PagedInputs, Variant, Problem, KernelConfig | None]:
    """Check every argument of a call over pages; give its values and its config."""
    arguments.refuse_recording("query")
    if not (isinstance(inputs.query, Tensor) and inputs.fp8):
        inputs = inputs._replace(query=cast(inputs.query)[0])
    longest_q, offsets = None, inputs.cu_seqlens_q
    if offsets is not None and isinstance(inputs.query, Tensor) and inputs.query.dim() == 3:
        tokens, device = inputs.query.shape[0], inputs.query.device
        arguments.check_offsets("cu_seqlens_q", offsets, tokens, device)
        longest_q = arguments.check_max_length("max_seqlen_q", None, offsets)
    check_paged(inputs)
    query = inputs.query
    if inputs.query_scale is not None and inputs.query_scale.dim() < 2:
        scale_of_all = inputs.query_scale.reshape(()).expand(inputs.batch, query.shape[1])
        inputs = inputs._replace(query_scale=scale_of_all)
    arguments.check_sinks(inputs.sinks, query)
    arguments.check_flag("return_lse", return_lse)
    arguments.check_flag("batch_invariant", batch_invariant)
    inputs = _with_contiguous_numbers(inputs)
    scale = arguments.resolve_scale(scale, query.shape[-1])
    _check_score_range(inputs, scale)
    config = arguments.resolve_config(config, query.device)
    readable = arguments.values_readable(inputs.kv_lens)
    longest_k = int(inputs.kv_lens.max()) if readable and inputs.batch else None
    longest_q = query.shape[2] if offsets is None else longest_q
    extents = Extents(inputs.batch, query.shape[1], longest_q, longest_k, packed=True)
    variant = variant_for(mask, score, scale, 0.0, extents, query.device, batch_invariant)
    slots = inputs.page_table.numel() * inputs.page_size
    problem = Problem(
        batch=inputs.batch,
        query_heads=query.shape[1],
        kv_heads=inputs.key_pages.shape[1],
        query_len=query.shape[0] if offsets is not None else query.shape[0] * query.shape[2],
        kv_len=int(inputs.kv_lens.sum()) if readable else slots,
        head_dim=query.shape[-1],
        value_dim=inputs.value_pages.shape[-1],
        dtype=query.dtype,
        device=query.device.type,
        device_index=query.device.index,
        packed=True,
        mask=variant.mask,
        score=variant.score,
        sinks=inputs.sinks is not None,
        configured=config is not None,
        page_size=inputs.page_size,
        page_dtype=inputs.key_pages.dtype,
        tma=all(map(strides_fit_tma, (query, inputs.key_pages, inputs.value_pages))),
        batch_invariant=batch_invariant,
    )
    return inputs, variant, problem, config


def _with_contiguous_numbers(inputs: PagedInputs) -> PagedInputs:
    """Sinks and offsets one after the other in memory."""
    sinks, offsets = arguments.contiguous(inputs.sinks), arguments.contiguous(inputs.cu_seqlens_q)
    return inputs._replace(sinks=sinks, cu_seqlens_q=offsets)


def _check_score_range(inputs: PagedInputs, scale: float) -> None:
    """Refuse scales of e4m3 queries by which scores may leave float32, before keys' scales."""
    found = inputs.query_scale
    if found is None or not found.numel() or not arguments.values_readable(found):
        return
    head_dim, largest = inputs.query.shape[-1], float(found.max())
    products = max(abs(scale), 1.0) * largest * arguments.LARGEST_PRODUCT * head_dim
    arguments.check_score_range({"query_scale": largest}, scale, head_dim, products)


def check_packing(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int | None, int | None]:
    """Check the offsets of packed sequences; give the longest lengths, as far as known."""
    arguments.check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], query.device)
    arguments.check_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0], query.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: got shape {tuple(cu_seqlens_k.shape)}, takes cu_seqlens_q's "
            f"{tuple(cu_seqlens_q.shape)}"
        )
    return (
        arguments.check_max_length("max_seqlen_q", max_seqlen_q, cu_seqlens_q),
        arguments.check_max_length("max_seqlen_k", max_seqlen_k, cu_seqlens_k),
    )


def contiguous_pair(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets one after the other in memory; one tensor for both, where they are one."""
    found = cu_seqlens_q.contiguous()
    return found, found if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.contiguous()


def with_seed(inputs: Inputs, variant: Variant) -> Inputs:
    """The inputs with a seed for dropout from PyTorch's generator, left on the device.

    Drawn last, when nothing can be refused any more; nothing is drawn without dropout.
    """
    if not variant.dropout_p > 0:
        return inputs
    return inputs._replace(seed=new_seed(inputs.query.device))


def new_seed(device: torch.device) -> Tensor:
    """A seed for dropout from PyTorch's generator of a device, left there."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def problem_of(inputs: Inputs, variant: Variant, config: KernelConfig | None) -> Problem:
    """The call's shape, by which implementations are chosen."""
    query, key, value = inputs.query, inputs.key, inputs.value
    offsets = inputs.cu_seqlens_q
    packed = offsets is not None
    rows = 0 if packed else 2
    query_sizes, key_sizes, device = query.shape, key.shape, query.device
    return Problem(
        batch=query_sizes[0] if offsets is None else offsets.shape[0] - 1,
        query_heads=query_sizes[1],
        kv_heads=key_sizes[1],
        query_len=query_sizes[rows],
        kv_len=key_sizes[rows],
        head_dim=query_sizes[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        device=device.type,
        device_index=device.index,
        packed=packed,
        mask=variant.mask,
        score=variant.score,
        sinks=inputs.sinks is not None,
        dropout=variant.dropout_p > 0,
        configured=config is not None,
        tma=strides_fit_tma(query) and strides_fit_tma(key) and strides_fit_tma(value),
    )


def strides_fit_tma(tensor: Tensor) -> bool:
    """Whether TMA can read rows of channels as they lie: it wants steps of whole 16 bytes."""
    shape, step = tensor.shape, 16 // tensor.dtype.itemsize
    if shape[-1] % step == 0 and tensor.is_contiguous():  # at once: each new length asks
        return True
    strides = tensor.stride()
    if strides[-1] != 1:
        return False
    for size, stride in zip(shape[:-1], strides, strict=False):
        if size > 1 and (stride <= 0 or stride % step):
            return False
    return True

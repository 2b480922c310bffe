"""The attention calls: check the arguments, choose an implementation, give the result."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from saccade import arguments, dispatch, operators
from saccade.masks import Mask, as_mask
from saccade.problem import Config, Inputs, Problem, Variant
from saccade.reference import attention as reference
from saccade.scores import Score, as_score


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    config: Config | Mapping[tuple[int, int], Config] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each query row becomes the average of the values, weighted by how well its keys match.

    Args:
        query: [batch, query_heads, query_len, head_dim], any strides.
        key: [batch, kv_heads, kv_len, head_dim]; kv_heads divides query_heads.
        value: [batch, kv_heads, kv_len, value_dim].
        mask: which pairs are visible: a `Mask` (`saccade.masks`), or a bool tensor broadcastable
            to [batch, query_heads, query_len, kv_len] (True = visible). None: all of them.
        score: a change of the scaled scores (`saccade.scores`), or None.
        scale: the factor of the scores; 1/sqrt(head_dim) where None.
        sinks: [query_heads] logits that join the softmax's denominator and carry no value.
        dropout_p: the share of weights that is dropped, in [0, 1); the rest grows to make up.
        return_lse: also return the log-sum-exp of each row's scores (sinks included).
        deterministic: gradients are bit-equal from run to run. Forward passes always are.
        implementation: "cpu" or "reference"; None takes the first that fits. A named one never
            falls back: it raises where it cannot serve.
        config: tile sizes, or a mapping from (major, minor) GPU capabilities to them.

    Returns:
        output [batch, query_heads, query_len, value_dim] in query's dtype, laid out so that
        ``output.transpose(1, 2).flatten(2)`` copies nothing; with `return_lse` also the lse
        [batch, query_heads, query_len], natural logarithm, float32 (float64 for float64).
        A row that sees nothing gives 0 and -inf.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: where the named implementation cannot serve the call.

    Source: Vaswani et al. 2017, section 3.2.1.

    >>> output = saccade.attention(query, key, value, mask=saccade.masks.causal())
    """
    inputs, variant, problem, config = prepare(
        query, key, value, None, None, None, None,
        mask=mask, score=score, scale=scale, sinks=sinks, dropout_p=dropout_p,
        return_lse=return_lse, deterministic=deterministic, config=config,
    )  # fmt: skip
    output, lse = _run(inputs, variant, problem, config, deterministic, implementation)
    return (output, lse) if return_lse else output


def attention_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    config: Config | Mapping[tuple[int, int], Config] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention for sequences of unequal length laid end to end, with no padding between them.

    Args:
        query: [tokens, query_heads, head_dim], the sequences one after the other.
        key: [kv_tokens, kv_heads, head_dim].
        value: [kv_tokens, kv_heads, value_dim].
        cu_seqlens_q: int32 [batch + 1]: sequence b's queries are the tokens from
            cu_seqlens_q[b] to cu_seqlens_q[b + 1]. Starts at 0, ends at the token count.
        cu_seqlens_k: the same for keys and values; cu_seqlens_q where None.
        max_seqlen_q, max_seqlen_k: the longest lengths, if known; never read from a GPU.
        mask, score, scale, sinks, dropout_p, return_lse, deterministic, implementation, config:
            as in `attention`; masks and scores number rows within each sequence, `batch` is the
            sequence, and their tensors are as long as the longest sequence, or longer.

    Returns:
        output [tokens, query_heads, value_dim]; with `return_lse` also the lse
        [query_heads, tokens].

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention`.
    """
    inputs, variant, problem, config = prepare(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        mask=mask, score=score, scale=scale, sinks=sinks, dropout_p=dropout_p,
        return_lse=return_lse, deterministic=deterministic, config=config,
    )  # fmt: skip
    output, lse = _run(inputs, variant, problem, config, deterministic, implementation)
    return (output, lse) if return_lse else output


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *,
    mask: Mask | Tensor | None,
    score: Score | None,
    scale: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    deterministic: bool,
    config: Config | Mapping[tuple[int, int], Config] | None,
) -> tuple[Inputs, Variant, Problem, Config | None]:
    """Check every argument and turn them into what implementations take."""
    packed = cu_seqlens_q is not None
    shapes = arguments.PACKED_SHAPES if packed else arguments.DENSE_SHAPES
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    arguments.check_tensors(query, key, value, shapes)
    arguments.check_sinks(sinks, query)
    arguments.check_flag("return_lse", return_lse)
    arguments.check_flag("deterministic", deterministic)
    scale = arguments.resolve_scale(scale, query.shape[-1])
    dropout_p = arguments.check_dropout(dropout_p)
    config = arguments.resolve_config(config, query.device)
    longest = None
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        longest = _check_packing(
            query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
    seed = _draw_seed(query.device) if dropout_p > 0 else None
    inputs = Inputs(query, key, value, sinks, seed, cu_seqlens_q, cu_seqlens_k)

    mask, score = as_mask(mask), as_score(score)
    extents = arguments.extents_of(inputs, longest)
    if mask.key:
        arguments.check_captured("mask", mask.key, mask.captured, extents, query.device)
    if score.key:
        arguments.check_captured("score", score.key, score.captured, extents, query.device)
    variant = Variant(mask.key, score.key, mask.captured, score.captured, scale, dropout_p)
    return inputs, variant, problem_of(inputs, variant, config), config


def _check_packing(
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


def _autocast(tensor: Tensor) -> Tensor:
    """Under autocast, inputs take its dtype; float64 stays, as in PyTorch's own operators."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor  # for the checks to refuse
    device_type = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def _draw_seed(device: torch.device) -> Tensor:
    """A seed for dropout from PyTorch's generator, left on the device."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def problem_of(inputs: Inputs, variant: Variant, config: Config | None) -> Problem:
    """The call's shape, by which implementations are chosen."""
    query, key, value = inputs.query, inputs.key, inputs.value
    packed = inputs.cu_seqlens_q is not None
    rows = 0 if packed else 2
    batch = inputs.cu_seqlens_q.shape[0] - 1 if packed else query.shape[0]
    device = query.device
    return Problem(
        batch=batch,
        query_heads=query.shape[1],
        kv_heads=key.shape[1],
        query_len=query.shape[rows],
        kv_len=key.shape[rows],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        device=device.type,
        packed=packed,
        mask=variant.mask,
        score=variant.score,
        sinks=inputs.sinks is not None,
        dropout=inputs.seed is not None,
        configured=config is not None,
    )


def _run(
    inputs: Inputs,
    variant: Variant,
    problem: Problem,
    config: Config | None,
    deterministic: bool,
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    """The reference is plain PyTorch, with PyTorch's gradients; all others are operators."""
    chosen = dispatch.choose(problem, implementation)
    if chosen == "reference":
        return reference.attention(inputs, variant)
    return operators.attention(inputs, variant, config, deterministic, chosen)

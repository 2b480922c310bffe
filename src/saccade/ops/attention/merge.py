"""Merge: partial results over disjoint keys become the result over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.runtime.spec import accumulate_dtype


def merge_states(
    outputs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Combine attention over parts of the keys into attention over all of them.

    Args:
        outputs: the parts' outputs, in a sequence or stacked along a first dimension: each
            [batch, query_heads, query_len, value_dim], or [tokens, query_heads, value_dim] for
            packed sequences.
        lses: the parts' log-sum-exps as `return_lse=True` gives them: each
            [batch, query_heads, query_len], or [query_heads, tokens] for packed sequences.

    Returns:
        (output, lse) of the union. A part that saw nothing (lse -inf) counts for nothing, its
        output is not read; a row that no part saw anything for gives 0 and -inf. Sums are
        float32 (float64 for float64); differentiable in both arguments. A sink counts once for
        each part it was passed to: pass sinks to one part only. An lse of 1e9 or -1e9 has no room
        for the log of a sum: where all scores of a row are so large, parts weigh alike.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Source: FlashAttention-2 (Dao 2023), section 3.1.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> halves = [
        ...     saccade.attention(query, key[:, :, rows], value[:, :, rows], return_lse=True)
        ...     for rows in (slice(0, 4), slice(4, 8))
        ... ]
        >>> output, lse = saccade.merge_states(*zip(*halves))
        >>> torch.testing.assert_close(output, saccade.attention(query, key, value))
    """
    of_parts, stacked = _stacked("outputs", outputs), _stacked("lses", lses)
    _check(of_parts, stacked)
    packed = of_parts.dim() == 4
    if packed:  # bring the lse into the output's order
        stacked = stacked.transpose(1, 2)
    stacked = stacked.to(accumulate_dtype(torch.promote_types(stacked.dtype, of_parts.dtype)))
    output, lse, _ = merged(of_parts, stacked)
    return output, lse.transpose(0, 1) if packed else lse


def merged(
    outputs: Tensor, lses: Tensor, lost: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `merge_states` computes of parts that were checked, whose lses lie as outputs do.

    Args:
        outputs: [parts, ..., value_dim].
        lses: [parts, ...], in the dtype of sums.
        lost: [parts, ...], log Σ exp(score - lse): what rounding took from each lse, which weights
            show beside large scores (`parallel/large_scores.py`). None: nothing.

    Returns:
        output, lse, and what rounding took from that; None where nothing was known of the parts.
    """
    hidden = lses == -torch.inf
    largest = lses.amax(0).detach()
    empty = largest == -torch.inf
    shift, above = largest.masked_fill(empty, 0), 0
    exponents = lses - shift
    if lost is not None:
        exponents = exponents + lost
        above = exponents.amax(0).masked_fill(empty, 0)
        exponents = exponents - above
    weights = exponents.exp()
    total = weights.sum(0).masked_fill(empty, 1)
    log_sum = above + total.log()
    lse = (shift + log_sum).masked_fill(empty, -torch.inf)
    read = outputs.to(lse.dtype).masked_fill(hidden.unsqueeze(-1), 0)  # selected away
    output = (read * (weights / total).unsqueeze(-1)).sum(0).to(outputs.dtype)
    if lost is not None:
        lost = (log_sum - (lse - shift)).masked_fill(empty, 0)
    return output, lse, lost


def _stacked(name: str, stack: Tensor | Sequence[Tensor]) -> Tensor:
    """The parts, each a floating-point tensor, along a first dimension."""
    takes = "a sequence of floating-point tensors, or a tensor of them stacked"
    at_once = isinstance(stack, Tensor) and stack.dim() > 0
    if not at_once and not isinstance(stack, Sequence):
        got = "a tensor without dimensions" if isinstance(stack, Tensor) else type(stack).__name__
        raise TypeError(f"{name}: got {got}, takes {takes}")
    if len(stack) == 0:
        raise ValueError(f"{name}: got no parts, takes at least one")
    parts = [stack] if isinstance(stack, Tensor) else list(stack)
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"{name}: got {got}, takes {takes}")
        if part.dtype != parts[0].dtype:
            raise TypeError(f"{name}: got {part.dtype}, takes the first part's {parts[0].dtype}")
        if part.shape != parts[0].shape:
            raise ValueError(
                f"{name}: got shapes {tuple(parts[0].shape)} and {tuple(part.shape)}, takes "
                "parts of one shape"
            )
        if part.device != parts[0].device:
            raise ValueError(f"{name}: got {part.device}, takes {parts[0].device}")
    return stack if isinstance(stack, Tensor) else torch.stack(parts)


def _check(outputs: Tensor, lses: Tensor) -> None:
    if lses.device != outputs.device:
        raise ValueError(f"lses: got {lses.device}, takes {outputs.device}")
    if len(lses) != len(outputs):
        raise ValueError(
            f"lses: got {len(lses)} parts, takes one for each of {len(outputs)} outputs"
        )
    shape = tuple(outputs.shape[1:])
    if len(shape) not in (3, 4):
        takes = "[batch, heads, length, dim] or [tokens, heads, dim]"
        raise ValueError(f"outputs: got shape {shape}, takes {takes}")
    wanted = shape[1::-1] if len(shape) == 3 else shape[:-1]
    if tuple(lses.shape[1:]) != wanted:
        raise ValueError(f"lses: got shape {tuple(lses.shape[1:])}, takes {wanted}")

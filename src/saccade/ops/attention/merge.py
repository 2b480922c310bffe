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
        each part it was passed to: pass sinks to one part only.

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
    outputs, lses = _parts("outputs", outputs), _parts("lses", lses)
    _check(outputs, lses)
    if outputs[0].dim() == 3:  # packed: bring the lse into the output's order
        lses = [lse.transpose(0, 1) for lse in lses]
    wide = accumulate_dtype(torch.promote_types(lses[0].dtype, outputs[0].dtype))
    stacked = torch.stack(lses).to(wide)  # [parts, ..., rows]
    largest = stacked.amax(0).detach()
    shift = largest.masked_fill(largest == -torch.inf, 0)
    weights = (stacked - shift).exp()
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (shift + total.log()).masked_fill(empty, -torch.inf)
    normalised = (weights / total).unsqueeze(-1)
    read = torch.stack([o.to(lse.dtype) for o in outputs])
    read = read.masked_fill((stacked == -torch.inf).unsqueeze(-1), 0)  # selected away
    output = (read * normalised).sum(0).to(outputs[0].dtype)
    return output, lse.transpose(0, 1) if outputs[0].dim() == 3 else lse


def _parts(name: str, stack: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The parts as a list, each a floating-point tensor."""
    takes = "a sequence of floating-point tensors, or a tensor of them stacked"
    stacked = isinstance(stack, Tensor) and stack.dim() > 0
    if not stacked and not isinstance(stack, Sequence):
        got = "a tensor without dimensions" if isinstance(stack, Tensor) else type(stack).__name__
        raise TypeError(f"{name}: got {got}, takes {takes}")
    parts = list(stack)
    if not parts:
        raise ValueError(f"{name}: got no parts, takes at least one")
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
    return parts


def _check(outputs: list[Tensor], lses: list[Tensor]) -> None:
    for name, parts in (("outputs", outputs), ("lses", lses)):
        for part in parts:
            if part.device != outputs[0].device:
                raise ValueError(f"{name}: got {part.device}, takes {outputs[0].device}")
    if len(lses) != len(outputs):
        raise ValueError(
            f"lses: got {len(lses)} parts, takes one for each of {len(outputs)} outputs"
        )
    shape = tuple(outputs[0].shape)
    if len(shape) not in (3, 4):
        takes = "[batch, heads, length, dim] or [tokens, heads, dim]"
        raise ValueError(f"outputs: got shape {shape}, takes {takes}")
    wanted = shape[1::-1] if len(shape) == 3 else shape[:-1]
    if tuple(lses[0].shape) != wanted:
        raise ValueError(f"lses: got shape {tuple(lses[0].shape)}, takes {wanted}")

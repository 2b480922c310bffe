"""Gradients of changed scores, carried back to the scores and to captured tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.modifiers.derivative import Derivatives, derivatives
from saccade.modifiers.evaluate import evaluate, inside
from saccade.modifiers.expression import Captured, Coordinates, needed
from saccade.modifiers.ops import slices_of
from saccade.modifiers.selection import keep


class Taken(NamedTuple):
    """What the pairs of a tile give to the gradient of a captured tensor.

    Attributes:
        place: the tensor's place among those that the score captured.
        gradient: of the entry that each pair reads.
        indices: which entry that is, for each dimension of the tensor, broadcastable to the pairs.
    """

    place: int
    gradient: Tensor
    indices: list[Tensor]

    def add_to(self, total: Tensor) -> None:
        """Add to a tensor of the captured one's shape."""
        gradient = self.gradient
        slices = slices_of(total, self.indices)
        if slices is not None:
            part = total[tuple(slice(start, stop) for _, start, stop in slices)]
            alone = set(range(4)) - {dim for dim, _, _ in slices}
            gradient = gradient.sum(tuple(alone)) if alone else gradient
            part += gradient.reshape(part.shape)
            return
        for dim in range(gradient.dim()):  # where pairs read the same entry, they add up first
            if all(index.dim() <= dim or index.shape[dim] == 1 for index in self.indices):
                gradient = gradient.sum(dim, keepdim=True)
        if not self.indices:
            total += gradient.sum()
            return
        places = tuple(index.expand(gradient.shape) for index in self.indices)
        total.index_put_(places, gradient.to(total.dtype), accumulate=True)


def change_with_slopes(
    key: str, captured: Captured, score: Tensor, at: Coordinates, wanted: Collection[int] = ()
) -> tuple[Tensor, Sequence[Tensor]]:
    """The changed scores, and what `change_backward` will need: a step is computed once for both.

    wanted: the places of the captured tensors whose gradients will be asked for.
    """
    found = derivatives(key)
    results = [found.result, *_numbers(found, wanted)]
    values = evaluate(found.expression, captured, at, score, needed(found.expression, *results))
    changed = values[found.result]
    return changed.expand(torch.broadcast_shapes(changed.shape, score.shape)), values


def change_backward(
    key: str,
    captured: Captured,
    score: Tensor,
    at: Coordinates,
    grad: Tensor,
    visible: Tensor | None,
    wanted: Collection[int] = (),
    values: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Taken]]:
    """Carry the gradient of changed scores back.

    Args:
        visible: which pairs are; what a derivative gives elsewhere, NaN perhaps, is left out.
        wanted: the places of the captured tensors whose gradients are asked for.
        values: what `change_with_slopes` gave besides; None: it is computed here.

    Returns:
        The gradient of the scores before the change, and what wanted tensors get.
    """
    if not key:
        return grad, []
    found = derivatives(key)
    if values is None:
        _, values = change_with_slopes(key, captured, score, at, wanted)

    def through(slope: Tensor) -> Tensor:
        product = (grad * slope).to(grad.dtype)
        return product if visible is None else keep(product, visible)

    taken = []
    for slot, (slope, read) in _reads(found, wanted).items():
        step, table = found.expression[read], captured.tensors[slot]
        indices = [values[number] for number in step.operands]
        if slices_of(table, indices) is None:
            bound = _nearest if step.op == "take" else inside
            indices = [bound(i, size) for i, size in zip(indices, table.shape, strict=True)]
            indices = [index.view((1,) * (4 - index.dim()) + index.shape) for index in indices]
        taken.append(Taken(slot, through(values[slope]), indices))
    if found.of_score is None:
        return torch.zeros_like(grad), taken
    return through(values[found.of_score]), taken


def _reads(found: Derivatives, wanted: Collection[int]) -> dict[int, tuple[int, int]]:
    return {slot: found.of_reads[slot] for slot in wanted if slot in found.of_reads}


def _numbers(found: Derivatives, wanted: Collection[int]) -> list[int]:
    """The steps that gradients are made of."""
    numbers = [number for pair in _reads(found, wanted).values() for number in pair]
    return numbers if found.of_score is None else [*numbers, found.of_score]


def _nearest(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, max(size - 1, 0))

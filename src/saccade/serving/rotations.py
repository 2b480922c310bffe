"""Rotations that become others past a length ("longrope"), for each sequence by its own length.

transformers turns all rows of a pass by one set of angles: by another one as soon as any position
reaches the length that a model was first trained for. So one long request would turn all others
otherwise. Here both sets are worked out in a pass, and each row has that of its sequence. One that
grows past the length begins again: all of its keys were turned by the first set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import Module


class LongRotations:
    """Modules of a model that make angles, of one length each.

    Attributes:
        first_length: tokens of a sequence whose angles are those of the first set, at most.
    """

    def __init__(self, modules: Sequence[tuple[str, Module]], first_length: int):
        self._modules, self.first_length = modules, first_length

    @classmethod
    def of(cls, model: Module) -> LongRotations | None:
        """Those of a model, if it has some and all become others at one length."""
        found = [
            (name, module)
            for name, module in model.named_modules()
            if getattr(module, "rope_type", None) == "longrope"
        ]
        lengths = {_first_length(module) for _, module in found}
        if len(lengths) != 1 or None in lengths:
            return None
        return cls(found, next(length for length in lengths if length is not None))

    def makes(self, buffer: str) -> bool:
        """Whether a buffer of the model's, by its name, is one that these write."""
        return any(buffer.startswith(f"{name}.") for name, _ in self._modules)

    @contextmanager
    def by_rows(self, long: Bool[Tensor, " rows"]) -> Iterator[None]:
        """Let a pass turn the rows of long sequences by the second set, and others by the first."""
        before = [(module, module.__dict__.get("forward")) for _, module in self._modules]
        for module, _ in before:
            module.__dict__["forward"] = self._forward(module.forward, long)
        try:
            yield
        finally:
            for module, own in before:
                del module.__dict__["forward"]
                if own is not None:
                    module.__dict__["forward"] = own

    def _forward(
        self, forward: Callable[..., Any], long: Bool[Tensor, " rows"]
    ) -> Callable[..., Any]:
        """A module's angles for each row by its own sequence; transformers looks at the largest
        position of a pass, so it is called with short ones alone, and with a long one beside."""

        def angles(rows: Tensor, position_ids: Int[Tensor, "1 rows"]) -> tuple[Tensor, ...]:
            first = forward(rows, position_ids.masked_fill(long, 0))
            behind = position_ids.new_full((1, 1), self.first_length)
            second = forward(rows, torch.cat([position_ids, behind], dim=1))
            chosen = long.unsqueeze(1)
            return tuple(
                torch.where(chosen, of_long[:, :-1], of_short)
                for of_short, of_long in zip(first, second, strict=True)
            )

        return angles


def _first_length(module: Any) -> int | None:
    """The length past which a module's rotations are others, where transformers looks it up."""
    settings = getattr(module.config, "rope_parameters", None) or {}
    length = settings.get("original_max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None

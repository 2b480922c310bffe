"""Rotations that become others past a length ("longrope"), for each sequence by its own length.

transformers turns all rows of a pass by one set of angles: by another one as soon as any position
reaches the length that a model was first trained for. So one long request would turn all others
otherwise. Here both sets are worked out in a pass, and each row has that of its sequence. One that
grows past the length begins again: all of its keys were turned by the first set.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        under_way = _Pass(long, self.first_length, threading.get_ident())
        turned = [(module, _Turned(module, weakref.ref(under_way))) for _, module in self._modules]
        for module, forward in turned:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, forward in turned:
                forward.leave(module)


@dataclass(eq=False)
class _Pass:
    """A pass of an engine: which rows are of long sequences, and the thread that it runs in."""

    long: Bool[Tensor, " rows"]
    first_length: int
    thread: int


class _Turned:
    """The forward pass of a module that makes angles, by rows while a pass of an engine lasts.

    An interrupt can keep it from being taken off the module. Then it does what the module does, as
    it does for other threads, and the next one is put in its place.
    """

    def __init__(self, module: Module, under_way: weakref.ref[_Pass]):
        before = module.__dict__.get("forward")
        self._own = before._own if isinstance(before, _Turned) else before
        self._forward = self._own or type(module).forward.__get__(module)
        self._under_way = under_way

    def leave(self, module: Module) -> None:
        """Give the module back what it had."""
        if self._own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = self._own

    def __call__(self, rows: Tensor, position_ids: Int[Tensor, "1 rows"], **more: Any) -> Any:
        """Angles of each row by its own sequence: transformers looks at the largest position of a
        call, so it is called with short ones alone, and with a long one beside."""
        under_way = self._under_way()
        if under_way is None or under_way.thread != threading.get_ident():
            return self._forward(rows, position_ids, **more)
        first = self._forward(rows, position_ids.masked_fill(under_way.long, 0), **more)
        behind = position_ids.new_full((1, 1), under_way.first_length)
        second = self._forward(rows, torch.cat([position_ids, behind], dim=1), **more)
        chosen = under_way.long.unsqueeze(1)
        return tuple(
            torch.where(chosen, of_long[:, :-1], of_short)
            for of_short, of_long in zip(first, second, strict=True)
        )


def _first_length(module: Any) -> int | None:
    """The length past which a module's rotations are others, where transformers looks it up."""
    settings = getattr(module.config, "rope_parameters", None) or {}
    length = settings.get("original_max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None

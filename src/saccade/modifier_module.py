"""Modifier module: a mask or score as a part of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from saccade.masks import Mask
from saccade.modifiers.expression import READS, Captured, parse
from saccade.scores import Score

Kind = TypeVar("Kind", Mask, Score)


class ModifierModule(torch.nn.Module, Generic[Kind]):
    """A module that owns the tensors of a mask or score, and gives it when it is called.

    A mask or score is a value: a model that only keeps one does not know its tensors. Here those
    that are an `nn.Parameter` are parameters of the module and all others are buffers, so that
    `module.to(...)`, `named_parameters()`, `state_dict()`, `copy.deepcopy`, DDP and FSDP treat them
    as they treat any others. They have the names of the constructor's arguments (`slopes` of
    `scores.alibi`) where these are clear, else `captured_0`, `captured_1` and so on.

    Args:
        modifier: a `saccade.masks.Mask` or `saccade.scores.Score`.
        persistent: whether buffers are part of `state_dict()`.

    Raises:
        TypeError: for anything else.
        ValueError: for one that captured what was computed of parameters, which no module can own.

    Examples:
        >>> slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
        >>> layer = saccade.ModifierModule(scores.alibi(slopes))
        >>> [name for name, _ in layer.named_parameters()]
        ['slopes']
        >>> query, key, value = torch.randn(3, 1, 2, 8, 16)
        >>> saccade.attention(query, key, value, score=layer()).sum().backward()
        >>> slopes.grad.shape
        torch.Size([2])
    """

    kind: type[Mask | Score]
    key: str
    ints: tuple[int, ...]
    floats: tuple[float, ...]

    def __init__(self, modifier: Kind, *, persistent: bool = True):
        super().__init__()
        if not isinstance(modifier, (Mask, Score)):
            raise TypeError(
                f"modifier: got {type(modifier).__name__}, takes a saccade Mask or Score; of a "
                "function saccade.masks.function and saccade.scores.function make one"
            )
        self.kind, self.key = type(modifier), modifier.key
        self.ints, self.floats = tuple(modifier.captured.ints), tuple(modifier.captured.floats)
        self.names: list[str] = []
        tensors = list(modifier.captured.tensors)
        labels = dict(_labels(modifier.key))
        for index, tensor in enumerate(tensors):
            first = next(other for other, known in enumerate(tensors) if known is tensor)
            if first < index:  # the expression reads it twice
                self.names.append(self.names[first])
                continue
            label = labels.get(index, "")
            name = label if label and not hasattr(self, label) else f"captured_{index}"
            self._add(name, tensor, persistent)
            self.names.append(name)

    def _add(self, name: str, tensor: Tensor, persistent: bool) -> None:
        if isinstance(tensor, torch.nn.Parameter):
            self.register_parameter(name, tensor)
        elif tensor.requires_grad:
            raise ValueError(
                f"modifier: got one whose tensor {name} requires a gradient and is no "
                "nn.Parameter, takes parameters; what is computed of them belongs into forward"
            )
        else:
            self.register_buffer(name, tensor, persistent=persistent)

    def forward(self) -> Kind:
        """The mask or score, with the tensors as they are now."""
        tensors = tuple(getattr(self, name) for name in self.names)
        return self.kind(self.key, Captured(tensors, self.ints, self.floats))  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """What it computes."""
        return repr(self())


def _labels(key: str) -> Iterator[tuple[int, str]]:
    """The constructor's name of each captured tensor that has one."""
    for step in parse(key):
        if step.op in READS and step.label:
            yield step.slot[1], step.label

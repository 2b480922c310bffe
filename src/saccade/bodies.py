"""Bodies: the implementations that run inside the operators, imported when they are first used.

The reference is not among them: it is plain PyTorch outside the operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from saccade.problem import Config, Gradients, Inputs, Variant


class Body(Protocol):
    """What an implementation is, as a module."""

    def forward(self, inputs: Inputs, variant: Variant, config: Config) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        ...

    def prepared(
        self, inputs: Inputs, variant: Variant, config: Config
    ) -> Callable[[Inputs, Variant], tuple[Tensor, Tensor]]:
        """`forward` for calls of the same shapes, strides, dtypes, device and variant."""
        ...

    def backward(
        self,
        inputs: Inputs,
        variant: Variant,
        config: Config,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        wanted_tables: Sequence[int],
        deterministic: bool,
    ) -> Gradients:
        """Gradients of the inputs, and of the wanted tensors that the score captured."""
        ...


MODULES = {"cpu": "saccade.cpu.attention", "portable": "saccade.portable.attention"}

_imported: dict[str, Body] = {}


def body_of(implementation: str) -> Body:
    """The module that does an implementation's work."""
    body = _imported.get(implementation)
    if body is None:
        body = cast(Body, importlib.import_module(MODULES[implementation]))
        _imported[implementation] = body
    return body

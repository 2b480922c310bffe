"""Bodies: the implementations that run inside the operators, imported when they are first used.

The reference is not among them: it is plain PyTorch outside the operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from saccade.linear.problem import LinearGradients, LinearInputs, LinearResults, LinearVariant
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


class LinearBody(Protocol):
    """What an implementation of linear attention is, as a module."""

    def forward(
        self, inputs: LinearInputs, variant: LinearVariant, config: Config
    ) -> LinearResults:
        """Output, normaliser and last state."""
        ...

    def backward(
        self,
        inputs: LinearInputs,
        variant: LinearVariant,
        config: Config,
        output: Tensor,
        normaliser: Tensor,
        grad_output: Tensor,
        grad_kv: Tensor | None,
        grad_key_sum: Tensor | None,
    ) -> LinearGradients:
        """Gradients of the inputs."""
        ...

    def step(
        self,
        kv: Tensor,
        key_sum: Tensor,
        state_index: Tensor | None,
        inputs: LinearInputs,
        variant: LinearVariant,
    ) -> Tensor:
        """Output of a few new rows; the states that they belong to are changed in place."""
        ...


MODULES = {"cpu": "saccade.cpu.attention", "portable": "saccade.portable.attention"}

LINEAR_MODULES = {"cpu": "saccade.cpu.linear", "portable": "saccade.portable.linear"}

_imported: dict[str, Body] = {}
_linear_imported: dict[str, LinearBody] = {}


def body_of(implementation: str) -> Body:
    """The module that does an implementation's work."""
    body = _imported.get(implementation)
    if body is None:
        body = cast(Body, importlib.import_module(MODULES[implementation]))
        _imported[implementation] = body
    return body


def linear_body_of(implementation: str) -> LinearBody:
    """The module that does an implementation's work in linear attention."""
    body = _linear_imported.get(implementation)
    if body is None:
        body = cast(LinearBody, importlib.import_module(LINEAR_MODULES[implementation]))
        _linear_imported[implementation] = body
    return body

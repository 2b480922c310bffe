"""Backend modules: what runs inside the operators, imported when it is first used.

The reference is not among them: it is plain PyTorch outside the operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from saccade.runtime.linear_spec import LinearGradients, LinearInputs, LinearResults, LinearVariant
from saccade.runtime.spec import Gradients, Inputs, KernelConfig, PagedInputs, Variant


class Body(Protocol):
    """What an implementation is, as a module."""

    def forward(
        self, inputs: Inputs, variant: Variant, config: KernelConfig
    ) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        ...

    def prepared(
        self, inputs: Inputs, variant: Variant, config: KernelConfig
    ) -> Callable[[Inputs, Variant], tuple[Tensor, Tensor]]:
        """`forward` for calls of the same shapes, strides, dtypes, device and variant."""
        ...

    def backward(
        self,
        inputs: Inputs,
        variant: Variant,
        config: KernelConfig,
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
        self, inputs: LinearInputs, variant: LinearVariant, config: KernelConfig
    ) -> LinearResults:
        """Output, normaliser and last state."""
        ...

    def backward(
        self,
        inputs: LinearInputs,
        variant: LinearVariant,
        config: KernelConfig,
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


class PagedBody(Protocol):
    """What an implementation of attention over pages is, as a module."""

    def forward(
        self, inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
    ) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        ...

    def prepared(
        self, inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
    ) -> Callable[[PagedInputs, Variant], tuple[Tensor, Tensor]]:
        """`forward` for calls of the same shapes, strides, dtypes, device and variant."""
        ...


MODULES = {
    "cpu": "saccade.ops.attention.cpu.host",
    "triton": "saccade.ops.attention.triton.host",
    "hopper": "saccade.ops.attention.hopper.host",
}
PAGED_MODULES = {
    "cpu": "saccade.ops.paged_attention.cpu.host",
    "triton": "saccade.ops.paged_attention.triton.host",
    "hopper": "saccade.ops.paged_attention.hopper.host",
}
PAGE_WRITER = "saccade.kv_cache.write_triton"
LINEAR_MODULES = {
    "cpu": "saccade.ops.linear_attention.cpu.host",
    "triton": "saccade.ops.linear_attention.triton.host",
    "hopper": "saccade.ops.linear_attention.hopper.host",
}

_imported: dict[str, Any] = {}


def body_of(implementation: str) -> Body:
    """The module that does an implementation's work."""
    return _module(MODULES[implementation])


def paged_body_of(implementation: str) -> PagedBody:
    """The module that does an implementation's work over pages."""
    return _module(PAGED_MODULES[implementation])


def page_writer() -> Any:
    """The module whose kernel writes into pages."""
    return _module(PAGE_WRITER)


def linear_body_of(implementation: str) -> LinearBody:
    """The module that does an implementation's work in linear attention."""
    return _module(LINEAR_MODULES[implementation])


def _module(name: str) -> Any:
    module = _imported.get(name)
    if module is None:
        module = _imported[name] = importlib.import_module(name)
    return module

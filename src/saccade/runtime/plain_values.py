"""What an operator is handed beside tensors where nothing was captured: variant, config, backends.

Linear attention and the gated delta rule end their schemas with `PLAIN_VALUES` behind the fields of
their variant. Softmax attention has masks and scores with tables of their own, and does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from saccade.runtime.backends import module_of
from saccade.runtime.call_cache import CheckedCall
from saccade.runtime.custom_op import Arguments
from saccade.runtime.spec import KernelConfig

PLAIN_VALUES = "int[] config, str forward_by, str backward_by"


class PlainValues:
    """How plain values are written, and read again.

    Args:
        operation: as `backends.BACKENDS` names it.
        variant: the NamedTuple that plain values begin with.
    """

    def __init__(self, operation: str, variant: Any):
        self._operation, self._variant, self._config = operation, variant, len(variant._fields)

    def flatten(self, checked: CheckedCall, deterministic: bool = True) -> tuple[Any, ...]:
        """The plain values of a call; its gradients are always deterministic."""
        numbers = [] if checked.config is None else checked.config.numbers()
        return (*checked.variant, numbers, checked.forward_by, checked.backward_by)

    def variant_of(self, tables: Sequence[Tensor], plain: Sequence[Any]) -> Any:
        """The variant that plain values stand for."""
        return self._variant(*plain[: self._config])

    def config_of(self, plain: Sequence[Any]) -> KernelConfig:
        """The config that plain values stand for."""
        numbers = plain[self._config]
        return KernelConfig.of_numbers(numbers) if numbers else KernelConfig()

    def module_of(self, plain: Sequence[Any], of: str = "forward") -> Any:
        """The module of the backend that plain values name for a pass, or for a step."""
        _, forward_by, backward_by = plain[self._config :]
        return module_of(self._operation, backward_by if of == "backward" else forward_by, of)

    def prepare(self, inputs: Any, checked: CheckedCall) -> Callable[[Any, Any], Any]:
        """The forward pass of a call that was validated, as `Operation` wants it."""
        module = module_of(self._operation, checked.forward_by)
        config = checked.config or KernelConfig()
        if hasattr(module, "prepared"):
            return module.prepared(inputs, config)
        return lambda inputs, variant: module.forward(inputs, variant, config)

    def run(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """The forward pass by an operator's arguments."""
        inputs, tables, plain = arguments
        forward = self.module_of(plain).forward
        return tuple(forward(inputs, self.variant_of(tables, plain), self.config_of(plain)))


def listed(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients that there are, as an operator gives them."""
    return [gradient for gradient in gradients if gradient is not None]

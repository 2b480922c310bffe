"""Whether a model is still what it was when an engine was made of it.

An engine has tried the model's layers, and may have captured addresses of its weights. A module or
a weight that is replaced later, a cast or a move to another device would be served wrongly, or not
at all by graphs that read the memory from before. Looking at all of a model takes 0.1 ms, which is
done when requests come. In each step it is looked at only where something hints at a change:
PyTorch calls a hook whenever any module or parameter is registered anywhere, which is counted here
where a watched module gets it, and one module and one weight are compared in turn: a cast changes
all weights. Buffers are weights too (biases of routers, scales), but for those that a pass writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

# Of a config, which is asked past its own way of finding attributes: that takes 20 µs.
ATTENTION = "_attn_implementation_internal"


class Registrations:
    """Counts modules and parameters that watched modules get.

    Attributes:
        count: so many so far.
        watched: modules by their number. Whether they equal others is theirs to say, so they are
            no keys.
    """

    count = 0
    watched: ClassVar[WeakValueDictionary[int, Module]] = WeakValueDictionary()

    @classmethod
    def note(cls, module: Module, name: str, registered: Any) -> None:
        """One more, of a watched module; nothing is put in its place.

        Code that is being compiled makes modules of its own, as `layers[:n]` does. Were the count
        read there, that code would be compiled anew for each count.
        """
        if not torch.compiler.is_compiling() and cls.watched.get(id(module)) is module:
            cls.count += 1


register_module_module_registration_hook(Registrations.note)
register_module_parameter_registration_hook(Registrations.note)


class Weight(NamedTuple):
    """A parameter or a buffer as an engine has found it."""

    name: str
    holder: dict[str, Any]  # a module's parameters or buffers, by `key`
    key: str
    parameter: Tensor
    dtype: torch.dtype
    device: torch.device
    address: int | None  # None: of another library's tensors

    @classmethod
    def of(cls, name: str, holder: dict[str, Any], key: str) -> Weight:
        """What a module holds under a key now."""
        parameter: Tensor = holder[key]
        return cls(
            name, holder, key, parameter, parameter.dtype, parameter.device, address(parameter)
        )

    @property
    def is_same(self) -> bool:
        """Whether it is in its place, and its numbers are where they were."""
        now = self.holder.get(self.key)
        if now is None or now is not self.parameter or now.dtype is not self.dtype:
            return False
        return self.address is None or now.data_ptr() == self.address

    def change(self) -> str:
        """What became of it, for users to read."""
        now = self.holder.get(self.key)
        if now is None:
            return f"its weight {self.name} was taken out"
        if now.dtype != self.dtype:
            return f"its weight {self.name} was cast from {self.dtype} to {now.dtype}"
        if now.device != self.device:
            return f"its weight {self.name} was moved from {self.device} to {now.device}"
        became = "given other memory" if now is self.parameter else "replaced"
        return f"its weight {self.name} was {became}"


def address(parameter: Tensor) -> int | None:
    """Where a plain parameter's numbers lie."""
    return parameter.data_ptr() if type(parameter) in (Parameter, Tensor) else None


class Change(NamedTuple):
    """How a model differs from what it was.

    Attributes:
        said: for users to read.
        of_numbers: whether the model is the same, with other numbers of the same kind elsewhere.
    """

    said: str
    of_numbers: bool


class ModelWatch:
    """A model's modules and weights, as they are now.

    Args:
        written_by_passes: names of buffers that are no weights.
    """

    def __init__(self, model: Module, written_by_passes: Container[str] = ()):
        self._model, self._written_by_passes = model, written_by_passes
        self.renew()

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers that are watched."""
        return [weight.parameter for weight in self._weights]

    def renew(self) -> None:
        """Take the model as it is now for what it is to be."""
        self._count = Registrations.count
        Registrations.watched.update((id(module), module) for module in self._model.modules())
        self._modules = [
            (name, module._modules, tuple(module._modules.values()))
            for name, module in self._model.named_modules()
            if module._modules
        ]
        self._weights = [
            weight for weight in _weights(self._model) if weight.name not in self._written_by_passes
        ]
        self._weight_in_turn = itertools.cycle(self._weights)
        self._module_in_turn = itertools.cycle(self._modules)
        configs = (getattr(module, "config", None) for module in self._model.modules())
        found = {
            id(each): vars(each) for each in configs if ATTENTION in getattr(each, "__dict__", ())
        }
        self._attention = [(each, each[ATTENTION]) for each in found.values()]

    def seems_same(self) -> bool:
        """Whether nothing hints at a change; takes a microsecond or two."""
        if self._count != Registrations.count:
            return False
        weight = next(self._weight_in_turn, None)
        _, modules, before = next(self._module_in_turn)
        same = tuple(modules.values()) == before and (weight is None or weight.is_same)
        return same and self._attends_so

    @property
    def _attends_so(self) -> bool:
        """Whether attention is done as it was."""
        return all([config.get(ATTENTION) == name for config, name in self._attention])

    def change(self) -> Change | None:
        """How the model differs from what it was; None where it does not."""
        self._count = Registrations.count  # before the look: what comes after it counts anew
        for config, before in self._attention:
            name = config.get(ATTENTION)
            if name != before:
                said = f"its attention implementation is {name!r}, which was {before!r}"
                return Change(said, of_numbers=False)
        for name, modules, before in self._modules:
            if tuple(modules.values()) != before:
                return Change(_replaced(name, modules, before), of_numbers=False)
        changed = next((weight for weight in self._weights if not weight.is_same), None)
        if changed is None:
            return None
        now = changed.holder.get(changed.key)
        same_kind = now is not None and (now.dtype, now.device, now.shape) == (
            changed.dtype, changed.device, changed.parameter.shape,
        )  # fmt: skip
        return Change(changed.change(), same_kind)


AT_RANDOM = "drop", "jitter", "noise"  # in names of a module's numbers


def random_settings(module: Module) -> list[str]:
    """Names of a module's numbers that say how random it is in training mode: many models drop
    activations by a function, not by a module."""
    named = [name for name in vars(module) if any(part in name for part in AT_RANDOM)]
    return [*named, "p"] if isinstance(module, _DropoutNd) else named


def is_random_in_training(module: Module) -> bool:
    """Whether any of these numbers is above zero."""
    values = [getattr(module, name) for name in random_settings(module)]
    return any(type(value) in (int, float) and value > 0 for value in values)


def _weights(model: Module) -> Iterator[Weight]:
    for prefix, module in model.named_modules():
        for holder in module._parameters, module._buffers:
            for key, tensor in holder.items():
                # Offloaded weights are brought, as others, for each pass.
                if tensor is not None and tensor.device.type != "meta":
                    yield Weight.of(f"{prefix}.{key}".lstrip("."), holder, key)


def _replaced(name: str, modules: dict[str, Any], before: tuple[Any, ...]) -> str:
    """Which of a module's own modules was replaced, taken out or added."""
    now = [*modules.items()]
    for (key, module), old in zip(now, before, strict=False):
        if module is not old:
            place = f"{name}.{key}".lstrip(".")
            return f"its module {place}, a {type(old).__name__}, is now a {type(module).__name__}"
    what = "a module was added to" if len(now) > len(before) else "a module was taken out of"
    return f"{what} its {name or 'modules'}"

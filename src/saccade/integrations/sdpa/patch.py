"""Patch: what stands at `torch.nn.functional.scaled_dot_product_attention` after `enable`.

Programs know that function by its identity. A handler of calls (`__torch_function__` of a tensor
or of a mode) asks `func is torch.nn.functional.scaled_dot_product_attention`, or `func is` what it
kept from earlier, or looks it up in a dictionary; TorchScript knows it by its address. So handlers
are given PyTorch's own function, which stands in its place again as long as they run; and the
patch equals it, hashes like it, and is registered with TorchScript as the same operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.overrides import TorchFunctionMode, has_torch_function
from torch.utils._device import DeviceContext

from saccade.integrations.sdpa.call import has_handler, is_causal_bias

NAME = "scaled_dot_product_attention"
ORIGINAL: Any = vars(torch._C)["_nn"].scaled_dot_product_attention


class Patch:
    """Callable in the place of PyTorch's function: asks `serve`, and else calls that function.

    Args:
        serve: gives the output of a call, or None for what PyTorch is to serve.
    """

    def __init__(self, serve: Callable[..., Tensor | None]):
        self.serve, self.active = serve, False
        self.before: Callable[..., Tensor] = ORIGINAL
        self._lock, self._away = threading.Lock(), 0
        self.__name__ = self.__qualname__ = NAME
        self.__module__, self.__doc__ = "torch.nn.functional", ORIGINAL.__doc__

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        """The output: ours while active, unless handlers look at the call or it is traced."""
        given = (*arguments, *options.values())
        if not is_handled(given):
            output = self.attempt(*arguments, **options)
            if output is not None:
                return output
        if not may_be_handled(given):
            return self.before(*arguments, **options)
        if torch.compiler.is_compiling():
            setattr(torch.nn.functional, NAME, self.before)
            output = self.before(*arguments, **options)
            setattr(torch.nn.functional, NAME, self)
            return output
        with self._out_of_the_way(), _at_the_bottom(_Last(self)):
            return self.before(*arguments, **options)

    def attempt(self, *arguments: Any, **options: Any) -> Tensor | None:
        """Our output, or None: traced and exported programs keep PyTorch's operator."""
        traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not self.active or traced or _is_exporting():
            return None
        return self.serve(*arguments, **options)

    def put(self) -> None:
        """Stand in the function's place from now on."""
        if not self.active:
            self.before, self.active = getattr(torch.nn.functional, NAME), True
            operator = _builtins._find_builtin(self.before)
            if operator is not None:
                _builtins._register_builtin(self, operator)
            setattr(torch.nn.functional, NAME, self)

    def take_away(self) -> None:
        """Give the function its place back, unless somebody else has taken it since."""
        self.active = False
        if getattr(torch.nn.functional, NAME) is self:
            setattr(torch.nn.functional, NAME, self.before)

    @contextmanager
    def _out_of_the_way(self) -> Iterator[None]:
        """PyTorch's function in its place, for handlers; other threads meanwhile call it, too."""
        with self._lock:
            self._away += 1
            if getattr(torch.nn.functional, NAME) is self:
                setattr(torch.nn.functional, NAME, self.before)
        try:
            yield
        finally:
            with self._lock:
                self._away -= 1
                alone = getattr(torch.nn.functional, NAME) is self.before
                if self.active and not self._away and alone:
                    setattr(torch.nn.functional, NAME, self)

    def __eq__(self, other: object) -> bool:
        """Whether it is PyTorch's function, whose place this has."""
        return other is self or other is ORIGINAL

    def __hash__(self) -> int:
        """PyTorch's function's: dictionaries find the one by the other."""
        return hash(ORIGINAL)

    def __reduce__(self) -> str:
        """Pickled and copied by name, as PyTorch's function is."""
        return NAME


class _Last(TorchFunctionMode):
    """A mode behind all others: when they have seen a call and pass it on, it comes to us."""

    def __init__(self, patch: Patch) -> None:
        super().__init__()
        self.patch = patch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What func gives; of PyTorch's function, what we give if we serve the call."""
        options = kwargs or {}
        if func is self.patch.before:
            output = self.patch.attempt(*args, **options)
            if output is not None:
                return output
        return func(*args, **options)


def is_handled(given: tuple[Any, ...]) -> bool:
    """Whether a mode or a tensor's type looks at calls with these arguments.

    Not counted are the mode of `torch.set_default_device`, which looks at what makes tensors, and
    CausalBias, which we understand.
    """
    if not may_be_handled(given):
        return False
    if any(not is_causal_bias(value) and has_handler(value) for value in given):
        return True
    return any(type(mode) is not DeviceContext for mode in _modes())


def may_be_handled(given: tuple[Any, ...]) -> bool:
    """Whether PyTorch asks a mode or a tensor's type; in compiled code it tells no modes."""
    return torch._C._is_torch_function_mode_enabled() or has_torch_function(given)


def _is_exporting() -> bool:
    """Whether a program is being exported, by `torch.compiler.is_exporting`'s own flag.

    Asked by that function, torch 2.11 says True in all compiled code; newer ones read the flag.
    """
    return torch.compiler._is_exporting_flag


def _modes() -> list[Any]:
    """The modes of this thread, the first to be asked last."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)]


@contextmanager
def _at_the_bottom(mode: _Last) -> Iterator[None]:
    """A mode below all that there are; nothing where there are none."""
    modes = _modes()
    if not modes:
        yield
        return
    _replace([mode, *modes])
    try:
        yield
    finally:
        _replace([other for other in _modes() if other is not mode])


def _replace(modes: list[Any]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)

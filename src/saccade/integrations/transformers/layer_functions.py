"""Layers with states of transformers' models by saccade: what their functions are called for.

Such a layer calls functions of its Python module by their names: those of a package (fla,
mamba-ssm) where that is installed, else a fallback in PyTorch. It has no choice of another one for
a model, so there are two parts here. In the module, each function gives calls that carry a mark to
saccade, and all others to what was there before. And a layer gets a hook that marks its calls while
its model attends by a name of saccade's. Other models of the module do as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from saccade.integrations.transformers import delta_rule, mamba2

MARK = "saccade_layer_function"
# By what modules call them. Each takes the function that was there, for what is left to it.
FUNCTIONS: dict[str, Callable[..., Any]] = {**delta_rule.FUNCTIONS, **mamba2.FUNCTIONS}


class MarkCalls:
    """A hook that marks a layer's calls while its model attends by one of some names.

    It holds the model's config, which changes where `set_attn_implementation` is called.
    """

    def __init__(self, config: Any, names: tuple[str, ...]) -> None:
        self.config, self.names = config, names

    def __call__(
        self, layer: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The layer's arguments with the mark, or None to leave them as they are."""
        if self.config._attn_implementation not in self.names:
            return None
        return arguments, options | {MARK: True}


def attach(model: PreTrainedModel, names: tuple[str, ...]) -> None:
    """Hook the layers of a model that call one of `FUNCTIONS`, once each."""
    for layer in model.modules():
        if not _calls_one(type(layer)):
            continue
        if any(isinstance(hook, MarkCalls) for hook in layer._forward_pre_hooks.values()):
            continue
        _divert(sys.modules[type(layer).__module__])
        layer.register_forward_pre_hook(MarkCalls(model.config, names), with_kwargs=True)


@functools.cache
def _calls_one(layer: type) -> bool:
    """Whether a class's forward calls one of `FUNCTIONS`, and hands on what it is told besides."""
    forward = inspect.unwrap(layer.forward) if hasattr(layer, "forward") else None
    code = getattr(forward, "__code__", None)
    if code is None or not set(FUNCTIONS).intersection(code.co_names):
        return False
    return bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _divert(module: Any) -> None:
    """Let a module's functions give marked calls to saccade."""
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        if function is not None and not hasattr(function, MARK):
            setattr(module, name, _diverted(name, function))


def _diverted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if options.pop(MARK, False):
            return FUNCTIONS[name](function, *arguments, **options)
        return function(*arguments, **options)

    setattr(call, MARK, True)
    return call


@functools.cache
def attach_when_made(names: tuple[str, ...]) -> None:
    """Let models hook their layers at the end of their making."""
    post_init = PreTrainedModel.post_init

    @functools.wraps(post_init)
    def attached(self: PreTrainedModel) -> None:
        post_init(self)
        attach(self, names)

    PreTrainedModel.post_init = attached

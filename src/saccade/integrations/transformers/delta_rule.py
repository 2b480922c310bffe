"""Linear layers of transformers' models by saccade's gated delta rule.

A layer of Qwen3-Next, Qwen3.5, OLMo-hybrid or Kimi Linear calls functions of its Python module by
their names: fla's where that is installed, else a fallback in PyTorch. It has no choice of another
one for a model, so there are two parts here. In the module, each function gives calls that carry a
mark to saccade, and all others to what was there before. And a layer gets a hook that marks its
calls while its model attends by a name of saccade's. Other models of the module do as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from saccade.integrations import fla

MARK = "saccade_gated_delta_rule"
# By what modules call them: of one decay a head, then of one a channel; prompts, then tokens.
FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a layer asks one of `FUNCTIONS` for, in its layout [batch, length, heads, dim].

    unused: what models hand through their layers, such as position_ids, and chunk_size.
    """
    by_channel = g.dim() == 4
    return fla.fused_recurrent_gated_delta_rule(
        query, key, value, None if by_channel else g, g if by_channel else None, beta=beta,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


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
            setattr(module, name, _diverted(function))


def _diverted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        marked = options.pop(MARK, False)
        return (gated_delta_rule if marked else function)(*arguments, **options)

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

"""Recall: a call that is like one that was checked before is not checked again.

Checking every argument takes longer than a small problem does on a GPU. So what `prepare` and
`dispatch` made of a plain eager call is kept under all that they look at: shapes, strides, dtypes,
devices, mask, score and options. Anything out of the ordinary (captured tensors, dropout, autocast,
tracing, tensor subclasses) is checked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from saccade.masks import Mask
from saccade.problem import Config, Inputs, Variant
from saccade.scores import Score

MOST_CALLS = 4096  # kinds of calls that are kept
PLAIN = frozenset({Tensor, Parameter})  # types that nothing but PyTorch itself looks into


@dataclass
class Recalled:
    """What was found out about a kind of call, and what was prepared for it: its forward pass, and
    the arguments of its operator."""

    variant: Variant
    config: Config | None
    chosen: str
    forward: Callable[[Inputs, Variant], tuple[Tensor, Tensor]] | None = None
    tables: list[Tensor] = field(default_factory=list)
    plain: dict[bool, tuple[Any, ...]] = field(default_factory=dict)  # by `deterministic`


_calls: dict[Any, Recalled] = {}


def key_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    score: Score | None,
    scale: float | None,
    implementation: str | None,
    config: Config | Mapping[tuple[int, int], Config] | None,
) -> tuple[Any, ...] | None:
    """What a call is recalled by; None for a call that must be checked."""
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        return None
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        return None
    # Equal is not enough: 1 and 1.0 and True are, and only one of them is a scale.
    if (
        (mask is not None and (type(mask) is not Mask or mask.captured.tensors))
        or (score is not None and (type(score) is not Score or score.captured.tensors))
        or (scale is not None and type(scale) is not float)
        or (implementation is not None and type(implementation) is not str)
        or (config is not None and type(config) is not Config)
    ):
        return None
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        mask, score, scale, implementation, config,
        torch.get_float32_matmul_precision() if query.dtype is torch.float32 else None,
    )  # fmt: skip


def recalled(key: tuple[Any, ...] | None) -> Recalled | None:
    """What was kept under a key."""
    return None if key is None else _calls.get(key)


def keep(key: tuple[Any, ...] | None, found: Recalled) -> None:
    """Keep what was found out; forget everything when there is too much of it."""
    if key is None:
        return
    if len(_calls) >= MOST_CALLS:
        _calls.clear()
    _calls[key] = found

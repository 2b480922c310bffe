"""Outside of graphs: what torch.compile leaves to Python, as values in it may change.

Imported where torch.compile traces, and not before: its decorator takes Dynamo, which takes a
second to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from saccade.modifiers.modifier import refusal_in_graphs

Made = TypeVar("Made")


@torch.compiler.disable(reason=refusal_in_graphs("mask"))
def mask_of(make: Callable[[Any], Made], function: Callable[..., Any]) -> Made:
    """The mask that `make` makes of a plain function: the graph breaks here, or says why not."""
    return make(function)


@torch.compiler.disable(reason=refusal_in_graphs("score"))
def score_of(make: Callable[[Any], Made], function: Callable[..., Any]) -> Made:
    """The score that `make` makes of a plain function: as `mask_of`."""
    return make(function)


@torch.compiler.disable(reason="the function reaches values, which a graph cannot follow")
def called(function: Callable[..., Made], captured: tuple[Any, ...]) -> Made:
    """The mask or score that a function of `masks.function` gives with these values."""
    return function(*captured)

"""Dispatch: the names of `xformers.ops.fmha.dispatch`, by which programs ask which kernel answers.

Saccade's answers every call that it serves; `saccade.explain` says by which implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.integrations.xformers.operators import (
    AttentionBwOpBase,
    AttentionFwOpBase,
    Inputs,
    Operator,
)

# By these names xformers has them, and programs import them.

_own = Operator.of("saccade")
_wants_fa3 = True


def _set_use_fa3(use_flash_attention3: bool) -> None:
    """Whether FlashAttention-3 may answer; it never does, and the wish is kept for who asks."""
    global _wants_fa3
    _wants_fa3 = use_flash_attention3


def _get_use_fa3() -> bool:
    """What `_set_use_fa3` was told last."""
    return _wants_fa3


def fa3_available() -> bool:
    """Whether FlashAttention-3 may answer: no."""
    return False


def _dispatch_fw_priority_list(
    inp: Inputs, needs_gradient: bool
) -> Sequence[type[AttentionFwOpBase]]:
    """Kernels that may answer a call, the best first."""
    return [_own.FwOp]


def _dispatch_fw(inp: Inputs, needs_gradient: bool = False) -> type[AttentionFwOpBase]:
    """The kernel of a forward pass."""
    return _own.FwOp


def _dispatch_bw(inp: Inputs, varlen_lse_packed: bool | None = None) -> type[AttentionBwOpBase]:
    """The kernel of a backward pass."""
    return _own.BwOp


def _ensure_op_supports_or_raise(exc_type: type[Exception], name: str, op: Any, inp: Any) -> None:
    """Raise where a call may not name a kernel: any may."""

"""Saccade: exact attention for PyTorch, for training and serving, in Python."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from torch.serialization import add_safe_globals as _add_safe_globals

from saccade import feature_maps, masks, scores
from saccade.explain import explain
from saccade.flop_counter import register_formulas as _register_formulas
from saccade.integrations.sdpa import (  # last: it is built on the names above
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from saccade.kv_cache.paged_cache import PagedCache
from saccade.kv_cache.pool import OutOfPagesError
from saccade.kv_cache.storage import move_pages, write_kv_cache
from saccade.modifier_module import ModifierModule
from saccade.modifiers.expression import Captured as _Captured
from saccade.ops.attention.api import attention, attention_varlen
from saccade.ops.attention.merge import merge_states
from saccade.ops.attention_fp8.api import attention_fp8, attention_fp8_varlen
from saccade.ops.delta_rule.api import (
    gated_delta_rule,
    gated_delta_rule_step,
    gated_delta_rule_varlen,
)
from saccade.ops.linear_attention.api import (
    linear_attention,
    linear_attention_step,
    linear_attention_varlen,
)
from saccade.ops.paged_attention.api import attention_paged
from saccade.rotary import apply_rotary
from saccade.runtime.spec import KernelConfig, LinearState

if _TYPE_CHECKING:
    from saccade import parallel as parallel
    from saccade import testing as testing
    from saccade.serving.engine import Engine as Engine

_register_formulas()

# What torch.load takes with its defaults: plain values that hold tensors and numbers.
_add_safe_globals([masks.Mask, scores.Score, _Captured, KernelConfig, LinearState])

__version__ = "0.2.0"
__all__ = [
    "Engine",
    "KernelConfig",
    "LinearState",
    "ModifierModule",
    "OutOfPagesError",
    "PagedCache",
    "apply_rotary",
    "attention",
    "attention_fp8",
    "attention_fp8_varlen",
    "attention_paged",
    "attention_varlen",
    "explain",
    "feature_maps",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_delta_rule_varlen",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_varlen",
    "masks",
    "merge_states",
    "move_pages",
    "parallel",
    "scaled_dot_product_attention",
    "scores",
    "testing",
    "write_kv_cache",
]


def __getattr__(name: str) -> object:
    """`saccade.Engine`, `saccade.parallel` and `saccade.testing`, when they are first asked for.

    Who trains on one GPU should not wait for serving, nor for plans, nor for the cases of tests.
    """
    if name == "Engine":
        from saccade.serving.engine import Engine

        return Engine
    if name in ("parallel", "testing"):
        return _import_module(f"saccade.{name}")
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")

"""Operators: xformers' names of its kernels, which programs import and pass as `op`.

Saccade chooses its own kernels, so that a name makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ALL_BW_OPS",
    "ALL_FW_OPS",
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "Inputs",
    "MemoryEfficientAttentionCkDecoderOp",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassBlackwellOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionDecoderOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "MemoryEfficientAttentionTritonFwdFlashBwOp",
    "TritonFlashAttentionOp",
    "ck",
    "ck_decoder",
    "ck_splitk",
    "cutlass",
    "cutlass_blackwell",
    "decoder",
    "flash",
    "flash3",
    "small_k",
    "triton",
    "triton_splitk",
]


@dataclass
class Inputs:
    """What a call brings, by which programs ask whether a kernel of xformers serves it."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False


class AttentionOpBase:
    """The name of a kernel of xformers."""

    NAME: ClassVar[str] = ""

    @classmethod
    def supports(cls, d: Inputs) -> bool:
        """Whether a call may name this kernel; any may, as saccade chooses its own."""
        return True

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        """Why a call may not name it: there is no reason."""
        return []


class AttentionFwOpBase(AttentionOpBase):
    """The name of a kernel of a forward pass."""


class AttentionBwOpBase(AttentionOpBase):
    """The name of a kernel of a backward pass."""


class Operator(NamedTuple):
    """The two names that a call takes as `op`; also by the attributes of a module of xformers."""

    FwOp: type[AttentionFwOpBase]
    BwOp: type[AttentionBwOpBase]

    @classmethod
    def of(cls, name: str) -> Operator:
        """The names of both passes."""
        forward = type("FwOp", (AttentionFwOpBase,), {"NAME": f"{name}F"})
        return cls(forward, type("BwOp", (AttentionBwOpBase,), {"NAME": f"{name}B"}))


AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]

ck = Operator.of("ck")
ck_decoder = Operator.of("ck_decoder")
ck_splitk = Operator.of("ck_splitk")
cutlass = Operator.of("cutlass")
cutlass_blackwell = Operator.of("cutlass_blackwell")
decoder = Operator.of("decoder")
flash = Operator.of("flash")
flash3 = Operator.of("flash3")
small_k = Operator.of("small_k")
triton = Operator.of("triton")
triton_splitk = Operator.of("triton_splitk")

MemoryEfficientAttentionCkDecoderOp = ck_decoder
MemoryEfficientAttentionCkOp = ck
MemoryEfficientAttentionCutlassBlackwellOp = cutlass_blackwell
MemoryEfficientAttentionCutlassFwdFlashBwOp = Operator(cutlass.FwOp, flash.BwOp)
MemoryEfficientAttentionCutlassOp = cutlass
MemoryEfficientAttentionDecoderOp = decoder
MemoryEfficientAttentionFlashAttentionOp = flash
MemoryEfficientAttentionOp = small_k
MemoryEfficientAttentionSplitKCkOp = ck_splitk
MemoryEfficientAttentionTritonFwdFlashBwOp = Operator(triton.FwOp, flash.BwOp)
TritonFlashAttentionOp = triton

MODULES = {
    "ck": ck, "ck_decoder": ck_decoder, "ck_splitk": ck_splitk, "cutlass": cutlass,
    "cutlass_blackwell": cutlass_blackwell, "decoder": decoder, "flash": flash, "flash3": flash3,
    "small_k": small_k, "triton": triton, "triton_splitk": triton_splitk,
}  # fmt: skip
ALL_FW_OPS = [operator.FwOp for operator in MODULES.values()]
ALL_BW_OPS = [operator.BwOp for operator in MODULES.values()]

"""Operators: xformers' names of its kernels, which programs import and pass as `op`.

Saccade chooses its own kernels, so that a name makes no difference.
"""

from __future__ import annotations

import functools
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

    @property
    def device(self) -> torch.device:
        """Query's."""
        return self.query.device

    @property
    def scale_float(self) -> float:
        """The factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def get_qkv_in_bmghk(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as [B, M, G, H, K]."""
        missing = {3: (2, 2), 4: (2,), 5: ()}[self.query.dim()]

        def grouped(rows: Tensor) -> Tensor:
            return functools.reduce(torch.unsqueeze, missing, rows)

        return grouped(self.query), grouped(self.key), grouped(self.value)

    def get_output_dtype(self) -> torch.dtype:
        """The output's dtype: the wished one, or float32 for a part of the keys."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        return self.output_dtype or (wide if self.is_partial else self.query.dtype)


@dataclass
class Context:
    """What a forward pass leaves for gradients."""

    lse: Tensor
    out: Tensor
    op_bw: Any = None
    rng_state: Any = None


@dataclass
class Gradients:
    """Of query, key, value and a bias."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    db: Tensor | None = None


def bmk2bmhk(tensor: Tensor, num_heads: int) -> Tensor:
    """[B · H, M, K] as [B, M, H, K]; a tensor that has four dimensions stays as it is."""
    if tensor.dim() == 4:
        return tensor
    return tensor.unflatten(0, (-1, num_heads)).transpose(1, 2)


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

    @classmethod
    def is_available(cls) -> bool:
        """Whether the kernel may be named."""
        return True

    @classmethod
    def info(cls) -> str:
        """That it may, as a word."""
        return "available"


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

"""Problems: what of a call decides which kernels serve it, and how they are scheduled."""

from __future__ import annotations

from saccade.hopper.configs import BackwardProblem, KernelProblem
from saccade.hopper.descriptors import width_of
from saccade.modifiers.names import is_causal, stretch_of
from saccade.portable.arguments import Geometry
from saccade.problem import Inputs, Variant


def kernel_problem(inputs: Inputs, variant: Variant) -> KernelProblem:
    """What the schedule of a call depends on."""
    head_width, value_width = (width_of(rows.shape[-1]) for rows in (inputs.query, inputs.value))
    return KernelProblem(
        head_width, value_width, variant.mask != "", variant.score != "",
        is_causal(variant.mask), inputs.key.shape[-2], inputs.cu_seqlens_q is not None,
    )  # fmt: skip


def backward_problem(inputs: Inputs, variant: Variant, deterministic: bool) -> BackwardProblem:
    """What decides whether and how these kernels serve a backward pass."""
    head_width, value_width = (width_of(rows.shape[-1]) for rows in (inputs.query, inputs.value))
    lengths = Geometry.of(inputs).lengths()
    return BackwardProblem(
        head_width, value_width, *lengths, variant.mask != "", deterministic,
        stretch=stretch_of(variant.mask), causal=is_causal(variant.mask),
        packed=inputs.cu_seqlens_q is not None, scored=variant.score != "",
    )  # fmt: skip

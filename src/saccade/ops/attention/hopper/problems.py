"""Problems: what of a call decides which kernels serve it, and how they are scheduled."""

from __future__ import annotations

from saccade.gpu.hopper.descriptors import width_of
from saccade.gpu.kernel_args import Geometry
from saccade.modifiers.names import is_causal, stretch_of
from saccade.ops.attention.hopper.configs import (
    BackwardProblem,
    KernelProblem,
    backward_unsupported,
    forward_unsupported,
)
from saccade.runtime.spec import Inputs, Problem, Variant


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


def left_to_triton(problem: Problem) -> str | None:
    """Which passes of a call the Triton kernels serve, and why; None: none of them."""
    if problem.page_size:
        return "but rows that wait for memory (decode) go to Triton kernels"
    widths = width_of(problem.head_dim), width_of(problem.value_dim)
    lengths = problem.query_len, problem.kv_len
    masked, scored = problem.mask != "", problem.score != ""
    backward = BackwardProblem(
        *widths, *lengths, masked, False, causal=is_causal(problem.mask),
        packed=problem.packed, scored=scored,
    )  # fmt: skip
    reasons = {
        "forward": forward_unsupported(KernelProblem(*widths, masked, scored)),
        "backward": backward_unsupported(backward),
    }
    left = [f"{name} by Triton kernels ({reason})" for name, reason in reasons.items() if reason]
    return "but " + ", ".join(left) if left else None

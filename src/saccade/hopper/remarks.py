"""Remarks: what Hopper's implementation leaves to the portable kernels, for `explain`."""

from __future__ import annotations

from saccade.hopper import configs
from saccade.hopper.configs import BackwardProblem, KernelProblem
from saccade.hopper.descriptors import width_of
from saccade.modifiers.names import is_causal
from saccade.problem import Problem


def remark(problem: Problem) -> str | None:
    """Which passes of a call the portable kernels serve, and why; None: none of them."""
    if problem.page_size:
        return "but rows that wait for memory (decode) go to portable kernels"
    widths = width_of(problem.head_dim), width_of(problem.value_dim)
    lengths = problem.query_len, problem.kv_len
    masked, scored = problem.mask != "", problem.score != ""
    backward = BackwardProblem(
        *widths, *lengths, masked, False, causal=is_causal(problem.mask),
        packed=problem.packed, scored=scored,
    )  # fmt: skip
    reasons = {
        "forward": configs.forward_unsupported(KernelProblem(*widths, masked, scored)),
        "backward": configs.backward_unsupported(backward),
    }
    left = [f"{name} by portable kernels ({reason})" for name, reason in reasons.items() if reason]
    return "but " + ", ".join(left) if left else None

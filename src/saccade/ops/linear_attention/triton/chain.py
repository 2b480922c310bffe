"""Linear attention, chaining: the state that each segment starts from, of what segments add to it.

    start_n = fade_{n−1} · start_{n−1} + part_{n−1}

Few numbers against those of a sequence, but many steps: one kernel takes them all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.triton.decay import whole_decays
from saccade.ops.linear_attention.triton.passes import Passes
from saccade.ops.linear_attention.triton.positions import State

NUMBERS = 256  # of a state, which one program follows through the segments


def chained(
    passes: Passes, parts: State, before: State | None, segments: int, backwards: bool
) -> tuple[State, State]:
    """For each segment the sum of all segments before it, faded; and that of all.

    The starts take the place of the parts.
    """
    whole = whole_decays(passes.summed_decay, passes.inputs, passes.spec, segments)
    decays = None if whole is None else whole.contiguous()
    matrices, vectors = (
        _chained(passes, part, None if before is None else before[position], decays, backwards)
        for position, part in enumerate(parts)
    )
    return parts, (matrices, vectors)


def _chained(
    passes: Passes, parts: Tensor, before: Tensor | None, decays: Tensor | None, backwards: bool
) -> Tensor:
    """What a segment after all others would start from; parts become starts."""
    spec = passes.spec
    segments, size = parts.shape[2], parts.shape[3:].numel()
    last = torch.empty_like(parts[:, :, 0])

    def make() -> Launch:
        constants = {
            "SIZE": size, "SEGMENTS": segments, "NUMBERS": NUMBERS, "BACKWARDS": backwards,
        }  # fmt: skip
        return Launch(linear_chain, constants, {"num_warps": 4, "num_stages": 1})

    def arguments() -> tuple[Any, ...]:
        return parts, before, last, decays

    key = "chain", size, segments, backwards, before is None
    launch = remembered(spec.launches, key, make)
    programs = parts.shape[:2].numel() * -(-size // NUMBERS)
    launch(programs, spec.device, there_are((parts, before, last, decays)), arguments)
    return last


@triton.jit
def linear_chain(
    parts, before, last, decays,  # addresses; fades: a factor for each state and segment, or None
    SIZE: tl.constexpr, SEGMENTS: tl.constexpr, NUMBERS: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """One program: NUMBERS of the SIZE of one state. Parts [states, SEGMENTS, SIZE] become starts.

    before: the first start (None: 0). last: what a segment after all others would start from.
    """
    pieces: tl.constexpr = (SIZE + NUMBERS - 1) // NUMBERS
    state, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    at = piece * NUMBERS + tl.arange(0, NUMBERS)
    exists = at < SIZE
    running = tl.zeros([NUMBERS], tl.float32)
    if before is not None:
        running += tl.load(before + (wide(state) * SIZE + at), mask=exists, other=0.0)
    for index in range(0, SEGMENTS):
        segment = SEGMENTS - 1 - index if BACKWARDS else index
        position = parts + ((wide(state) * SEGMENTS + segment) * SIZE + at)
        part = tl.load(position, mask=exists, other=0.0)
        tl.store(position, running, mask=exists)
        if decays is not None:
            running *= tl.load(decays + (wide(state) * SEGMENTS + segment))
        running += part
    tl.store(last + (wide(state) * SIZE + at), running, mask=exists)

"""Verdicts on whole tiles and kernels' code, for random masks: never wrong; and how often exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import coordinates, judged, mask_of_kernel, reduced
from random_masks import SHAPE, made, programs
from torch import Tensor

from saccade.masks import Mask
from saccade.modifiers import evaluate, intervals
from saccade.modifiers.intervals import rows

in_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs in Triton's interpreter"
)
often = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # what is drawn is deep
TILES = [(4, 4), (5, 3), (1, 8), (16, 16)]


def visible(mask: Mask, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return evaluate.visible(mask.key, mask.captured, coordinates(shape)).expand(shape)


def classified(
    mask: Mask, tiles: tuple[int, int], shape: tuple[int, ...] = SHAPE
) -> tuple[Tensor, Tensor]:
    at = coordinates(shape)._replace(
        query_row=rows(0, shape[2], tiles[0], 2), kv_row=rows(0, shape[3], tiles[1], 3)
    )
    verdict = intervals.classify(mask.key, mask.captured, at)
    counts = (shape[0], shape[1], -(-shape[2] // tiles[0]), -(-shape[3] // tiles[1]))
    return verdict.possible.expand(counts), verdict.certain.expand(counts)


def check_sound(verdict: tuple[Tensor, Tensor], seen: Tensor, tiles: tuple[int, int]) -> None:
    some, every = reduced(seen, tiles)
    assert not bool((some & ~verdict[0]).any()), "a visible pair would be skipped"
    assert not bool((verdict[1] & ~every).any()), "a hidden pair would be seen"


def made_or_refused(program: Any, align: str) -> Mask | None:
    """A mask; None of what is refused when it is made: kinds that do not go together."""
    try:
        return made(program, align)
    except TypeError as error:
        known = ("joins", "read at a real", "takes a bool result", "takes a truth", "divides by 0")
        assert any(word in str(error) for word in known), error
        return None


aligned = st.sampled_from(["top_left", "bottom_right"])


@settings(often, max_examples=400)
@given(programs, aligned, st.sampled_from(TILES))
def test_random_masks_are_never_judged_wrongly(program, align, tiles):
    mask = made_or_refused(program, align)
    if mask is not None:
        check_sound(classified(mask, tiles), visible(mask), tiles)


@in_interpreter
@settings(often, max_examples=150)
@given(programs, aligned)
def test_random_masks_are_the_same_in_kernels(program, align):
    mask = made_or_refused(program, align)
    if mask is not None:
        assert torch.equal(mask_of_kernel(mask, SHAPE), visible(mask))


@in_interpreter
@settings(often, max_examples=120)
@given(programs, aligned, st.booleans())
def test_random_masks_are_never_judged_wrongly_by_kernels(program, align, over_keys):
    mask = made_or_refused(program, align)
    if mask is not None:
        seen = mask_of_kernel(mask, SHAPE)
        check_sound(judged(mask, SHAPE, (4, 4), over_keys), seen, (4, 4))

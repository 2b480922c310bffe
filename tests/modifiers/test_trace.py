"""What a traced function computes is what the function computes, pair by pair and in kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import coordinates, mask_of_kernel, score_of_kernel
from torch import Tensor
from written_functions import KV_LEN, LONGEST, MASKS, SCORES, SHAPE, documents, lengths, normal

import saccade
from saccade.masks import as_mask
from saccade.modifiers import evaluate
from saccade.scores import as_score

in_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs in Triton's interpreter"
)


def pair_by_pair(function: Callable[..., Any], given: Tensor | None = None) -> Tensor:
    """The function called on plain numbers of PyTorch, one pair after the other."""
    rows = [[torch.tensor(row) for row in range(size)] for size in SHAPE]
    found = torch.empty(SHAPE, dtype=torch.bool if given is None else given.dtype)
    for at in itertools.product(*map(range, SHAPE)):
        indices = [rows[dim][row] for dim, row in enumerate(at)]
        score = [] if given is None else [given[at]]
        found[at] = function(*score, *indices)
    return found


def visible(mask: Any) -> Tensor:
    return evaluate.visible(mask.key, mask.captured, coordinates(SHAPE)).expand(SHAPE)


@pytest.mark.parametrize("name", MASKS)
@in_interpreter
def test_masks_mean_what_their_functions_say(name):
    mask = as_mask(MASKS[name])
    wanted = pair_by_pair(MASKS[name])
    assert torch.equal(visible(mask), wanted)
    assert torch.equal(mask_of_kernel(mask, SHAPE), wanted)


@pytest.mark.parametrize("name", SCORES)
@in_interpreter
def test_scores_mean_what_their_functions_say(name):
    score, given = as_score(SCORES[name]), normal(*SHAPE, seed=99)
    wanted = pair_by_pair(SCORES[name], given)
    leaf = given.clone().requires_grad_()
    found = evaluate.change(score.key, score.captured, leaf, coordinates(SHAPE))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    changed, slope = score_of_kernel(score, given)
    torch.testing.assert_close(changed, wanted, rtol=1e-5, atol=1e-5)
    by_autograd = torch.zeros_like(given)
    if found.requires_grad:
        (by_autograd,) = torch.autograd.grad(found, leaf, torch.ones_like(found))
    torch.testing.assert_close(slope, by_autograd, rtol=1e-4, atol=1e-5)


def of_transformers() -> dict[str, Callable[..., Any]]:
    from transformers import masking_utils as made

    causal = made.causal_mask_function
    padding = torch.arange(LONGEST)[None] < lengths[:, None]
    return {
        "causal": causal,
        "bidirectional": made.bidirectional_mask_function,
        "sliding": made.sliding_window_causal_mask_function(3),
        "around": made.sliding_window_bidirectional_mask_function(2),
        "chunked": made.chunked_causal_mask_function(4, torch.tensor([1, 0])),
        "padded": made.and_masks(causal, made.padding_mask_function(padding)),
        "packed": made.and_masks(causal, made.packed_sequence_mask_function(documents)),
        "or": made.or_masks(causal, lambda b, h, q, k: k < 5),
        "offset": made.add_offsets_to_mask_function(causal, 2, 1),
    }


NAMES = [
    "causal", "bidirectional", "sliding", "around", "chunked", "padded", "packed", "or", "offset",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@in_interpreter
def test_masks_of_transformers(name):
    function = of_transformers()[name]
    mask, wanted = as_mask(function), pair_by_pair(function)
    assert torch.equal(visible(mask), wanted)
    assert torch.equal(mask_of_kernel(mask, SHAPE), wanted)


@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton"])
def test_functions_are_taken_as_they_are(implementation):
    if implementation == "triton" and torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, KV_LEN, 16).unbind()
    window = lambda b, h, q, k: (q - k <= 4) & (q >= k)  # noqa: E731
    slope = torch.tensor([0.1, 0.5, 1.0])
    alibi = lambda s, b, h, q, k: s - slope[h] * (q - k).abs()  # noqa: E731
    call = {"implementation": implementation}
    found = saccade.attention(query, key, value, mask=window, score=alibi, **call)  # pyright: ignore[reportArgumentType, reportCallIssue]
    wanted = saccade.attention(  # pyright: ignore[reportCallIssue]
        query,
        key,
        value,
        mask=saccade.masks.window(4),
        score=saccade.scores.alibi(slope),
        **call,  # pyright: ignore[reportArgumentType]
    )
    torch.testing.assert_close(found, wanted)

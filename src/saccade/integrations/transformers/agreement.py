"""Agreement: whether transformers' mask functions still mean what saccade takes them for.

Factories are known by name, and a later transformers could give a name another meaning. So each is
tried once, on a few rows: what it says of every pair against what saccade makes of it. One that
differs is no longer recognised, and its masks are written out by transformers itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

import saccade
from saccade.integrations.transformers import recognition
from saccade.integrations.transformers.kinds import Visible
from saccade.integrations.transformers.masks import MaskRequest

# (query_len, kv_len, query_offset, kv_offset): in place; behind a past that was cut off; in the
# middle of a cache that is longer than its contents
PLACES = ((9, 9, 0, 0), (4, 7, 5, 2), (3, 9, 4, 0))
BLOCKS = torch.tensor([[0, 0, -1, 1, 1, 1, -1, -1, 2], [-1, 0, 0, 0, 0, -1, 1, 1, 1]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [4, 0, 1, 2, 3, 4, 5, 6, 7]])
REAL = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1, 0]]).bool()
PADDED = torch.tensor([0, 2])


def specimens() -> dict[str, Callable[[], Callable[..., Any]]]:
    """How to make a mask function by each factory that is tried, beside a causal one."""
    library: Any = masking_utils  # of which some factories came with later versions
    causal = library.causal_mask_function
    return {
        "sliding_window_overlay": lambda: library.and_masks(
            library.sliding_window_overlay(3), causal
        ),
        "sliding_window_bidirectional_overlay": lambda: (
            library.sliding_window_bidirectional_overlay(2)
        ),
        "chunked_overlay": lambda: library.and_masks(library.chunked_overlay(3, PADDED), causal),
        "blockwise_overlay": lambda: library.or_masks(causal, library.blockwise_overlay(BLOCKS)),
        "padding_mask_function": lambda: library.and_masks(
            causal, library.padding_mask_function(REAL)
        ),
        "packed_sequence_mask_function": lambda: library.and_masks(
            causal, library.packed_sequence_mask_function(DOCUMENTS)
        ),
        "remap_positions_for_packed_sequence": lambda: library.and_masks(
            library.packed_sequence_mask_function(DOCUMENTS),
            library.remap_positions_for_packed_sequence(
                library.and_masks(library.chunked_overlay(3, PADDED), causal), POSITIONS
            ),
        ),
    }


def shown(mask: Visible, shape: tuple[int, int, int]) -> Tensor:
    """A mask as bools [batch, query_len, kv_len]: rows average the numbers of the keys they see."""
    batch, query_len, kv_len = shape
    query, key = torch.zeros(batch, 1, query_len, 1), torch.zeros(batch, 1, kv_len, 1)
    value = torch.eye(kv_len).expand(batch, 1, kv_len, kv_len)
    return saccade.attention(query, key, value, mask=mask)[:, 0] > 0


def agrees(mask_function: Callable[..., Any]) -> bool:
    """Whether saccade makes of a mask function what it says, in every place."""
    for query_len, kv_len, query_offset, kv_offset in PLACES:
        request = MaskRequest(
            2, query_len, kv_len, query_offset, kv_offset, mask_function, None, False,
            torch.device("cpu"),
        )  # fmt: skip
        try:
            mask = recognition.recognised(mask_function, request.rows())
        except recognition.NotUnderstood:
            return False
        if not torch.equal(shown(mask, (2, query_len, kv_len)), request.dense()[:, 0]):
            return False
    return True


@functools.cache
def check() -> tuple[str, ...]:
    """Stop recognising the factories that mean something else; their names.

    Raises:
        ImportError: if causal itself is not what it was.
    """
    if not agrees(masking_utils.causal_mask_function):
        raise ImportError(
            "transformers.masking_utils.causal_mask_function: shows other pairs than kv_idx <= "
            "q_idx, which saccade.integrations.transformers takes it for"
        )
    found = []
    for factory, specimen in specimens().items():
        if hasattr(masking_utils, factory) and not agrees(specimen()):
            recognition.forget(factory)
            found.append(factory)
    return tuple(found)

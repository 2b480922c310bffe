"""Dropout as a pure function of (seed, batch, head, query row, key row).

Whether a pair is dropped comes from a counter-based generator, so tiles may be visited in any
order, on any device, forward or backward, and always drop the same pairs for the same seed.

Source: Philox 4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3", section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # Weyl sequence: golden ratio and sqrt(3) - 1
LOW_32 = 0xFFFFFFFF


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> list[Tensor]:
    """Four random words for each counter.

    Args:
        counter: four int64 tensors with values in [0, 2^32) that broadcast against each other.
        seed: int64 scalar; its low and high 32 bits are the generator's two key words.

    Returns:
        Four int64 tensors of words in [0, 2^32).
    """
    words = list(counter)
    key = [seed & LOW_32, (seed >> 32) & LOW_32]
    for _ in range(ROUNDS):
        # int64 products wrap, but their 64 bits are right; the shift's sign bits are masked off.
        products = [words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]]
        high = [(product >> 32) & LOW_32 for product in products]
        low = [product & LOW_32 for product in products]
        words = [high[1] ^ words[1] ^ key[0], low[1], high[0] ^ words[3] ^ key[1], low[0]]
        key = [(k + step) & LOW_32 for k, step in zip(key, KEY_STEPS, strict=True)]
    return words


def threshold(dropout_p: float) -> int:
    """A word below this number drops its pair: dropout_p in units of 2^-32."""
    return round(dropout_p * 2**32)


def kept(
    seed: Tensor, batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor, dropout_p: float
) -> Tensor:
    """True where a pair is kept; the index tensors broadcast against each other.

    The counter is (kv_row // 4, query_row, head, batch), and kv_row % 4 picks one of the four
    words: a program that walks along the keys draws once for four of them.
    """
    words = philox_4x32((kv_row >> 2, query_row, head, batch), seed)
    lane = kv_row & 3
    word = torch.where(
        lane < 2,
        torch.where(lane == 0, words[0], words[1]),
        torch.where(lane == 2, words[2], words[3]),
    )
    return word >= threshold(dropout_p)


def kept_range(
    seed: Tensor,
    batch: Tensor,
    head: Tensor,
    query_row: Tensor,
    kv_range: tuple[int, int],
    dropout_p: float,
) -> Tensor:
    """`kept` for the key rows start … stop - 1 along the last dimension, drawing each word once."""
    start, stop = kv_range
    first = start // 4
    groups = torch.arange(first, -(-stop // 4), device=seed.device).view(1, 1, 1, -1)
    words = torch.stack(philox_4x32((groups, query_row, head, batch), seed), dim=-1)
    return (words.flatten(-2) >= threshold(dropout_p))[..., start - 4 * first : stop - 4 * first]

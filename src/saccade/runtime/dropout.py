"""Dropout as a pure function of (seed, batch, head, query row, key row).

Whether a pair is dropped comes from a counter-based generator, so tiles may be visited in any
order, on any device, forward or backward, and always drop the same pairs for the same seed.

Source: Philox 4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3", section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # Weyl sequence: golden ratio and sqrt(3) - 1
LOW_32 = 0xFFFFFFFF
DRAWN = 2**14  # counters at once: numbers of more leave a processor's cache; fewer cost starts


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor | int) -> list[Tensor]:
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
        # int64 products wrap, but their 64 bits are right. Words 1 and 3 are products' low halves:
        # what stands above them is masked off once they are mixed, as the shift's sign bits are.
        products = [words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]]
        mixed = [
            _mixed(product >> 32, word, of_key)
            for product, word, of_key in zip(products[::-1], words[1::2], key, strict=True)
        ]
        words = [mixed[0], products[1], mixed[1], products[0]]
        key = [(k + step) & LOW_32 for k, step in zip(key, KEY_STEPS, strict=True)]
    return [words[0], words[1] & LOW_32, words[2], words[3] & LOW_32]


def _mixed(high: Tensor, word: Tensor, key: Tensor | int) -> Tensor:
    """The low 32 bits of high ^ word ^ key; a seed that is a tensor may be mapped by vmap."""
    if isinstance(key, Tensor):
        return (high ^ word ^ key) & LOW_32
    fits = (size in (1, whole) for size, whole in zip(word.shape, high.shape, strict=False))
    wide = high.dim() == word.dim() and all(fits)
    mixed = high.bitwise_xor_(word) if wide else high ^ word
    return mixed.bitwise_xor_(key).bitwise_and_(LOW_32)


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
    seed: int,
    batch: Tensor,
    head: Tensor,
    query_row: Tensor,
    kv_range: tuple[int, int],
    dropout_p: float,
) -> Tensor:
    """`kept` on the CPU for a rectangle of pairs, drawing each word once.

    Args:
        seed: int64; see `philox_4x32`.
        batch, head, query_row: index tensors along the first three of four dimensions.
        kv_range: the key rows start … stop - 1.
    """
    start, stop = kv_range
    first = start // 4
    groups = torch.arange(first, -(-stop // 4), device="cpu").view(1, 1, 1, -1)
    sides = batch.shape[0], head.shape[1], query_row.shape[2], groups.shape[3]
    of_head = max(1, sides[2] * sides[3])
    heads, batches = max(1, DRAWN // of_head), max(1, DRAWN // (of_head * max(1, sides[1])))
    found = torch.empty((*sides, 4), dtype=torch.bool, device="cpu")
    for b in range(0, sides[0], batches):
        for h in range(0, sides[1], heads):
            at = slice(b, b + batches), slice(h, h + heads)
            words = philox_4x32((groups, query_row, head[:, at[1]], batch[at[0]]), seed)
            for lane, word in enumerate(words):
                torch.ge(word, threshold(dropout_p), out=found[at][..., lane])
    return found.flatten(-2)[..., start - 4 * first : stop - 4 * first]


# ---- rows of a longer call -----------------------------------------------------------------------

BEHIND = 1024  # rows of a table behind the last, as programs read those of whole tiles


class Numbers(NamedTuple):
    """What heads, sequences and rows of a call are called in a longer one that it is a part of.

    Attributes:
        table: int32 [1 + rows, 4]. The first row holds what is added to a head's number. After it
            row t holds, of query row t in the order of memory, its number in its sequence, and what
            is added to the batch entry's number; and of key row t its number in its sequence. One
            row alone: rows and batch entries are called what they are in the call.
        grouped: whether keys whose numbers have a counter in common, four by four, lie so in the
            call, too: one draw then serves four of them.
    """

    table: Tensor
    grouped: bool

    def to(self, device: torch.device) -> Numbers:
        """The table on a device."""
        return self._replace(table=self.table.to(device))

    @staticmethod
    def of_heads(first: int) -> Numbers:
        """Those of a call that has all rows, and the heads from `first` on."""
        return Numbers(torch.tensor([[first, 0, 0, 0]], dtype=torch.int32), True)

    @staticmethod
    def of_rows(
        first_head: int, query_row: Tensor, added_batch: Tensor, kv_row: Tensor, kv_place: Tensor
    ) -> Numbers:
        """Those of a call that has some rows.

        Args:
            first_head: what is added to a head's number.
            query_row, kv_row: the numbers of all rows in the order of memory, on the CPU.
            added_batch: of each query row, what is added to the batch entry's number.
            kv_place: where each key row lies in its sequence of the call.
        """
        longest = max(len(query_row), len(kv_row))
        table = torch.zeros(1 + longest + BEHIND, 4, dtype=torch.int32)
        table[0, 0] = first_head
        table[1 : 1 + len(query_row), 0] = query_row
        table[1 : 1 + len(query_row), 1] = added_batch
        table[1 : 1 + len(kv_row), 2] = kv_row
        first = torch.arange(len(kv_row)) - kv_place % 4  # the first key that has its counter
        alike = (kv_row % 4 == kv_place % 4) & (kv_row - kv_place % 4 == kv_row[first])
        return Numbers(table, bool(alike.all()))


Pairs = tuple[Tensor, Tensor, Tensor, Tensor]


def in_whole(table: Tensor, pairs: Pairs, query_place: Tensor, kv_place: Tensor) -> Pairs:
    """Batch entries, heads, query rows and key rows of pairs as they are called in a longer call.

    Args:
        table: that of `Numbers`.
        pairs: as they are called in the call; index tensors that broadcast against each other.
        query_place, kv_place: where each row lies in memory, shaped as query rows and key rows.
    """
    batch, head, query_row, kv_row = pairs
    head = head + table[0, 0]
    if len(table) == 1:
        return batch, head, query_row, kv_row
    of_query, of_key = table[1 + query_place].long(), table[1 + kv_place].long()
    return batch + of_query[..., 1], head, of_query[..., 0], of_key[..., 2]


def kept_rows(
    seed: int, batch: Tensor, head: Tensor, query_row: Tensor, kv_row: Tensor, dropout_p: float
) -> Tensor:
    """`kept` on the CPU where key rows have any numbers, drawing each word once.

    batch, head, query_row, kv_row: index tensors along the dimensions of four, which those of rows
    and of batch entries may have as their first, too.
    """
    found = []
    for entry in range(max(len(batch), len(query_row), len(kv_row))):
        of_batch, rows, keys = (
            each[min(entry, len(each) - 1)].unsqueeze(0) for each in (batch, query_row, kv_row)
        )
        groups, places = (keys.flatten() >> 2).unique(return_inverse=True)
        of_heads = []
        step = max(1, DRAWN // max(1, rows.shape[2] * len(groups)))
        for heads in head.split(step, 1):
            words = philox_4x32((groups.view(1, 1, 1, -1), rows, heads, of_batch), seed)
            of_heads.append(torch.stack([word >= threshold(dropout_p) for word in words], -1))
        drawn = torch.cat(of_heads, 1).flatten(-2)
        found.append(drawn.index_select(-1, 4 * places + (keys.flatten() & 3)))
    return torch.cat(found)

"""Kinds: the description of a test case, and the masks and scores that it can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade import masks, scores
from saccade.masks import Mask
from saccade.scores import Score


@dataclass(frozen=True)
class Description:
    """All that a case is made from.

    `lengths` are (query, key) lengths: one pair a sequence; a dense case uses the first.
    """

    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    lengths: tuple[tuple[int, int], ...] = ((24, 24),)
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    packed: bool = False
    mask: str = "none"
    score: str = "none"
    sinks: bool = False
    dropout_p: float = 0.0
    layout: str = "contiguous"
    poison_hidden: bool = False
    scale: float | None = None
    seed: int = 0
    device: str = "cpu"

    @property
    def query_heads(self) -> int:
        """Query heads in all."""
        return self.kv_heads * self.group

    @property
    def longest(self) -> tuple[int, int]:
        """The longest query length and key length."""
        used = self.lengths if self.packed else self.lengths[:1]
        return max(q for q, _ in used), max(k for _, k in used)

    @property
    def batch_size(self) -> int:
        """Batch entries, or sequences."""
        return len(self.lengths) if self.packed else self.batch


@masks.function
def _every_nth(batch: Any, head: Any, query_row: Any, kv_row: Any, step: Any) -> Any:
    return (query_row - kv_row) % step == 0


@masks.function(align="bottom_right")
def _not_my_twin(batch: Any, head: Any, query_row: Any, kv_row: Any, table: Any) -> Any:
    return (masks.take(table, head) <= query_row) & ((kv_row ^ 1) != query_row)


@scores.function
def _gain(score: Any, batch: Any, head: Any, query_row: Any, kv_row: Any, gain: Any) -> Any:
    return score * gain


def _random(d: Description, generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from low to high - 1 (at least low), on the case's device."""
    return torch.randint(low, max(high, low + 1), shape, generator=generator).to(d.device)


def _document_mask(d: Description, generator: torch.Generator) -> Mask:
    query_len, kv_len = d.longest
    ids = [
        _random(d, generator, 0, 3, d.batch_size, n).sort(-1).values for n in (query_len, kv_len)
    ]
    return masks.documents(*ids)


def _block_mask(d: Description, generator: torch.Generator) -> Mask:
    query_len, kv_len = d.longest
    shape = (d.query_heads, -(-query_len // 5), -(-kv_len // 7))
    return masks.blocks(_random(d, generator, 0, 2, *shape).bool(), (5, 7))


def _tree_mask(d: Description, generator: torch.Generator) -> Mask:
    query_len = d.longest[0]
    ranks = torch.arange(query_len)
    parents = (torch.rand(d.batch_size, query_len, generator=generator) * (ranks + 1)).long() - 1
    lengths = d.lengths if d.packed else d.lengths * d.batch_size
    context_lens = [max(keys - rows, 0) for rows, keys in lengths[: d.batch_size]]
    bits = masks.tree_bits(parents).to(d.device)
    return masks.tree(bits, torch.tensor(context_lens, dtype=torch.int64).to(d.device))


def _dense_mask(d: Description, generator: torch.Generator) -> Tensor:
    return _random(d, generator, 0, 3, d.batch_size, 1, *d.longest).bool()


def _lengths(d: Description, generator: torch.Generator) -> Tensor:
    return _random(d, generator, 0, d.longest[1] + 1, d.batch_size)


def _slopes(d: Description) -> Tensor:
    return 2.0 ** -torch.arange(1.0, d.query_heads + 1, device=d.device)


def bias_shape(d: Description) -> tuple[int, ...]:
    """The shape of the bias of a case: 1 in the dimensions over which its kind broadcasts."""
    full = (d.batch_size, d.query_heads, *d.longest)
    broadcast = {"bias": (), "head_bias": (0, 2), "key_bias": (0, 1, 2), "batch_bias": (1,)}
    kind = next(kind for kind in d.score.split(" >> ") if "bias" in kind)
    return tuple(1 if dim in broadcast[kind] else size for dim, size in enumerate(full))


MASKS: dict[str, Callable[[Description, torch.Generator], Mask | Tensor | None]] = {
    "none": lambda d, g: None,
    "causal": lambda d, g: masks.causal(),
    "causal_top_left": lambda d, g: masks.causal(align="top_left"),
    "window": lambda d, g: masks.window(3, 2),
    "prefix": lambda d, g: masks.prefix(_lengths(d, g)),
    "key_lengths": lambda d, g: masks.key_lengths(_lengths(d, g)),
    "documents": _document_mask,
    "blocks": _block_mask,
    "tensor": _dense_mask,
    "tree": _tree_mask,
    "nothing": lambda d, g: ~(masks.causal() | ~masks.causal()),
    "own": lambda d, g: _every_nth(3),
    "own_table": lambda d, g: _not_my_twin(_random(d, g, 0, 9, d.query_heads)),
    "mixed": lambda d, g: (masks.causal() & masks.window(7)) | ~masks.key_lengths(_lengths(d, g)),
}

SCORES: dict[str, Callable[[Description, Tensor | None], Score | None]] = {
    "none": lambda d, b: None,
    "softcap": lambda d, b: scores.softcap(2.0),
    "alibi": lambda d, b: scores.alibi(_slopes(d)),
    "own": lambda d, b: _gain(0.5),
    "bias": lambda d, b: scores.bias(b),  # type: ignore[arg-type]
    "head_bias": lambda d, b: scores.bias(b),  # type: ignore[arg-type]
    "key_bias": lambda d, b: scores.bias(b),  # type: ignore[arg-type]
    "batch_bias": lambda d, b: scores.bias(b),  # type: ignore[arg-type]
    "bias >> softcap": lambda d, b: scores.bias(b) >> scores.softcap(1.5),  # type: ignore[arg-type]
}

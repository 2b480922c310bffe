"""Forty masks and scores as people write them for FlexAttention, for the tests that serve them.

Written for one small call: two batch entries, three heads, rows of a 6 x 8 picture or of a film of
3 x 4 x 4, which is 48 rows either way. Tables lie on the default device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 48, 8
FRAMES, ROWS, COLUMNS = 3, 4, 4
Function = Callable[..., Any]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _whole(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    made = torch.randint(low, high, shape, generator=_generator(seed), device="cpu")
    return made.to(torch.get_default_device())


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=_generator(seed), dtype=torch.float64)


@dataclass(frozen=True)
class FlexCase:
    """One call.

    Attributes:
        mask: gives a mask function of the tensors that it captures; None: no mask.
        score: gives a score function of its tensors; None: no change.
        learned: tensors of real numbers that the score captures and that get gradients.
    """

    mask: Callable[[], Function] | None = None
    score: Callable[..., Function] | None = None
    learned: tuple[Tensor, ...] = ()


# ---- masks ---------------------------------------------------------------------------------------


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def sliding(size: int) -> Function:
    def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= size

    return all_of(causal, within)


def all_of(*masks: Function) -> Function:
    def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_ones((), dtype=torch.bool)
        for mask in masks:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return joined


def any_of(*masks: Function) -> Function:
    def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_zeros((), dtype=torch.bool)
        for mask in masks:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return joined


def documents() -> Function:
    ids = _whole(0, 4, LENGTH).sort().values

    def of_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[q_idx] == ids[kv_idx]

    return all_of(of_document, causal)


def documents_by_batch() -> Function:
    ids = _whole(0, 4, BATCH, LENGTH, seed=1).sort(-1).values
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def prefix_of_documents() -> Function:
    """A prefix language model in each of several documents: rows are numbered within them."""
    starts = torch.tensor([0, 13, 20, 41, LENGTH])
    ids = torch.searchsorted(starts[1:], torch.arange(LENGTH), right=True)
    lengths = torch.tensor([5, 2, 9, 1])

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        own = ids[q_idx]
        row, key = q_idx - starts[own], kv_idx - starts[ids[kv_idx]]
        return (own == ids[kv_idx]) & ((key < lengths[own]) | (row >= key))

    return mask_mod


def prefix() -> Function:
    lengths = torch.tensor([7, 20], dtype=torch.int32)
    return any_of(lambda b, h, q_idx, kv_idx: kv_idx < lengths[b], causal)


def prefix_by_where() -> Function:
    lengths = torch.tensor([7, 20])
    return lambda b, h, q, kv: torch.where(kv < lengths[b], True, q >= kv)


def dilated(size: int, step: int) -> Function:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = (q_idx - kv_idx).abs()
        return (distance <= size) & ((distance % step) == 0) & (q_idx >= kv_idx)

    return mask_mod


def neighbours_of_two(width: int, kernel: int) -> Function:
    """Stand-alone self-attention in two dimensions: pixels within a square."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        down, right = q_idx // width - kv_idx // width, q_idx % width - kv_idx % width
        return (torch.abs(down) <= kernel // 2) & (torch.abs(right) <= kernel // 2)

    return mask_mod


def neighbours_of_three(kernel: tuple[int, int, int]) -> Function:
    def place(row: Any) -> tuple[Any, Any, Any]:
        return row // (ROWS * COLUMNS), row % (ROWS * COLUMNS) // COLUMNS, row % COLUMNS

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        one, other = place(q_idx), place(kv_idx)
        seen = [(x - y).abs() <= size // 2 for x, y, size in zip(one, other, kernel, strict=True)]
        return seen[0] & seen[1] & seen[2]

    return mask_mod


def natten(width: int, kernel: int) -> Function:
    """Neighbourhood attention: at the edges the square moves inside instead of shrinking."""
    height = LENGTH // width

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row, column = q_idx // width, q_idx % width
        middle_row = row.clamp(kernel // 2, (height - 1) - kernel // 2)
        middle_column = column.clamp(kernel // 2, (width - 1) - kernel // 2)
        near = (middle_row - kv_idx // width).abs() <= kernel // 2
        return near & ((middle_column - kv_idx % width).abs() <= kernel // 2)

    return mask_mod


def natten_by_tiles() -> Function:
    """The same for pixels that lie in tiles of 2 x 4: their places are looked up."""
    places = torch.arange(LENGTH).view(6, 8).unflatten(1, (2, 4)).unflatten(0, (3, 2))
    order = places.permute(0, 2, 1, 3).flatten()
    rows, columns = order // 8, order % 8

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = torch.abs(torch.clamp(rows[q], min=1, max=4) - rows[kv]) <= 1
        return near & (torch.abs(torch.clamp(columns[q], 1, 6) - columns[kv]) <= 1)

    return mask_mod


def block_diagonal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.eq(q_idx // 12, kv_idx // 12)


def chunked(size: int) -> Function:
    return all_of(lambda b, h, q, kv: q // size == kv // size, causal)


def stochastic_depth() -> Function:
    """Some heads of some batch entries see nothing in this step."""
    keeps = torch.tensor([[True, False, True], [False, True, True]])
    return lambda b, h, q_idx, kv_idx: keeps[b][h] & (q_idx >= kv_idx)


def key_padding() -> Function:
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [29]])
    return lambda b, h, q_idx, kv_idx: real[b, kv_idx]


def padding_of_both() -> Function:
    lengths = torch.tensor([40, 9], dtype=torch.int32)
    return lambda b, h, q_idx, kv_idx: (q_idx < lengths[b]) & (kv_idx < lengths[b])


def tree() -> Function:
    """Drafted tokens see what they descend from."""
    parents = [-1] + [int(_whole(max(0, row - 5), row, 1, seed=row)) for row in range(1, LENGTH)]
    ancestors = torch.eye(LENGTH, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            ancestors[row] |= ancestors[parent]
    return lambda b, h, q_idx, kv_idx: ancestors[q_idx, kv_idx]


def tree_by_intervals() -> Function:
    """The same by entry and exit times of a walk through the tree."""
    enters = torch.arange(LENGTH)
    leaves = torch.minimum(enters + _whole(1, 14, LENGTH, seed=3), torch.tensor(LENGTH))
    return lambda b, h, q, kv: (enters[kv] <= enters[q]) & (enters[q] < leaves[kv])


def shared_question() -> Function:
    """Several answers to one question: each sees the question and itself."""
    ids = torch.tensor([0] * 16 + [1] * 11 + [2] * 13 + [3] * 8)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = ids[q_idx] == ids[kv_idx]
        return (q_idx >= kv_idx) & (same | (ids[kv_idx] == 0))

    return mask_mod


def flamingo() -> Function:
    """Text sees the last picture before it; pictures lie in the keys, 12 rows each."""
    first = torch.tensor([0, 10, 25, 30])

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        picture = kv_idx // 12
        begun = q_idx >= first[picture]
        following = torch.where(picture < 3, first[torch.clamp(picture + 1, max=3)], LENGTH)
        return begun & (q_idx < following)

    return mask_mod


def sinks_and_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((kv_idx < 4) | (q_idx - kv_idx < 10)) & (kv_idx <= q_idx)


def window_by_head() -> Function:
    sizes = torch.tensor([3, 17, 48])
    return lambda b, h, q, kv: (q >= kv) & (q - kv < sizes[h])


def global_tokens() -> Function:
    marked = torch.zeros(LENGTH, dtype=torch.bool)
    marked[[0, 19, 33]] = True
    return lambda b, h, q, kv: marked[q] | marked[kv] | ((q - kv).abs() < 4)


def blocks_in_a_table() -> Function:
    layout = _whole(0, 2, HEADS, 6, 4, seed=8).bool()
    layout[:, :, 0] = True
    return lambda b, h, q, kv: layout[h, q // 8, kv // 12]


def pages() -> Function:
    """Keys lie in pages; a table says which page of the sequence each one is, -1 none."""
    pages_of = torch.tensor([[2, 0, -1, 1, 3, -1], [-1, 1, 0, 3, -1, 2]])

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        page = pages_of[b, kv_idx // 8]
        position = page * 8 + kv_idx % 8
        return torch.where(page >= 0, causal(b, h, q_idx, position), False)

    return mask_mod


def offset(shift: Tensor) -> Function:
    """One token after another: the rows of a call start somewhere else."""
    return lambda b, h, q, kv: sliding(9)(b, h, q + shift, kv)


class Holder:
    """A method that reads what its object holds."""

    def __init__(self) -> None:
        self.ids, self.step = _whole(0, 3, LENGTH, seed=5), 3

    def mask_mod(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (self.ids[q_idx] == self.ids[kv_idx]) | ((q_idx - kv_idx) % self.step == 0)


def of_step(step: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.logical_or(kv_idx % step == 0, torch.logical_not(q_idx != kv_idx))


# ---- scores --------------------------------------------------------------------------------------


def alibi(slopes: Tensor) -> Function:
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def alibi_of_heads(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The slopes of the paper, computed of the head."""
    return score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx)


def softcap(cap: float) -> Function:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        score = score / cap
        score = torch.tanh(score)
        return score * cap

    return score_mod


def relative(table: Tensor) -> Function:
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + LENGTH - 1]


def t5(table: Tensor) -> Function:
    """Distances fall into buckets, which grow with the logarithm."""
    buckets, exact, farthest = table.shape[0], table.shape[0] // 2, 40

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = -torch.minimum(kv_idx - q_idx, torch.zeros_like(kv_idx - q_idx))
        ratio = torch.log(distance.float().clamp(min=1) / exact) / math.log(farthest / exact)
        large = exact + (ratio * (buckets - exact)).to(torch.int64)
        large = torch.minimum(large, torch.full_like(large, buckets - 1))
        return score + table[torch.where(distance < exact, distance, large), h]

    return score_mod


def bias(table: Tensor) -> Function:
    return lambda score, b, h, q, kv: score + table[b, h, q, kv]


def gate(amounts: Tensor) -> Function:
    return lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(amounts[h])


def forgetting(gates: Tensor) -> Function:
    """The forgetting transformer: cumulated logarithms of gates."""
    return lambda score, b, h, q, kv: score + gates[b, h, q] - gates[b, h, kv]


def temperature(factor: Tensor, base: Tensor) -> Function:
    return lambda score, b, h, q, kv: torch.where(q >= kv, score * factor + base[h], -float("inf"))


def of_two_sides(table: Tensor) -> Function:
    """A bias along rows and one along columns, as vision transformers have it."""
    height = LENGTH // WIDTH

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        down, right = q // WIDTH - kv // WIDTH, q % WIDTH - kv % WIDTH
        return score + table[h, down + height - 1, right + WIDTH - 1]

    return score_mod


def checkerboard(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(kv_idx == q_idx, score * 2.0, score)


def document_penalty(amount: Tensor) -> Function:
    ids = _whole(0, 4, LENGTH).sort().values
    return lambda score, b, h, q, kv: torch.where(ids[q] == ids[kv], score, score - amount)


CASES: dict[str, FlexCase] = {
    "causal": FlexCase(lambda: causal),
    "sliding window": FlexCase(lambda: sliding(7)),
    "documents, causal": FlexCase(documents),
    "documents by batch": FlexCase(documents_by_batch),
    "prefix": FlexCase(prefix),
    "prefix by where": FlexCase(prefix_by_where),
    "prefix in documents": FlexCase(prefix_of_documents),
    "dilated window": FlexCase(lambda: dilated(12, 3)),
    "stand-alone, 2-D": FlexCase(lambda: neighbours_of_two(WIDTH, 5)),
    "stand-alone, 3-D": FlexCase(lambda: neighbours_of_three((3, 3, 2))),
    "natten": FlexCase(lambda: natten(WIDTH, 3)),
    "natten by tiles": FlexCase(natten_by_tiles),
    "block diagonal": FlexCase(lambda: block_diagonal),
    "chunked, causal": FlexCase(lambda: chunked(10)),
    "stochastic depth": FlexCase(stochastic_depth),
    "key padding": FlexCase(key_padding),
    "padding of both": FlexCase(padding_of_both),
    "tree": FlexCase(tree),
    "tree by intervals": FlexCase(tree_by_intervals),
    "shared question": FlexCase(shared_question),
    "flamingo": FlexCase(flamingo),
    "sinks and window": FlexCase(lambda: sinks_and_window),
    "windows by head": FlexCase(window_by_head),
    "global tokens": FlexCase(global_tokens),
    "blocks in a table": FlexCase(blocks_in_a_table),
    "pages": FlexCase(pages),
    "offset": FlexCase(lambda: offset(torch.tensor(5))),
    "method of an object": FlexCase(lambda: Holder().mask_mod),
    "partial function": FlexCase(lambda: functools.partial(of_step, 5)),
    "alibi": FlexCase(lambda: causal, alibi, (_normal(HEADS, seed=1),)),
    "alibi of heads": FlexCase(score=lambda: alibi_of_heads),
    "softcap": FlexCase(lambda: causal, lambda: softcap(1.5)),
    "relative": FlexCase(None, relative, (_normal(HEADS, 2 * LENGTH - 1, seed=2),)),
    "t5": FlexCase(lambda: causal, t5, (_normal(12, HEADS, seed=3),)),
    "bias": FlexCase(None, bias, (_normal(BATCH, HEADS, LENGTH, LENGTH, seed=4),)),
    "gate": FlexCase(lambda: sliding(20), gate, (_normal(HEADS, seed=5),)),
    "forgetting": FlexCase(lambda: causal, forgetting, (_normal(BATCH, HEADS, LENGTH, seed=6),)),
    "masked by its score": FlexCase(
        None, temperature, (_normal(seed=7).abs(), _normal(HEADS, seed=8))
    ),
    "bias of two sides": FlexCase(None, of_two_sides, (_normal(HEADS, 11, 15, seed=9),)),
    "checkerboard": FlexCase(lambda: causal, lambda: checkerboard),
    "penalty between documents": FlexCase(None, document_penalty, (_normal(seed=10).abs(),)),
}


# ---- the call ------------------------------------------------------------------------------------


def rows(
    seed: int = 0, heads: int = HEADS, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return (
        torch.randn(BATCH, HEADS, LENGTH, 16, dtype=dtype),
        torch.randn(BATCH, heads, LENGTH, 16, dtype=dtype),
        torch.randn(BATCH, heads, LENGTH, 8, dtype=dtype),
    )


def plain(
    case: FlexCase, tensors: Sequence[Tensor], learned: list[Tensor], largest: Any = None
) -> Tensor:
    """The call in plain PyTorch: functions run on indices, one batch entry and head at a time.

    largest: a list to which the largest score of each is added.
    """
    query, key, value = tensors
    mask = case.mask and case.mask()
    score = case.score and case.score(*learned)
    q, kv = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    outputs = []
    for b in torch.arange(BATCH):
        for h in torch.arange(HEADS):
            scores = query[b, h] @ key[b, h].mT / math.sqrt(query.shape[-1])
            if score is not None:
                scores = score(scores, b, h, q, kv)
            if mask is not None:
                seen = mask(b, h, q, kv).expand(LENGTH, LENGTH)
                scores = scores.masked_fill(~seen, -torch.inf)
            if largest is not None:
                largest += scores[scores.isfinite()].abs().tolist()
            empty = (scores == -torch.inf).all(-1, keepdim=True)
            weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
            outputs.append(weights @ value[b, h])
    return torch.stack(outputs).unflatten(0, (BATCH, HEADS))

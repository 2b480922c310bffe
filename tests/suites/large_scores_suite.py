"""Rows all of whose scores are large, of every implementation.

A mask that is added as -1e9, or as a dtype's smallest number, makes them so where it hides all keys
of a row. Such scores are equal, as what they differ by is rounded away, and their lse has no room
for the log of their number.

What is right is softmax in float64 of scores that were rounded to float32 once, when they were
changed: with errors that are bounded, number by number, by what each term of its sum is off by.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from implementations import F16, IMPLEMENTATIONS, Implementation, fixture_of
from torch import Tensor

import saccade
from saccade import masks, scores
from saccade.runtime.spec import accumulate_dtype

implementation = fixture_of(IMPLEMENTATIONS)

SIZES = {
    "-1e4": -1e4,
    "-1e9": -1e9,
    "1e9": 1e9,
    "smallest": torch.finfo(torch.float32).min,
    "smallest of bfloat16": torch.finfo(torch.bfloat16).min,
}
SPACING = 2.0**-10  # of float32 from 8,192 on: scores about -1e4 may come out so far apart
BATCH, HEADS, KV_HEADS = 2, 4, 2


@masks.function
def far_off(batch, head, query_row, kv_row):
    return (query_row - kv_row > 1) | (kv_row - query_row > 1)


@scores.function
def replaced(score, batch, head, query_row, kv_row, table):
    return torch.where(table[query_row, kv_row] == 0, score, table[query_row, kv_row])


def normal(*shape: int, seed: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


class Problem:
    """A call, what its results are in float64, and how far off each number may be.

    kind: "bias", "written" (large scores in place of others), or "alibi" (with steps of 2^20).
    """

    def __init__(
        self, kind: str, size: float, implementation: Implementation, dtype: torch.dtype,
        lengths: tuple[int, int], dim: int, sink: float | None, masked: bool,
    ) -> None:  # fmt: skip
        like = torch.empty(0, dtype=dtype, device=implementation.device)
        self.kind, self.dtype, self.masked = kind, dtype, masked
        rows, keys = lengths
        self.query = normal(BATCH, HEADS, rows, dim, seed=1, like=like)
        self.key = normal(BATCH, KV_HEADS, keys, dim, seed=2, like=like)
        self.value = normal(BATCH, KV_HEADS, keys, dim, seed=3, like=like)
        self.grad_output = normal(BATCH, HEADS, rows, dim, seed=4, like=like)
        self.grad_lse = normal(BATCH, HEADS, rows, seed=5, like=like.float())
        if kind == "alibi":
            self.table = torch.full((HEADS,), 2.0**20, device=like.device)
        else:  # ordinary rows, large ones, and those with one ordinary key or two sizes
            table = torch.zeros(rows, keys, device=like.device)
            table[1::4] = table[2::4] = size
            table[2::4, keys // 2] = 0
            table[3::4, ::2], table[3::4, 1::2] = size, size / 2
            self.table = table
        self.sinks = None if sink is None else torch.full((HEADS,), sink, device=like.device)
        self.spacing = SPACING if kind != "alibi" and abs(size) < 2**14 else 0.0

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Query, key, value, the score's table and sinks, if there are any."""
        found = [self.query, self.key, self.value, self.table]
        found += [] if self.sinks is None else [self.sinks]
        return [each.detach().to(dtype or each.dtype).requires_grad_() for each in found]

    @property
    def mask(self) -> masks.Mask | None:
        """What hides pairs."""
        if self.kind == "alibi":
            return far_off()
        return masks.window(self.key.shape[2] - 9, 7) if self.masked else None

    def run(
        self, name: str, packed: bool, constant: bool = False, **options: Any
    ) -> list[Tensor | None]:
        """Output, lse and gradients; constant: none of the score's table."""
        leaves = self.leaves()
        leaves[3].requires_grad_(not constant)
        query, key, value, table, *sinks = leaves
        score = {"bias": scores.bias, "written": replaced, "alibi": scores.alibi}[self.kind](table)
        options |= {"score": score, "mask": self.mask, "sinks": sinks[0] if sinks else None}
        options |= {"return_lse": True, "implementation": name}
        if packed:
            offsets = [
                torch.arange(BATCH + 1, dtype=torch.int32, device=query.device) * each.shape[2]
                for each in (query, key)
            ]
            tokens = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
            output, lse = saccade.attention_varlen(
                tokens[0],
                tokens[1],
                tokens[2],
                offsets[0],
                offsets[1],
                max_seqlen_q=query.shape[2],
                max_seqlen_k=key.shape[2],
                **options,
            )
            output = output.unflatten(0, (BATCH, -1)).transpose(1, 2)
            lse = lse.unflatten(1, (BATCH, -1)).transpose(0, 1)
        else:
            output, lse = saccade.attention(query, key, value, **options)
        grads = self.grad_output, self.grad_lse.to(lse.dtype)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found: list[Tensor | None] = [*torch.autograd.grad((output, lse), wanted, grads)]
        return [output, lse, *found[:3], *([None] if constant else []), *found[3:]]

    def scores(self, query: Tensor, key: Tensor, table: Tensor) -> Tensor:
        """Changed scores in float64, rounded once with derivatives of 1, -inf where hidden."""
        rows, keys = query.shape[2], key.shape[2]
        plain = query @ key.repeat_interleave(2, 1).mT / query.shape[-1] ** 0.5
        row, column = torch.arange(rows)[:, None], torch.arange(keys)
        distance = (row + keys - rows - column).abs().to(table)
        if self.kind == "alibi":
            changed = plain - table.view(-1, 1, 1) * distance
        else:
            changed = plain + table if self.kind == "bias" else plain.where(table == 0, table)
        wide = accumulate_dtype(self.dtype)
        changed = changed + (changed.detach().to(wide).double() - changed.detach())
        if self.mask is not None:
            visible = self.mask.to_dense(BATCH, HEADS, rows, keys).to(changed.device)
            changed = changed.masked_fill(~visible, -torch.inf)
        return changed

    def answer(self, gradients: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """What is right, and how far off each number may be."""
        leaves = self.leaves(torch.float64)
        query, key, value, table, *sinks = leaves
        changed, group = self.scores(query, key, table), HEADS // KV_HEADS
        sink = [sinks[0].view(1, -1, 1, 1).expand(*changed.shape[:3], 1)] if sinks else []
        together = torch.cat([changed, *sink], -1)
        largest = together.amax(-1, keepdim=True).detach()
        exponents = (together - largest).exp()
        row_sum = exponents.sum(-1, keepdim=True)
        weights = (exponents / row_sum)[..., : changed.shape[-1]]
        lse = (largest + row_sum.log()).squeeze(-1)
        output = weights @ value.repeat_interleave(group, 1)
        grads, found = (self.grad_output.double(), self.grad_lse.double()), [output, lse]
        if gradients:
            found += torch.autograd.grad((output, lse), leaves, grads)
        with torch.no_grad():
            allowed = self._allowed(weights, exponents / row_sum, lse)
        return [each.detach() for each in found], allowed

    def _allowed(self, weights: Tensor, all_weights: Tensor, lse: Tensor) -> list[Tensor]:
        """The sum of a number's terms, without their signs, times what each is off by: twice an
        error of its score (which the lse has, too), and a rounding of each of four factors."""
        unit = torch.finfo(self.dtype).eps / 2
        of_terms = 2 * self.spacing + 4 * unit + 2.0**-18  # the last: of sums of float32
        query, key, value, grad = (
            each.double().abs() for each in (self.query, self.key, self.value, self.grad_output)
        )
        scale, spread = query.shape[-1] ** -0.5, value.repeat_interleave(2, 1)
        output = weights @ spread
        row_terms = (grad * output).sum(-1, keepdim=True) + self.grad_lse.double().abs()[..., None]
        of_scores = weights * (grad @ spread.mT + row_terms)
        of_products = of_scores
        if self.kind == "written":  # of scores in whose place others stand, the table's have it
            of_products = of_scores.where(self.table == 0, 0)

        def of_group(each: Tensor) -> Tensor:
            return each.unflatten(1, (KV_HEADS, -1)).sum(2)

        of_table = of_scores.sum((0, 1))
        if self.kind == "alibi":
            rows, keys = weights.shape[-2:]
            row, column = torch.arange(rows)[:, None], torch.arange(keys)
            distance = (row + keys - rows - column).abs().to(weights)
            of_table = (of_scores * distance).sum((0, 2, 3))
        sums = [
            output,
            lse.abs() * (2.0**-22 / of_terms) + 1,
            scale * of_products @ key.repeat_interleave(2, 1),
            scale * of_group(of_products.mT @ query),
            of_group(weights.mT @ grad),
            of_table,
        ]
        if self.sinks is not None:
            sums.append((all_weights[..., -1:] * row_terms).sum((0, 2, 3)))
        least = torch.finfo(self.dtype).smallest_normal if self.dtype == F16 else 0.0
        return [of_terms * each + least for each in sums]

    def check(self, name: str, packed: bool = False, **options: Any) -> None:
        """Compare results with what is right."""
        self._compare(self.run(name, packed, **options))

    def check_pages(self, name: str, page_size: int, **options: Any) -> None:
        """Compare what a pass over pages gives."""
        pages = [
            each.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1).contiguous()
            for each in (self.key, self.value)
        ]
        keys, device = self.key.shape[2], self.key.device
        table = torch.arange(BATCH * keys // page_size, dtype=torch.int32, device=device)
        output, lse = saccade.attention_paged(
            self.query, pages[0], pages[1], table.view(BATCH, -1),
            torch.full((BATCH,), keys, dtype=torch.int32, device=device), mask=self.mask,
            score=scores.bias(self.table), sinks=self.sinks, return_lse=True, implementation=name,
            **options,
        )  # fmt: skip
        self._compare([output, lse])

    def _compare(self, found: Sequence[Tensor | None]) -> None:
        names = "output", "lse", "query", "key", "value", "table", "sinks"
        answers = self.answer(len(found) > 2)
        for what, one, exact, allowed in zip(names, found, *answers, strict=False):
            if one is None:
                continue
            error = (one.detach().double() - exact).abs()
            worst = float((error / allowed.clamp(min=1e-300)).nan_to_num(nan=torch.inf).max())
            wrong = f"{what}: off by {worst:.3g} times as much as it may be"
            assert bool((error <= allowed).all()), wrong


def check_pages(implementation: Implementation, size: str, **options: Any) -> None:
    """Large scores over pages: few query rows and many, of sequences that are cut or not."""
    compiled = implementation.device == "cuda"
    keys, of_rows = (2048, (1, 9, 300)) if compiled else (64, (1, 9))
    choices = itertools.product(implementation.dtypes, of_rows, (None, -1e9))
    for number, (dtype, rows, sink) in enumerate(choices):
        masked = number % 3 == 0
        case = Problem("bias", SIZES[size], implementation, dtype, (rows, keys), 64, sink, masked)
        if rows == 1:
            case.table.fill_(SIZES[size])
        case.check_pages(implementation.name, 16, **options)


def sizes_of(implementation: Implementation) -> tuple[tuple[int, int], int]:
    """Lengths, and channels."""
    return ((9, 40), 16) if implementation.interpreted else ((70, 300), 64)


class TestLargeScores:
    """Means where scores are equal, and gradients of means."""

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("kind", ["bias", "written"])
    def test_every_size(self, implementation: Implementation, kind: str, size: str) -> None:
        choices = itertools.product(implementation.dtypes, (None, -1e9, 0.5))
        for number, (dtype, sink) in enumerate(choices):
            masked, packed = number % 2 == 1, number // 2 % 2 == 1
            lengths, dim = sizes_of(implementation)
            case = Problem(kind, SIZES[size], implementation, dtype, lengths, dim, sink, masked)
            case.check(implementation.name, packed)

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("dim", [16, 128, 256])
    def test_widths(
        self, implementation: Implementation, dim: int, masked: bool, deterministic: bool
    ) -> None:
        for dtype in implementation.dtypes_of(dim + masked):
            lengths, size = sizes_of(implementation)[0], SIZES["-1e9"]
            case = Problem("bias", size, implementation, dtype, lengths, dim, None, masked)
            case.check(implementation.name, deterministic=deterministic)

    @pytest.mark.parametrize("masked", [False, True])
    def test_repeats(self, implementation: Implementation, masked: bool) -> None:
        """Calls that are alike: on a GPU, later ones are done again as they were recorded."""
        lengths, dim = sizes_of(implementation)
        for size in SIZES.values():
            case = Problem("bias", size, implementation, F16, lengths, dim, None, masked)
            for _ in range(1 if implementation.device == "cpu" else 3):
                case.check(implementation.name, constant=True)

    def test_distances(self, implementation: Implementation) -> None:
        for dtype, packed in itertools.product(implementation.dtypes, (False, True)):
            lengths, dim = sizes_of(implementation)
            case = Problem("alibi", 0.0, implementation, dtype, lengths, dim, 0.5, True)
            case.check(implementation.name, packed)

    def test_tiles_of_few_large_rows(self, implementation: Implementation) -> None:
        """Rows beside large ones in a tile, and tiles without any."""
        lengths, dim = ((40, 40), 16) if implementation.interpreted else ((300, 300), 64)
        for dtype in implementation.dtypes:
            case = Problem("bias", -1e9, implementation, dtype, lengths, dim, None, False)
            case.table[: lengths[0] // 2] = 0
            case.check(implementation.name)

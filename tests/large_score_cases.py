"""Cases over ranks of rows all of whose scores are large, as large_scores_suite.py has them.

An lse of -1e9 does not tell how many keys it is of, and ranks merge by lses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from implementations import BF16, F16, F32, F64, Implementation
from suites.large_scores_suite import BATCH, HEADS, KV_HEADS, Problem, replaced
from torch import Tensor

from saccade import parallel, scores
from saccade.runtime.spec import accumulate_dtype

SIZES = {
    "-1e9": -1e9,
    "1e6": 1e6,
    "-1e4": -1e4,
    "smallest": torch.finfo(torch.float32).min,
}
LENGTH, DIM = 21, 16  # which no number of ranks divides
CHANGES: dict[str, Any] = {"bias": scores.bias, "written": replaced}


class Dealt(Problem):
    """A problem whose rows are dealt to ranks."""

    def __init__(
        self, kind: str, size: float, dtype: torch.dtype, sink: float | None, masked: bool,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        where = Implementation("any", device=device)
        super().__init__(kind, size, where, dtype, (LENGTH, LENGTH), DIM, sink, masked)
        # Of this row the keys of some ranks have all the weight, and those of others none.
        self.table[7, : LENGTH // 2], self.table[7, LENGTH // 2 :] = size, size * 0.999
        # Scores may come out one step apart where steps are no larger than the products in them.
        rounded = torch.tensor(size, dtype=accumulate_dtype(dtype))
        step = float((torch.nextafter(rounded, 0 * rounded) - rounded).abs())
        self.spacing = step if step < 16 else 0.0

    def over(
        self, plan: parallel.Plan, call: Any = parallel.attention, **options: Any
    ) -> list[Tensor | None]:
        """Output, lse and gradients of the whole, from every rank's part of them.

        call: the public one, or what torch.compile makes of it.
        """
        leaves = [
            (plan.shard(each, 2) if place < 3 else each).detach().clone().requires_grad_()
            for place, each in enumerate(self.leaves())
        ]
        query, key, value, table, *sinks = leaves
        output, lse = call(
            query, key, value, plan=plan, score=CHANGES[self.kind](table),
            sinks=sinks[0] if sinks else None, return_lse=True, **options,
        )  # fmt: skip
        grads = plan.shard(self.grad_output, 2), plan.shard(self.grad_lse, 2).to(lse.dtype)
        found = [output, lse, *torch.autograd.grad((output, lse), leaves, grads)]
        whole = [plan.unshard(each.detach(), 2) for each in found[:5]]
        return [*whole, *found[5:]]


def problems(size: str, device: str) -> Iterator[Dealt]:
    """Every kind of score in every dtype, with masks and sinks or without."""
    dtypes = (F32, F16, F64, BF16) if device == "cpu" else (F32, F16, BF16)
    for number, (dtype, kind) in enumerate(itertools.product(dtypes, CHANGES)):
        sink = (None, SIZES[size], 0.5)[number % 3]
        yield Dealt(kind, SIZES[size], dtype, sink, number in (1, 2, 4, 7), device)


def check(group: Any, found: Iterable[tuple[Problem, list[Tensor | None]]]) -> None:
    """Compare with what is right, each on one rank; once no other one waits for this."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for problem, results in list(found)[rank::ranks]:
        problem._compare(results)


def plan_of(problem: Problem, group: Any, method: str) -> parallel.Plan:
    """A plan of a problem by a method."""
    return parallel.plan(
        problem.mask, LENGTH, group, method=method, batch=BATCH, query_heads=HEADS,
        kv_heads=KV_HEADS, head_dim=DIM,
    )  # fmt: skip


def compare(group: Any, method: str, size: str, device: str = "cpu") -> None:
    """Calls by a method."""
    check(group, (
        (problem, problem.over(plan_of(problem, group, method)))
        for problem in problems(size, device)
    ))  # fmt: skip


def compare_pages(group: Any, size: str, device: str = "cpu") -> None:
    """Calls over a sharded cache, of rows beside each other and packed."""
    check(group, (
        (problem, over_pages(problem, group, packed))
        for problem in problems(size, device)
        for packed in (False, True)
    ))  # fmt: skip


def over_pages(problem: Problem, group: Any, packed: bool) -> list[Tensor | None]:
    """Output and lse of a problem's queries over a sharded cache of its keys."""
    like = problem.query
    cache = parallel.ShardedCache(
        40, page_size=2, mesh=group, num_layers=1, kv_heads=KV_HEADS, head_dim=DIM,
        dtype=like.dtype, device=like.device,
    )  # fmt: skip
    sequences = [cache.allocate() for _ in range(BATCH)]
    for place, sequence in enumerate(sequences):
        key, value = (each[place].transpose(0, 1) for each in (problem.key, problem.value))
        cache.write(0, key, value, cache.append({sequence: LENGTH}))
    options: dict[str, Any] = {"mask": problem.mask, "sinks": problem.sinks, "return_lse": True}
    options["score"] = CHANGES[problem.kind](problem.table)
    if not packed:
        return [*cache.attend(0, problem.query, sequences, **options)]
    tokens = problem.query.transpose(1, 2).flatten(0, 1)
    offsets = LENGTH * torch.arange(BATCH + 1, dtype=torch.int32, device=like.device)
    output, lse = cache.attend(0, tokens, sequences, cu_seqlens_q=offsets, **options)
    output = output.unflatten(0, (BATCH, -1)).transpose(1, 2)
    return [output, lse.unflatten(1, (BATCH, -1)).transpose(0, 1)]

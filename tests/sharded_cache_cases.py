"""Cases of a cache whose tokens are dealt to ranks: what one process computes, all ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import saccade
from saccade import masks, parallel, scores
from saccade.testing import make_paged_case, oracle, tolerances
from saccade.testing.oracle import assert_within
from saccade.testing.paged import PagedCase

SIZES: dict[str, Any] = {"num_layers": 1, "kv_heads": 2, "head_dim": 8}


def rows_of(made: PagedCase, name: str, sequence: int) -> Tensor:
    """The keys or values of a case's sequence, [tokens, kv_heads, dim]."""
    size, length = made.description.page_size, int(made.table["kv_lens"][sequence])
    row = torch.arange(length)
    page = made.table["page_table"][sequence].long()[row // size]
    return made.tensors[f"{name}_pages"][page, :, row % size]


def compare(group: Any, **description: Any) -> None:
    """A case over pages, its tokens dealt to ranks, within the bound that one process has."""
    made = make_paged_case(**description)
    d = made.description
    cache = parallel.ShardedCache(
        40, page_size=3, mesh=group, num_layers=1, kv_heads=d.kv_heads, head_dim=d.head_dim,
        value_dim=d.value_dim, dtype=d.dtype, device=d.device,
    )  # fmt: skip
    sequences = [cache.allocate() for _ in d.lengths]
    for sequence, number in enumerate(sequences):
        key, value = (rows_of(made, name, sequence) for name in ("key", "value"))
        cache.write(0, key, value, cache.append({number: len(key)}))
    options = made.arguments()
    for name in ("key_pages", "value_pages", "page_table", "kv_lens"):
        options.pop(name)
    output, lse = cache.attend(0, options.pop("query"), sequences, return_lse=True, **options)
    cache.check()
    if len(str(d)) % dist.get_world_size(group) == dist.get_rank(group):
        exact = oracle(made)
        found = {"output": output, "lse": lse}
        assert_within(found, exact, tolerances(made, exact), str(d))


def lives(group: Any) -> None:
    """Sequences that begin alike, fork, are cut and go on, under a window and without."""
    options: dict[str, Any] = {**SIZES, "dtype": torch.float64}
    options |= {"num_layers": None, "windows": (None, 7)}
    ranks = dist.get_world_size(group)
    # A page of the one stands for as many tokens as those of all ranks together.
    one = saccade.PagedCache({None: 30, 7: 30}, page_size=2 * ranks, **options)
    all_ranks = parallel.ShardedCache({None: 30, 7: 30}, page_size=2, mesh=group, **options)
    generator = torch.Generator().manual_seed(0)

    def both(call: Callable[[Any], int]) -> int:
        number, other = (call(cache) for cache in (one, all_ranks))
        assert number == other
        return number

    def grow(tokens: dict[int, Any]) -> None:
        count = sum(len(new) for new in tokens.values())
        key, value = torch.randn(2, count, 2, 8, generator=generator, dtype=torch.float64)
        for cache in (one, all_ranks):
            slots = cache.append(tokens)
            for layer in (0, 1):
                cache.write(layer, key, value + layer, slots)

    def same(sequences: list[int], rows: int, **more: Any) -> None:
        query = torch.randn(len(sequences), 4, rows, 8, generator=generator, dtype=torch.float64)
        for layer in (0, 1):
            found = [c.attend(layer, query, sequences, causal=True, **more)
                     for c in (one, all_ranks)]  # fmt: skip
            torch.testing.assert_close(*found)
        assert one.statistics() == all_ranks.statistics()
        all_ranks.check()

    prompt = list(range(20))
    first, empty = (both(lambda cache: cache.allocate()) for _ in range(2))
    grow({first: prompt})
    same([first, empty], 1)
    same([first], 5, score=scores.alibi(torch.tensor([0.5, 0.25, 0.1, 0.01])))
    for cache in (one, all_ranks):
        cache.commit(first)
    second = both(lambda cache: cache.allocate(prompt))
    assert one.length(second) == all_ranks.length(second) > 0  # its beginning was found
    grow({second: prompt[one.length(second) :], first: [7]})
    third = both(lambda cache: cache.fork(second))
    grow({third: [1, 2], second: [3]})
    same([first, second, third], 1)
    for cache in (one, all_ranks):
        cache.trim(third, 21)
        cache.free(second)
    grow({third: [5, 6, 7]})
    same([third], 3, sinks=torch.randn(4, generator=generator, dtype=torch.float64))
    same([third, first], 1)
    query = torch.zeros(2, 4, 3, 8, dtype=torch.float64)
    # With pages of 2 x 2 tokens, the first's rows before its last see some that were let go of.
    for cache in (one, all_ranks) if ranks == 2 else ():
        try:
            cache.attend(1, query, [third, first])
        except ValueError as error:
            assert f"got 3 rows of sequence {first}, takes" in str(error), error
        else:
            raise AssertionError("rows that see released tokens were read")


def differ(group: Any, refused: Any) -> None:
    """Ranks that differ, and one that cannot begin."""
    rank = dist.get_rank(group)
    cache = parallel.ShardedCache(8, page_size=2, mesh=group, **SIZES)
    sequence = cache.allocate()
    rows = torch.zeros(3, 2, 8)
    cache.write(0, rows, rows, cache.append({sequence: 3}))
    query = torch.zeros(1, 4, 1, 8)

    def attend(**options: Any) -> None:
        cache.attend(0, options.pop("query", query), [sequence], **options)

    different: list[tuple[dict[str, Any], str]] = [
        ({"mask": masks.window(2)}, "mask: got none on rank"),
        ({"query": query.expand(1, 4, 2, 8)}, "query: got (1, 4, 1, 8) torch.float32 on rank"),
        ({"scale": 2.0}, "options: got "),
        ({"query": query + 1}, "query, whole on every rank: got numbers "),
    ]
    for options, text in different:
        refused(ValueError, [text, "rank 1"], lambda o=options: attend(**(o if rank == 1 else {})))
    table = torch.full((4,), float(rank == 1))
    refused(ValueError, ["sinks, whole on every rank: got numbers "], lambda: attend(sinks=table))
    by_head = scores.function(lambda score, batch, head, query_row, kv_row: score + table[head])
    refused(ValueError, ["score's tensor 0, whole on every"], lambda: attend(score=by_head))
    texts = ["scale: got"] if rank == 1 else ["another rank could not begin this call: rank 1"]
    refused(
        TypeError if rank == 1 else ValueError, texts,
        lambda: attend(**({"scale": "x"} if rank == 1 else {})),
    )  # fmt: skip
    if rank == 1:
        cache.append({sequence: 1})
    refused(ValueError, ["lengths: got [3] on rank", "[4] on rank 1"], attend)
    if rank != 1:
        cache.append({sequence: 1})
    attend()
    refused(ValueError, ["mesh: got 2 simulated ranks"], lambda: parallel.ShardedCache(
        8, mesh=2, **SIZES
    ))  # fmt: skip

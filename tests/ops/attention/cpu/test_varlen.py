"""Packed sequences as dense problems: neighbours of equal length together, as views."""

import pytest
import torch

from saccade.ops.attention.cpu.segments import Segment, parts_of
from saccade.runtime.spec import Inputs


def packed(lengths: list[tuple[int, int]]) -> Inputs:
    counts = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths, strict=True)]
    query = torch.arange(int(counts[0][-1]) * 4 * 2.0).view(-1, 4, 2)
    key = torch.arange(int(counts[1][-1]) * 2 * 2.0).view(-1, 2, 2)
    return Inputs(query, key, -key, None, None, counts[0], counts[1])


def test_a_dense_call_is_one_part():
    rows = torch.randn(3, 4, 5, 2)
    (part,) = parts_of(Inputs(rows, rows, rows))
    assert part == Segment(0, 3, None, None)
    lse = torch.randn(3, 4, 5)
    assert part.queries(rows) is part.keys(rows) is rows
    assert part.lse(lse) is lse


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([(3, 4)], [1]),
        ([(3, 4)] * 5, [5]),
        ([(3, 4), (3, 4), (2, 4), (3, 4)], [2, 1, 1]),
        ([(3, 4), (3, 5), (3, 5), (3, 4), (3, 4)], [1, 2, 2]),
        ([(0, 4), (0, 4), (2, 0), (0, 0), (0, 0)], [2, 1, 2]),
    ],
    ids=["one", "all-alike", "other-queries", "other-keys", "empty"],
)
def test_neighbours_of_equal_length_are_one_part(lengths, batches):
    inputs = packed(lengths)
    parts = parts_of(inputs)
    assert [part.batch for part in parts] == batches
    assert [part.first_batch for part in parts] == [sum(batches[:k]) for k in range(len(batches))]
    query_start = kv_start = 0
    for part in parts:
        query_len, kv_len = lengths[part.first_batch]
        assert part.queries(inputs.query).shape == (part.batch, 4, query_len, 2)
        assert part.keys(inputs.key).shape == (part.batch, 2, kv_len, 2)
        for b in range(part.batch):
            rows = inputs.query[query_start : query_start + query_len].transpose(0, 1)
            assert torch.equal(part.queries(inputs.query)[b], rows)
            keys = inputs.value[kv_start : kv_start + kv_len].transpose(0, 1)
            assert torch.equal(part.keys(inputs.value)[b], keys)
            query_start, kv_start = query_start + query_len, kv_start + kv_len
    assert (query_start, kv_start) == (len(inputs.query), len(inputs.key))


def test_views_write_through():
    inputs = packed([(3, 4), (3, 4), (0, 2), (5, 1)])
    output, grad_key = torch.zeros(11, 4, 7), torch.zeros(11, 2, 3)
    lse = torch.zeros(4, 11)
    for number, part in enumerate(parts_of(inputs), start=1):
        part.queries(output).copy_(torch.full_like(part.queries(output), number))
        part.keys(grad_key).fill_(number)
        part.lse(lse).add_(number)
    of_queries = torch.tensor([1.0] * 6 + [3.0] * 5)
    assert torch.equal(output, of_queries.view(-1, 1, 1).expand(11, 4, 7))
    assert torch.equal(lse, of_queries.expand(4, 11))
    of_keys = torch.tensor([1.0] * 8 + [2.0] * 2 + [3.0])
    assert torch.equal(grad_key, of_keys.view(-1, 1, 1).expand(11, 2, 3))


def test_lse_is_read_by_head_and_token():
    inputs = packed([(3, 4), (3, 4), (5, 1)])
    lse = torch.randn(4, 11)
    first, second = parts_of(inputs)
    assert torch.equal(first.lse(lse), torch.stack([lse[:, :3], lse[:, 3:6]]))
    assert torch.equal(second.lse(lse), lse[None, :, 6:])


def test_no_sequences_are_no_parts():
    none = torch.zeros(1, dtype=torch.int32)
    rows = torch.zeros(0, 2, 4)
    assert parts_of(Inputs(rows, rows, rows, None, None, none, none)) == []

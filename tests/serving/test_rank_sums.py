"""Sums over ranks by memory that ranks read of one another: graphs, and which ranks have it.

What such sums give on two processes is in rank_cases.py, with memory of another kind.
"""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from saccade.serving import rank_sums
from saccade.serving.rank_sums import PeerMemory, Seat, replace_sums, why_apart

MESSAGES = torch.ops._c10d_functional
SUM = torch.ops.saccade.sum_over_ranks.default


def graph_of(
    *, bias: bool = False, used: bool = False, operation: str = "sum", copied: bool = True
) -> Graph:
    """A product, its sum over ranks that is copied into it, and what uses it: as Dynamo has it."""
    graph = Graph()
    rows, weight = graph.placeholder("rows"), graph.placeholder("weight")
    others = (graph.placeholder("bias"),) if bias else (None,)
    part = graph.call_function(F.linear, (rows, weight, *others))
    before = graph.call_function(torch.neg, (part,)) if used else rows
    whole = graph.call_function(MESSAGES.all_reduce, (part, operation, "0"))
    found = graph.call_function(MESSAGES.wait_tensor, (whole,))
    if copied:
        graph.call_method("copy_", (part, found))
        found = part
    graph.output(graph.call_function(torch.add, (before, found)))
    return graph


def calls(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op in ("call_function", "call_method")]


def test_a_sum_takes_the_product_before_it() -> None:
    graph = graph_of()
    assert replace_sums(graph) == 1
    graph.lint()
    assert calls(graph) == [SUM, torch.add]
    rows, weight, group = next(node for node in graph.nodes if node.target is SUM).args
    assert (rows.name, weight.name, group) == ("rows", "weight", "0")


@pytest.mark.parametrize(
    "options",
    [{"bias": True}, {"used": True}, {"copied": False}],
    ids=lambda each: next(iter(each)),
)
def test_a_product_that_something_else_needs_stays(options: dict[str, Any]) -> None:
    graph = graph_of(**options)
    assert replace_sums(graph) == 1
    graph.lint()
    assert F.linear in calls(graph) and SUM in calls(graph)
    assert not {MESSAGES.all_reduce, MESSAGES.wait_tensor} & set(calls(graph))
    rows, weight, _ = next(node for node in graph.nodes if node.target is SUM).args
    assert rows.target is F.linear and weight is None


def test_what_is_no_sum_stays() -> None:
    graph = graph_of(operation="max")
    before = calls(graph)
    assert replace_sums(graph) == 0 and calls(graph) == before


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"used": True}, {"copied": False}])
def test_graphs_compute_what_they_did(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Where a sum over ranks gives three times a rank's part."""
    monkeypatch.setattr(rank_sums, "sum_by_messages", lambda part, group: 3 * part)
    graph = graph_of(**options)
    replace_sums(graph)
    tensors = [torch.randn(2, 4), torch.randn(4, 4), torch.randn(4)][
        : 3 if "bias" in options else 2
    ]
    product = F.linear(*tensors)
    before = -product if "used" in options else tensors[0]
    found = GraphModule(torch.nn.Module(), graph)(*tensors)
    torch.testing.assert_close(found, before + 3 * product)


# ---- who has such memory -------------------------------------------------------------------------

TWO = [Seat("a", "0", ("1",), ""), Seat("a", "1", ("0",), "")]


def test_ranks_that_reach_each_other_share_memory() -> None:
    assert why_apart(TWO) == ""


@pytest.mark.parametrize(
    ("seats", "reason"),
    [
        ([TWO[0], TWO[1]._replace(reason="the model is on cpu")], "the model is on cpu"),
        ([TWO[0], TWO[1]._replace(host="b")], "ranks are on several hosts"),
        ([TWO[0], TWO[0]], "ranks share a GPU"),
        ([TWO[0], TWO[1]._replace(reaches=())],
         "the GPU of rank 1 does not see, or read, that of rank 0"),
        ([Seat("a", str(each), tuple(map(str, range(9))), "") for each in range(9)],
         "there are 9 ranks, of which at most 8 add for themselves"),
    ],
)  # fmt: skip
def test_others_are_told_why_not(seats: list[Seat], reason: str) -> None:
    assert why_apart(seats) == reason


def test_a_cpu_has_none() -> None:
    assert rank_sums.seat_of(torch.device("cpu")).reason == "the model is on cpu"


@pytest.mark.parametrize(
    ("shape", "dtype", "takes"),
    [
        ((1, 1, 4096), torch.bfloat16, True),
        ((1, 32, 4096), torch.bfloat16, True),  # of 256 KiB
        ((1, 33, 4096), torch.bfloat16, False),
        ((1, 4096), torch.float32, True),
        ((1, 4096), torch.float16, False),
        ((1, 7), torch.bfloat16, False),  # the kernel reads 16 bytes at once
        ((0, 4096), torch.bfloat16, False),
    ],
)
def test_which_sums_are_small(shape: tuple[int, ...], dtype: torch.dtype, takes: bool) -> None:
    memory = PeerMemory.__new__(PeerMemory)
    memory.nbytes = rank_sums.MOST_BYTES
    assert memory.takes(shape, dtype) is takes


def test_multicast_is_off_while_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv(rank_sums.NO_MULTICAST, raising=False)
        else:
            monkeypatch.setenv(rank_sums.NO_MULTICAST, before)
        with rank_sums.without_multicast():
            assert os.environ[rank_sums.NO_MULTICAST] == "1"
        assert os.environ.get(rank_sums.NO_MULTICAST) == before

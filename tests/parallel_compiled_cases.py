"""Cases of calls over ranks in graphs of torch.compile: they compute what eager calls do.

    python tests/parallel_compiled_cases.py FOLDER [--inductor]

Each case compiles graphs for two ranks, which takes far longer than what they compute; by Inductor,
which compiles C++ for each, minutes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_cases import DENSE, PACKED, case, known, planned, refused, results, run_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from worlds import run_worlds

from saccade import masks, parallel, scores
from saccade.parallel.dtensors import as_dtensor
from saccade.testing.cases import Case

WORLD = 2
CASES: dict[str, Callable[[Any], None]] = {}
INDUCTOR_CASES: dict[str, Callable[[Any], None]] = {}
SIZES: Any = {"query_heads": 4, "kv_heads": 2, "head_dim": 8}


def compiled(call: Any, backend: str = "aot_eager") -> Any:
    """A call in one graph, without a break."""
    torch.compiler.reset()
    return torch.compile(call, backend=backend, fullgraph=True)


def called(made: Case) -> Any:
    return parallel.attention if made.cu_seqlens is None else parallel.attention_varlen


def compare(
    group: Any, method: str, description: dict[str, Any], backend: str = "aot_eager", **options: Any
) -> None:
    """Output, lse and all gradients are those of the eager call."""
    made = known(**description)
    plan = planned(made, group, method)
    found = results(made, plan, compiled(called(made), backend), **options)
    torch.testing.assert_close(found, results(made, plan, **options), rtol=1e-5, atol=1e-5)


# Several plain calls, half of the heads at a time; masks and scores that read captured tensors by
# row and by head, with gradients; ranks that hold no row and send none.
GRAPHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "packed, by gather": (
        "gather", {"mask": "causal", "lengths": PACKED, "packed": True, "sinks": True}, {},
    ),
    "with tables, by ulysses": (
        "ulysses", {"mask": "mixed", "lengths": DENSE, "score": "bias >> softcap", "sinks": True},
        {},
    ),
    "with tables, by ring": (
        "ring", {"mask": "documents", "lengths": DENSE, "score": "head_bias", "sinks": True},
        {"reduce_gradients": False, "deterministic": True},
    ),
    "of fewer rows than ranks, by ring": (
        "ring", {"mask": "causal", "lengths": ((1, 1),), "score": "bias", "sinks": True}, {},
    ),
}  # fmt: skip
for _name, (_method, _description, _options) in GRAPHS.items():
    for _backend, _cases in (("aot_eager", CASES), ("inductor", INDUCTOR_CASES)):

        @case(
            f"a graph {_name}", _method, _description, _backend, _options, cases=[_cases],
        )  # fmt: skip
        def _in_graph(
            group: Any, method: str, description: dict[str, Any], backend: str,
            options: dict[str, Any],
        ) -> None:  # fmt: skip
            compare(group, method, description, backend, **options)


@case("a graph is compiled anew for another plan, and for none that it knows", cases=[CASES])
def _other_plans(group: Any) -> None:
    def soft(query: Any, key: Any, plan: Any) -> Any:
        return parallel.attention(query, key, key, plan=plan, score=scores.softcap(2.0))

    def check(plan: Any) -> None:
        rows = [plan.shard(torch.randn(1, heads, plan.length, 8), 2) for heads in (4, 2)]
        torch.testing.assert_close(graph(*rows, plan=plan), soft(*rows, plan=plan))

    graph = compiled(soft)
    plans = [parallel.plan(masks.causal(), rows, group, **SIZES) for rows in (24, 40)]
    for plan in plans:
        check(plan)
    with torch._dynamo.config.patch(error_on_recompile=True):  # type: ignore[attr-defined]
        for plan in plans:
            check(plan)


@case("ranks whose graphs differ", cases=[CASES])
def _graphs_differ(group: Any) -> None:
    rank = dist.get_rank(group)
    plan = parallel.plan(masks.causal(), 24, group, method="ulysses", **SIZES)
    query, key = (plan.shard(torch.randn(1, heads, 24, 8), 2) for heads in (4, 2))

    def attend(query: Any, scale: float) -> Any:
        return parallel.attention(query, key, key, plan=plan, scale=scale)

    graph = compiled(attend)
    refused(
        ValueError, ["scale: got 1.0 on rank 0, 2.0 on rank 1"],
        lambda: graph(query, 1.0 + rank),
    )  # fmt: skip
    text = "key: got 2 heads, takes a number that divides query's 3"
    texts = [text] if rank else ["another rank could not begin this call: rank 1: ValueError", text]
    refused(ValueError, texts, lambda: graph(query[:, rank:], 1.0))
    torch.testing.assert_close(graph(query, 1.0), attend(query, 1.0))  # and go on


@case("a graph of DTensors of a plan's rows", cases=[CASES])
def _dtensors_in_graph(group: Any) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = parallel.plan(masks.causal(), 13, group, method="ulysses", **SIZES)
    query, key = (plan.shard(torch.randn(1, heads, 13, 8), 2) for heads in (4, 2))

    def attend(query: Any, key: Any) -> Any:
        return parallel.attention(query, key, key, plan=plan)

    found = compiled(attend)(*(as_dtensor(plan, each, mesh, 2) for each in (query, key)))
    assert isinstance(found, DTensor) and found.shape[2] == 13
    torch.testing.assert_close(found.to_local(), attend(query, key))


if __name__ == "__main__":
    chosen = INDUCTOR_CASES if sys.argv[2:] == ["--inductor"] else CASES
    run = functools.partial(run_rank, cases=chosen)
    sys.exit(run_worlds(run, Path(sys.argv[1]), [WORLD]))

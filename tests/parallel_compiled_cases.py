"""Cases of calls over ranks in graphs of torch.compile: they compute what eager calls do.

    python tests/parallel_compiled_cases.py FOLDER [--slow]
    python tests/parallel_compiled_cases.py FOLDER --nccl [TEXT]  # on two GPUs; whose names have it

Each case compiles graphs for two ranks, which takes far longer than what they compute; by Inductor,
which compiles C++ for each, minutes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import large_score_cases
import parallel_cases
import recurrence_cases
import torch
import torch._inductor.config
import torch.distributed as dist
from parallel_cases import (
    DENSE,
    PACKED,
    TRIPLES,
    case,
    known,
    planned,
    refused,
    results,
    run_rank,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from worlds import run_worlds

from saccade import masks, parallel, scores
from saccade.parallel.dtensors import as_dtensor
from saccade.testing import make_delta_case, make_linear_case
from saccade.testing.cases import Case

WORLD = 2
CASES: dict[str, Callable[[Any], None]] = {}
SLOW_CASES: dict[str, Callable[[Any], None]] = {}
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
    graph = compiled(called(made), backend)
    with torch._inductor.config.patch(fallback_random=True):  # or it draws other seeds of dropout
        found = results(made, plan, graph, **options)
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
DROPPED: Any = {
    "gather": {"mask": "causal", "lengths": PACKED, "packed": True},
    "ulysses": {"mask": "causal", "lengths": DENSE, "sinks": True},
    "ring": {"mask": "documents", "lengths": DENSE, "score": "bias"},
}
for _method, _description in DROPPED.items():
    _named = f"with dropout, by {_method}"
    GRAPHS[_named] = _method, {**_description, "dropout_p": 0.3}, {}
for _name, (_method, _description, _options) in GRAPHS.items():
    for _backend, _cases in (("aot_eager", CASES), ("inductor", SLOW_CASES)):

        @case(
            f"a graph {_name}", _method, _description, _backend, _options, cases=[_cases],
        )  # fmt: skip
        def _in_graph(
            group: Any, method: str, description: dict[str, Any], backend: str,
            options: dict[str, Any],
        ) -> None:  # fmt: skip
            compare(group, method, description, backend, **options)


@case("a graph whose lse nothing asks for, by ring", cases=[CASES])
def _without_lse(group: Any) -> None:
    plan = parallel.plan(masks.causal(), 24, group, method="ring", **SIZES)
    rows = [plan.shard(torch.randn(1, heads, 24, 8), 2).requires_grad_() for heads in (4, 2, 2)]
    graph = compiled(parallel.attention)
    found = [
        torch.autograd.grad(call(*rows, plan=plan).square().sum(), rows)
        for call in (graph, parallel.attention)
    ]
    torch.testing.assert_close(*found)


@case("a graph of rows of large scores, by ring", cases=[CASES])
def _large_scores(group: Any) -> None:
    problem = large_score_cases.Dealt("bias", -1e9, torch.float32, 0.5, masked=True)
    plan = large_score_cases.plan_of(problem, group, "ring")
    problem._compare(problem.over(plan, compiled(parallel.attention)))


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

    def attend(query: Any, scale: float, dropout_p: float = 0.0, sinks: Any = None) -> Any:
        return parallel.attention(
            query, key, key, plan=plan, scale=scale, dropout_p=dropout_p, sinks=sinks
        )

    graph = compiled(attend)
    refused(
        ValueError, ["scale: got 1.0 on rank 0, 2.0 on rank 1"],
        lambda: graph(query, 1.0 + rank),
    )  # fmt: skip
    text = "key: got 2 heads, takes a number that divides query's 3"
    texts = [text] if rank else ["another rank could not begin this call: rank 1: ValueError", text]
    refused(ValueError, texts, lambda: graph(query[:, rank:], 1.0))
    torch.testing.assert_close(graph(query, 1.0), attend(query, 1.0))  # and go on
    texts = ["seed of dropout, which torch.manual_seed sets: got", "takes the same on every rank"]
    for seeds in ((5, 5), (5, 6), (5, 5)):
        torch.manual_seed(seeds[rank])
        if seeds[0] == seeds[1]:
            found = graph(query, 1.0, 0.5)
            torch.manual_seed(5)
            torch.testing.assert_close(found, attend(query, 1.0, 0.5))
        else:
            refused(ValueError, texts, lambda: graph(query, 1.0, 0.5))
    texts = ["sinks, whole on every rank: got numbers ", "takes the same on every rank"]
    same, own = torch.ones(4), torch.full((4,), float(rank))
    torch.testing.assert_close(graph(query, 1.0, sinks=same), attend(query, 1.0, sinks=same))
    refused(ValueError, texts, lambda: graph(query, 1.0, sinks=own))
    torch.testing.assert_close(graph(query, 1.0, sinks=same), attend(query, 1.0, sinks=same))


@case("a graph of DTensors of a plan's rows", cases=[SLOW_CASES])
def _dtensors_in_graph(group: Any) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = parallel.plan(masks.causal(), 13, group, method="ulysses", **SIZES)
    query, key = (plan.shard(torch.randn(1, heads, 13, 8), 2) for heads in (4, 2))

    def attend(query: Any, key: Any) -> Any:
        return parallel.attention(query, key, key, plan=plan)

    found = compiled(attend)(*(as_dtensor(plan, each, mesh, 2) for each in (query, key)))
    assert isinstance(found, DTensor) and found.shape[2] == 13
    torch.testing.assert_close(found.to_local(), attend(query, key))


# Decay by row and by head, a state before, packed pieces; one runs each time.
RECURRENCES: dict[str, dict[str, Any]] = {
    "linear attention": {
        "kind": "linear", "lengths": ((24, 24),), "decay": "heads", "state": True, "batch": 1,
    },
    "packed linear attention": {
        "kind": "linear", "lengths": TRIPLES, "packed": True, "decay": "rows", "state": True,
    },
    "the gated delta rule": {
        "kind": "delta", "lengths": (40,), "decay": "heads", "state": True, "normalize_qk": True,
    },
    "linear attention to all keys": {
        "kind": "linear", "lengths": ((3, 3),), "causal": False, "feature_map": "exp", "batch": 1,
    },
}  # fmt: skip
OF_RECURRENCES = [f"a graph of {_name}" for _name in RECURRENCES]
for _number, (_name, _description) in enumerate(RECURRENCES.items()):

    @case(OF_RECURRENCES[_number], _description, cases=[SLOW_CASES if _number else CASES])
    def _recurrence(group: Any, described: dict[str, Any]) -> None:
        description = dict(described)
        make: Any = make_linear_case if description.pop("kind") == "linear" else make_delta_case
        made = make(**description, device=parallel_cases.DEVICE)
        found = recurrence_cases.results(made, group, compiled)
        eager = recurrence_cases.results(made, group)
        torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-5)


@case("recurrences whose graphs differ", cases=[SLOW_CASES])
def _recurrences_differ(group: Any) -> None:
    rank = dist.get_rank(group)
    plan = parallel.plan(masks.causal(), 24, group)
    rows = torch.rand(1, 2, 12, 8)

    def scan(query: Any, **options: Any) -> Any:
        return parallel.linear_attention(query, rows, rows, plan=plan, **options)

    graph = compiled(scan)
    texts = ["options: got {", "'eps': 0.5"]
    refused(ValueError, texts, lambda: graph(rows, eps=0.5 + rank))
    text = "query: got 11 rows on rank 1, takes the plan's 12"
    texts = [text] if rank else ["another rank could not begin this call: rank 1: ValueError", text]
    refused(ValueError, texts, lambda: graph(rows[:, :, rank:]))
    refused(Exception, ["feature_map: got ReLU inside torch.compile, takes a name there"],
            lambda: graph(rows, feature_map=torch.nn.ReLU()))  # fmt: skip
    torch.testing.assert_close(graph(rows), scan(rows))  # and go on
    texts = ["decay, whole on every rank: got numbers ", "on rank 1; takes the same on every rank"]
    decay = torch.full((2,), -0.5)
    for turn in range(3):  # by one graph, which compares each time it runs
        if turn == 1:
            refused(ValueError, texts, lambda: graph(rows, decay=decay - rank))
        else:
            torch.testing.assert_close(graph(rows, decay=decay), scan(rows, decay=decay))


def run_rank_on_gpu(rank: int, world: int, folder: Path, text: str = "") -> None:
    """Run the graphs that compare with eager calls as one rank of a world, by NCCL.

    text: that names of cases have.
    """
    parallel_cases.DEVICE = "cuda"
    cases = {
        name: run for name, run in CASES.items() if name.startswith(("a graph w", "a graph p"))
    }
    others = {name: run for name, run in (CASES | SLOW_CASES).items() if name in OF_RECURRENCES}
    chosen = {name: run for name, run in (cases | others).items() if text in name}
    run_rank(rank, world, folder, chosen)


if __name__ == "__main__":
    if sys.argv[2:3] == ["--nccl"]:
        on_gpu = functools.partial(run_rank_on_gpu, text="".join(sys.argv[3:]))
        sys.exit(run_worlds(on_gpu, Path(sys.argv[1]), [WORLD], "spawn"))
    chosen = SLOW_CASES if sys.argv[2:] == ["--slow"] else CASES
    run = functools.partial(run_rank, cases=chosen)
    imports = ("torch._inductor.compile_fx",)
    sys.exit(run_worlds(run, Path(sys.argv[1]), [WORLD], imports=imports))

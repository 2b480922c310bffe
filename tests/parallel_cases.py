"""Cases of calls over ranks, run by a few processes beside each other.

    python tests/parallel_cases.py FOLDER WORLD [WORLD ...]
    python tests/parallel_cases.py FOLDER --nccl [TEXT]  # on two GPUs; whose names have a text

Each case compares a call over ranks, and its gradients, with the float64 oracle of the whole call.
For each number of ranks so many processes are forked, as imports take longer than cases; each rank
writes what went wrong, "" where nothing did, to a file.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import large_score_cases
import recurrence_cases
import sharded_cache_cases
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from worlds import joined, run_worlds

import saccade
from saccade import feature_maps, masks, parallel, scores
from saccade.parallel import exchange, large_scores
from saccade.parallel.delta import api as delta_api
from saccade.parallel.dtensors import as_dtensor
from saccade.parallel.linear import api as linear_api
from saccade.parallel.recurrence import pieces_of
from saccade.testing import make_case, oracle, tolerances
from saccade.testing.cases import MASKS, Case
from saccade.testing.oracle import assert_within

APIS = {"linear_attention": linear_api, "gated_delta_rule": delta_api}
METHODS = ("gather", "ulysses", "ring")
DEVICE = "cpu"  # or "cuda", of this process
DENSE, PACKED = ((37, 37),), ((9, 9), (0, 0), (21, 21), (1, 1))
CASES: dict[str, Callable[[Any], None]] = {}
NCCL_CASES: dict[str, Callable[[Any], None]] = {}  # kernels take seconds to compile for each mask
BOTH = (CASES, NCCL_CASES)


def case(
    name: str, *parameters: Any, cases: Sequence[dict[str, Any]] = (CASES,)
) -> Callable[..., Any]:
    def keep(check: Callable[..., None]) -> Callable[..., None]:
        for each in cases:
            each[name] = lambda group: check(group, *parameters)
        return check

    return keep


@functools.cache
def known(**description: Any) -> Case:
    return make_case(**description, device=DEVICE)


@functools.cache
def exact_and_allowed(**description: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    exact = oracle(known(**description))
    return exact, tolerances(known(**description), exact)


def check(world: Any, found: dict[str, Tensor], what: str, **description: Any) -> None:
    """Compare with the oracle, on the one rank whose turn it is for these numbers."""
    if len(str(sorted(description.items()))) % dist.get_world_size(world) == dist.get_rank(world):
        exact, allowed = exact_and_allowed(**description)
        exact = {name: exact[name] for name in found}
        assert_within(found, exact, allowed, f"{what} {description}")


PLANS: dict[Any, parallel.Plan] = {}


def planned(made: Case, group: Any, method: str) -> parallel.Plan:
    """A plan of a case by a method; rows are dealt alike for all."""
    d = made.description
    if d not in PLANS:
        PLANS[d] = new_plan(made, group, "auto")
    return replace(PLANS[d], method=method, memory={})


def new_plan(made: Case, group: Any, method: str) -> parallel.Plan:
    d = made.description
    offsets = None if made.cu_seqlens is None else made.cu_seqlens[0]
    return parallel.plan(
        made.mask, d.lengths[0][0] if offsets is None else offsets, group, method=method,
        batch=d.batch if offsets is None else 1, query_heads=d.query_heads, kv_heads=d.kv_heads,
        head_dim=d.head_dim, value_dim=d.value_dim,
    )  # fmt: skip


def results(made: Case, plan: parallel.Plan, call: Any = None, **options: Any) -> dict[str, Tensor]:
    """Output, lse and gradients of the whole, from every rank's part of them.

    call: a public one, or what torch.compile makes of it.
    """
    packed = made.cu_seqlens is not None
    dim, of_lse = (0, 1) if packed else (2, 2)
    leaves = {
        name: (plan.shard(tensor, dim) if name in ("query", "key", "value") else tensor).clone()
        for name, tensor in made.tensors.items()
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    call = call or (parallel.attention_varlen if packed else parallel.attention)
    torch.manual_seed(made.description.seed)  # of dropout, as the case has it
    output, lse = call(
        leaves["query"], leaves["key"], leaves["value"], plan=plan, return_lse=True,
        score=made.score(leaves.get("bias")), scale=made.description.scale,
        sinks=leaves.get("sinks"), dropout_p=made.description.dropout_p, **options,
    )  # fmt: skip
    weights = plan.shard(made.grads["output"], dim), plan.shard(made.grads["lse"], of_lse)
    weights = [weight.to(of.dtype) for weight, of in zip(weights, (output, lse), strict=True)]
    grads = torch.autograd.grad([output, lse], list(leaves.values()), weights)
    found = {"output": output.detach(), "lse": lse.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype, name
        found[f"grad_{name}"] = grad
    rows = [name for name in found if name not in ("grad_sinks", "grad_bias")]
    together = [found[name].movedim(of_lse if name == "lse" else dim, 0) for name in rows]
    whole = plan.unshard(torch.cat([each.double().flatten(1) for each in together], 1), 0)
    parts = whole.split([each[:0].flatten(1).shape[1] for each in together], 1)
    for name, each, part in zip(rows, together, parts, strict=True):
        shaped = part.reshape(plan.length, *each.shape[1:])
        found[name] = shaped.movedim(0, of_lse if name == "lse" else dim)
    return found


def compare(world: Any, method: str, **description: Any) -> None:
    made = known(**description)
    check(world, results(made, planned(made, world, method)), method, **description)


def refused(error: type[Exception], texts: list[str], call: Callable[[], Any]) -> str:
    """What was said."""
    try:
        call()
    except error as found:
        assert all(text in str(found) for text in texts), str(found)
        return str(found)
    raise AssertionError(f"nothing was refused: {texts}")


# ---- every mask by every method, and beside it one score, sinks or none, one layout --------------

VARIED = ("none", "alibi", "bias", "own", "head_bias", "bias >> softcap", "key_bias")
for _number, _mask in enumerate(MASKS):
    for _packed in (False, True):
        _turn = METHODS[(_number + _packed) % 3]  # of two ranks; four take the others
        _description = {
            "mask": _mask, "lengths": PACKED if _packed else DENSE, "packed": _packed,
            "score": VARIED[(_number + 3 * _packed) % len(VARIED)], "sinks": bool(_number % 2),
            "value_dim": 8 if _number % 3 == 0 else 16,
        }  # fmt: skip
        for _method in METHODS:

            @case(
                f"{_mask} {'packed' if _packed else 'dense'} {_method}",
                _method,
                _turn,
                _description,
            )
            def _masked(group: Any, method: str, turn: str, description: dict[str, Any]) -> None:
                if (dist.get_world_size(group) == 2) == (method == turn):
                    compare(group, method, **description)


# ---- rows of large scores ------------------------------------------------------------------------

for _size in large_score_cases.SIZES:
    _cases = BOTH if _size == "-1e9" else (CASES,)
    for _method in METHODS:

        @case(f"scores of {_size} {_method}", _method, _size, cases=_cases)
        def _large(group: Any, method: str, size: str) -> None:
            large_score_cases.compare(group, method, size, DEVICE)

    @case(f"scores of {_size} over pages", _size, cases=_cases)
    def _large_pages(group: Any, size: str) -> None:
        large_score_cases.compare_pages(group, size, DEVICE)


@case("large scores whose numbers are not looked at, as on a GPU")
def _large_unseen(group: Any) -> None:
    with patch.object(large_scores, "in_graph", return_value=True):
        large_score_cases.compare(group, "ring", "-1e9")
        large_score_cases.compare_pages(group, "-1e9")


@case("gradients of an output alone, and of an lse")
def _of_one_result(group: Any) -> None:
    """They add up to those of both, by every method."""
    made = known(mask="causal", lengths=DENSE, sinks=True, dtype=torch.float64)
    for method in METHODS:
        plan = planned(made, group, method)
        leaves = [plan.shard(made.tensors[name], 2) for name in ("query", "key", "value")]
        leaves = [each.clone().requires_grad_() for each in (*leaves, made.tensors["sinks"])]
        found = parallel.attention(*leaves[:3], sinks=leaves[3], plan=plan, return_lse=True)
        weights = [plan.shard(made.grads[name], 2).to(torch.float64) for name in ("output", "lse")]
        both, *alone = (
            torch.autograd.grad(found[which], leaves, weights[which], retain_graph=True)
            for which in (slice(None), slice(1), slice(1, None))
        )
        torch.testing.assert_close(both, tuple(map(torch.add, *alone)))


# ---- dropout -------------------------------------------------------------------------------------

# Plain calls of rows that follow one another, and rows whose numbers come from tables, with keys in
# groups of four and otherwise.
DROPPED: list[dict[str, Any]] = [
    {"mask": "causal", "lengths": ((64, 64),), "sinks": True},
    {"mask": "causal", "lengths": PACKED, "packed": True},
    {"mask": "window", "lengths": DENSE, "kv_heads": 4, "group": 1},
    {"mask": "documents", "lengths": ((64, 64),), "score": "bias", "sinks": True},
    {"mask": "mixed", "lengths": ((9, 9), (30, 30)), "packed": True, "score": "head_bias"},
    {"mask": "causal", "lengths": ((64, 64),), "dtype": torch.bfloat16},
    {"mask": "causal", "lengths": ((16, 16), (3, 3)), "packed": True, "dtype": torch.float64},
    {"mask": "none", "lengths": ((5, 5),), "score": "alibi", "kv_heads": 1, "group": 4},
]
for _number, _description in enumerate(DROPPED):
    for _method in METHODS:

        @case(
            f"dropout, {_description}, {_method}", _method, {**_description, "dropout_p": 0.3},
            cases=BOTH if _number < 2 else (CASES,),
        )  # fmt: skip
        def _dropped(group: Any, method: str, description: dict[str, Any]) -> None:
            compare(group, method, **description)


@case("dropout by kernels, in Triton's interpreter")
def _interpreted(group: Any) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" or dist.get_world_size(group) > 2:
        return  # where there is a GPU, other cases take kernels; and interpreting takes seconds
    sizes: dict[str, Any] = {"kv_heads": 1, "group": 2, "batch": 1, "dropout_p": 0.3}
    for method, lengths in (
        ("gather", ((12, 12),)),
        ("gather", ((3, 3), (9, 9))),
        ("ring", ((12, 12),)),
    ):
        description = {"mask": "causal", "lengths": lengths, "packed": len(lengths) > 1, **sizes}
        made = known(**description)
        found = results(made, planned(made, group, method), implementation="triton")
        check(group, found, method, **description)


@case("the same pairs are dropped as by one process", cases=BOTH)
def _same_pairs(group: Any) -> None:
    rows = 48
    sizes: Any = {"query_heads": 4, "kv_heads": 4, "head_dim": 8, "batch": 2, "value_dim": rows}
    query, key = torch.randn(2, 2, 4, rows, 8, device=DEVICE)
    value = torch.eye(rows, device=DEVICE).expand(2, 4, rows, rows).contiguous()  # weights
    documents = masks.documents(torch.arange(rows, device=DEVICE)[None] // 13)
    for mask in (masks.causal(), masks.window(20), documents):
        torch.manual_seed(3)
        weights = saccade.attention(query, key, value, mask=mask, dropout_p=0.4)
        for method in METHODS:
            plan = parallel.plan(mask, rows, group, method=method, **sizes)
            local = [plan.shard(each, 2) for each in (query, key, value)]
            torch.manual_seed(3)
            found = plan.unshard(parallel.attention(*local, plan=plan, dropout_p=0.4), 2)
            assert torch.equal(found == 0, weights == 0), (method, mask)
            torch.testing.assert_close(found, weights)
    state = torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()
    torch.manual_seed(3)
    saccade.attention(query, key, value, dropout_p=0.4)
    after = torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, after)  # a call over ranks draws as many numbers


@case("short sequences leave ranks without rows")
def _empty(group: Any) -> None:
    for method in METHODS:
        for rows in (0, 1, 3):
            for score in ("none", "bias"):
                compare(
                    group, method, mask="causal", lengths=((rows, rows),), score=score, sinks=True,
                )  # fmt: skip
        lengths = ((0, 0), (2, 2))
        compare(group, method, mask="causal", lengths=lengths, packed=True, score="alibi")


@case("other dtypes, hidden NaN, one kv head, many kv heads")
def _others(group: Any) -> None:
    for method in METHODS:
        for dtype in (torch.bfloat16, torch.float64):
            compare(group, method, mask="causal", lengths=((64, 64),), dtype=dtype, sinks=True)
        compare(group, method, mask="window", lengths=DENSE, poison_hidden=True)
        compare(group, method, mask="documents", lengths=DENSE, kv_heads=1, group=4)
        compare(group, method, mask="causal", lengths=DENSE, kv_heads=4, group=1, batch=1)


@case("gradients are the same bits each time")
def _deterministic(group: Any) -> None:
    made = known(mask="mixed", lengths=DENSE, score="bias", sinks=True)
    for method in METHODS:
        plan = planned(made, group, method)
        first, again = (results(made, plan, deterministic=True) for _ in range(2))
        assert all(torch.equal(first[name], again[name]) for name in first)


@case("gradients of what every rank has are its own where they are not summed")
def _own_gradients(group: Any) -> None:
    description: dict[str, Any] = {
        "mask": "causal",
        "lengths": DENSE,
        "score": "bias",
        "sinks": True,
    }
    made = known(**description)
    for method in METHODS:
        found = results(made, planned(made, group, method), reduce_gradients=False)
        for name in ("grad_sinks", "grad_bias"):
            dist.all_reduce(found[name], group=group)
        check(group, found, method, **description)


@case("without gradients, and the output alone")
def _no_gradients(group: Any) -> None:
    made = known(mask="causal", lengths=DENSE)
    for method in METHODS:
        plan = planned(made, group, method)
        rows = [plan.shard(made.tensors[name], 2) for name in ("query", "key", "value")]
        with torch.no_grad():
            output = parallel.attention(rows[0], rows[1], rows[2], plan=plan)
        assert not output.requires_grad
        found = {"output": plan.unshard(output, 2)}
        check(group, found, method, mask="causal", lengths=DENSE)


@case("the layers of a model on the same rows")
def _layers(group: Any) -> None:
    made, local = (known(mask=name, lengths=DENSE) for name in ("causal", "window"))
    for method in METHODS:
        plan = planned(made, group, method)
        other = plan.for_mask(local.mask)
        assert torch.equal(plan.rows, other.rows)
        check(group, results(local, other), method, mask="window", lengths=DENSE)


@case("rows are sent as autocast makes them")
def _autocast(group: Any) -> None:
    description: dict[str, Any] = {"mask": "causal", "lengths": ((64, 64),)}
    made, exact = known(**description), oracle(known(**description))
    for method in METHODS:
        plan = planned(made, group, method)
        rows = [plan.shard(made.tensors[name], 2) for name in ("query", "key", "value")]
        with torch.autocast("cpu", torch.bfloat16):
            output = parallel.attention(rows[0], rows[1], rows[2], plan=plan)
        assert output.dtype == torch.bfloat16
        error = plan.unshard(output, 2).double() - exact["output"]
        assert error.abs().max() < 0.05


@case("unshard carries gradients of its own rows")
def _unshard(group: Any) -> None:
    plan = parallel.plan(masks.causal(), 13, group)
    whole = torch.arange(13.0).requires_grad_()
    gathered = plan.unshard(plan.shard(whole, 0) * 2, 0)
    assert torch.equal(gathered, whole * 2)
    gathered.square().sum().backward()
    assert whole.grad is not None
    wanted = torch.zeros(13).index_copy(0, plan.rows, (8 * whole.detach())[plan.rows])
    assert torch.equal(whole.grad, wanted)


@case("shards that differ")
def _shards_differ(group: Any) -> None:
    rank = dist.get_rank(group)
    plan = parallel.plan(masks.causal(), 24, group)
    own = torch.zeros(1, len(plan.rows), 4)

    def unsharded(shards: Any = own, dim: int = 1) -> Tensor:
        return plan.unshard(shards, dim=dim)

    longer = torch.cat([own, own], 1)
    different: list[tuple[dict[str, Any], list[str]]] = [
        ({"shards": own[..., :3]}, ["shards: got [1, 4] beside rows, torch.float32 on rank", "3]"]),
        ({"shards": own.double()}, ["shards: got [1, 4] beside rows, torch.float32 on rank", "64"]),
        ({"shards": own.mT, "dim": 2}, ["dim: got 1 on rank", "2 on rank 1; takes the same"]),
    ]
    for options, texts in different:
        refused(ValueError, texts, lambda o=options: unsharded(**(o if rank == 1 else {})))
    mine: list[tuple[dict[str, Any], str]] = [
        ({"shards": longer}, f"shards: got {2 * 24 // dist.get_world_size(group)} rows along"),
        ({"dim": 7}, "dim: got 7 of shards of 3 dimensions, takes -3 to 2"),
    ]
    for options, text in mine:
        texts = [text] if rank == 1 else ["another rank could not begin this call: rank 1", text]
        refused(ValueError, texts, lambda o=options: unsharded(**(o if rank == 1 else {})))
    assert unsharded(dim=-2).shape == (1, 24, 4)  # and go on


@case("nothing is sent where every rank holds all keys that it needs")
def _local(group: Any) -> None:
    lengths = ((16, 16),) * dist.get_world_size(group)  # a document a rank
    description = {"mask": "causal", "lengths": lengths, "packed": True, "score": "alibi"}
    made = known(**description)
    plan = planned(made, group, "gather")
    assert plan.sends_nothing

    def sends(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a message")

    with patch.object(exchange, "Message", sends):
        rows = [plan.shard(made.tensors[name], 0) for name in ("query", "key", "value")]
        parallel.attention_varlen(rows[0], rows[1], rows[2], plan=plan)
    check(group, results(made, plan), "gather", **description)


# ---- recurrences ---------------------------------------------------------------------------------

TRIPLES = tuple((rows, rows) for rows in recurrence_cases.SEQUENCES)
RECURRENCES: list[dict[str, Any]] = [
    {"kind": "linear", "decay": "rows", "state": True, "heads": (4, 2, 2)},
    {"kind": "linear", "decay": "rows", "state": True, "heads": (4, 2, 2), "batch": 1},
    {"kind": "linear", "decay": "heads", "normalize": "clamp", "packed": True, "state": True},
    {"kind": "linear", "packed": True, "causal": False, "decay": "rows"},
    {"kind": "linear", "causal": False, "feature_map": "exp", "batch": 1, "state": True},
    {"kind": "linear", "dtype": torch.bfloat16, "normalize": "none"},
    {"kind": "delta", "decay": "heads", "state": True, "normalize_qk": True},
    {"kind": "delta", "decay": "channels", "packed": True, "state": True},
    {"kind": "delta", "packed": True, "dtype": torch.bfloat16},
    {"kind": "delta", "decay": "channels", "state": True, "batch": 1},
    {"kind": "delta", "batch": 1, "heads": (2, 2), "head_dim": 8},
]
_seen: set[str] = set()  # the first of each kind runs by NCCL too
for _description in RECURRENCES:
    _kind = _description["kind"]
    _lengths: Any = TRIPLES if _kind == "linear" else recurrence_cases.SEQUENCES
    if not _description.get("packed"):
        _lengths = ((40, 40),) if _kind == "linear" else (40,)
    _made = {"lengths": _lengths, **_description}

    @case(f"recurrence {_description}", _made, cases=BOTH if _kind not in _seen else (CASES,))
    def _recurrence(group: Any, made: dict[str, Any]) -> None:
        recurrence_cases.compare(group, **made, device=DEVICE)

    _seen.add(_kind)


@case("recurrences of rows that lie together", cases=BOTH)
def _together(group: Any) -> None:
    plan = recurrence_cases.plan_of(group, False, 40, recurrence_cases.TOGETHER)
    assert [piece.rank for piece in pieces_of(plan)] == [*range(dist.get_world_size(group))]
    made: dict[str, Any] = {
        "mask": recurrence_cases.TOGETHER, "decay": "rows", "batch": 1, "device": DEVICE,
    }  # fmt: skip
    for packed in (False, True):
        of_keys = TRIPLES if packed else ((40, 40),)
        lengths = recurrence_cases.SEQUENCES if packed else (40,)
        made |= {"packed": packed}
        for state in (False, True):
            recurrence_cases.compare(group, "linear", lengths=of_keys, state=state, **made)
            made_delta = made | {"decay": "heads"}
            recurrence_cases.compare(group, "delta", lengths=lengths, state=state, **made_delta)


@case("pieces of equal length are one call")
def _one_call_for_pieces(group: Any) -> None:
    plan = parallel.plan(masks.causal(), 8 * dist.get_world_size(group), group)
    rows = torch.randn(1, 2, len(plan.rows), 8, requires_grad=True)
    others: Any = parallel.linear_attention, parallel.gated_delta_rule
    for name, call in zip(("linear_attention", "gated_delta_rule"), others, strict=True):
        given = (rows,) * 3 + (rows[..., 0].sigmoid(),) * (name != "linear_attention")
        with patch.object(APIS[name], name, wraps=getattr(saccade, name)) as calls:
            call(*given, plan=plan).sum().backward()
        batches = [seen.args[1].shape[:3] for seen in calls.call_args_list]
        pieces = sum(piece.rank == plan.rank for piece in pieces_of(plan))
        sent = pieces - (len(plan.rows) > 0 and int(plan.rows[-1]) == plan.length - 1)
        assert batches[-1] == (pieces, 2, 8 // pieces) and batches[0][0] == max(sent, 1), batches
        # A sequence's first piece starts from nothing: no matrix of it is asked for.
        moves = name != "linear_attention" and sent > int(0 in plan.rows.tolist())
        assert len(batches) == 2 + moves, batches


@case("recurrences of fewer rows than ranks")
def _few_rows(group: Any) -> None:
    for rows in (0, 1, 3):
        options: Any = {"decay": "rows", "state": True}
        recurrence_cases.compare(group, "linear", lengths=((rows, rows),), **options)
        options = {"decay": "heads", "state": True}
        recurrence_cases.compare(group, "delta", lengths=(rows,), **options)


@case("states with units")
def _favor(group: Any) -> None:
    torch.manual_seed(1)
    favor = feature_maps.Favor(8, 16).double()
    query, key, value = 2 * torch.randn(3, 1, 2, 40, 8, dtype=torch.float64)
    for causal in (True, False):
        made = {"feature_map": favor, "causal": causal, "decay": -torch.rand(1, 2, 40).double() / 9}
        _, before = saccade.linear_attention(query, key, value, return_state=True, **made)
        assert before.log_scale is not None
        for initial in (None, before):
            options = {**made, "initial_state": initial, "return_state": True}
            exact, last = saccade.linear_attention(query, key, value, **options)
            assert last.log_scale is not None
            plan = parallel.plan(masks.causal(), 40, group)
            rows = [plan.shard(each, 2) for each in (query, key, value)]
            options["decay"] = plan.shard(made["decay"], 2)
            output, state = parallel.linear_attention(
                rows[0], rows[1], rows[2], plan=plan, **options
            )
            torch.testing.assert_close(plan.unshard(output, 2), exact)
            whole = [each.log_scale.exp()[..., None] * each.key_sum for each in (state, last)]
            torch.testing.assert_close(*whole)


@case("gradients of an initial state are a rank's own where they are not summed")
def _own_gradients_of_state(group: Any) -> None:
    rows = torch.randn(1, 2, 24, 8)
    found = []
    for reduce in (True, False):
        plan = parallel.plan(masks.causal(), 24, group)
        state = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
        state.requires_grad_()
        local, beta = plan.shard(rows, 2) / 4, plan.shard(torch.full((1, 2, 24), 0.5), 2)
        parallel.gated_delta_rule(
            local, local, local, beta, plan=plan, initial_state=state, reduce_gradients=reduce
        ).sum().backward()
        assert state.grad is not None
        if not reduce:
            dist.all_reduce(state.grad, group=group)
        found.append(state.grad)
    torch.testing.assert_close(*found)


def recur(plan: parallel.Plan, delta: bool = False, more: int = 0, **options: Any) -> None:
    """A recurrence of zeros; more: rows beyond the plan's."""
    rows = torch.zeros(1, 2, len(plan.rows) + more, 8)
    if delta:
        parallel.gated_delta_rule(rows, rows, rows, rows[..., 0], plan=plan, **options)
    else:
        parallel.linear_attention(rows, rows, rows, plan=plan, **options)


@case("recurrences that differ")
def _recurrences_differ(group: Any) -> None:
    rank = dist.get_rank(group)
    plan = parallel.plan(masks.causal(), 24, group)
    constant, state = torch.zeros(2), torch.zeros(1, 2, 8, 8)
    sums, by_row = state[..., 0], torch.zeros(1, 2, len(plan.rows))
    whole = "torch.float32, whole on "
    different: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        ({}, {"decay": constant}, ["decay: got none on rank", f"(2,) {whole}rank 1"]),
        ({}, {"decay": by_row}, ["decay: got none on rank", "[1, 2] beside rows, "]),
        ({}, {"feature_map": "relu"}, ["options: got ", "rank 1"]),
        ({}, {"delta": True, "initial_state": state}, ["call: got linear_attention on rank"]),
        ({}, {"return_state": True}, ["options: got ", "rank 1"]),
        ({"delta": True}, {"decay": by_row}, ["decay: got none on rank", "[1, 2] beside rows, "]),
        (
            {"delta": True}, {"initial_state": state},
            ["initial_state: got none on rank", f"(1, 2, 8, 8) {whole}rank 1"],
        ),
        (
            {"delta": True, "initial_state": state}, {"initial_state": state + 1},
            ["initial_state, whole on every rank: got numbers ", "on rank 1; takes the same"],
        ),
        (
            {"initial_state": saccade.LinearState(state, sums)},
            {"initial_state": saccade.LinearState(state, sums + 1)},
            ["initial_state.key_sum, whole on every rank: got numbers ", "on rank 1; takes the"],
        ),
        (
            {"decay": constant}, {"decay": constant - 1},
            ["decay, whole on every rank: got numbers ", "on rank 1; takes the same"],
        ),
    ]  # fmt: skip
    for common, of_one, texts in different:
        options = common | (of_one if rank == 1 else {})
        said = refused(ValueError, texts, functools.partial(recur, plan, **options))
        assert "query: got" not in said, said  # what is equal is not named
    recur(plan)  # and go on


@case("recurrences that one rank cannot begin")
def _recurrences_refused(group: Any) -> None:
    rank = dist.get_rank(group)
    plan, state = parallel.plan(masks.causal(), 24, group), torch.zeros(1, 2, 8, 8)
    mine: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"more": 1}, ValueError, "query: got "),
        ({"decay": torch.zeros(3)}, ValueError, "decay: got shape (3,)"),
        ({"decay": 1.0}, TypeError, "decay: got float"),
        ({"initial_state": state}, TypeError, "initial_state: got Tensor"),
        (
            {"initial_state": saccade.LinearState(state[:, :1], state[:, :1, :, 0])},
            ValueError,
            "initial_state.kv: got shape (1, 1, 8, 8)",
        ),
        ({"delta": True, "initial_state": torch.zeros(1, 2, 8, 9)}, ValueError, "initial_state: "),
        ({"eps": -1.0}, ValueError, "eps: got -1"),
    ]
    for options, error, text in mine:
        delta = {"delta": options.get("delta", False)}
        texts = [text] if rank == 1 else ["another rank could not begin this call: rank 1", text]
        kind: type[Exception] = error if rank == 1 else ValueError
        refused(kind, texts, lambda o=options, d=delta: recur(plan, **(o if rank == 1 else d)))
    texts = ["key_lengths: an unknown option; takes align, causal, config, decay"]
    refused(TypeError, texts, lambda: recur(plan, key_lengths=1))
    recur(plan)  # and go on
    recur(plan, delta=True)


# ---- caches --------------------------------------------------------------------------------------

PAGED: list[dict[str, Any]] = [
    {"sinks": True, "lengths": ((1, 40), (1, 0), (1, 1))},
    {"mask": "causal", "packed": True, "lengths": ((3, 17), (1, 2), (5, 5)), "score": "alibi"},
    {"mask": "window", "lengths": ((4, 20), (4, 4)), "dtype": torch.bfloat16, "value_dim": 8},
    {"mask": "documents", "lengths": ((2, 30), (2, 3)), "score": "bias"},
]
for _description in PAGED:

    @case(
        f"pages {_description}", _description, cases=BOTH if "sinks" in _description else (CASES,)
    )
    def _paged(group: Any, description: dict[str, Any]) -> None:
        sharded_cache_cases.compare(group, **description, device=DEVICE)


@case("sequences of a sharded cache")
def _sharded_cache(group: Any) -> None:
    sharded_cache_cases.lives(group)


@case("sharded caches that differ")
def _caches_differ(group: Any) -> None:
    sharded_cache_cases.differ(group, refused)


# ---- by NCCL -------------------------------------------------------------------------------------

FLASH: Any = {"dtype": torch.bfloat16, "head_dim": 128, "value_dim": 128}
ON_GPUS: dict[str, Any] = {
    "causal, bfloat16": {"mask": "causal", "lengths": ((600, 600),), "sinks": True, **FLASH},
    "packed, bfloat16": {
        "mask": "causal", "lengths": ((300, 300), (0, 0), (700, 700)), "packed": True, **FLASH,
    },
    "bias, float32": {"mask": "window", "lengths": DENSE, "score": "bias"},
}  # fmt: skip
for _name, _description in ON_GPUS.items():
    for _method in METHODS:

        @case(f"{_name} {_method}", _method, _description, cases=[NCCL_CASES])
        def _on_gpus(group: Any, method: str, description: dict[str, Any]) -> None:
            compare(group, method, **description)


# ---- DTensors ------------------------------------------------------------------------------------


@case("DTensors of a plan's rows give DTensors")
def _dtensors(group: Any) -> None:
    ranks = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for packed, lengths in ((False, ((40, 40),)), (True, ((9, 9), (31, 31)))):
        description: dict[str, Any] = {"mask": "causal", "lengths": lengths, "packed": packed}
        made, dim = known(**description), 0 if packed else 2
        plan = planned(made, group, METHODS[ranks % 3])
        call: Any = parallel.attention_varlen if packed else parallel.attention
        names = ("query", "key", "value")
        plain = [plan.shard(made.tensors[name], dim).requires_grad_() for name in names]
        leaves = [each.detach().clone().requires_grad_() for each in plain]
        dealt = [as_dtensor(plan, each, mesh, dim) for each in leaves]  # parts may be unequal
        found = call(*dealt, plan=plan, return_lse=True)
        for one, other, at in zip(
            found, call(*plain, plan=plan, return_lse=True), (dim, 1 if packed else 2), strict=True
        ):
            assert one.placements == (Shard(at),) and one.shape[at] == plan.length
            assert torch.equal(one.to_local(), other)
            other.sum().backward(retain_graph=True)
            one.to_local().sum().backward(retain_graph=True)
        torch.testing.assert_close(
            [each.grad for each in leaves], [each.grad for each in plain], rtol=0, atol=0
        )
    whole = [DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in plain]
    refused(ValueError, ["query: got a DTensor placed as R", "takes one dealt to the plan's ranks"],
            lambda: call(*whole, plan=plan))  # fmt: skip
    refused(TypeError, ["key: got Tensor beside DTensors"], lambda: call(
        dealt[0], *plain[1:], plan=plan
    ))  # fmt: skip


# ---- ranks that differ ---------------------------------------------------------------------------


def called(group: Any, rank: int, *, mask: Any = None, length: int = 24, **options: Any) -> None:
    sizes: Any = {"query_heads": 4, "kv_heads": 4, "head_dim": 8}
    method, dtype = options.pop("method", "gather"), options.pop("dtype", torch.float32)
    packed = options.pop("packed", False)
    rows_of: Any = torch.tensor([0, length], dtype=torch.int32) if packed else length
    plan = parallel.plan(mask, rows_of, group, method=method, **sizes)
    rows = len(plan.rows) + options.pop("more", 0)
    query = torch.zeros((rows, 4, 8) if packed else (1, 4, rows, 8), dtype=dtype, device=DEVICE)
    call: Any = parallel.attention_varlen if packed else parallel.attention
    call(query, query, query, plan=plan, **options)


DIFFERENT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mask": ({"mask": masks.causal()}, ["mask: got none on rank", "kv_row <= query_row + shift"]),
    "captured": ({"mask": masks.window(3)}, ["mask: got none on rank", "query_row + shift - 3"]),
    "length": ({"length": 28}, ["length: got 24 on rank", "28 on rank 1"]),
    "dtype": ({"dtype": torch.float64}, ["dtype: got torch.float32 on rank", "torch.float64"]),
    "method": ({"method": "ring"}, ["method: got gather on rank", "ring on rank 1"]),
    "score": ({"score": scores.softcap(3.0)}, ["score: got none on rank", "tanh"]),
    "scale": ({"scale": 2.0}, ["scale: got 0.35", "2.0 on rank 1"]),
    "dropout": ({"dropout_p": 0.5}, ["dropout_p: got 0.0 on rank", "0.5 on rank 1"]),
    "gradients": ({"deterministic": True}, ["options: got deterministic=False", "=True"]),
}
for _name, (_options, _texts) in DIFFERENT.items():

    @case(f"ranks that differ in {_name}", _options, _texts, cases=BOTH)
    def _differs(group: Any, options: dict[str, Any], texts: list[str]) -> None:
        rank = dist.get_rank(group)
        refused(ValueError, texts, lambda: called(group, rank, **(options if rank == 1 else {})))
        called(group, rank)  # and go on


@case("ranks whose sinks or scores have other numbers", cases=BOTH)
def _other_numbers(group: Any) -> None:
    rank = dist.get_rank(group)

    def brought(name: str, number: float) -> dict[str, Any]:
        if name == "sinks":
            return {"sinks": torch.full((4,), number, device=DEVICE)}
        return {"score": scores.bias(torch.full((1, 4, 24, 24), number, device=DEVICE))}

    for method, packed, name in itertools.product(METHODS, (False, True), ("sinks", "score")):
        call = functools.partial(called, group, rank, method=method, packed=packed)
        said = "sinks" if name == "sinks" else "score's tensor 0"
        texts = [f"{said}, whole on every rank: got numbers ", "on rank 1; takes the same"]
        refused(ValueError, texts, functools.partial(call, **brought(name, float(rank == 1))))
        call(**brought(name, 1.0))


@case("ranks that draw from other seeds", cases=BOTH)
def _other_seeds(group: Any) -> None:
    rank = dist.get_rank(group)
    for method in METHODS:
        torch.manual_seed(7 + (rank == 1))
        texts = ["seed of dropout, which torch.manual_seed sets: got ", "on rank 1; takes the same"]
        call = functools.partial(called, group, rank, method=method, dropout_p=0.5)
        refused(ValueError, texts, call)
        torch.manual_seed(7)
        call()


@case("a rank that cannot begin", cases=BOTH)
def _cannot_begin(group: Any) -> None:
    rank = dist.get_rank(group)
    texts = ["query: got (1, 4, ", "takes the plan's"]
    texts += [] if rank == 1 else ["another rank could not begin this call: rank 1: ValueError"]
    refused(ValueError, texts, lambda: called(group, rank, more=int(rank == 1)))
    refused(
        ValueError, ["dropout_p: got 1.5, takes a number in [0, 1)"],
        lambda: called(group, rank, dropout_p=1.5 if rank == 1 else 0.0),
    )  # fmt: skip
    called(group, rank)


@case("what is refused on every rank")
def _refused(group: Any) -> None:
    rank = dist.get_rank(group)
    texts = ['implementation: got "reference" with the method "ring"']
    options: dict[str, Any] = {"method": "ring", "implementation": "reference"}
    refused(NotImplementedError, texts, lambda: called(group, rank, **options))
    refused(TypeError, ["mask: got one beside a plan"], lambda: parallel.attention(
        *torch.zeros(3, 1, 4, 12, 8), plan=parallel.plan(None, 24, group), mask=masks.causal()
    ))  # fmt: skip
    refused(TypeError, ["whatever: an unknown option; takes score, "], lambda: parallel.attention(
        *torch.zeros(3, 1, 4, 12, 8), plan=parallel.plan(None, 24, group), whatever=1
    ))  # fmt: skip
    refused(TypeError, ["plan: got NoneType"], lambda: parallel.attention(
        *torch.zeros(3, 1, 4, 12, 8), plan=None  # type: ignore[arg-type]
    ))  # fmt: skip
    refused(ValueError, ["plan: got one of 2 simulated ranks"], lambda: parallel.attention(
        *torch.zeros(3, 1, 4, 12, 8), plan=parallel.plan(None, 24, 2)
    ))  # fmt: skip


@case("a rank that does not come is told of after the time-out")
def _late(group: Any) -> None:
    if dist.get_world_size(group) > 2:
        return  # it takes seconds, and knows no number of ranks
    short = dist.new_group(timeout=timedelta(seconds=1))
    rank = dist.get_rank(group)
    called(short, rank)
    start = time.monotonic()
    if rank == 1:
        time.sleep(2.5)  # longer than others wait
    else:
        texts = [f"rank {rank} failed at call ", "rank 1 was last at call 1, keys"]
        refused(RuntimeError, texts, lambda: called(short, rank))
        assert time.monotonic() - start < 30
    dist.barrier(group)


def run_rank(
    rank: int, world: int, folder: Path, cases: dict[str, Callable[[Any], None]] | None = None
) -> None:
    """Run all cases, or some, as one rank of a world."""
    said = {}
    cases = cases or (NCCL_CASES if DEVICE == "cuda" else CASES)
    with joined(rank, world, folder, "nccl" if DEVICE == "cuda" else "gloo"):
        for name, run in cases.items():
            start = time.monotonic()
            try:
                torch.manual_seed(0)
                run(dist.group.WORLD)
                said[name] = ""
            except Exception:
                said[name] = traceback.format_exc()
            if rank == 0 or said[name]:
                print(f"{time.monotonic() - start:.2f} {name} {said[name]}", flush=True)
        (folder / f"found.{world}.{rank}").write_text(json.dumps(said), encoding="utf-8")
    if DEVICE == "cuda" and any(said.values()):
        sys.exit(1)  # there is no test that reads the files


def run_rank_on_gpu(rank: int, world: int, folder: Path) -> None:
    """Run the cases for NCCL, or those whose names have a text, as one rank of a world."""
    global DEVICE
    DEVICE = "cuda"
    for name in [name for name in NCCL_CASES if "".join(sys.argv[3:]) not in name]:
        del NCCL_CASES[name]
    run_rank(rank, world, folder)


if __name__ == "__main__":
    if sys.argv[2] == "--nccl":
        sys.exit(run_worlds(run_rank_on_gpu, Path(sys.argv[1]), [2], "spawn"))
    sys.exit(run_worlds(run_rank, Path(sys.argv[1]), [int(world) for world in sys.argv[2:]]))

"""Cases of calls on DTensors, run by two processes beside each other.

    python tests/shard_cases.py FOLDER

Each case compares a sharded call, and its gradients, with the same call on plain tensors; each rank
writes what went wrong, "" where nothing did, to a file of the folder.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from worlds import joined, run_worlds

import saccade
from saccade import masks, scores

WORLD = 2
BATCH, HEADS, WHOLE = Shard(0), Shard(1), Replicate()
OFFSETS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
CASES: dict[str, Callable[[Any], None]] = {}
attention_varlen: Any = saccade.attention_varlen
attention_paged: Any = saccade.attention_paged


def case(name: str, *parameters: Any) -> Callable[..., Any]:
    def keep(check: Callable[..., None]) -> Callable[..., None]:
        CASES[name] = lambda mesh: check(mesh, *parameters)
        return check

    return keep


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def same(found: Any, wanted: Tensor, what: str) -> None:
    assert isinstance(found, DTensor), f"{what}: got {type(found).__name__}"
    assert found.shape == wanted.shape, f"{what}: {found.shape} for {wanted.shape}"
    torch.testing.assert_close(found.full_tensor(), wanted, msg=lambda text: f"{what}: {text}")


def compare(
    mesh: Any, call: Callable[..., Any], tensors: list[Tensor], places: list[Any]
) -> list[DTensor]:
    """Results and gradients of a call on plain tensors and on the same ones distributed."""
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    parts = [
        distribute_tensor(tensor, mesh, [place]).requires_grad_()
        for tensor, place in zip(tensors, places, strict=True)
    ]
    wanted, found = call(*plain), call(*parts)
    weights = [torch.randn_like(each) for each in wanted]
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        same(one, other, f"result {number}")
    torch.autograd.backward(wanted, weights)
    spread = [
        distribute_tensor(weight, mesh, each.placements)
        for each, weight in zip(found, weights, strict=True)
    ]
    torch.autograd.backward(found, spread)
    for number, (one, other) in enumerate(zip(parts, plain, strict=True)):
        assert other.grad is not None and isinstance(one.grad, DTensor)
        assert not any(place.is_partial() for place in one.grad.placements), f"gradient {number}"
        same(one.grad, other.grad, f"gradient {number}")
    return list(found)


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as found:
        assert text in str(found), str(found)
    else:
        raise AssertionError(f"nothing was refused: {text}")


def attend(**options: Any) -> Callable[..., Any]:
    return lambda *rows: saccade.attention(*rows, return_lse=True, **options)


torch.manual_seed(0)  # the same on both ranks
LENGTHS = torch.tensor([7, 4, 0, 6])
SLOPES = 2.0 ** -torch.arange(1, 5).double()
MASKS: dict[str, Any] = {
    "causal": masks.causal(),
    "lengths": masks.key_lengths(LENGTHS),
    "batch and head in numbers": lambda b, h, i, j: (i + 2 * b + 3 * h - j) % 4 != 0,
    "a table read at head // 2": masks.function(
        lambda b, h, i, j, table: j < masks.take(table, b, h // 2)
    )(torch.randint(1, 8, (4, 2))),
    "a dense mask": torch.rand(4, 4, 5, 7) > 0.3,
    "one for all": torch.rand(1, 1, 5, 7) > 0.3,
}
for _name, _mask in MASKS.items():
    for _place in (BATCH, HEADS):

        @case(f"{_name} {_place}", _mask, _place)
        def _masked(mesh: Any, mask: Any, place: Any) -> None:
            rows = [drawn(4, 4, 5, 8), drawn(4, 2, 7, 8), drawn(4, 2, 7, 6)]
            (output, lse) = compare(mesh, attend(mask=mask, score=scores.alibi(SLOPES)), rows,
                                    [place] * 3)  # fmt: skip
            assert output.placements == lse.placements == (place,)


@case("all heads share one key head")
def _one_kv_head(mesh: Any) -> None:
    rows = [drawn(2, 4, 5, 8), drawn(2, 1, 7, 8), drawn(2, 1, 7, 8)]
    compare(mesh, attend(), rows, [HEADS, WHOLE, WHOLE])


@case("replicated")
def _replicated(mesh: Any) -> None:
    compare(mesh, attend(), [drawn(2, 2, 5, 8) for _ in range(3)], [WHOLE] * 3)


@case("keys of another placement")
def _other_placement(mesh: Any) -> None:
    compare(mesh, attend(), [drawn(2, 2, 5, 8) for _ in range(3)], [HEADS, BATCH, WHOLE])


@case("a mesh of two dimensions")
def _two_dimensions(mesh: Any) -> None:
    for shape in ((1, 2), (2, 1)):
        both = init_device_mesh("cpu", shape)
        rows = [drawn(2, 4, 5, 8), drawn(2, 2, 7, 8), drawn(2, 2, 7, 6)]
        wanted = saccade.attention(*rows, mask=MASKS["batch and head in numbers"])
        parts = [distribute_tensor(each, both, [BATCH, HEADS]) for each in rows]
        found = saccade.attention(*parts, mask=MASKS["batch and head in numbers"])
        same(found, wanted, f"result on {shape}")


@case("a batch that two does not divide")
def _uneven(mesh: Any) -> None:
    compare(mesh, attend(mask=masks.key_lengths(LENGTHS[:3])), [drawn(3, 2, 5, 8)] * 3, [BATCH] * 3)


for _place in (BATCH, HEADS):

    @case(f"sinks and a bias with gradients {_place}", _place)
    def _gradients_of_captured(mesh: Any, place: Any) -> None:
        rows = [drawn(2, 4, 5, 8), drawn(2, 2, 7, 8), drawn(2, 2, 7, 8)]

        def call(query: Any, key: Any, value: Any, sinks: Any, bias: Any) -> Any:
            options = {"sinks": sinks, "score": scores.bias(bias), "return_lse": True}
            return saccade.attention(query, key, value, **options)

        tables = [drawn(4), drawn(1, 4, 5, 7)]
        compare(mesh, call, [*rows, *tables], [place] * 3 + [WHOLE, WHOLE])
        of_heads = [Shard(0), Shard(1)]
        compare(mesh, call, [*rows, *tables], [place] * 3 + of_heads)


@case("packed")
def _packed(mesh: Any) -> None:
    rows = [drawn(14, 4, 8), drawn(14, 2, 8), drawn(14, 2, 8)]

    def call(*parts: Any) -> Any:
        mask = masks.causal() & masks.function(lambda b, h, i, j: (i + h + b - j) % 3 != 0)()
        return attention_varlen(*parts, OFFSETS, mask=mask, return_lse=True)

    output, lse = compare(mesh, call, rows, [HEADS] * 3)
    assert output.placements == (HEADS,) and lse.placements == (Shard(0),)
    compare(mesh, call, rows, [WHOLE] * 3)


for _place in (BATCH, HEADS):

    @case(f"pages {_place}", _place)
    def _paged(mesh: Any, place: Any) -> None:
        pages = torch.randn(2, 9, 2, 4, 8).unbind()
        table, lens = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([3, 10]).int()
        query, sinks = torch.randn(2, 4, 3, 8), torch.randn(4)
        options = {"mask": masks.causal(), "score": scores.alibi(SLOPES.float()), "sinks": sinks}
        wanted = attention_paged(query, *pages, table, lens, return_lse=True, **options)
        kept = [
            distribute_tensor(each, mesh, [WHOLE if place == BATCH else HEADS]) for each in pages
        ]
        parts = distribute_tensor(query, mesh, [place])
        found = attention_paged(parts, *kept, table, lens, return_lse=True, **options)
        for one, other in zip(found, wanted, strict=True):
            same(one, other, "result")
        spread = distribute_tensor(table, mesh, [BATCH]), distribute_tensor(lens, mesh, [BATCH])
        same(attention_paged(parts, *kept, *spread, **options), wanted[0], "result")
        try:
            attention_paged(parts, *[distribute_tensor(each, mesh, [Shard(0)]) for each in
                                             pages], table, lens)  # fmt: skip
        except ValueError as error:
            assert "key_pages: got the placements [Shard(dim=0)]" in str(error)
        else:
            raise AssertionError("pages that lie elsewhere were taken")


for _place in (HEADS, WHOLE):

    @case(f"what is written to pages {_place}", _place)
    @torch.no_grad()
    def _written(mesh: Any, place: Any) -> None:
        rows, slots = torch.randn(2, 7, 2, 8).unbind(), torch.tensor([3, 9, -1, 0, 22, 17, 5])
        rotary = torch.rand(2, 7, 3).unbind()
        for dtype, scales in ((torch.float32, False), (torch.int8, True)):
            pages = [torch.zeros(6, 2, 4, 8, dtype=dtype) for _ in "kv"]
            beside = [torch.ones(6, 2, 4) for _ in "kv"] if scales else []

            def write(parts: Any, pages: Any, beside: Any, slots: Any, rotary: Any) -> None:
                named = dict(zip(("key_scales", "value_scales"), beside, strict=False))
                (keys, values), (key_pages, value_pages) = parts, pages
                saccade.write_kv_cache(
                    keys, values, key_pages, value_pages, slots, rotary=rotary, **named
                )

            def place_all(tensors: Any, where: Any) -> list[DTensor]:
                return [distribute_tensor(each.clone(), mesh, [where]) for each in tensors]

            for whole in (False, True):  # what all ranks have: plain, or DTensors
                spread = place_all(pages, place), place_all(beside, place)
                given = (place_all([slots], WHOLE)[0], place_all(rotary, WHOLE))
                write(place_all(rows, place), *spread, *(given if whole else (slots, rotary)))
                wanted = [each.clone() for each in pages], [each.clone() for each in beside]
                write(rows, *wanted, slots, rotary)
                for one, other in zip(
                    (*spread[0], *spread[1]), (*wanted[0], *wanted[1]), strict=True
                ):
                    same(one, other, "pages")
        refused(ValueError, "key_pages: got a plain tensor, takes [Shard(dim=1)] on key's mesh",
                lambda: write(place_all(rows, HEADS), *wanted, slots, rotary))  # fmt: skip
        refused(TypeError, "key: got Tensor beside DTensors",
                lambda: write(rows, *spread, slots, rotary))  # fmt: skip
        refused(ValueError, "key: got the placement S(0), takes Shard(1) (heads) or Replicate()",
                lambda: write(place_all(rows, Shard(0)), *spread, slots, rotary))  # fmt: skip


@case("rotary")
def _rotary(mesh: Any) -> None:
    cos, sin = torch.rand(2, 6, 3).double().unbind()

    def turned(rows: Any) -> tuple[Any]:
        return (saccade.apply_rotary(rows, (cos, sin)),)

    for place in (Shard(0), HEADS, WHOLE):
        compare(mesh, turned, [drawn(6, 4, 8)], [place])


for _place in (BATCH, HEADS):

    @case(f"linear {_place}", _place)
    def _linear(mesh: Any, place: Any) -> None:
        rows = [drawn(2, 4, 9, 8), drawn(2, 2, 9, 8), drawn(2, 2, 9, 6)]
        decay, sums = -torch.rand(2, 2, 9).double(), [drawn(2, 2, 8, 6), drawn(2, 2, 8).abs()]

        def call(query: Any, key: Any, value: Any, decay: Any, kv: Any, key_sum: Any) -> Any:
            output, state = saccade.linear_attention(
                query, key, value, decay=decay, key_lengths=torch.tensor([9, 6]),
                initial_state=saccade.LinearState(kv, key_sum), return_state=True,
            )  # fmt: skip
            return output, state.kv, state.key_sum

        compare(mesh, call, [*rows, decay, *sums], [place] * 6)
        compare(mesh, call, [*rows, decay, *sums], [place] * 3 + [WHOLE] * 3)


@case("linear packed")
def _linear_packed(mesh: Any) -> None:
    rows = [drawn(12, 4, 8), drawn(12, 2, 8), drawn(12, 2, 8), -torch.rand(2).double()]

    def call(query: Any, key: Any, value: Any, decay: Any) -> Any:
        output, state = saccade.linear_attention_varlen(
            query, key, value, OFFSETS, decay=decay, return_state=True
        )
        return output, state.kv, state.key_sum

    compare(mesh, call, rows, [HEADS] * 3 + [Shard(0)])


for _place in (BATCH, HEADS):

    @case(f"step {_place}", _place)
    @torch.no_grad()
    def _step(mesh: Any, place: Any) -> None:
        state = saccade.LinearState(drawn(2, 2, 8, 6), drawn(2, 2, 8).abs())
        spread = saccade.LinearState(
            *(distribute_tensor(each, mesh, [place]) for each in state[:2])
        )
        for _ in range(3):
            rows = [drawn(2, 4, 1, 8), drawn(2, 2, 1, 8), drawn(2, 2, 1, 6)]
            decay = -torch.rand(2).double()
            parts = [distribute_tensor(each, mesh, [place]) for each in rows]
            wanted = saccade.linear_attention_step(state, *rows, decay=decay)
            same(saccade.linear_attention_step(spread, *parts, decay=decay), wanted, "output")
        same(spread.kv, state.kv, "kv")
        same(spread.key_sum, state.key_sum, "key_sum")


for _place in (BATCH, HEADS):

    @case(f"delta {_place}", _place)
    def _delta(mesh: Any, place: Any) -> None:
        rows = [drawn(2, 2, 9, 8), drawn(2, 2, 9, 8) / 3, drawn(2, 4, 9, 6)]
        rows += [torch.rand(2, 4, 9).double(), -torch.rand(2, 4, 9, 8).double()]

        def call(query: Any, key: Any, value: Any, beta: Any, decay: Any, state: Any) -> Any:
            return saccade.gated_delta_rule(
                query, key, value, beta, decay=decay, initial_state=state, return_state=True
            )

        compare(mesh, call, [*rows, drawn(2, 4, 8, 6)], [place] * 6)
        compare(mesh, call, [*rows, drawn(2, 4, 8, 6)], [place] * 4 + [WHOLE] * 2)

    @case(f"delta step {_place}", _place)
    @torch.no_grad()
    def _delta_step(mesh: Any, place: Any) -> None:
        state = drawn(2, 4, 8, 6)
        spread = distribute_tensor(state, mesh, [place])
        for _ in range(2):
            rows = [drawn(2, 2, 1, 8), drawn(2, 2, 1, 8), drawn(2, 4, 1, 6)]
            rows.append(torch.rand(2, 4, 1).double())
            parts = [distribute_tensor(each, mesh, [place]) for each in rows]
            wanted = saccade.gated_delta_rule_step(state, *rows)
            same(saccade.gated_delta_rule_step(spread, *parts), wanted, "output")
        same(spread, state, "state")


@case("delta packed")
def _delta_packed(mesh: Any) -> None:
    rows = [drawn(12, 2, 8), drawn(12, 2, 8) / 3, drawn(12, 4, 8), torch.rand(12, 4).double()]

    def call(query: Any, key: Any, value: Any, beta: Any) -> Any:
        return saccade.gated_delta_rule_varlen(query, key, value, beta, OFFSETS, return_state=True)

    compare(mesh, call, rows, [HEADS] * 4)


for _place in (BATCH, HEADS):

    @case(f"compiled {_place}", _place)
    def _compiled(mesh: Any, place: Any) -> None:
        torch.compiler.reset()
        mask = masks.causal() & masks.key_lengths(LENGTHS[:2]) & MASKS["a table read at head // 2"]
        call = attend(mask=mask, score=scores.alibi(SLOPES))
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)

        def either(*rows: Any) -> Any:
            return compiled(*rows) if isinstance(rows[0], DTensor) else call(*rows)

        compare(mesh, either, [drawn(2, 4, 5, 8) for _ in range(3)], [place] * 3)


@case("refusals")
def _refusals(mesh: Any) -> None:
    def place(tensor: Tensor, where: Any) -> DTensor:
        return distribute_tensor(tensor, mesh, [where])

    rows = drawn(2, 4, 4, 8)
    by_rows, by_heads, by_batch = (place(rows, Shard(dim)) for dim in (2, 1, 0))
    refused(ValueError, "query: got the placement S(2), takes Shard(0) (batch), Shard(1) (heads)",
            lambda: saccade.attention(by_rows, rows, rows))  # fmt: skip
    refused(TypeError, "query: got Tensor beside DTensors",
            lambda: saccade.attention(rows, by_heads, by_heads))  # fmt: skip
    refused(ValueError, "query: got 3 heads on 2 shards",
            lambda: saccade.attention(*[place(drawn(2, 3, 4, 8), HEADS)] * 3))  # fmt: skip
    refused(NotImplementedError, "dropout_p: got 0.1 with DTensors",
            lambda: saccade.attention(by_heads, by_heads, by_heads, dropout_p=0.1))  # fmt: skip
    leaf = rows.clone().requires_grad_()
    refused(TypeError, "key: got a plain tensor that requires gradients",
            lambda: saccade.attention(by_heads, leaf, by_heads))  # fmt: skip
    other = distribute_tensor(rows, init_device_mesh("cpu", (1, WORLD)), [HEADS, HEADS])
    refused(ValueError, "key: got a DTensor of another mesh",
            lambda: saccade.attention(by_heads, other, by_heads))  # fmt: skip
    packed = place(drawn(12, 4, 8), Shard(0))
    refused(ValueError, "query: got the placement S(0), takes Shard(1) (heads) or Replicate()",
            lambda: attention_varlen(packed, packed, packed, OFFSETS))  # fmt: skip
    none = [None] * 5
    plain = [[], [], [], "", "", 0.3, 0.0, [0, 0, 0, 0], *[False] * 4, "cpu", "cpu"]
    refused(NotImplementedError, "saccade.attention.default does not have a sharding strategy",
            lambda: torch.ops.saccade.attention(*[by_heads] * 3, *none, *plain))  # fmt: skip
    mapped = torch.nn.Linear(8, 8).double()
    refused(NotImplementedError, "feature_map: got Linear, which has parameters",
            lambda: saccade.linear_attention(*[by_heads] * 3, feature_map=mapped))  # fmt: skip
    state = saccade.LinearState(drawn(2, 4, 8, 8), drawn(2, 4, 8))
    refused(ValueError, "state.kv: got a plain tensor",
            lambda: saccade.linear_attention_step(state, *[by_batch[:, :, :1]] * 3))  # fmt: skip
    index = torch.tensor([1, 0])
    refused(ValueError, "state_index: got entries of a pool",
            lambda: saccade.linear_attention_step(state, *[by_batch[:, :, :1]] * 3,
                                                  state_index=index))  # fmt: skip


def run_rank(rank: int, world: int, folder: Path) -> None:
    """Run all cases as one rank of a world."""
    found = {}
    with joined(rank, world, folder):
        mesh = init_device_mesh("cpu", (world,))
        for number, (name, check) in enumerate(CASES.items()):
            torch.manual_seed(number)
            try:
                check(mesh)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
            (folder / f"found.{rank}").write_text(json.dumps(found), encoding="utf-8")
            dist.barrier()


if __name__ == "__main__":
    imports = "torch._inductor.compile_fx", "torch.distributed.fsdp"
    sys.exit(run_worlds(run_rank, Path(sys.argv[1]), [WORLD], imports=imports))

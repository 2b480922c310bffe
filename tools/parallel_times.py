"""Time attention over ranks beside one card that computes the whole call.

Usage: python tools/parallel_times.py [--ranks N] [--load NAME ...] [--rows N] [--method NAME ...]

--help says more.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import saccade
from saccade.parallel import Plan

HELP = """\
Every rank first computes the whole call alone on its card, then its part of the call over ranks; a
ratio is the time of the whole call over that of the call over ranks, so N cards can reach N. Each
pass is timed several times in turns, from a barrier on; the slowest rank counts, and of the turns
the median. A line is printed as soon as its numbers are there, the table in the end.
"""
EPILOG = """\
"auto" is what the plan's cost model chooses among the methods: it is named, and not timed twice.
"difference" is the largest between an output, or a gradient, of both ways: it must be what two
roundings of the dtype make of numbers of that size.

On GPUs messages go by NCCL, one process a card, with NVLink multicast off (NCCL_NVLS_ENABLE=0), as
some hosts share it; on CPUs by gloo. The program starts its ranks itself, or is one of torchrun's.

  parallel_times.py --json times.json                     causal and documents, 64k rows, 2 cards
  parallel_times.py --load causal --rows 262144 --rounds 3
  parallel_times.py --once                                each call once: fills the kernel cache
  parallel_times.py --ranks 2 --rows 256 --heads 4 2 --dim 16 --document 64     on a laptop
  torchrun --nproc-per-node 8 tools/parallel_times.py --method gather ulysses
"""
METHODS = ("gather", "ulysses", "ring")
LOADS = ("causal", "documents")
PASSES = ("forward", "backward")
LEAST_SECONDS = 0.1  # that a turn takes: short calls are repeated
COLUMNS = ("load", "rows", "pass", "method", "one ms", "ranks ms", "ratio", "TFLOP/s", "difference")


class Options(NamedTuple):
    """What is timed."""

    ranks: int
    loads: list[str]
    rows: int
    document: int
    methods: list[str]
    heads: list[int]
    dim: int
    rounds: int
    once: bool
    priority: bool
    json: Path | None


def parsed(arguments: list[str]) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cards = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=cards if cards > 1 else 2)
    parser.add_argument("--load", dest="loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rows", type=int, default=65536, help="of all ranks")
    parser.add_argument("--document", type=int, default=8192, help="rows of each document")
    parser.add_argument(
        "--method", dest="methods", nargs="+", choices=METHODS, default=list(METHODS)
    )
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KV"))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="time nothing")
    parser.add_argument(
        "--priority", action="store_true", help="NCCL's stream goes before kernels that wait"
    )
    parser.add_argument("--json", type=Path, help="append the lines of the table to this file")
    return Options(**vars(parser.parse_args(arguments)))


# ---- calls ---------------------------------------------------------------------------------------


class Timed(NamedTuple):
    """A call, what its gradients are of, and the gradient of its output."""

    run: Callable[[], Tensor]
    leaves: list[Tensor]
    given: Tensor

    def passes(self) -> dict[str, Callable[[], Any]]:
        """Each pass by name."""
        output = self.run()

        def forward() -> Tensor:
            with torch.no_grad():
                return self.run()

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(output, self.leaves, self.given, retain_graph=True)

        return {"forward": forward, "backward": backward}


def offsets_of(options: Options) -> Tensor:
    """Documents laid end to end."""
    starts = range(0, options.rows, options.document)
    return torch.tensor([*starts, options.rows], dtype=torch.int32)


def whole_rows(load: str, options: Options, device: torch.device) -> list[Tensor]:
    """Query, key and value of all rows, and the gradient of the output, on every rank alike."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query_heads, kv_heads = options.heads
    found = []
    for heads in (query_heads, kv_heads, kv_heads, query_heads):
        packed = load == "documents"
        shape = (options.rows, heads) if packed else (1, heads, options.rows)
        found.append(
            torch.randn(*shape, options.dim, generator=generator, device=device, dtype=dtype)
        )
    return found


def on_one(load: str, options: Options, rows: list[Tensor]) -> Timed:
    """The whole call."""
    leaves = [each.clone().requires_grad_() for each in rows[:3]]
    if load == "causal":
        return Timed(lambda: saccade.attention(*leaves, causal=True), leaves, rows[3])
    offsets = offsets_of(options).to(rows[0].device)
    size = int(offsets.diff().max())

    def run() -> Tensor:
        query, key, value = leaves
        return saccade.attention_varlen(
            query, key, value, offsets, max_seqlen_q=size, max_seqlen_k=size, causal=True
        )

    return Timed(run, leaves, rows[3])


def plan_of(load: str, options: Options, method: str) -> Plan:
    """The plan of a call over all ranks."""
    return saccade.parallel.plan(
        None, options.rows if load == "causal" else offsets_of(options), dist.group.WORLD,
        causal=True, method=method, query_heads=options.heads[0], kv_heads=options.heads[1],
        head_dim=options.dim,
    )  # fmt: skip


def over_ranks(load: str, plan: Plan, rows: list[Tensor]) -> Timed:
    """This rank's part of the call over ranks."""
    dim = 2 if load == "causal" else 0
    leaves = [plan.shard(each, dim).requires_grad_() for each in rows[:3]]
    by = saccade.parallel
    call: Any = by.attention if load == "causal" else by.attention_varlen
    return Timed(lambda: call(*leaves, plan=plan), leaves, plan.shard(rows[3], dim))


def difference(load: str, plan: Plan, one: Timed, ranks: Timed, which: str) -> float:
    """The largest difference between the results of a pass, over all ranks."""
    dim = 2 if load == "causal" else 0
    results = [timed.passes()[which]() for timed in (one, ranks)]
    if which == "forward":
        results = [(each,) for each in results]
    found = torch.stack([
        (plan.shard(whole, dim).float() - part.float()).abs().max()
        for whole, part in zip(*results, strict=True)
    ]).max()  # fmt: skip
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def flops(load: str, options: Options, which: str) -> float:
    """Operations of a pass over the visible pairs."""
    sizes = [options.rows] if load == "causal" else offsets_of(options).diff().tolist()
    pairs = sum(size * (size + 1) / 2 for size in sizes)
    return 4 * pairs * options.heads[0] * options.dim * (1 if which == "forward" else 2.5)


# ---- clocks --------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """The time of a call on the slowest rank, of several in a row after a barrier."""
    ready = torch.zeros(1, device=device)
    dist.all_reduce(ready)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end)
    else:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        taken = (time.perf_counter() - start) * 1e3
    slowest = torch.tensor([taken / repeats], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def timed(
    load: str, options: Options, device: torch.device, report: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The lines of a load's table."""
    rows = whole_rows(load, options, device)
    one = on_one(load, options, rows)
    chosen = plan_of(load, options, "auto").method
    passes = {"one card": one.passes()}
    calls: dict[str, tuple[Plan, Timed]] = {}
    for method in options.methods:
        plan = plan_of(load, options, method)
        calls[method] = plan, over_ranks(load, plan, rows)
        passes[method] = calls[method][1].passes()
    for name, works in passes.items():
        for which, work in works.items():
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            report(f"{load} {which} {name}: first call {time.perf_counter() - start:.1f} s")
    if options.once:
        return
    for which in PASSES:
        taken: dict[str, list[float]] = {name: [] for name in passes}
        repeats = {}
        for name, works in passes.items():
            once = milliseconds(works[which], 1, device)
            repeats[name] = min(50, max(1, round(LEAST_SECONDS * 1e3 / once)))
        for number in range(options.rounds):
            for name in list(passes)[:: 1 if number % 2 else -1]:
                taken[name].append(milliseconds(passes[name][which], repeats[name], device))
        alone = statistics.median(taken["one card"])
        for method in options.methods:
            together = statistics.median(taken[method])
            row = {
                "load": load, "rows": options.rows, "ranks": options.ranks, "pass": which,
                "method": method, "auto": method == chosen, "one_ms": alone, "ranks_ms": together,
                "ratio": alone / together,
                "tflops": flops(load, options, which) / together / options.ranks / 1e9,
                "difference": difference(load, calls[method][0], one, calls[method][1], which),
                "heads": options.heads, "head_dim": options.dim, "rounds": options.rounds,
                "dtype": str(rows[0].dtype).removeprefix("torch."), "priority": options.priority,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
                "torch": torch.__version__,
            }  # fmt: skip
            report(" ".join(cells(row)))
            yield row


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    method = row["method"] + (" (auto)" if row["auto"] else "")
    numbers = [f"{row['one_ms']:.2f}", f"{row['ranks_ms']:.2f}", f"{row['ratio']:.2f}"]
    speed = f"{row['tflops']:.3g}"
    return [row["load"], f"{row['rows']:,}", row["pass"], method, *numbers, speed,
            f"{row['difference']:.1e}"]  # fmt: skip


# ---- ranks ---------------------------------------------------------------------------------------


def run_rank(rank: int, options: Options) -> None:
    """Be one rank."""
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpus else None
    more: dict[str, Any] = {}
    if device is None:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
        how = dist.ProcessGroupNCCL.Options()
        how.is_high_priority_stream = options.priority
        more = {"pg_options": how}
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", rank=rank, world_size=options.ranks, **more
    )

    def report(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    rows: list[dict[str, Any]] = []
    for load in options.loads:
        rows += timed(load, options, device, report)
    if rank == 0 and rows:
        print_table(rows)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    dist.destroy_process_group()


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what was measured as Markdown."""
    print(f"\n{rows[0]['ranks']} ranks, {rows[0]['device']}, torch {rows[0]['torch']}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|---:|---|---|{'---:|' * (len(COLUMNS) - 4)}")
    for row in rows:
        print(f"| {' | '.join(cells(row))} |")


def main(arguments: list[str]) -> None:
    """Start the ranks, or be one that torchrun has started."""
    options = parsed(arguments)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # before any rank begins
    if "RANK" in os.environ:
        options = options._replace(ranks=int(os.environ["WORLD_SIZE"]))
        run_rank(int(os.environ["RANK"]), options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spawn(run_rank, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main(sys.argv[1:])

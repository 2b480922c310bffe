"""Print what the cost model expects of attention over ranks, as tables for docs/parallel.md.

Usage: python tools/parallel_costs.py

The load is that of the published figures beside it: causal attention in bfloat16, 64 query heads
and 8 kv heads of 128 channels, 8,192 rows for each GPU. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from saccade import masks
from saccade.parallel import Plan, plan

ROWS = 8192  # for each GPU
RANKS = (8, 64, 256, 1024)
HEADS: Any = {"query_heads": 64, "kv_heads": 8, "head_dim": 128}
METHODS = ("gather", "ulysses", "ring")
MASKS = {"causal": masks.causal(), "a window of 4,096": masks.window(4096)}


def speed(found: Plan, method: str, backward: bool) -> str:
    """TFLOP/s of each GPU, visible pairs alone counted; "-" where the method cannot serve."""
    cost = found.costs[method]
    if cost.refused:
        return "-"
    flops = 2 * float(found.work.sum()) / found.ranks * (found.sizes.head_dim * 2)
    seconds = cost.backward if backward else cost.forward
    return f"{flops * (2.5 if backward else 1) / seconds / 1e12:.0f}"


def rows() -> Iterator[str]:
    """The lines of the table."""
    yield (
        "| mask | GPUs | rows | keys a GPU receives, of all | method | "
        + " | ".join(f"{method}, forward / backward" for method in METHODS)
        + " |"
    )
    yield "|---|---:|---:|---:|---|" + "---:|" * len(METHODS)
    for name, mask in MASKS.items():
        for ranks in RANKS:
            found = plan(mask, ROWS * ranks, ranks, **HEADS)
            others = (found.sent.sum(1) - found.sent.diagonal()).mean()
            speeds = [
                " / ".join(speed(found, method, backward) for backward in (False, True))
                if not found.costs[method].refused
                else "refused"
                for method in METHODS
            ]
            yield (
                f"| {name} | {ranks:,} | {found.length:,} | {float(others) / found.length:.1%} | "
                f"{found.method} | {' | '.join(speeds)} |"
            )


def main() -> None:
    """Print the table."""
    for line in rows():
        print(line)


if __name__ == "__main__":
    main()

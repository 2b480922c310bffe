"""What a plan shows: tables of ranks and of methods in the terminal, and a picture of its tiles."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from saccade.parallel.work import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.table import Table

MOST_RANKS = 16  # in a table; of more the first, the last and the extreme ones
MOST_RANGES = 3  # of rows, written out
MOST_TILES = 256  # along a side of the picture
WIDTH = 100


def text(plan: Any) -> str:
    """The tables as text."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(tables(plan))
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def tables(plan: Any) -> Group:
    """What each rank holds and computes, and what each method takes."""
    from rich.console import Group

    return Group(_ranks(plan), _methods(plan), _assumed(plan))


def _ranks(plan: Any) -> Table:
    from rich.table import Table

    rows = f"{plan.length:,} rows"
    if plan.cu_seqlens is not None:
        rows += f" of {len(plan.cu_seqlens) - 1:,} sequences"
    title = f"{rows} on {plan.ranks:,} ranks, imbalance {plan.imbalance:.1%}"
    table = Table(title=title, title_justify="left")
    for name in ("rank", "rows", "which", "pairs", "of the mean", "keys of others"):
        table.add_column(name, justify="left" if name == "which" else "right")
    mean, sent = float(plan.work.mean()), plan.sent
    others = sent.sum(1) - sent.diagonal()
    for rank in _shown(plan):
        work = float(plan.work[rank])
        table.add_row(
            str(rank), f"{len(plan.rows_of(rank)):,}", _ranges(plan, rank), f"{work:.3g}",
            f"{work / mean:.1%}" if mean else "-", f"{int(others[rank]):,}",
        )  # fmt: skip
    return table


def _shown(plan: Any) -> list[int]:
    """The ranks of a table: all, or the first, the last, and those with most and least work."""
    if plan.ranks <= MOST_RANKS:
        return list(range(plan.ranks))
    half = MOST_RANKS // 2 - 1
    extreme = {int(plan.work.argmax()), int(plan.work.argmin())}
    return sorted({*range(half), *range(plan.ranks - half, plan.ranks), *extreme})


def _ranges(plan: Any, rank: int) -> str:
    """The rows of a rank as ranges."""
    edges = plan.dealt.edges
    found: list[list[int]] = []
    for chunk in (plan.dealt.owners == rank).nonzero().flatten().tolist():
        first, end = int(edges[chunk]), int(edges[chunk + 1])
        if found and found[-1][1] == first:
            found[-1][1] = end
        elif end > first:
            found.append([first, end])
    said = [f"{first:,} to {end - 1:,}" for first, end in found[:MOST_RANGES]]
    more = len(found) - MOST_RANGES
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def _methods(plan: Any) -> Table:
    from rich.table import Table

    chosen = "named" if plan.named_method else "chosen by the cost model"
    table = Table(title=f'method "{plan.method}", {chosen}', title_justify="left")
    for name in ("method", "received", "keys held", "compute", "messages", "forward", "backward"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for cost in plan.costs.values():
        if cost.refused:
            table.add_row(cost.method, f"refused: {cost.refused}")
            continue
        seconds = (cost.compute, cost.communication, cost.forward, cost.backward)
        table.add_row(cost.method, _bytes(cost.received), f"{cost.held:,}", *map(_seconds, seconds))
    return table


def _assumed(plan: Any) -> str:
    machine, sizes = plan.machine, plan.sizes
    return (
        f"assumed: {sizes.query_heads}/{sizes.kv_heads} heads of {sizes.head_dim} channels, "
        f"{sizes.itemsize} bytes a number; {machine.flops / 1e12:g} TFLOP/s, "
        f"{machine.link_bytes / 1e9:g} GB/s among {machine.ranks_per_host} ranks of a host, "
        f"{machine.network_bytes / 1e9:g} GB/s between hosts, {machine.latency * 1e6:g} µs a "
        "message. By the slowest rank."
    )


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} B"


def _seconds(number: float) -> str:
    return f"{number * 1e3:.3g} ms" if number >= 1e-3 else f"{number * 1e6:.3g} µs"


def picture(plan: Any, path: Any) -> Figure:
    """Which rank computes which tiles of pairs, and pairs and keys of each rank."""
    # The object interface: it leaves alone whatever the caller does with pyplot.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    tiles, work, keys = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    edges = torch.arange(MOST_TILES + 1) * plan.length // MOST_TILES
    seen = needs(plan.whole_call, edges, edges)
    chunk = torch.searchsorted(plan.dealt.edges[1:], edges[:-1], right=True)
    owners = plan.dealt.owners[chunk.clamp_max(len(plan.dealt.owners) - 1)]
    colours = colormaps["turbo"](owners.double().numpy() / max(plan.ranks - 1, 1))[:, None]
    shown = colours.repeat(MOST_TILES, 1)
    shown[~seen.numpy()] = 1.0  # hidden tiles are white
    size = plan.length or 1
    tiles.imshow(shown, extent=(0, size, size, 0), aspect="equal", interpolation="nearest")
    tiles.set(title=f'{plan.ranks} ranks, "{plan.method}"', xlabel="key row", ylabel="query row")
    numbers = torch.arange(plan.ranks)
    bars = colormaps["turbo"](numbers.double().numpy() / max(plan.ranks - 1, 1))
    sent = plan.sent
    for axes, values, title in (
        (work, plan.work, f"pairs, imbalance {plan.imbalance:.1%}"),
        (keys, sent.sum(1) - sent.diagonal(), "keys of others"),
    ):
        axes.barh(numbers.tolist(), values.tolist(), color=bars)
        axes.invert_yaxis()
        axes.set(title=title, ylabel="rank")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure

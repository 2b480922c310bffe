"""Listing: the cases that can be measured on a device, and who can take part."""

from __future__ import annotations

import torch

from saccade.bench import measure, selection, table
from saccade.bench.cases import CASES
from saccade.bench.peers import Peer, all_peers
from saccade.bench.session import console

# Dense, over pages, and linear attention: who can take part in one of them can take part.
EASY = {
    "cpu": ("cpu-decode-fp32-d128-16k", "tiny-causal-fp32-d16-48", "tiny-linear-fp32-d16-48"),
    "cuda": (
        "gpu-causal-bf16-d64-512", "gpu-pages-h32x8-bf16-d128-1x8k", "gpu-linear-bf16-d64-8x8k",
    ),
}  # fmt: skip


def show_cases(where: torch.device) -> None:
    """Print the named cases for a device."""
    console().print(table.cases_table(selection.listed_cases(where.type)))


def show_peers(where: torch.device) -> None:
    """Print everybody, and why they cannot take part here, judged by an easy case of each kind."""
    terminal = console()
    with terminal.status("asking ..."):
        answers = [(peer, reason_against(peer, where)) for peer in all_peers()]
    terminal.print(table.peers_table(answers))


def reason_against(peer: Peer, where: torch.device) -> str | None:
    """Why somebody cannot take part in any easy case, or None."""
    reasons = []
    for name in EASY[where.type]:
        try:
            call = peer.prepare(CASES[name], where)
        except Exception as error:  # whatever a package raises, the others are to be listed
            call = f"fails: {measure.first_line(error)}"
        if not isinstance(call, str):
            return None
        reasons.append(call)
    return reasons[0]

"""Peers: everybody who can be timed, each with a reason where it cannot."""

from saccade.bench.peers import ours, packages, paged, pytorch, rates
from saccade.bench.peers.peer import Call as Call
from saccade.bench.peers.peer import Peer as Peer
from saccade.bench.peers.peer import from_layout as from_layout
from saccade.bench.peers.peer import to_layout as to_layout


def all_peers() -> list[Peer]:
    """Everybody, in the order of the tables' columns."""
    modules = (ours, pytorch, packages, rates, paged)
    return [peer for module in modules for peer in module.peers()]

"""The clock for a GPU: what a graph reads outlives its capture."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from saccade.bench.timing import GpuClock, Runnable


class NoStream:
    def wait_stream(self, other):
        pass


class NoGraph:
    def replay(self):
        pass


@pytest.fixture
def no_gpu(monkeypatch):
    """Just enough of torch.cuda to capture nothing."""
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def candidate(device):
    """A candidate that alone holds what it reads, and how to see whether that is still there."""
    read = torch.ones(1 << 22, device=device)
    return Runnable(lambda: read + 1), weakref.ref(read)


@pytest.mark.usefixtures("no_gpu")
def test_what_a_graph_reads_lives_as_long_as_its_replay():
    given, read = candidate("cpu")
    replay = GpuClock(torch.device("cpu"), graph=True).ready(given)
    del given
    gc.collect()
    assert read() is not None
    del replay
    gc.collect()
    assert read() is None


@pytest.mark.gpu
def test_a_replay_reads_what_it_captured_after_others_were_captured():
    device = torch.device("cuda")
    clock = GpuClock(device, graph=True)
    replays = [clock.ready(candidate(device)[0]) for _ in range(3)]
    torch.cuda.empty_cache()
    for replay in replays:
        replay.run()
    torch.cuda.synchronize()

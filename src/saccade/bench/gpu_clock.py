"""GPU clock: device events around calls, with graph replay and a cold L2 cache where asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.bench.passes import Runnable

FLUSH_BYTES = 2**28  # several times the largest L2 cache
HEAD_START = 20_000  # cycles: in that time the host puts a graph's launch behind the event


class GpuClock:
    """The clock for a GPU, where a call returns long before it is over.

    Args:
        graph: capture each candidate once and time its replays, without the host's part.
        cold: fill the L2 cache with other things before every call, which is then timed by itself.
    """

    def __init__(self, device: torch.device, *, graph: bool = False, cold: bool = False) -> None:
        self.graph = graph
        self.flush = None
        if cold:
            self.flush = torch.zeros(FLUSH_BYTES // 4, device=device)

    def ready(self, candidate: Runnable) -> Runnable:
        """Compile by calling; capture where replays are asked for."""
        with candidate.around():
            for _ in range(3):
                candidate.run()
            torch.cuda.synchronize()
            return self._captured(candidate) if self.graph else candidate

    def _captured(self, candidate: Runnable) -> Runnable:
        # Capture wants a warm-up on the stream that it uses; torch.cuda.graph takes care of order.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            candidate.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = candidate.run()
        # A graph holds addresses: what it reads and writes must live as long as it is replayed.
        kept = candidate, output

        def replay() -> object:
            graph.replay()
            return kept

        return Runnable(replay)

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The time of one call between events on the device."""
        turns = [(run, repeats)] if self.flush is None else [(run, 1)] * repeats
        events = [_timed(turn, count, self.flush) for turn, count in turns]
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) / repeats / 1e3


def _timed(
    run: Callable[[], object], repeats: int, flush: Tensor | None
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if flush is not None:
        flush.sum()  # reads: what is written would be written back while the call is timed
        torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    return start, end

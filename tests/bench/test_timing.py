"""Candidates take turns in changing order, and what is reported of them is the median."""

import gc
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch

from saccade.bench.timing import GpuClock, Runnable, Timing, TimingPlan, WallClock, orders, rotate


class CountingClock(WallClock):
    """A clock by which every call of a candidate takes a time that the test has set."""

    def __init__(self, seconds):
        self.times = seconds
        self.turns = []

    def seconds(self, run, repeats):
        name = run()
        self.turns.append((name, repeats))
        return self.times[name]


def named(*names):
    return {name: Runnable(lambda name=name: name) for name in names}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_orders_change_every_round_and_cover_all(count):
    names = list("abcde")[:count]
    rounds = list(itertools.islice(orders(names), 20))
    assert all(sorted(order) == names for order in rounds)
    if count > 1:
        assert all(one != two for one, two in itertools.pairwise(rounds))
        assert {order[0] for order in rounds} == set(names)


def test_timing_sums_up_samples():
    timing = Timing.of([0.005, 0.001, 0.003])
    assert timing == Timing(median_ms=3.0, min_ms=1.0, max_ms=5.0, rounds=3)
    assert Timing.of([0.001, 0.003]).median_ms == 2.0


def test_short_calls_are_repeated_until_a_sample_is_long_enough():
    clock = CountingClock({"short": 0.001, "long": 0.1})
    plan = TimingPlan(rounds=4, sample_seconds=0.025, warm_seconds=0.0)
    timings = rotate(named("short", "long"), clock, plan)
    assert {name: timing.rounds for name, timing in timings.items()} == {"short": 4, "long": 4}
    assert timings["short"].median_ms == pytest.approx(1.0)
    warm_up, timed = clock.turns[:2], clock.turns[2:]
    assert warm_up == [("short", 1), ("long", 1)]
    assert set(timed) == {("short", 25), ("long", 1)}


def test_a_rotation_beyond_its_limit_ends_after_three_rounds():
    clock = CountingClock({"a": 1.0, "b": 2.0})
    timings = rotate(named("a", "b"), clock, TimingPlan(warm_seconds=0.0, limit_seconds=0.0))
    assert timings["a"].rounds == timings["b"].rounds == 3


def test_one_turn_without_a_warm_up():
    clock = CountingClock({"a": 1.0})
    rotate(named("a"), clock, TimingPlan(rounds=1, sample_seconds=0.0))
    assert clock.turns == [("a", 1)]


def test_every_turn_is_heard_of():
    heard = []
    clock = CountingClock({"a": 1.0, "b": 2.0})
    rotate(named("a", "b"), clock, TimingPlan(rounds=2, warm_seconds=0.0), heard.append)
    assert sorted(heard) == ["a", "a", "b", "b"]


def test_the_wall_clock_measures():
    seconds = WallClock().seconds(lambda: sum(range(1000)), 3)
    assert 0 < seconds < 1


# ---- the clock for a GPU: what a graph reads outlives its capture ----


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

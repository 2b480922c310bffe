"""The scheduler without a model: no request starves, no page is lost; the fastest threads."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import OutOfPagesError, PagedCache
from saccade.serving.decoding import Sampling
from saccade.serving.request import Limits, Request, RequestState
from saccade.serving.scheduler import Scheduler, choose_threads

SIZES: dict[str, Any] = {"kv_heads": 1, "head_dim": 1}


def make(num_pages=16, page_size=4, host_pages=0, windows=(None,), **options):
    cache = PagedCache(num_pages, page_size, host_pages=host_pages, windows=windows, **SIZES)
    options = {
        "max_batch_tokens": 8, "max_sequences": 4, "preemption": "recompute", **options
    }  # fmt: skip
    return Scheduler(cache, **options), cache


def request(number, prompt, new_tokens=4, followers=0):
    tokens = prompt if isinstance(prompt, list) else [number] * prompt
    made, *others = (
        Request(number + n, tokens, Sampling(), Limits(new_tokens)) for n in range(1 + followers)
    )
    made.followers = others
    return made


def carry_out(scheduler, plan):
    """What an engine does with a plan; the requests that are done now."""
    scheduler.commit(plan.chunks)
    done = []
    for chunk in plan.chunks:
        if chunk.draws:
            everyone = [chunk.request, *chunk.request.followers]
            scheduler.fork(chunk.request)
            for each in everyone:
                if each.accept(7) is not None:
                    scheduler.remove(each)
                    each.finish("length")
                    done.append(each)
    return done


def chunks_of(plan):
    return [(chunk.request.number, chunk.start, chunk.stop) for chunk in plan.chunks]


def test_prompts_are_read_in_chunks_beside_requests_that_write():
    scheduler, _ = make()
    scheduler.add(request(0, 3))
    scheduler.add(request(1, 12))
    plans = []
    for _ in range(3):
        plans.append(scheduler.plan())
        carry_out(scheduler, plans[-1])
    assert [chunks_of(plan) for plan in plans] == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 4), (1, 5, 12)],
        [(0, 4, 5), (1, 12, 13)],
    ]


def test_equal_beginnings_are_found_once_they_are_written():
    scheduler, _ = make()
    scheduler.add(request(0, [1, 2, 3, 4, 5, 6]))
    carry_out(scheduler, scheduler.plan())
    later = request(1, [1, 2, 3, 4, 9])
    scheduler.add(later)
    assert chunks_of(scheduler.plan()) == [(0, 6, 7), (1, 4, 5)]
    assert later.computed_from_cache == 4


@pytest.mark.parametrize(
    ("host_pages", "state"), [(8, RequestState.SWAPPED), (0, RequestState.WAITING)]
)
def test_the_youngest_gives_way(host_pages, state):
    scheduler, cache = make(num_pages=5, host_pages=host_pages, preemption="swap")
    old, young = request(0, 7, 9), request(1, 7, 9)
    scheduler.add(old)
    carry_out(scheduler, scheduler.plan())
    scheduler.add(young)
    while young.preemptions == 0:
        carry_out(scheduler, scheduler.plan())
    assert (old.state, young.state, scheduler.running) == (RequestState.RUNNING, state, [old])
    assert (young.recomputed > 0) == (state is RequestState.WAITING)
    cache.check()
    while not scheduler.idle:
        carry_out(scheduler, scheduler.plan())
    assert len(old.generated) == len(young.generated) == 9
    assert cache.statistics().used == cache.statistics().host_used == 0


def test_samples_share_the_prompts_pages():
    scheduler, cache = make()
    leader = request(0, 6, 2, followers=2)
    scheduler.add(leader)
    carry_out(scheduler, scheduler.plan())
    assert len(scheduler.running) == 3 and cache.statistics().used == 2
    carry_out(scheduler, scheduler.plan())
    assert cache.statistics().copied == 2  # of three that write into the last page, one keeps it
    assert scheduler.idle and cache.statistics().used == 0


def test_samples_go_on_without_their_leader():
    scheduler, _ = make()
    leader = request(0, 6, 2, followers=2)
    followers = [*leader.followers]
    scheduler.add(leader)
    scheduler.plan()
    scheduler.remove(leader)
    while not scheduler.idle:
        carry_out(scheduler, scheduler.plan())
    assert [len(each.generated) for each in followers] == [2, 2]


def test_one_request_alone_without_pages_is_an_error_that_loses_nothing(monkeypatch):
    scheduler, cache = make()
    alone = request(0, 6)
    scheduler.add(alone)

    def refuse(tokens, **options):
        raise OutOfPagesError(2, 0, "device")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "grow", refuse)
        with pytest.raises(OutOfPagesError):
            scheduler.plan()
    cache.check()
    assert chunks_of(scheduler.plan()) == [(0, 0, 6)]


REQUESTS = st.tuples(
    st.integers(1, 20),  # tokens of the prompt
    st.integers(1, 12),  # new tokens
    st.integers(0, 2),  # followers
    st.integers(0, 6),  # steps until it arrives
    st.sampled_from([None] * 5 + [1, 4]),  # steps until it is cancelled
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(REQUESTS, min_size=1, max_size=7),
    st.sampled_from(["swap", "recompute"]),
    st.integers(0, 8),
    st.integers(3, 10),
    st.sampled_from([(None,), (3,), (None, 3)]),
    st.integers(0, 3),
    st.booleans(),
)
def test_everyone_is_served_whatever_happens(
    asked, preemption, host_pages, rows, windows, failing, alike
):
    scheduler, cache = make(
        num_pages=8, host_pages=host_pages, max_batch_tokens=rows, max_sequences=3,
        preemption=preemption, windows=windows,
    )  # fmt: skip
    arrivals, cancellations, everyone = Counter(), Counter(), []
    late = []
    for number, (prompt, new, followers, arrives, cancelled) in enumerate(asked):
        tokens = [5] * prompt if alike else [number] * prompt
        made = request(10 * number, tokens, new, followers)
        late.append((arrives, made))
        everyone += [(made, new), *((follower, new) for follower in made.followers)]
        if cancelled is not None:
            cancellations[number] = arrives + cancelled
    cancelled_requests = set()
    for turn in range(600):
        for arrives, made in late:
            if arrives == turn:
                scheduler.add(made)
        for number, when in cancellations.items():
            made = late[number][1]
            if when == turn and made.state is not RequestState.DONE:
                scheduler.remove(made)
                made.finish("cancelled")
                cancelled_requests.add(made)
        plan = scheduler.plan()
        cache.check()
        if plan is None:
            if turn > 12:
                break
            continue
        check_plan(scheduler, plan, rows)
        if failing and turn % 4 < failing and turn < 100:
            for unfinished in scheduler.recover():
                unfinished.restart()
        else:
            carry_out(scheduler, plan)
        cache.check()
    assert scheduler.idle
    assert all(
        len(made.generated) == new for made, new in everyone if made not in cancelled_requests
    )
    assert cache.statistics().used == cache.statistics().host_used == 0
    assert arrivals == Counter()


def check_plan(scheduler, plan, rows):
    """Bounds are kept, and the oldest that runs takes part."""
    assert sum(stop - start for _, start, stop in chunks_of(plan)) == len(plan.slots[0]) <= rows
    assert all(start < stop for _, start, stop in chunks_of(plan))
    assert sum(each.width for each in scheduler.running) <= 3
    assert scheduler.running[0] in [chunk.request for chunk in plan.chunks]
    numbers = [each.number for each in scheduler.running]
    assert numbers == sorted(numbers)


@pytest.fixture
def four() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fastest", [1, 2, 4])
def test_the_fastest_is_taken(four: None, fastest: int) -> None:
    tried: list[int] = []

    def work() -> None:
        tried.append(torch.get_num_threads())
        time.sleep(0.001 if tried[-1] == fastest else 0.02)

    assert choose_threads(work) == torch.get_num_threads() == fastest
    assert set(tried) == {1, 2, 4}

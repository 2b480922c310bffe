"""PagedCache: kinds of layers with pages of their own, one set of sequences, all or nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import saccade
from saccade import masks
from saccade.kv_cache.sequences import ended, enter, trimmed
from saccade.testing import poisoned

PAGE_SIZE = 3
WINDOWS = [None, 4, None, 1, 4]
PAGES = {None: 14, 4: 9, 1: 8}
HOST = {None: 8, 4: 6, 1: 6}


def make(**changes: Any) -> saccade.PagedCache:
    options: dict[str, Any] = {"kv_heads": 1, "head_dim": 1, "host_pages": HOST, **changes}
    with poisoned():
        return saccade.PagedCache(PAGES, PAGE_SIZE, windows=WINDOWS, **options)


def snapshot(cache: saccade.PagedCache) -> Any:
    kept = [
        (b.sequences, b.pool.holders, b.pool.free.pages(), [*b.pool.idle], b.host_pool.holders)
        for b in cache.groups
    ]
    return copy.deepcopy(kept)


def write(cache: saccade.PagedCache, slots: Any, tokens: list[int]) -> None:
    for layer in range(len(WINDOWS)):
        rows = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1) + layer / 8
        cache.write(layer, rows, -rows, slots)


def test_layers_of_a_kind_share_a_cache() -> None:
    cache = make()
    assert cache.windows == (None, 4, 1)
    assert [tuple(place) for place in cache.addresses] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]
    assert [len(each.memory.layers) for each in cache.groups] == [2, 2, 1]
    assert cache.available() == [14, 9, 8]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"windows": []}, "windows: got none"),
        ({"windows": [None, -1]}, "windows: got -1"),
        ({"windows": [None, 7], "num_pages": {None: 3}}, "num_pages: .* for the window 7"),
        ({"windows": [2], "host_pages": {None: 3}}, "host_pages: .* for the window 2"),
    ],
)
def test_arguments(arguments: dict[str, Any], complaint: str) -> None:
    pages = arguments.pop("num_pages", 4)
    with pytest.raises(ValueError, match=complaint):
        saccade.PagedCache(pages, kv_heads=1, head_dim=2, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({}, TypeError, "num_layers: got None, takes a whole number, or windows"),
        ({"num_layers": 2, "windows": [None, 3]}, TypeError, "windows: got it beside"),
        ({"window": 2, "windows": [None, 3]}, TypeError, "windows: got it beside"),
        ({"windows": 3}, TypeError, "windows: got int, takes a window or None for each layer"),
        ({"num_layers": 0}, ValueError, "num_layers: got 0"),
        ({"num_layers": 1, "window": -1}, ValueError, "window: got -1"),
    ],
)
def test_layers_are_counted_or_listed(
    arguments: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        saccade.PagedCache(4, kv_heads=1, head_dim=2, **arguments)


def test_lists_come_where_windows_are_listed_only() -> None:
    one = saccade.PagedCache(4, num_layers=2, window=3, kv_heads=1, head_dim=2)
    listed = saccade.PagedCache(4, windows=[3, 3], kv_heads=1, head_dim=2)
    assert one.windows == listed.windows == (3,)
    assert one.append({one.allocate(): 2}).tolist() == [0, 1]
    [slots] = listed.append({listed.allocate(): 2})
    assert slots.tolist() == [0, 1]
    assert one.available() == 3 and listed.available() == [3]
    assert torch.equal(one.tables([0])[0], listed.tables([0])[0][0])


def test_sliding_layers_give_pages_back_and_attend_as_if_they_had_not() -> None:
    windows, length = [None, 5], 40
    cache = saccade.PagedCache(
        {None: 10, 5: 4}, 4, windows=windows, kv_heads=2, head_dim=8, prefix_caching=False
    )
    sequence, generator = cache.allocate(), torch.Generator().manual_seed(0)
    rows = [torch.randn(length, 2, 8, generator=generator) for _ in range(4)]
    query = torch.randn(length, 4, 8, generator=generator)
    for at in range(length):  # more pages than the sliding kind has, one token at a time
        slots = cache.append({sequence: 1})
        for layer, window in enumerate(windows):
            key, value = rows[2 * layer], rows[2 * layer + 1]
            cache.write(layer, key[at : at + 1], value[at : at + 1], slots)
            new = query[at][None, :, None]
            found = cache.attend(layer, new, [sequence], mask=masks.causal())
            wanted = saccade.attention(
                new, *(each[: at + 1].transpose(0, 1)[None] for each in (key, value)),
                mask=masks.causal() if window is None else masks.window(window),
            )  # fmt: skip
            torch.testing.assert_close(found, wanted)
        cache.check()
    assert cache.statistics().released == 8
    assert cache.sequence_statistics(sequence).pages == 10 + 2
    cache.free(sequence)
    assert cache.statistics().used == 0


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_see_released_tokens_are_refused(packed: bool) -> None:
    """What stands in a table for a released page holds other tokens."""
    cache = saccade.PagedCache(16, 1, num_layers=1, window=3, kv_heads=1, head_dim=8)
    sequence, other = cache.allocate(), cache.allocate()

    def attend(rows: int) -> torch.Tensor:
        query = torch.ones(1, 1, rows, 8)
        if not packed:
            return cache.attend(0, query, [sequence])
        offsets = torch.tensor([0, rows, rows], dtype=torch.int32)
        query = query[0].transpose(0, 1)
        return cache.attend(0, query, [sequence, other], cu_seqlens_q=offsets)

    cache.append({sequence: 5, other: 1})
    cache.append({sequence: 3})  # rows 5 to 7 see 2 to 7; 0 and 1 are let go of
    attend(3)
    with pytest.raises(ValueError, match="query: got 4 rows of sequence 0, takes 3 at most"):
        attend(4)
    cache.trim(sequence, 5)
    with pytest.raises(ValueError, match="query: got 1 rows of sequence 0, takes 0 at most"):
        attend(1)
    cache.append({sequence: 1})
    attend(1)


def test_a_beginning_counts_where_every_kind_has_it() -> None:
    cache = make()
    prompt = list(range(10))
    first = cache.allocate(prompt)
    write(cache, cache.append({first: prompt}), prompt)
    cache.commit(first)
    assert cache.length(cache.allocate(prompt)) == 9
    for state in cache.groups[1:2]:  # evict what one sliding kind knew from page 1 on
        for page in state.sequences[0].kept[1:]:
            state.index.forget(page)
    assert cache.length(cache.allocate(prompt)) == 3
    cache.check()


def test_trim_goes_no_further_than_the_narrowest_window_lets_it() -> None:
    cache = make()
    sequence = cache.allocate()
    for _ in range(4):
        cache.append({sequence: 3})
    before = snapshot(cache)
    with pytest.raises(ValueError, match="takes at least 7: earlier pages are released"):
        cache.trim(sequence, 6)
    assert snapshot(cache) == before
    cache.trim(sequence, 8)
    assert cache.length(sequence) == 8
    cache.check()


def test_a_long_step_skips_pages_that_nobody_will_see_and_loses_none() -> None:
    cache = make()
    sequence = cache.allocate()
    cache.append({sequence: 5})
    twin = cache.fork(sequence)
    slots = cache.append({sequence: 14}, spare=[None] + [2] * (len(cache.windows) - 1))
    cache.check()
    assert -1 in slots[-1].tolist() and -1 not in slots[0].tolist()
    cache.free(twin)
    cache.free(sequence)
    cache.check()
    assert cache.statistics().used == 0


def test_invariants_are_seen_to_break() -> None:
    cache = make()
    sequence = cache.allocate()
    cache.append({sequence: 4})
    enter([trimmed(cache.groups[1], sequence, 3)])
    with pytest.raises(AssertionError, match="sequence 0 is not the same in all groups"):
        cache.check()
    enter([ended(cache.groups[1], sequence)])
    with pytest.raises(AssertionError, match="layers of window 4 have other sequences"):
        cache.check()


class Machine(RuleBasedStateMachine):
    """Random calls against a dict of lists, as for one cache."""

    @initialize(caching=st.booleans())
    def begin(self, caching: bool) -> None:
        self.cache = make(prefix_caching=caching)
        self.model: dict[int, list[int]] = {}
        self.swapped: set[int] = set()

    @property
    def awake(self) -> list[int]:
        return [sequence for sequence in self.model if sequence not in self.swapped]

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """The call's result, or None where it was refused, and then nothing has changed."""
        before = snapshot(self.cache)
        try:
            return call(*arguments)
        except (saccade.OutOfPagesError, ValueError) as error:
            assert isinstance(error, saccade.OutOfPagesError) or "released" in str(error)
            assert snapshot(self.cache) == before
            return error

    def pick(self, data: Any, among: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(among)))

    @rule(text=st.integers(0, 1), length=st.integers(0, 14))
    def allocate(self, text: int, length: int) -> None:
        tokens = [1000 * text + row for row in range(length)]
        sequence = self.cache.allocate(tokens)
        found = self.cache.length(sequence)
        self.model[sequence] = tokens[:found]
        slots = self.attempt(self.cache.append, {sequence: tokens[found:]})
        if isinstance(slots, list):
            write(self.cache, slots, tokens[found:])
            self.model[sequence] = tokens

    @precondition(lambda self: self.awake)
    @rule(data=st.data(), count=st.integers(0, 7))
    def append(self, data: Any, count: int) -> None:
        some = sorted(data.draw(st.sets(st.sampled_from(self.awake), min_size=1, max_size=3)))
        tokens = {s: [len(self.model[s]) + new for new in range(count)] for s in some}
        slots = self.attempt(self.cache.append, tokens)
        if isinstance(slots, list):
            write(self.cache, slots, [token for new in tokens.values() for token in new])
            for sequence, new in tokens.items():
                self.model[sequence] = self.model[sequence] + new

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        sequence = self.pick(data, self.awake)
        self.model[self.cache.fork(sequence)] = list(self.model[sequence])

    @precondition(lambda self: len(self.model) > 2)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        sequence = self.pick(data, list(self.model))
        self.cache.free(sequence)
        del self.model[sequence]
        self.swapped.discard(sequence)

    @precondition(lambda self: self.awake)
    @rule(data=st.data(), back=st.integers(0, 5))
    def trim(self, data: Any, back: int) -> None:
        sequence = self.pick(data, self.awake)
        length = max(len(self.model[sequence]) - back, 0)
        if self.attempt(self.cache.trim, sequence, length) is None:
            del self.model[sequence][length:]

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def swap_out(self, data: Any) -> None:
        sequence = self.pick(data, self.awake)
        if self.attempt(self.cache.swap_out, sequence) is None:
            self.swapped.add(sequence)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: Any) -> None:
        sequence = self.pick(data, list(self.swapped))
        if self.attempt(self.cache.swap_in, sequence) is None:
            self.swapped.discard(sequence)

    @precondition(lambda self: len(self.model) > 3)
    @rule()
    def compact(self) -> None:
        self.cache.compact()

    @invariant()
    def every_token_that_can_be_seen_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        if not self.awake:
            return
        tables = self.cache.tables(self.awake)
        for layer, window in enumerate(WINDOWS):
            table, lens = tables[self.cache.addresses[layer].group]
            known = self.cache._known_tables(layer, self.awake)
            assert torch.equal(known[0], table) and torch.equal(known[1], lens)
            pages = self.cache.pages(layer)
            for row, sequence in enumerate(self.awake):
                tokens = self.model[sequence]
                assert int(lens[row]) == len(tokens)
                first = 0 if window is None else max(len(tokens) - window, 0)
                at = torch.arange(first, len(tokens))
                page, slot = table[row].long()[at // PAGE_SIZE], at % PAGE_SIZE
                wanted = torch.tensor(tokens[first:], dtype=torch.float32) + layer / 8
                assert torch.equal(pages.key_pages[page, 0, slot, 0], wanted)
                assert torch.equal(pages.value_pages[page, 0, slot, 0], -wanted)

    def teardown(self) -> None:
        for sequence in list(getattr(self, "model", ())):
            self.cache.free(sequence)
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.statistics().used == self.cache.statistics().host_used == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=20,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.generate],
)


class Refused(RuntimeError):
    """An injected fault."""


@pytest.mark.parametrize("what", ["pages", "memory", "sequences"])
def test_a_fault_at_every_point_changes_no_kind(what: str) -> None:
    point = 0
    while True:
        cache, calls, refused = make(), 0, False

        def refuse(original: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == point + 1:  # noqa: B023  # read while this turn of the loop runs
                    raise Refused
                return original(*arguments, **options)

            return call

        for state in cache.groups:
            targets = {
                "pages": [(state.pool, "take"), (state.host_pool, "take")],
                "memory": [(state.memory, name) for name in ("copy", "to_host", "to_device")],
                "sequences": [(state.pool, "hold")],
            }[what]
            for owner, name in targets:
                setattr(owner, name, refuse(getattr(owner, name)))

        def fault(call: Any) -> Any:
            nonlocal refused
            before = snapshot(cache)  # noqa: B023
            try:
                return call()
            except Refused:
                refused = True
                cache.check()  # noqa: B023
                assert snapshot(cache) == before  # noqa: B023
                return call()  # and the same call goes through afterwards

        first = fault(cache.allocate)
        fault(lambda: cache.append({first: 5}))  # noqa: B023
        second = fault(lambda: cache.fork(first))  # noqa: B023
        fault(lambda: cache.append({first: 1, second: 2}))  # noqa: B023
        fault(lambda: cache.swap_out(first))  # noqa: B023
        fault(lambda: cache.append({second: 4}))  # noqa: B023
        fault(lambda: cache.swap_in(first))  # noqa: B023
        cache.check()
        if not refused:
            break
        point += 1
    assert point >= {"pages": 12, "memory": 9, "sequences": 6}[what]

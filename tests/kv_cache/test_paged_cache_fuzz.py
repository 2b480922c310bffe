"""Random calls against plain lists: no token is lost, no page leaks, a refusal changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import saccade
from saccade.testing import poisoned

PAGES, PAGE_SIZE, HOST_PAGES = 14, 3, 8


def text_from(text: int, start: int, count: int) -> list[int]:
    """Tokens of one of many texts, each other than all others: beginnings of a text are equal."""
    return [1000 * text + row for row in range(start, start + count)]


class Machine(RuleBasedStateMachine):
    """A cache beside a dict of lists: each token's key and value is its own number."""

    @initialize(window=st.sampled_from([None, None, 0, 4]), caching=st.booleans())
    def begin(self, window: int | None, caching: bool) -> None:
        with poisoned():
            self.cache = saccade.PagedCache(
                PAGES, PAGE_SIZE, num_layers=1, kv_heads=1, head_dim=1, host_pages=HOST_PAGES,
                window=window, prefix_caching=caching,
            )  # fmt: skip
        self.window = window
        self.model: dict[int, list[int]] = {}
        self.swapped: set[int] = set()
        self.stamp = self.compacted = 0

    # ---- what the rules share ------------------------------------------------------------

    @property
    def awake(self) -> list[int]:
        return [sequence for sequence in self.model if sequence not in self.swapped]

    def write(self, slots: torch.Tensor, tokens: list[int]) -> None:
        rows = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1)
        self.cache.write(0, rows, -rows, slots)

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """The call's result, or None where pages ran out, and then nothing has changed."""
        before = self.snapshot()
        try:
            return call(*arguments)
        except saccade.OutOfPagesError as error:
            assert error.needed > error.available
            assert self.snapshot() == before
            return None

    def snapshot(self) -> Any:
        state = self.cache.groups[0]
        pool = state.pool
        return copy.deepcopy(
            (
                state.sequences,
                pool.holders,
                pool.free.pages(),
                [*pool.idle],
                state.host_pool.holders,
            )
        )

    def pick(self, data: Any, among: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(among)))

    # ---- rules ---------------------------------------------------------------------------

    @rule(
        text=st.integers(0, 1),
        length=st.integers(0, 14),
        salt=st.sampled_from([b"", b"", b"other"]),
    )
    def allocate(self, text: int, length: int, salt: bytes) -> None:
        tokens = text_from(text, 0, length)
        sequence = self.cache.allocate(tokens, salt=salt)
        found = self.cache.length(sequence)
        assert found == 0 or found < len(tokens)
        assert found % PAGE_SIZE == 0
        self.model[sequence] = tokens[:found]
        slots = self.attempt(self.cache.append, {sequence: tokens[found:]})
        if slots is not None:
            self.write(slots, tokens[found:])
            self.model[sequence] = list(tokens)

    @precondition(lambda self: self.awake)
    @rule(data=st.data(), count=st.integers(0, 7), named=st.booleans(), text=st.integers(0, 1))
    def append(self, data: Any, count: int, named: bool, text: int) -> None:
        some = data.draw(st.sets(st.sampled_from(self.awake), min_size=1, max_size=3))
        tokens = {}
        for sequence in sorted(some):
            self.stamp += 1
            kind = text if named else 1000 + self.stamp
            tokens[sequence] = text_from(kind, len(self.model[sequence]), count)
        given = {s: (new if named else len(new)) for s, new in tokens.items()}
        slots = self.attempt(self.cache.append, given)
        if slots is None:
            return
        self.write(slots, [token for new in tokens.values() for token in new])
        for sequence, new in tokens.items():
            self.model[sequence] = self.model[sequence] + new

    @precondition(lambda self: self.awake)
    @rule(data=st.data(), back=st.integers(1, 4))
    def take_back_and_go_on(self, data: Any, back: int) -> None:
        """Drafts that were published, and are then replaced by other tokens."""
        sequence = self.pick(data, self.awake)
        if self.window is not None or len(self.model[sequence]) < back:
            return
        self.cache.commit(sequence)
        self.cache.trim(sequence, len(self.model[sequence]) - back)
        del self.model[sequence][-back:]
        self.stamp += 1
        tokens = text_from(1000 + self.stamp, len(self.model[sequence]), 1)
        slots = self.attempt(self.cache.append, {sequence: tokens})
        if slots is not None:
            self.write(slots, tokens)
            self.model[sequence] += tokens

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        sequence = self.pick(data, self.awake)
        self.model[self.cache.fork(sequence)] = list(self.model[sequence])

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        self.cache.commit(self.pick(data, self.awake))

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
        before = self.snapshot()
        try:
            self.cache.trim(sequence, length)
        except ValueError as error:
            assert self.window is not None and "released" in str(error)
            assert self.snapshot() == before
            return
        del self.model[sequence][length:]

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def swap_out(self, data: Any) -> None:
        sequence = self.pick(data, self.awake)
        before = self.snapshot()
        try:
            self.cache.swap_out(sequence)
        except saccade.OutOfPagesError as error:
            assert error.where == "host" and self.snapshot() == before
            return
        self.swapped.add(sequence)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: Any) -> None:
        sequence = self.pick(data, list(self.swapped))
        before = self.snapshot()
        try:
            self.cache.swap_in(sequence)
        except saccade.OutOfPagesError as error:
            assert error.where == "device" and self.snapshot() == before
            return
        self.swapped.discard(sequence)

    @precondition(lambda self: self.stamp > self.compacted + 4)
    @rule()
    def compact(self) -> None:
        self.compacted = self.stamp
        self.cache.compact()
        used = self.cache.statistics()
        assert self.cache.groups[0].pool.free.pages() == list(range(PAGES))[used.used + used.idle :]

    # ---- what must hold ------------------------------------------------------------------

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            statistics = self.cache.statistics()
            assert statistics.used + statistics.idle + statistics.free == PAGES
            assert statistics.tokens == sum(map(len, self.model.values()))

    @invariant()
    def every_token_is_where_the_tables_say(self) -> None:
        if not getattr(self, "model", None) or not self.awake:
            return
        made = self.cache.tables(self.awake)
        # What `attend` takes, which it may know from an earlier call.
        assert all(map(torch.equal, self.cache._known_tables(0, self.awake), made))
        tables, lengths = (each.tolist() for each in made)
        pages = self.cache.pages(0)
        keys, values = (each[:, 0, :, 0].tolist() for each in (pages.key_pages, pages.value_pages))
        for table, length, sequence in zip(tables, lengths, self.awake, strict=True):
            tokens = self.model[sequence]
            assert length == len(tokens) == self.cache.length(sequence)
            first = 0
            if self.window is not None:  # what was behind the window may be gone
                held = self.cache.groups[0].sequences[sequence]
                first = sum(number is None for number in held.pages) * PAGE_SIZE
                # the next token sees as far back as this
                assert first <= max(len(tokens) - self.window, 0)
            places = [(table[at // PAGE_SIZE], at % PAGE_SIZE) for at in range(first, length)]
            assert [keys[page][slot] for page, slot in places] == tokens[first:]
            assert [-values[page][slot] for page, slot in places] == tokens[first:]

    @invariant()
    def known_pages_hold_what_they_are_known_for(self) -> None:
        if hasattr(self, "cache"):
            pages = self.cache.pages(0).key_pages
            for page, entry in self.cache.groups[0].index.entry_of.items():
                assert pages[page, 0, :, 0].tolist() == list(entry.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in list(self.model):
            self.cache.free(sequence)
        self.cache.check()
        assert self.cache.statistics().used == self.cache.statistics().host_used == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=120,
    stateful_step_count=50,  # 6,000 steps in all
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.generate],
)


class Refused(RuntimeError):
    """An injected fault."""


def script(cache: saccade.PagedCache, fault: Any) -> None:
    """One of everything that takes pages or copies them; `fault` wraps each call."""
    first = cache.allocate()
    fault(lambda: cache.append({first: 7}))
    second = cache.fork(first)
    fault(lambda: cache.append({first: 1, second: 2}))
    fault(lambda: cache.swap_out(first))
    fault(lambda: cache.append({second: 4}))
    fault(lambda: cache.swap_in(first))
    cache.trim(second, 5)
    third = cache.fork(second)
    fault(lambda: cache.append({third: 3, second: 3}))
    cache.free(second)
    fault(cache.compact)


@pytest.mark.parametrize("what", ["pages", "memory"])
def test_a_fault_at_every_point_changes_nothing(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    point, faults = 0, 0
    while True:
        cache = saccade.PagedCache(12, 3, num_layers=2, kv_heads=1, head_dim=2, host_pages=8)
        machine = Machine()
        machine.cache = cache
        calls = 0

        def refuse(original: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == point + 1:  # noqa: B023  # read while this turn of the loop runs
                    raise Refused
                return original(*arguments, **options)

            return call

        if what == "pages":
            cache.groups[0].pool.take = refuse(cache.groups[0].pool.take)  # type: ignore[method-assign]
            host = cache.groups[0].host_pool
            host.take = refuse(host.take)  # type: ignore[method-assign]
        else:
            memory = cache.groups[0].memory
            for name in ("copy", "moves", "to_host", "to_device"):
                monkeypatch.setattr(memory, name, refuse(getattr(memory, name)))
        refused = False

        def fault(call: Any) -> None:
            nonlocal refused
            before = machine.snapshot()  # noqa: B023
            try:
                call()
            except Refused:
                refused = True
                cache.check()  # noqa: B023
                assert machine.snapshot() == before  # noqa: B023
                call()  # and the same call goes through afterwards

        script(cache, fault)
        cache.check()
        if not refused:
            break
        point, faults = point + 1, faults + 1
    assert faults >= 6

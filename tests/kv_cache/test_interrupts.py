"""An exception at any line of the cache's code leaves it whole: nothing leaks, no row is lost."""

from __future__ import annotations

from typing import Any

import interrupts
import pytest
import torch

import saccade
from saccade.testing import poisoned

WINDOWS = [None, 4, None]
TEXT = list(range(1, 60))


class Served:
    """A cache beside the tokens that each of its sequences should have.

    Each call is made until it goes through. One that an interrupt ended has done nothing, or all
    of it; in that case what it did is taken back, since nobody knows its slots.
    """

    def __init__(self, layered: bool, interrupt: interrupts.Interrupt):
        options: dict[str, Any] = {"kv_heads": 1, "head_dim": 1, "host_pages": 12}
        self.cache: Any = (
            saccade.PagedCache(16, 3, windows=WINDOWS, **options)
            if layered
            else saccade.PagedCache(16, 3, num_layers=1, **options)
        )
        self.layered = layered
        self.model: dict[int, list[int]] = {}
        self.interrupt, self.met = interrupt, 0
        self.growing: set[int] = set()

    def attempt(self, call: Any) -> Any:
        before = self.lengths()
        while True:
            try:
                with self.interrupt.armed():
                    return call()
            except KeyboardInterrupt:
                self.met += 1
            self.cache.check()
            self.take_back(before)

    def lengths(self) -> dict[int, int]:
        return {sequence: self.cache.length(sequence) for sequence in self.model}

    def take_back(self, before: dict[int, int]) -> None:
        now = self.lengths()
        changed = [sequence for sequence in now if now[sequence] != before[sequence]]
        # A step grows all of its sequences or none.
        assert not changed or set(changed) == self.growing
        for sequence in changed:
            self.cache.trim(sequence, before[sequence])
        for orphan in set(self.known) - set(self.model):  # whose number never arrived
            self.cache.free(orphan)
        self.cache.check()

    def allocate(self, tokens: list[int]) -> int:
        sequence = self.attempt(lambda: self.cache.allocate(tokens))
        self.model[sequence] = tokens[: self.cache.length(sequence)]
        return sequence

    def fork(self, sequence: int) -> int:
        twin = self.attempt(lambda: self.cache.fork(sequence))
        self.model[twin] = [*self.model[sequence]]
        return twin

    def append(self, tokens: dict[int, list[int]]) -> None:
        self.growing = set(tokens)
        slots = self.attempt(lambda: self.cache.append(tokens))
        rows = torch.tensor([t for given in tokens.values() for t in given]).float().view(-1, 1, 1)
        for layer in range(len(WINDOWS) if self.layered else 1):
            self.cache.write(layer, rows, -rows, slots)
        for sequence, given in tokens.items():
            self.model[sequence] += given

    def append_and_name(self, sequence: int, given: list[int]) -> None:
        """The same by a number, and named later."""
        self.growing = {sequence}
        slots = self.attempt(lambda: self.cache.append({sequence: len(given)}))
        rows = torch.tensor(given).float().view(-1, 1, 1)
        for layer in range(len(WINDOWS) if self.layered else 1):
            self.cache.write(layer, rows, -rows, slots)
        self.model[sequence] += given
        self.attempt(lambda: self.cache.name(sequence, self.model[sequence]))

    def trim(self, sequence: int, length: int) -> None:
        del self.model[sequence][length:]
        self.once(lambda: self.cache.trim(sequence, length))
        if self.cache.length(sequence) != length:
            self.cache.trim(sequence, length)

    def free(self, sequence: int) -> None:
        del self.model[sequence]
        self.once(lambda: self.cache.free(sequence))
        if sequence in self.known:
            self.cache.free(sequence)

    def once(self, call: Any) -> None:
        try:
            with self.interrupt.armed():
                call()
        except KeyboardInterrupt:
            self.met += 1
        self.cache.check()

    @property
    def known(self) -> Any:
        return self.cache.groups[0].sequences

    def swap(self, sequence: int) -> None:
        for method, away in ((self.cache.swap_out, True), (self.cache.swap_in, False)):

            def call(method: Any = method, away: bool = away) -> None:
                if self.cache.sequence_statistics(sequence).swapped_out != away:
                    method(sequence)

            self.attempt(call)

    def assert_rows_are_right(self) -> None:
        for sequence, tokens in self.model.items():
            assert self.cache.length(sequence) == len(tokens)
            tables = self.cache.tables([sequence])
            for layer in range(len(WINDOWS) if self.layered else 1):
                group = self.cache.addresses[layer].group
                table = (tables[group] if self.layered else tables)[0]
                rows = self.cache.pages(layer).key_pages[table[0].long(), 0, :, 0].flatten()
                window = WINDOWS[layer] if self.layered else None
                seen = tokens if window is None else tokens[-window - 1 :]
                assert rows[: len(tokens)][len(tokens) - len(seen) :].tolist() == seen


def script(served: Served) -> None:
    """Something of everything: shared pages, copies, evictions, swaps, moves."""
    first = served.allocate(TEXT[:8])
    served.append({first: TEXT[:8]})
    served.append({first: TEXT[8:13]})
    second = served.allocate(TEXT[:9])
    third = served.fork(first)
    served.append({first: [50], second: TEXT[len(served.model[second]) : 9], third: [51, 52]})
    served.trim(third, 13)
    served.append({third: [53, 54, 55]})
    served.attempt(lambda: served.cache.commit(third))
    served.swap(first)
    served.free(second)
    served.attempt(served.cache.compact)
    served.assert_rows_are_right()
    served.attempt(lambda: served.cache.forget(third))
    fourth = served.allocate([7] * 9)
    served.append({fourth: [7] * 9, first: [56]})
    served.free(third)
    fifth = served.allocate([9] * 21)
    served.append_and_name(fourth, [57])
    served.append({fifth: [9] * 21})  # takes pages that only the prefix cache knew


def run(layered: bool, line: int, *files: str) -> bool:
    """The script with one interrupt; False where it came to its end before."""
    interrupt = interrupts.Interrupt(line, *files)
    with poisoned():
        served = Served(layered, interrupt)
    script(served)
    served.assert_rows_are_right()
    served.cache.check()
    for sequence in list(served.model):
        served.free(sequence)
    served.cache.check()
    found = served.cache.statistics()
    assert (found.used, found.host_used, found.sequences) == (0, 0, 0)
    assert served.met == interrupt.came
    return interrupt.came


@pytest.mark.parametrize(
    ("layered", "stride", "files"),
    [
        (False, 2, ["kv_cache/sequences.py", "kv_cache/storage.py"]),
        (
            False,
            5,
            ["kv_cache/pool.py", "kv_cache/paged_cache.py"],
        ),
        (True, 29, ["kv_cache"]),
    ],
    ids=str,
)
def test_an_interrupt_at_any_line_leaves_all_whole(
    layered: bool, stride: int, files: list[str]
) -> None:
    line = 0
    while run(layered, line, *files):
        line += stride
    assert line > 300

"""States of whole sequences: allocated, copied on write, swapped and freed with their pages."""

from __future__ import annotations

import random
from typing import Any

import interrupts
import pytest
import torch

import saccade

STATES = [((3, 2), torch.float32), ((4,), torch.bfloat16)]


def cache(**options: Any) -> saccade.PagedCache:
    sizes = {"num_layers": 1, "kv_heads": 1, "head_dim": 8, "page_size": 4}
    few = {"states": STATES, "num_states": 3, "host_states": 2, "host_pages": 8}
    return saccade.PagedCache(options.pop("num_pages", 16), **{**sizes, **few, **options})


def write(made: saccade.PagedCache, sequence: int, value: float) -> None:
    (number,) = made.state_numbers([sequence])
    for pool in made.states:
        pool[number] = value


def read(made: saccade.PagedCache, sequence: int) -> list[float]:
    (number,) = made.state_numbers([sequence])
    values = {float(value) for pool in made.states for value in pool[number].flatten()}
    made.check()
    return sorted(values)


def test_a_sequence_has_a_state_as_soon_as_it_has_a_token():
    made = cache()
    assert [(pool.shape, pool.dtype) for pool in made.states] == [
        ((3, *shape), dtype) for shape, dtype in STATES
    ]
    sequence = made.allocate([1, 2, 3])
    with pytest.raises(ValueError, match=f"sequences: got {sequence}, which has no token"):
        made.state_numbers([sequence])
    made.append({sequence: [1, 2, 3]})
    write(made, sequence, 5)
    made.append({sequence: 20})
    assert read(made, sequence) == [5]  # however long it gets
    made.free(sequence)
    assert made.statistics().states_used == 0


def test_a_fork_copies_the_state_when_either_grows():
    made = cache()
    first = made.allocate()
    made.append({first: 6})
    write(made, first, 1)
    second = made.fork(first)
    assert made.state_numbers([first]) == made.state_numbers([second])
    made.append({first: 1})
    write(made, first, 2)
    assert (read(made, first), read(made, second)) == ([2], [1])
    before = made.state_numbers([second])
    made.append({second: 1})  # which it holds alone by now
    assert made.state_numbers([second]) == before


def test_states_are_swapped_and_moved_with_pages():
    made = cache()
    sequences = [made.allocate() for _ in range(3)]
    for number, sequence in enumerate(sequences):
        made.append({sequence: 5})
        write(made, sequence, number)
    made.swap_out(sequences[1])
    assert (made.statistics().states_used, made.statistics().host_states_used) == (2, 1)
    with pytest.raises(ValueError, match="swapped out"):
        made.state_numbers([sequences[1]])
    other = made.allocate()
    made.append({other: 1})
    write(made, other, 9)
    with pytest.raises(saccade.OutOfPagesError, match="out of states on the device: 1 needed, 0"):
        made.swap_in(sequences[1])
    made.free(sequences[0])
    made.swap_in(sequences[1])
    assert made.compact() >= 0
    kept = [sequences[1], sequences[2], other]
    assert [read(made, sequence) for sequence in kept] == [[1], [2], [9]]


def test_when_states_run_out_nothing_changes():
    made = cache(num_states=1)
    first, second = made.allocate(), made.allocate()
    made.append({first: 3})
    with pytest.raises(saccade.OutOfPagesError, match="out of states on the device") as caught:
        made.append({first: 4, second: 2})
    assert (caught.value.kind, caught.value.needed, caught.value.available) == ("states", 1, 0)
    assert (made.length(first), made.length(second)) == (3, 0)
    made.check()


def test_a_state_goes_neither_back_nor_to_others():
    made = cache()
    tokens = list(range(12))
    first = made.allocate(tokens)
    made.append({first: tokens})
    made.commit(first)
    assert made.length(made.allocate(tokens)) == 0  # pages alone are no beginning
    with pytest.raises(ValueError, match="length: got 8 for a sequence with a state of 12 tokens"):
        made.trim(first, 8)
    made.trim(first, 12)
    made.trim(first, 0)
    assert made.statistics().states_used == 0
    made.check()


def test_a_kept_state_is_found_by_what_begins_alike():
    made = cache(num_states=3)
    tokens = list(range(10))
    first = made.allocate(tokens)
    assert made.state_borders(first, 10) == [8]
    made.append({first: tokens[:8]})
    write(made, first, 1)
    made.append({first: tokens[8:]}, keep=[first])
    write(made, first, 2)  # in a place of its own
    second = made.allocate([*tokens[:8], 77, 78])
    assert (made.length(second), read(made, second)) == (8, [1])
    made.append({second: [77, 78]})
    write(made, second, 3)  # which copies what it found
    third = made.allocate(tokens)
    assert (read(made, first), read(made, second), read(made, third)) == ([2], [3], [1])
    assert made.statistics().states_used == 3
    made.append({third: 1})  # there is no room for a copy: the kept one is given up
    write(made, third, 4)
    fourth = made.allocate(tokens)
    assert made.length(fourth) == 0
    assert made.state_borders(fourth, 10) == [8]
    for sequence in (first, second, third, fourth):
        made.free(sequence)
    made.check()
    assert made.statistics().states_used == 0


def test_states_that_no_one_may_find_are_not_kept():
    made = cache(num_states=6)
    tokens = list(range(8))
    unnamed, salted, wrong = (
        made.allocate(),
        made.allocate(tokens, salt=b"a"),
        made.allocate(tokens),
    )
    made.append({unnamed: 8, salted: tokens, wrong: tokens})
    made.append({unnamed: 1}, keep=[unnamed])
    made.append({salted: 1}, keep=[salted])
    made.free(unnamed)
    assert made.length(made.allocate([*tokens, 9])) == 0
    assert made.length(made.allocate([*tokens, 9], salt=b"a")) == 8
    made.append({wrong: [9]}, keep=[wrong])
    made.forget(wrong)
    assert made.length(made.allocate([*tokens, 9])) == 0
    short = made.allocate([1, 2, 3])
    assert made.state_borders(short, 3) == made.state_borders(short, 4) == []
    made.check()


def test_where_beginnings_part_a_state_is_worth_keeping():
    made = cache()
    tokens = list(range(15))
    first = made.allocate(tokens)
    made.append({first: tokens})
    made.commit(first)
    other = made.allocate([*tokens[:9], 50, 51, 52, 53])
    assert (made.length(other), made.state_borders(other, 13)) == (0, [8, 12])
    made = cache(prefix_caching=False)
    assert made.state_borders(made.allocate(tokens), 15) == []


def test_layers_with_states_alone_need_no_pages():
    made = saccade.PagedCache({}, windows=[], kv_heads=[], head_dim=[], states=STATES, num_states=2)
    sequence = made.allocate([1, 2])
    assert made.append({sequence: [1, 2]}) == made.tables([sequence]) == made.available() == []
    made.name(sequence, [1, 2])
    write(made, sequence, 3)
    assert (read(made, sequence), made.length(sequence), made.num_pages) == ([3], 2, ())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_states": 0}, ValueError, "num_states: got 0"),
        ({"states": [((0, 2), torch.float32)]}, ValueError, "states: got 0"),
        ({"states": [((2,), "float32")]}, TypeError, "states: got str, takes shapes and dtypes"),
        ({"host_states": -1}, ValueError, "host_states: got -1"),
    ],
)
def test_wrong_sizes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        cache(**options)


def test_a_cache_without_states_says_so():
    made = cache(states=[], num_states=0)
    assert made.states == []
    with pytest.raises(ValueError, match="sequences: got some of a cache without states"):
        made.state_numbers([made.allocate()])


def test_no_state_is_ever_another_sequences():
    """Random calls on sequences of one and the same token, whose states say how long they are."""
    chance = random.Random(0)
    made = cache(num_states=6, host_states=2, num_pages=40)
    away: set[int] = set()
    lengths: dict[int, int] = {}
    grown = found = 0
    for _ in range(400):
        here = [each for each in lengths if each not in away]
        what = chance.choice(
            ["begin", "begin", "grow", "grow", "fork", "out", "in", "free", "free", "compact"]
        )
        new: dict[int, int] = {}
        try:
            if what == "begin" and len(lengths) < 5:
                length = chance.randint(3, 14)
                sequence = made.allocate([1] * length)
                lengths[sequence] = made.length(sequence)
                found += lengths[sequence] > 0
                new = {sequence: length - lengths[sequence]}
            elif what == "grow" and here:
                some = chance.sample(here, chance.randint(1, len(here)))
                new = {each: chance.randint(1, 3) for each in some}
            elif what == "fork" and here and len(lengths) < 5:
                lengths[made.fork(here[0])] = lengths[here[0]]
            elif what == "out" and here:
                made.swap_out(here[0])
                away.add(here[0])
            elif what == "in" and away:
                made.swap_in(of := min(away))
                away.discard(of)
            elif what == "free" and lengths:
                made.free(of := chance.choice(sorted(lengths)))
                away.discard(of)
                del lengths[of]
            elif what == "compact":
                made.compact()
            made.append({each: [1] * count for each, count in new.items()}, keep=here)
            for each, count in new.items():
                lengths[each] += count
                write(made, each, lengths[each])
                grown += 1
        except saccade.OutOfPagesError:
            pass
        made.check()
        for each in lengths.keys() - away:
            assert not lengths[each] or read(made, each) == [lengths[each]]
    assert grown > 50 and found > 5


TEXT = list(range(1, 20))


class Ending:
    """Calls of a cache until one of them is interrupted; a state says which tokens it is after."""

    def __init__(self, interrupt: interrupts.Interrupt):
        self.made, self.interrupt = cache(num_states=4), interrupt

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self.interrupt.armed():
            return getattr(self.made, name)(*arguments, **options)

    def grow(self, sequence: int, tokens: list[int], **options: Any) -> None:
        self.call("append", {sequence: tokens}, **options)
        write(self.made, sequence, self.made.length(sequence))

    def run(self) -> None:
        first = self.call("allocate", TEXT[:10])
        self.grow(first, TEXT[:8])
        self.grow(first, TEXT[8:10], keep=[first])
        second = self.call("allocate", [*TEXT[:8], 50])
        self.grow(second, [50])
        third = self.call("fork", first)
        self.grow(third, TEXT[10:12])
        self.grow(first, TEXT[10:13])
        self.call("swap_out", third)
        self.call("free", second)
        self.call("swap_in", third)
        self.grow(third, TEXT[12:14], keep=[third])
        self.call("compact")
        self.call("forget", third)


def test_an_interrupt_at_any_line_leaves_no_wrong_state() -> None:
    """What is found behind an interrupt is a state after as many tokens as it says."""
    stride, line, found = 29, 0, 0
    while True:
        ending = Ending(interrupts.Interrupt(line, "kv_cache"))
        try:
            ending.run()
            break
        except KeyboardInterrupt:
            line += stride
        made = ending.made
        made.check()
        sequence = made.allocate(TEXT)
        found += made.length(sequence) > 0
        if made.length(sequence):
            assert read(made, sequence) == [made.length(sequence)]
        for each in list(made._everything[0].sequences):
            made.free(each)
        made.check()
        assert (made.statistics().states_used, made.statistics().host_states_used) == (0, 0)
    assert line > 1000 and found > 5

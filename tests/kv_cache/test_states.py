"""States of whole sequences: allocated, copied on write, swapped and freed with their pages."""

from __future__ import annotations

import random
from typing import Any

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
    """Random calls: each sequence's state is what was last written for it."""
    chance = random.Random(0)
    made = cache(num_states=4, host_states=2, num_pages=40)
    value = 0
    held: dict[int, int] = {}
    away: set[int] = set()
    for _ in range(300):
        here = [each for each in held if each not in away]
        what = chance.choice(
            ["begin", "grow", "grow", "fork", "out", "in", "free", "free", "compact"]
        )
        try:
            if what == "begin":
                sequence = made.allocate()
                made.append({sequence: chance.randint(1, 6)})
                held[sequence] = value = value + 1
                write(made, sequence, value % 256)
            elif what == "grow" and here:
                some = chance.sample(here, chance.randint(1, len(here)))
                made.append(dict.fromkeys(some, 1))
                for each in some:
                    held[each] = value = value + 1
                    write(made, each, value % 256)
            elif what == "fork" and here and len(held) < 5:
                of = chance.choice(here)
                held[made.fork(of)] = held[of]
            elif what == "out" and here:
                made.swap_out(of := chance.choice(here))
                away.add(of)
            elif what == "in" and away:
                made.swap_in(of := chance.choice(sorted(away)))
                away.discard(of)
            elif what == "free" and held:
                made.free(of := chance.choice(sorted(held)))
                del held[of]
                away.discard(of)
            elif what == "compact":
                made.compact()
        except saccade.OutOfPagesError:
            for each in set(made._everything[0].sequences) - set(held):
                made.free(each)  # begun, and never grown
        made.check()
        for each in held.keys() - away:
            assert read(made, each) == [held[each] % 256]
    assert value > 60

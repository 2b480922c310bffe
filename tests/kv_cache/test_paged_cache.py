"""PagedCache by example: what is shared, copied, found again, refused, and read."""

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.kv_cache import paged_cache
from saccade.kv_cache.pool import FreeRanges, PrefixIndex
from saccade.kv_cache.storage import on_device

GENERATOR = torch.Generator().manual_seed(0)


def cache_of(num_pages=12, page_size=4, **options):
    sizes = {"num_layers": 2, "kv_heads": 2, "head_dim": 8}
    return saccade.PagedCache(num_pages, page_size, **{**sizes, **options})


def put(cache, tokens):
    """Append random rows in both layers; gives them back, [tokens, heads, dim] for each layer."""
    slots = cache.append(tokens)
    rows = [torch.randn(2, len(slots), 2, 8, generator=GENERATOR) for _ in range(2)]
    for layer, (key, value) in enumerate(rows):
        cache.write(layer, key, value, slots)
    return rows


def test_a_cache_made_in_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        cache = cache_of(host_pages=2, states=[((3,), torch.float32)], num_states=2)
    sequence = cache.allocate()
    (key, _), _ = put(cache, {sequence: 3})
    assert torch.equal(cache.pages(0).key_pages[0, :, :3].transpose(0, 1), key)
    assert not any(state.is_inference() for state in cache.states)


@pytest.mark.parametrize("window", [None, 5])
def test_decoding_reads_what_was_written(window):
    cache = cache_of(20, window=window)
    sequence, written = cache.allocate(), []
    query = torch.randn(1, 4, 1, 8, generator=GENERATOR)
    for count in (7, 1, 1, 4, 1, 1, 1):
        written.append(put(cache, {sequence: count}))
        for layer in range(2):
            key, value = (
                torch.cat([rows[layer][kind] for rows in written]).transpose(0, 1)[None]
                for kind in range(2)
            )
            mask = None if window is None else saccade.masks.window(window)
            found = cache.attend(layer, query, [sequence])
            torch.testing.assert_close(found, saccade.attention(query, key, value, mask=mask))
    pages = cache.sequence_statistics(sequence).pages
    assert pages == (4 if window is None else 2)
    assert cache.statistics().released == 4 - pages
    cache.check()


def test_a_fork_shares_until_one_writes():
    cache = cache_of()
    first = cache.allocate()
    put(cache, {first: 6})
    second = cache.fork(first)
    assert cache.statistics().used == 2
    before = cache.attend(0, torch.ones(1, 4, 1, 8), [first])
    put(cache, {second: 1})  # copies the second page, which holds two tokens
    assert cache.statistics().copied == cache.sequence_statistics(second).copied == 1
    assert cache.statistics().used == 3
    assert torch.equal(cache.attend(0, torch.ones(1, 4, 1, 8), [first]), before)
    put(cache, {first: 1})  # nobody else holds it now
    assert cache.statistics().copied == 1
    cache.check()


def test_forks_that_write_in_one_step_leave_the_page_to_the_last():
    cache = cache_of()
    first = cache.allocate()
    put(cache, {first: 5})
    others = [cache.fork(first) for _ in range(2)]
    put(cache, dict.fromkeys([first, *others], 1))
    assert cache.statistics().copied == 2
    assert cache.statistics().used == 4
    cache.check()


PROMPT = list(range(100, 111))


def test_equal_beginnings_are_found_once_they_are_written():
    cache = cache_of()
    first = cache.allocate(PROMPT)
    assert cache.length(first) == 0
    put(cache, {first: PROMPT})
    assert cache.length(cache.allocate(PROMPT)) == 0  # not known to be written
    cache.commit(first)
    second = cache.allocate(PROMPT)
    assert cache.length(second) == 8
    assert cache.sequence_statistics(second).cached == 8
    assert torch.equal(cache.tables([first])[0][:, :2], cache.tables([second])[0])
    assert cache.length(cache.allocate(PROMPT[:8])) == 4  # one token at least is left
    assert cache.length(cache.allocate([0, *PROMPT])) == 0
    assert cache.length(cache.allocate(PROMPT, salt=b"another adapter")) == 0
    assert cache.statistics().matched == 12
    cache.check()


@pytest.mark.parametrize("windows", [None, [None, 5]])
def test_tokens_named_later_are_found_as_far_as_they_are_named(windows):
    options = {"windows": windows, "num_layers": None} if windows else {}
    cache = cache_of(40, **options)
    first = cache.allocate()
    slots, at_once = cache.grow({first: 10}), cache.append({cache.allocate(): 10})
    if windows:
        slots, at_once = slots[1], at_once[1]
    assert isinstance(slots, list) and len(slots) == len(at_once) == 10
    for end, found in ((3, 0), (5, 4), (10, 8)):
        cache.name(first, TOKENS[:end])
        assert cache.length(cache.allocate(TOKENS)) == found
    cache.grow({first: 3})
    twin = cache.fork(first)
    cache.name(first, TOKENS[:13])
    cache.name(first, TOKENS[:5])  # known by now
    assert cache.length(cache.allocate(TOKENS)) == 12
    cache.name(twin, [*TOKENS[:10], 7, 7, 7])
    # A page that two share is known by the tokens that it was named by first.
    assert cache.length(cache.allocate([*TOKENS[:10], 7, 7, 7, 0])) == 8
    with pytest.raises(ValueError, match="tokens: got 14, takes at most 13"):
        cache.name(first, TOKENS[:14])
    third = cache.allocate()
    cache.grow({third: 2})
    with pytest.raises(TypeError, match="tokens: got float"):
        cache.name(third, [1, 1.5])  # pyright: ignore[reportArgumentType]
    cache.check()


TOKENS = list(range(50, 70))


def test_page_numbers_are_those_of_the_table():
    cache = cache_of(window=5)
    sequence = cache.allocate()
    for _ in range(4):
        cache.grow({sequence: 4})
    table, _ = cache.tables([sequence])
    assert cache.page_numbers(sequence) == table[0].tolist()
    assert cache.statistics().released > 0


def test_a_beginning_stays_after_its_sequence_until_room_is_needed():
    cache = cache_of(4)
    first = cache.allocate(PROMPT)
    put(cache, {first: PROMPT})
    cache.commit(first)
    cache.free(first)
    assert cache.statistics().idle == 2 and cache.statistics().used == 0
    again = cache.allocate(PROMPT)
    assert cache.length(again) == 8 and cache.statistics().idle == 0
    cache.free(again)
    other = cache.allocate()
    put(cache, {other: 12})  # the page that ends the beginning goes first
    assert cache.statistics().evicted == 1
    assert cache.length(cache.allocate(PROMPT)) == 4


def test_equal_hashes_of_unlike_tokens_are_told_apart(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "digest", staticmethod(lambda before, tokens: b"all alike"))
    cache = cache_of()
    first = cache.allocate(PROMPT)
    put(cache, {first: PROMPT})
    cache.commit(first)
    assert cache.length(cache.allocate([7] * 9)) == 0
    assert cache.length(cache.allocate(PROMPT)) == 4


def test_without_prefix_caching_nothing_is_shared():
    cache = cache_of(prefix_caching=False)
    first = cache.allocate(PROMPT)
    put(cache, {first: PROMPT})
    cache.commit(first)
    assert cache.length(cache.allocate(PROMPT)) == 0
    cache.free(first)
    assert cache.statistics().idle == 0


def test_out_of_pages_says_what_is_missing():
    cache = cache_of(3)
    sequence = cache.allocate()
    with pytest.raises(
        saccade.OutOfPagesError, match="on the device: 4 needed, 3 available"
    ) as caught:
        cache.append({sequence: 13})
    assert (caught.value.needed, caught.value.available) == (4, 3)
    put(cache, {sequence: 12})
    with pytest.raises(saccade.OutOfPagesError, match="on the host: 3 needed, 0 available"):
        cache.swap_out(sequence)
    cache.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_swapping_keeps_every_row(dtype):
    cache = cache_of(6, host_pages=5, dtype=dtype)
    first = cache.allocate()
    put(cache, {first: 10})
    second = cache.fork(first)
    query = torch.randn(1, 4, 1, 8, generator=GENERATOR)
    before = [cache.attend(layer, query, [first]) for layer in range(2)]
    cache.swap_out(first)
    assert cache.statistics().host_used == 3 and cache.statistics().used == 3
    with pytest.raises(ValueError, match="sequence: got 0, which is swapped out"):
        cache.append({first: 1})
    with pytest.raises(ValueError, match="which is swapped out"):
        cache.tables([first])
    cache.free(second)
    put(cache, {cache.allocate(): 4})
    cache.swap_in(first)
    after = [cache.attend(layer, query, [first]) for layer in range(2)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    cache.check()


def test_compaction_moves_pages_and_keeps_every_row():
    cache = cache_of(20)
    sequences = [cache.allocate() for _ in range(3)]
    for _ in range(3):
        put(cache, dict.fromkeys(sequences, 4))
    cache.free(sequences[1])
    query = torch.randn(2, 4, 1, 8, generator=GENERATOR)
    left = [sequences[0], sequences[2]]
    before = cache.attend(1, query, left)
    assert cache.compact() > 0
    assert cache.tables(left)[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(cache.attend(1, query, left), before)
    assert cache.compact() == 0
    cache.check()


def test_layers_of_a_step_share_tables_which_are_made_anew_as_far_as_sequences_change(monkeypatch):
    cache = cache_of(20)
    sequences, made = [cache.allocate() for _ in range(2)], []

    def counted(numbers: Any, *options: Any) -> torch.Tensor:
        made.append(len(numbers))
        return on_device(numbers, *options)

    monkeypatch.setattr(paged_cache, "on_device", counted)
    query = torch.randn(2, 4, 1, 8, generator=GENERATOR)

    def of_a_step() -> list[int]:
        made.clear()
        for layer in range(2):
            pages = cache.pages(layer)
            found = cache.attend(layer, query, sequences)
            wanted = [*made]
            tables = cache.tables(sequences)
            made[:] = wanted
            assert torch.equal(found, saccade.attention_paged(query, *pages[:2], *tables))
        return [*made]

    put(cache, dict.fromkeys(sequences, 3))
    bytes_of_table, lengths = 2 * 4, 2
    assert of_a_step() == [bytes_of_table, lengths]
    assert of_a_step() == []
    put(cache, dict.fromkeys(sequences, 1))  # in the same pages
    assert of_a_step() == [lengths]
    put(cache, {sequences[1]: 1})  # in another one
    assert of_a_step() == [2 * bytes_of_table, lengths]
    cache.trim(sequences[1], 4)
    assert of_a_step() == [bytes_of_table, lengths]
    for each in cache.tables(sequences):  # which are the caller's own
        each.zero_()
    assert of_a_step() == []
    monkeypatch.setattr(paged_cache, "_stream", lambda device: "another stream")
    assert of_a_step() == [bytes_of_table, lengths]
    monkeypatch.setattr(paged_cache, "_is_captured", lambda device: True)
    assert of_a_step() == [bytes_of_table, lengths] * 2  # for each layer


def test_tables_that_a_mode_sees_are_not_left_for_others():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    cache = cache_of()
    sequence = cache.allocate()
    put(cache, {sequence: 3})
    with Mode():
        cache.attend(0, torch.ones(1, 4, 1, 8), [sequence])
    assert not cache._known
    for _ in range(2 * paged_cache.MOST_TABLES):
        sequence = cache.fork(sequence)
        cache.attend(0, torch.ones(1, 4, 1, 8), [sequence])
    assert len(cache._known) == paged_cache.MOST_TABLES


def test_a_growing_sequence_gets_neighbouring_pages():
    cache = cache_of(64)
    sequences = [cache.allocate() for _ in range(4)]
    for _ in range(10):
        cache.append(dict.fromkeys(sequences, 4))
    for row in cache.tables(sequences)[0].tolist():
        jumps = sum(later != earlier + 1 for earlier, later in itertools.pairwise(row))
        assert jumps <= 2


def test_free_runs():
    runs = FreeRanges(10)
    assert runs.take(3, None) == [0, 1, 2]
    assert runs.take(2, None) == [5, 6]  # in the middle of 3 … 9: room to grow for the first
    assert runs.take(2, after=2) == [3, 4]
    runs.give(1)
    runs.give(5)
    runs.give(6)
    assert runs.pages() == [1, 5, 6, 7, 8, 9] and len(runs) == 6
    assert sorted(runs.take(6, None)) == [1, 5, 6, 7, 8, 9] and len(runs) == 0


def test_threads_lose_nothing():
    cache = cache_of(200, num_layers=1)
    failures = []

    def work(number):
        try:
            for turn in range(30):
                sequence = cache.allocate(PROMPT)
                cache.append({sequence: PROMPT[cache.length(sequence) :]})
                fork = cache.fork(sequence)
                cache.append({fork: 1 + (number + turn) % 3, sequence: 1})
                cache.free(sequence)
                cache.free(fork)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    cache.check()
    assert cache.statistics().used == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_pages": 0}, ValueError, "num_pages: got 0, takes a whole number of at least 1"),
        ({"page_size": 1025}, ValueError, "page_size: got 1025, takes 1 to 1024"),
        ({"kv_heads": 2.0}, TypeError, r"kv_heads: got 2\.0"),
        ({"window": -1}, ValueError, "window: got -1"),
        ({"dtype": torch.int32}, TypeError, r"dtype: got torch\.int32"),
    ],
)
def test_complaints(options, error, message):
    with pytest.raises(error, match=message):
        cache_of(**options)


def test_complaints_of_calls():
    cache = cache_of(window=4)
    sequence = cache.allocate()
    for call in (cache.free, cache.fork, cache.commit, cache.swap_out, cache.length):
        with pytest.raises(KeyError, match="sequence: got 9, takes one that was allocated"):
            call(9)
    with pytest.raises(ValueError, match="tokens: got -1"):
        cache.append({sequence: -1})
    with pytest.raises(TypeError):
        cache.append({sequence: [1.5]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="takes one that is swapped out"):
        cache.swap_in(sequence)
    cache.append({sequence: 14})
    cache.append({sequence: 1})
    with pytest.raises(ValueError, match="length: got 16, takes 0 to 15"):
        cache.trim(sequence, 16)
    with pytest.raises(ValueError, match="length: got 11, takes at least 12: earlier pages"):
        cache.trim(sequence, 11)
    cache.trim(sequence, 12)
    cache.check()


def test_complaints_of_arguments():
    cache: Any = cache_of()
    sequence = cache.allocate()
    slots = cache.append({sequence: 3})
    rows, query = torch.ones(3, 2, 8), torch.ones(1, 4, 1, 8)
    cache.write(0, rows, rows, slots)
    complaints: dict[str, Callable[[], Any]] = {
        "value: got None, takes a tensor": lambda: cache.write(0, rows, None, slots),
        "layer: got 0.0, takes a whole number": lambda: cache.write(0.0, rows, rows, slots),
        "layer: got True": lambda: cache.attend(True, query, [sequence]),
        "length: got 1.0, takes a whole": lambda: cache.trim(sequence, 1.0),
        "length: got True": lambda: cache.trim(sequence, True),
        "sequences: got 0, takes a list": lambda: cache.attend(0, query, sequence),
        "sequences: got 7, takes a list": lambda: cache.tables(7),
        "salt: got str, takes bytes": lambda: cache.allocate([1], salt="tenant"),
        "tokens: got list, takes a mapping": lambda: cache.append([1]),
        "tokens: got Tensor, takes several": lambda: cache.append({sequence: torch.tensor(3)}),
        "latent: got 1, takes True or False": lambda: cache_of(latent=1),
        "prefix_caching: got 'no'": lambda: cache_of(prefix_caching="no"),
    }
    for said, call in complaints.items():
        with pytest.raises(TypeError, match=said):
            call()
    with pytest.raises(ValueError, match="num_pages: got a number for the window 5, which no"):
        saccade.PagedCache({None: 8, 5: 2}, 4, num_layers=1, kv_heads=2, head_dim=8)
    assert cache.length(sequence) == 3
    wanted = cache.attend(0, query, [sequence])
    assert cache.attend(0, query, torch.tensor([sequence])).equal(wanted)
    cache.check()


@pytest.mark.parametrize("number", [True, 1.0, None, "1", [1], (1,), torch.tensor(1)])
def test_what_is_no_number_of_a_sequence_ends_none(number):
    cache: Any = cache_of(host_pages=4)
    sequences = [cache.allocate() for _ in range(2)]  # 0 and 1, which True and 1.0 are equal to
    cache.append(dict.fromkeys(sequences, 3))
    calls: list[Callable[[], Any]] = [
        partial(getattr(cache, name), number)
        for name in (
            "free", "fork", "commit", "forget", "length", "page_numbers", "sequence_statistics",
            "swap_out", "swap_in",
        )
    ]  # fmt: skip
    calls += [
        lambda: cache.trim(number, 1),
        lambda: cache.name(number, [1]),
        lambda: cache.state_borders(number, 4),
        lambda: cache.tables([number]),
        lambda: cache.attend(0, torch.ones(1, 4, 1, 8), [number]),
    ]
    if not isinstance(number, list):  # which no mapping takes
        calls.append(lambda: cache.append({number: 1}))
    for call in calls:
        with pytest.raises(TypeError, match=r"sequence: got .*, takes the number that allocate or"):
            call()
    assert [cache.length(each) for each in sequences] == [3, 3]
    cache.check()


def test_numbers_of_numpy_are_numbers_of_sequences():
    cache: Any = cache_of()
    sequence = np.int64(cache.allocate())
    cache.append({sequence: 3})
    assert cache.length(sequence) == cache.length(0) == 3
    cache.free(sequence)
    cache.check()


@pytest.mark.parametrize("tokens", [b"ab", "ab", {1, 2}, {1: 2}, 5, None, torch.tensor(1)])
def test_tokens_without_an_order_or_of_text_are_refused(tokens):
    cache: Any = cache_of()
    sequence = cache.allocate([1, 2, 3])
    cache.append({sequence: [1, 2, 3]})
    calls = [lambda: cache.allocate(tokens), lambda: cache.name(sequence, tokens)]
    if not isinstance(tokens, int):  # which is how many
        calls.append(lambda: cache.append({sequence: tokens}))
    for call in calls:
        with pytest.raises(TypeError, match=r"tokens: got .*, takes several whole numbers"):
            call()
    assert (cache.length(sequence), cache.statistics().sequences) == (3, 1)


def test_complaints_of_options():
    cache: Any = cache_of()
    sequence = cache.allocate()
    slots = cache.append({sequence: 3})
    rows, query = torch.ones(3, 2, 8), torch.ones(1, 4, 1, 8)
    complaints: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "spare: got int, takes a list of None or whole numbers, one for each of 1 groups": (
            TypeError, lambda: cache.append({sequence: 1}, spare=5)),
        "spare: got 2 of them": (
            ValueError, lambda: cache.append({sequence: 1}, spare=[None, None])),
        "spare: got 1.0": (TypeError, lambda: cache.append({sequence: 1}, spare=[1.0])),
        "spare: got -1": (ValueError, lambda: cache.append({sequence: 1}, spare=[-1])),
        "keep: got int": (TypeError, lambda: cache.append({sequence: 1}, keep=5)),
        "slots: got NoneType, takes int64 .tokens., or a list of 1 such": (
            TypeError, lambda: cache.write(0, rows, rows, None)),
        "slots: got list": (TypeError, lambda: cache.write(0, rows, rows, slots.tolist())),
        "key_scales: got it as an option": (
            TypeError, lambda: cache.write(0, rows, rows, slots, key_scales=None)),
        "kv_lens: got it as an option, takes none": (
            TypeError, lambda: cache.attend(0, query, [sequence], kv_lens=torch.tensor([3]))),
    }  # fmt: skip
    for said, (error, call) in complaints.items():
        with pytest.raises(error, match=said):
            call()
    assert cache.length(sequence) == 3
    cache.check()


@pytest.mark.parametrize("layer", [2, -3])
def test_layers_that_are_not_there(layer):
    cache = cache_of()
    rows = torch.ones(0, 2, 8)
    for call in (
        lambda: cache.pages(layer),
        lambda: cache.write(layer, rows, rows, torch.empty(0, dtype=torch.int64)),
        lambda: cache.attend(layer, torch.ones(1, 4, 1, 8), [cache.allocate()]),
    ):
        with pytest.raises(IndexError, match=f"layer: got {layer}, takes 0 to 1"):
            call()


def test_check_sees_what_is_broken():
    cache = cache_of()
    sequence = cache.allocate(PROMPT)
    cache.append({sequence: PROMPT})
    cache.groups[0].pool.holders[0] += 1
    with pytest.raises(AssertionError, match="page 0 on the device counts 2 holders and has 1"):
        cache.check()
    cache.groups[0].pool.holders[0] -= 1
    cache.groups[0].sequences[sequence].length += 4
    with pytest.raises(AssertionError, match="3 pages for 15 tokens"):
        cache.check()


@pytest.mark.parametrize(
    ("token", "error", "got"),
    [
        (-1, ValueError, "got -1"),
        (2**63, ValueError, "got 9223372036854775808"),
        (True, TypeError, "got bool"),
        (1.0, TypeError, "got float"),
        ("a", TypeError, "got str"),
    ],
)
def test_what_is_no_token_is_refused_before_anything_changes(token, error, got):
    for cache in (cache_of(), saccade.PagedCache(12, 4, windows=[None], kv_heads=1, head_dim=1)):
        sequence = cache.allocate([1, 2, 3, 4, 5])
        cache.append({sequence: [1, 2, 3, 4, 5]})
        with pytest.raises(error, match="tokens: " + got):
            cache.allocate([token] * 5)
        with pytest.raises(error, match="tokens: " + got):
            cache.append({sequence: [token] * 9})
        cache.check()
        assert (cache.statistics().used, cache.statistics().sequences) == (2, 1)


def test_what_is_forgotten_is_found_by_nobody():
    cache = cache_of()
    first, twin = cache.allocate(PROMPT), cache.allocate(PROMPT)
    put(cache, {first: PROMPT, twin: PROMPT})
    cache.commit(first)
    cache.commit(twin)
    cache.free(first)  # its pages are those that are known
    cache.forget(twin)
    cache.check()
    assert cache.length(cache.allocate(PROMPT)) == 0
    assert cache.statistics().idle == 0


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_cache_is_neither_pickled_nor_copied(copied):
    cache = saccade.PagedCache(4, page_size=4, num_layers=1, kv_heads=1, head_dim=8)
    with pytest.raises(TypeError, match=r"^PagedCache: got a copy or a pickle of one"):
        copied(cache)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_an_error_is_sent_to_other_processes_whole(copied):
    error = saccade.OutOfPagesError(5, 2, "host", "states")
    found = copied(error)
    assert type(found) is saccade.OutOfPagesError
    assert vars(found) == vars(error)
    assert str(found) == str(error)

"""Tokens from logits, each row by its own settings and random numbers; text that never changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.serving.decode_steps import Inbox, Row
from saccade.serving.decoding import Lanes, Sampling, TextStream, Traits, choose, draw, uniform

CPU = torch.device("cpu")
LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3


def rows_of(
    samplings: list[Sampling], counters: list[int] | None = None, vocabulary: int = 50
) -> Any:
    """The rows' settings, by way of what the host sends; each has its own lane."""
    inbox = Inbox(len(samplings), [1], vocabulary, CPU)
    for number, sampling in enumerate(samplings):
        counter = 0 if counters is None else counters[number]
        inbox.write(number, Row(0, -1, counter, number, sampling))
    inbox.send(len(samplings), [0])
    return inbox.settings(len(samplings))


def chosen(
    logits: torch.Tensor, samplings: list[Sampling], *,
    prompt: list[int] | None = None, generated: list[int] | None = None,
    ends: frozenset[int] = frozenset(),
) -> Any:  # fmt: skip
    vocabulary, generated = logits.shape[-1], generated or []
    lanes = Lanes(len(samplings), vocabulary, CPU)
    for lane, sampling in enumerate(samplings):
        lanes.begin(lane, sampling, prompt or [0], generated, ends)
    traits = Traits.of_any([sampling.traits for sampling in samplings])
    counters = [len(generated)] * len(samplings)
    return choose(logits, rows_of(samplings, counters, vocabulary), traits, lanes)


def tokens(logits: torch.Tensor, samplings: list[Sampling], **what: Any) -> list[int]:
    return chosen(logits, samplings, **what).tokens.tolist()


def test_temperature_0_takes_the_likeliest():
    assert tokens(LOGITS, [Sampling()] * 6) == LOGITS.argmax(-1).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_one_token_to_choose_from_is_the_likeliest(seed):
    several: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}]
    for settings in several:
        given = [Sampling(temperature=2.0, seed=seed, **settings)] * 6
        assert tokens(LOGITS, given) == LOGITS.argmax(-1).tolist()


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.9}, {"min_p": 0.2},
     {"top_k": 20, "top_p": 0.95, "min_p": 0.05}],
    ids=str,
)  # fmt: skip
def test_tokens_come_as_often_as_their_weights_say(settings):
    temperature, row, count = 1.3, LOGITS[0].double(), 20_000
    order = row.argsort(descending=True)
    weights = (
        (row[order] / temperature)
        .masked_fill(torch.arange(50) >= settings.get("top_k", 50), -torch.inf)
        .softmax(-1)
    )
    weights[weights.cumsum(-1) - weights >= settings.get("top_p", 1.0)] = 0
    weights[weights < settings.get("min_p", 0.0) * weights[0]] = 0
    wanted = torch.zeros(50, dtype=torch.float64)
    wanted[order] = weights / weights.sum()
    # Numbers at equal distances: each token must come as often as its share, to within one.
    sampling = Sampling(temperature=temperature, **settings)
    settings_of_rows = rows_of([sampling] * count)
    numbers = (torch.arange(count) + 0.5).double() / count
    logits = LOGITS[:1].expand(count, -1)
    found = draw(logits, settings_of_rows, sampling.traits, numbers).bincount(minlength=50)
    assert (found - count * wanted).abs().max() <= 1.01


MIXED = [
    Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=3),
    Sampling(temperature=2.0, top_p=0.5, repetition_penalty=1.3),
    Sampling(temperature=1.0, top_k=20, min_p=0.1, presence_penalty=0.5, logprobs=2),
    Sampling(temperature=1e-9, logit_bias={3: 2.0}, min_new_tokens=4),
]  # fmt: skip


def test_a_rows_token_does_not_depend_on_its_neighbours():
    what: dict[str, Any] = {"prompt": [1, 2], "generated": [3, 3], "ends": frozenset([4, 5])}
    samplings = [replace(each, seed=n) for n, each in enumerate(MIXED)]
    together = tokens(LOGITS, samplings, **what)
    alone = [tokens(LOGITS[n : n + 1], samplings[n : n + 1], **what)[0] for n in range(6)]
    assert together == alone
    assert tokens(LOGITS.flip(0), samplings[::-1], **what) == together[::-1]


@pytest.mark.parametrize("nonfinite", [torch.nan, torch.inf])
def test_rows_that_are_no_distribution_give_none_and_harm_no_other(nonfinite):
    logits = LOGITS.clone()
    logits[2, 7] = nonfinite
    several: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_k": 4}, {"logprobs": 1}]
    for settings in several:
        given = [Sampling(**settings)] * 6
        found, wanted = tokens(logits, given), tokens(LOGITS, given)
        assert found == [*wanted[:2], -1, *wanted[3:]]


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.999}, {"min_p": 1e-9}], ids=str)
def test_hidden_tokens_are_never_drawn(number, settings):
    logits = LOGITS.clone()
    logits[:, 10:] = -torch.inf
    sampling = Sampling(temperature=5.0, **settings)
    numbers = torch.full((6,), number, dtype=torch.float64)
    assert int(draw(logits, rows_of([sampling] * 6), sampling.traits, numbers).max()) < 10


@pytest.mark.parametrize("temperature", [1e-300, 1.7e308])
def test_extreme_temperatures_give_tokens_that_there_are(temperature):
    found = tokens(LOGITS, [Sampling(temperature=temperature)] * 6)
    assert all(0 <= token < 50 for token in found)
    if temperature < 1:
        assert found == LOGITS.argmax(-1).tolist()


# ---- what changes logits -------------------------------------------------------------------------


def test_penalties_are_those_of_their_definitions():
    prompt, generated = [1, 7, 9], [7, 3, 3]
    sampling = Sampling(
        repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.7, logprobs=0
    )
    for row in range(6):
        wanted = LOGITS[row].clone()
        for token in {*prompt, *generated}:
            value = wanted[token]
            wanted[token] = value / 1.4 if value > 0 else value * 1.4
        for token in set(generated):
            wanted[token] -= 0.3 + 0.7 * generated.count(token)
        # Made the likeliest by a hair, each token shows what its logit is.
        for token in range(50):
            others = wanted.clone()
            others[token] = -torch.inf
            lift = float(others.max() - wanted[token])
            for change, is_chosen in ((lift + 1e-3, True), (lift - 1e-3, False)):
                biased = replace(sampling, logit_bias={token: change})
                found = tokens(LOGITS[row : row + 1], [biased], prompt=prompt, generated=generated)
                assert (found == [token]) == is_chosen
        if row == 1:
            break


def test_chosen_tokens_count_from_then_on():
    sampling, lanes = Sampling(frequency_penalty=0.5), Lanes(1, 50, CPU)
    lanes.begin(0, sampling, [0], [], frozenset())
    logits, counts, found = LOGITS[:1], torch.zeros(50), []
    for counter in range(8):
        found += choose(logits, rows_of([sampling], [counter]), sampling.traits, lanes).tokens
        assert int(found[-1]) == int((logits[0] - 0.5 * counts).argmax())
        counts[int(found[-1])] += 1
    assert len({int(token) for token in found}) > 1


def test_a_lane_forgets_what_another_request_left_there():
    lanes = Lanes(2, 50, CPU)
    before = Sampling(repetition_penalty=9.0, logit_bias={4: 50.0}, min_new_tokens=9)
    lanes.begin(1, before, [1, 2, 3], [4, 4], frozenset([5]))
    after = Sampling(repetition_penalty=2.0, logit_bias={6: 1.0}, min_new_tokens=1)
    lanes.begin(1, after, [7], [8], frozenset([9]))
    assert lanes.counts[1].nonzero().tolist() == [[8]]
    assert lanes.prompted[1].nonzero().tolist() == [[7]]
    assert lanes.biases[1].nonzero().tolist() == [[6]]
    assert lanes.ends[1].nonzero().tolist() == [[9]]
    assert not lanes.counts[:1].any() and not lanes.ends[2:].any()


def test_ends_are_not_chosen_before_there_are_enough_tokens():
    ends = frozenset(LOGITS[0].topk(3).indices.tolist())
    fourth = int(LOGITS[0].topk(4).indices[3])
    held = Sampling(min_new_tokens=2)
    for generated, wanted in (([], fourth), ([1], fourth), ([1, 1], int(LOGITS[0].argmax()))):
        assert tokens(LOGITS[:1], [held], generated=generated, ends=ends) == [wanted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_take_no_token_is_no_distribution(temperature):
    nothing = Sampling(
        temperature=temperature, logit_bias=dict.fromkeys(range(LOGITS.shape[1]), -torch.inf)
    )
    assert tokens(LOGITS[:2], [nothing, Sampling()]) == [-1, int(LOGITS[1].argmax())]


@pytest.mark.parametrize("change", [
    {"presence_penalty": 1e30, "frequency_penalty": 1e30}, {"repetition_penalty": 1e30},
    {"repetition_penalty": 1e-30, "frequency_penalty": -1e30}, {"logit_bias": {3: -1e30}},
])  # fmt: skip
def test_the_largest_changes_leave_a_distribution(change):
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, **change)
        assert tokens(LOGITS[:1], [sampling], generated=[1, 1, 3])[0] >= 0


def test_log_probabilities_are_those_of_the_models_logits():
    sampling = Sampling(logit_bias={11: 100.0}, logprobs=3)
    found = chosen(LOGITS, [sampling] * 6)
    wanted = LOGITS.double().log_softmax(-1)
    assert found.tokens.tolist() == [11] * 6
    assert torch.equal(found.logprobs[:, 0], wanted[:, 11])
    assert torch.equal(found.logprobs[:, 1:], wanted.gather(1, found.likeliest))
    assert torch.equal(found.likeliest[:, 0], LOGITS.argmax(-1))


# ---- random numbers ------------------------------------------------------------------------------


def keys(seeds: list[int]) -> torch.Tensor:
    return torch.tensor([Sampling(seed=seed).key for seed in seeds])


def test_random_numbers_are_those_of_splitmix():
    def splitmix(state: int) -> int:
        bits = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    state = keys([5]).expand(100)
    found = uniform(state, torch.arange(100)).tolist()
    first = int(state[0]) % 2**64
    wanted = [splitmix((first + n * 0x9E3779B97F4A7C15) % 2**64) >> 11 for n in range(1, 101)]
    assert found == [number * 2.0**-53 for number in wanted]
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # as published for the seed 0


def test_numbers_of_a_seed_and_of_all_seeds_fill_the_interval():
    of_one = uniform(keys([3]).expand(20_000), torch.arange(20_000))
    of_all = uniform(keys(list(range(20_000))), torch.zeros(20_000, dtype=torch.int64))
    for numbers in (of_one, of_all):
        assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
        # Counts of 2,000 in ten bins: six standard deviations are 6 · sqrt(2000 · 0.9) = 255.
        assert (numbers.mul(10).long().bincount(minlength=10) - 2000).abs().max() < 255


def test_every_seed_has_numbers_of_its_own():
    seeds = [0, 1, -1, 2, -2, 2**70, -(2**70)]
    assert len(set(keys(seeds).tolist())) == len(seeds)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature: got -1.0"),
        ({"temperature": float("nan")}, ValueError, "temperature: got nan"),
        ({"temperature": "hot"}, TypeError, "temperature: got str"),
        ({"top_k": 0}, ValueError, "top_k: got 0, takes 1 or more"),
        ({"top_p": 0.0}, ValueError, "top_p: got 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p: got 1.5"),
        ({"min_p": -0.1}, ValueError, "min_p: got -0.1"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty: got 0"),
        ({"presence_penalty": float("inf")}, ValueError, "presence_penalty: got inf"),
        ({"frequency_penalty": 10**400}, ValueError, "frequency_penalty: got 1000"),
        ({"frequency_penalty": -1e39}, ValueError, "got -1e\\+39, takes a finite number from -1e"),
        ({"repetition_penalty": 1e39}, ValueError, "repetition_penalty: got 1e\\+39, takes a posi"),
        ({"repetition_penalty": 1e-39}, ValueError, "repetition_penalty: got 1e-39, takes a pos"),
        ({"logit_bias": {1: -1e39}}, ValueError, "logit_bias: got -1e\\+39, takes .* or -inf"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens: got -1"),
        ({"logprobs": 21}, ValueError, "logprobs: got 21, takes at most 20"),
        ({"logit_bias": [1]}, TypeError, "logit_bias: got list"),
        ({"logit_bias": {1: float("inf")}}, ValueError, "logit_bias: got inf"),
        ({"logit_bias": {-1: 0.0}}, ValueError, "logit_bias: got -1"),
        ({"seed": 1.0}, TypeError, "seed: got float"),
    ],
)
def test_bad_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        Sampling(**settings)


# ---- text ----------------------------------------------------------------------------------------


class ByteTokenizer:
    """A token is a byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=False):
        return bytes(token_ids).decode("utf-8", errors="replace")


def streamed(text, stop_strings=()):
    stream, pieces = TextStream(ByteTokenizer(), stop_strings), []
    for token in ByteTokenizer().encode(text):
        stream.push(token)
        pieces.append(stream.piece())
        if stream.stopped:
            break
    stream.finish()
    return stream, [*pieces, stream.piece()]


@given(st.text(), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_are_the_text_up_to_the_first_stop_string(text, stop_strings):
    stream, pieces = streamed(text, stop_strings)
    # The first to be complete counts; of those complete at one place, the one that begins first.
    ends = [
        (place + len(stop), place)
        for stop in stop_strings
        for place in [text.find(stop)]
        if place >= 0
    ]
    first_end = min((end for end, _ in ends), default=None)
    wanted = text if first_end is None else text[: min(p for e, p in ends if e == first_end)]
    assert "".join(pieces) == stream.text == wanted
    assert stream.stopped == (first_end is not None)


def test_unfinished_characters_are_held_back():
    _, pieces = streamed("aé語b")
    assert [piece for piece in pieces if piece] == ["a", "é", "語", "b"]


def test_what_may_become_a_stop_string_is_held_back():
    _, pieces = streamed("abcabx", ["abcd"])
    assert pieces[:4] == ["", "", "", "abc"]
    assert "".join(pieces) == "abcabx"


def test_bytes_that_are_no_character_come_in_the_end():
    stream = TextStream(ByteTokenizer(), ())
    for token in (97, 0xE8, 0xAA):
        stream.push(token)
    assert stream.piece() == "a"
    stream.finish()
    assert stream.piece() == "\ufffd"


@pytest.mark.parametrize("stop", ["b", "cb", "abcb"])
def test_stop_string_is_not_part_of_the_text(stop):
    stream, _ = streamed("aabcbb", [stop])
    assert stream.stopped and stop not in stream.text

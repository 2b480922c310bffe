"""Tokens from logits, each row by its own settings and random numbers; text that never changes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.serving.decoding import Dice, Draw, Sampling, TextStream, choose

LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3


def draws(number=0.5, **settings: Any):
    return [Draw(Sampling(**settings), number)] * 6


def test_temperature_0_takes_the_likeliest():
    assert choose(LOGITS, draws()) == LOGITS.argmax(-1).tolist()


@pytest.mark.parametrize("number", [0.0, 0.3, 0.999999999])
def test_one_token_to_choose_from_is_the_likeliest(number):
    for settings in ({"top_k": 1}, {"top_p": 1e-9}):
        given = draws(number=number, temperature=2.0, **settings)
        assert choose(LOGITS, given) == LOGITS.argmax(-1).tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.9}], ids=str
)
def test_tokens_come_as_often_as_their_weights_say(settings):
    temperature, row, count = 1.3, LOGITS[0].double(), 20_000
    order = row.argsort(descending=True)
    weights = (
        (row[order] / temperature)
        .masked_fill(torch.arange(50) >= settings.get("top_k", 50), -torch.inf)
        .softmax(-1)
    )
    weights[weights.cumsum(-1) - weights >= settings.get("top_p", 1.0)] = 0
    wanted = torch.zeros(50, dtype=torch.float64)
    wanted[order] = weights / weights.sum()
    # Numbers at equal distances: each token must come as often as its share, to within one.
    sampling = Sampling(temperature=temperature, **settings)
    given = [Draw(sampling, (index + 0.5) / count) for index in range(count)]
    found = torch.tensor(choose(LOGITS[:1].expand(count, -1), given)).bincount(minlength=50)
    assert (found - count * wanted).abs().max() <= 1.01


def test_a_rows_token_does_not_depend_on_its_neighbours():
    settings = [
        Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=3),
        Sampling(temperature=2.0, top_p=0.5), Sampling(temperature=1.0, top_k=20, top_p=0.9),
        Sampling(temperature=1e-9),
    ]  # fmt: skip
    given = [Draw(each, 0.1 + 0.15 * n) for n, each in enumerate(settings)]
    together = choose(LOGITS, given)
    assert together == [choose(LOGITS[n : n + 1], given[n : n + 1])[0] for n in range(6)]
    assert choose(LOGITS.flip(0), given[::-1]) == together[::-1]


@pytest.mark.parametrize("nonfinite", [torch.nan, torch.inf])
def test_rows_that_are_no_distribution_give_none_and_harm_no_other(nonfinite):
    logits = LOGITS.clone()
    logits[2, 7] = nonfinite
    for settings in ({}, {"temperature": 1.0, "top_k": 4}):
        found, wanted = choose(logits, draws(**settings)), choose(LOGITS, draws(**settings))
        assert found == [*wanted[:2], None, *wanted[3:]]


def test_hidden_tokens_are_never_drawn():
    logits = LOGITS.clone()
    logits[:, 10:] = -torch.inf
    for number in (0.0, 0.5, 1 - 1e-12):
        found = choose(logits, draws(number=number, temperature=5.0))
        assert all(token is not None and token < 10 for token in found)


def test_dice_give_the_same_numbers_again():
    first, again, other = Dice(3), Dice(3), Dice(4)
    numbers = [first.number(index) for index in range(5)]
    assert numbers == [again.number(index) for index in reversed(range(5))][::-1]
    assert numbers != [other.number(index) for index in range(5)]


def test_every_seed_has_numbers_of_its_own():
    seeds = [0, 1, -1, 2, -2, 2**70, -(2**70)]
    assert len({Dice(seed).number(0) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature: got -1.0"),
        ({"temperature": float("nan")}, ValueError, "temperature: got nan"),
        ({"temperature": "hot"}, TypeError, "temperature: got str"),
        ({"top_k": 0}, ValueError, "top_k: got 0, takes 1 or more"),
        ({"top_p": 0.0}, ValueError, "top_p: got 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p: got 1.5"),
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

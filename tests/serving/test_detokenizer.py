"""Text: what was given out never changes, and stop strings are found wherever tokens end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.serving.detokenizer import TextStream


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

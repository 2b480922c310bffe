"""What single tokens add to a text: parts of characters, and spaces that decoders leave out."""

import json
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models

from saccade.demo.model import byte_tokenizer
from saccade.serving.openai_format import Answer, News, Usage, read_chat, read_completion
from saccade.serving.request import TokenLogprob
from saccade.serving.token_text import Offsets, TokenText, text_of

NAMES = ["</s>", "▁", "▁Hello", "Hello", "▁world", "é", "\ufffd"]
BYTES = len(NAMES)  # the number of the token of byte 0


def of_bytes() -> Any:
    """A byte-level tokenizer."""
    made = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer()))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def of_words() -> Any:
    """One in the manner of Llama 2's: words begin with a mark, a text's first space is left out."""
    names = [*NAMES, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    made.add_special_tokens(["</s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def offsets(tokenizer: Any, tokens: list[int]) -> list[int]:
    made = Offsets(
        lambda token: tokenizer.decode([token], skip_special_tokens=True),
        lambda token: text_of(tokenizer, token),
    )
    return [made.add(token) for token in tokens]


@pytest.mark.parametrize("text", ["plain", "é a€😀", "日本語 ünï"])
def test_bytes_of_tokens_make_the_text(text):
    tokenizer = of_bytes()
    tokens = tokenizer.encode(text)
    found = [text_of(tokenizer, token).data for token in tokens]
    assert b"".join(data or b"" for data in found).decode() == text
    places = offsets(tokenizer, tokens)
    ends = [len(text.encode()[:number].decode(errors="ignore")) for number in range(len(tokens))]
    assert places == ends


def test_tokens_of_words_have_their_spaces():
    tokenizer = of_words()
    told = [text_of(tokenizer, token) for token in (2, 3, 1, 5)]
    assert [each.text for each in told] == [" Hello", "Hello", " ", "é"]
    assert [each.data for each in told] == [b" Hello", b"Hello", b" ", "é".encode()]


@pytest.mark.parametrize(
    ("tokens", "text", "places"),
    [
        ([2, 4], "Hello world", [0, 5]),
        ([1, 3, 4], "Hello world", [0, 0, 5]),
        ([0, 2, 0, 4], "Hello world", [0, 0, 5, 5]),
        ([3, BYTES + 0xC3, BYTES + 0xA9, 4], "Helloé world", [0, 5, 5, 6]),
        ([6, 2], "\ufffd Hello", [0, 1]),
    ],
)
def test_offsets_are_places_in_the_text(tokens, text, places):
    tokenizer = of_words()
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert offsets(tokenizer, tokens) == places


def test_what_a_character_begins_and_another_follows_is_counted():
    tokenizer = of_bytes()
    assert offsets(tokenizer, [0xC3, ord("a"), ord("b")]) == [0, 1, 2]


def test_parts_without_a_name_have_no_bytes():
    class Nameless:
        def decode(self, tokens: list[int]) -> str:
            return "\ufffd" * len(tokens)

    assert text_of(Nameless(), 7) == TokenText("\ufffd", None)


def test_a_mark_that_is_a_token_of_its_own_is_one():
    assert text_of(of_words(), 6) == TokenText("\ufffd", "\ufffd".encode())


def answered(body: dict[str, Any], tokenizer: Any) -> Any:
    """The choice that tells of the two bytes of é, with both as the likeliest of the first."""
    chat = "messages" in body
    asked = read_chat(body, tokenizer) if chat else read_completion(body)
    logprobs = [
        TokenLogprob(0xC3, -1.0, [(0xC3, -1.0), (0xA9, -2.0)]),
        TokenLogprob(0xA9, -3.0, []),
    ]
    news = [News(0, "é", 2, logprobs, "length")]
    whole = Answer(asked, tokenizer, "m", "1", 0)
    return whole.whole([news], Usage(1, 0, 2))["choices"][0]["logprobs"]


def test_chats_tell_the_bytes_of_parts_of_characters():
    tokenizer = of_bytes()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    content = answered(body, tokenizer)["content"]
    assert bytes([byte for one in content for byte in one["bytes"]]).decode() == "é"
    assert [one["token"] for one in content] == ["\\xc3", "\\xa9"]
    assert [one["bytes"] for one in content[0]["top_logprobs"]] == [[0xC3], [0xA9]]


def test_completions_tell_parts_of_characters_apart():
    found = answered({"prompt": "a", "logprobs": 2}, of_bytes())
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found["top_logprobs"][0] == {"bytes:\\xc3": -1.0, "bytes:\\xa9": -2.0}
    assert found["text_offset"] == [0, 0]

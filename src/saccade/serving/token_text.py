"""Token text: what single tokens add to a text, as characters and as bytes.

A token may be a part of a character: its text is then the mark for what is no UTF-8, and its bytes
are told by how its tokenizer writes it. And tokenizers that begin words with a mark for a space
leave out a text's first one, so that a token alone has other text than behind others.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any, NamedTuple

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile("<0x([0-9A-F]{2})>")  # as SentencePiece writes one


def byte_characters() -> list[str]:
    """The character by which a byte-level tokenizer writes each byte (Radford et al. 2019).

    Printable bytes stand for themselves, all others for characters from 256 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class TokenText(NamedTuple):
    """What one token adds to a text that it does not begin.

    Attributes:
        text: with U+FFFD in the place of parts of characters.
        data: its bytes; None where the tokenizer does not tell those of a part.
    """

    text: str
    data: bytes | None

    @property
    def escaped(self) -> str:
        """Its text, or that of its bytes where it ends within a character: no two are alike."""
        if UNKNOWN not in self.text or self.data is None:
            return self.text
        return "".join(f"\\x{byte:02x}" for byte in self.data)


def text_of(tokenizer: Any, token: int) -> TokenText:
    """What a token adds to a text that it does not begin."""
    alone, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    text = twice[len(alone) :] if twice.startswith(alone) else alone
    if UNKNOWN not in text:
        return TokenText(text, text.encode())
    name = getattr(tokenizer, "convert_ids_to_tokens", lambda _: None)(token)
    if isinstance(name, str) and UNKNOWN in name:  # it is that character
        return TokenText(text, text.encode())
    data = _bytes_of(name) if isinstance(name, str) else None
    if data is None or data.decode("utf-8", "replace") != tokenizer.decode([token]):
        return TokenText(text, None)
    return TokenText(alone, data)


def _bytes_of(name: str) -> bytes | None:
    """The bytes of a token by its name in the vocabulary, if that is made of bytes."""
    if (found := BYTE.fullmatch(name)) is not None:
        return bytes.fromhex(found[1])
    return bytes(map(BYTES.__getitem__, name)) if set(name) <= BYTES.keys() else None


class Offsets:
    """Where in a growing text its tokens begin, counted in characters.

    Args:
        shown: a token's text where it begins one; "" for special tokens.
        text_of: what it adds behind others.
    """

    def __init__(self, shown: Callable[[int], str], text_of: Callable[[int], TokenText]):
        self._shown, self._text_of = shown, text_of
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._length, self._begun = 0, False

    def add(self, token: int) -> int:
        """The offset of one more token; one that ends a character begins where that does."""
        shown, found = self._shown(token), self._text_of(token)
        if not shown and not found.text.isspace():  # special tokens are no part of the text
            return self._length
        data = found.data
        if not self._begun and UNKNOWN not in found.text:
            data = shown.encode()  # which may lack a space
        self._begun = True
        if data is None or not data or not _continues(data):  # what was begun stays unfinished
            self._length += len(self._characters.decode(b"", True))
        offset = self._length
        self._length += len(shown if data is None else self._characters.decode(data))
        return offset


def _continues(data: bytes) -> bool:
    """Whether bytes begin within a character."""
    return data[0] & 0b1100_0000 == 0b1000_0000

"""Prefix: which full pages hold which tokens, so that equal beginnings are computed once.

A page is known by a hash of 128 bits over its tokens and the hash of the page before it: equal
hashes mean equal beginnings. The tokens themselves are compared as well. Source: vLLM's automatic
prefix caching (Kwon et al. 2023, section 4.4, on shared prefixes).
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from typing import NamedTuple


class PrefixEntry(NamedTuple):
    """What a page is known by."""

    digest: bytes
    before: bytes  # the digest of the page before it
    tokens: tuple[int, ...]


class PrefixIndex:
    """Full pages by the tokens from the start of their sequence to their end."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.page_of: dict[bytes, int] = {}
        self.entry_of: dict[int, PrefixEntry] = {}

    @staticmethod
    def root(salt: bytes) -> bytes:
        """What comes before the first page: sequences of unlike salt share nothing."""
        return hashlib.blake2b(salt, digest_size=16, person=b"saccade-root").digest()

    @staticmethod
    def digest(before: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a page behind another one."""
        words = array.array("q", tokens).tobytes()
        return hashlib.blake2b(before + words, digest_size=16).digest()

    def match(self, tokens: Sequence[int], root: bytes) -> list[tuple[int, bytes]]:
        """(page, digest) of the longest known beginning in whole pages, its last token left out.

        One token at least is left to be computed, so that there is a next one to predict.
        """
        found: list[tuple[int, bytes]] = []
        before = root
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            wanted = tuple(tokens[start : start + self.page_size])
            digest = self.digest(before, wanted)
            page = self.page_of.get(digest)
            if page is None or self.entry_of[page] != PrefixEntry(digest, before, wanted):
                break
            found.append((page, digest))
            before = digest
        return found

    def publish(self, page: int, before: bytes, tokens: Sequence[int]) -> bytes:
        """Make a full page known, unless another one with the same beginning is; its digest."""
        digest = self.digest(before, tokens)
        if digest not in self.page_of and page not in self.entry_of:
            self.entry_of[page] = PrefixEntry(digest, before, tuple(tokens))
            self.page_of[digest] = page
        return digest

    def __contains__(self, page: int) -> bool:
        return page in self.entry_of

    def forget(self, page: int) -> None:
        """A page holds other tokens from now on."""
        entry = self.entry_of.pop(page, None)
        if entry is not None:
            del self.page_of[entry.digest]

    def mend(self) -> None:
        """Make the hashes lead to the pages again, when an exception may have come between."""
        self.page_of = {entry.digest: page for page, entry in self.entry_of.items()}

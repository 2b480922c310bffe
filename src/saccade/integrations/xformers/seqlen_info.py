"""Seqlen info: how one dimension of tokens is divided into sequences, as xformers describes it.

Each description has its numbers twice: as Python's, which nothing has to be read for, and as
tensors, which calls use. What is updated in place keeps its tensors, for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from saccade.integrations.arguments import whole


def moved(described: Any, to: Any) -> Any:
    """A dataclass with all its tensors, and what holds tensors, on a device; or its real numbers in
    a dtype, which offsets have none of."""
    found = {}
    for field in fields(described):
        value = getattr(described, field.name)
        whole_tensor = isinstance(value, Tensor) and not value.is_floating_point()
        if hasattr(value, "to") and not (whole_tensor and isinstance(to, torch.dtype)):
            found[field.name] = value.to(to)
    return replace(described, **found)


def listed(numbers: Any) -> Any:
    """Lengths that are read more than once: those that a generator gives, in a list."""
    return list(numbers) if isinstance(numbers, Iterator) else numbers


def default_device(device: Any = None) -> torch.device:
    """The device of numbers that were given without one: the accelerator, if there is one."""
    if device is None and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    return torch.device("cpu" if device is None else device)


def int32(numbers: Sequence[int], device: Any) -> Tensor:
    """Whole numbers as a tensor."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def whole_numbers(name: str, numbers: Iterable[int]) -> list[int]:
    """Lengths or starts as a list.

    Raises:
        TypeError: for a tensor, whose numbers would have to be read from its device, and for what
            is no whole number.
        ValueError: for a negative number.
    """
    if isinstance(numbers, Tensor):
        raise TypeError(f"{name}: got a tensor, takes a list of numbers: {name}.tolist()")
    found = [whole(name, number) for number in numbers]
    if found and min(found) < 0:
        raise ValueError(f"{name}: got {min(found)}, takes numbers of at least 0")
    return found


def longest_of(lengths: Sequence[int]) -> int:
    """The longest length; -1 where there is none, by what torch.compile knows of `max`."""
    return max(lengths) if lengths else -1


def shortest_of(lengths: Sequence[int]) -> int:
    """The shortest length; -1 where there is none."""
    return min(lengths) if lengths else -1


@dataclass(eq=False)
class SeqLenInfo:
    """Sequences that lie one behind the other, from the first token to the last.

    Of lengths [2, 3, 2]: seqstart [0, 2, 5, 7], max_seqlen 3, min_seqlen 2.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> Self:
        """The sequences of these lengths."""
        lengths = whole_numbers("seqlens", seqlens)
        start = _offsets(lengths)
        return cls(
            seqstart=int32(start, default_device(device)),
            max_seqlen=longest_of(lengths),
            min_seqlen=shortest_of(lengths),
            seqstart_py=start,
        )

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """Replace the lengths by as many others, none longer than the longest was."""
        lengths = whole_numbers("seqlens", seqlens)
        _check_update(lengths, len(self.seqstart_py) - 1, self.max_seqlen)
        self.seqstart_py[:] = _offsets(lengths)
        self.seqstart.copy_(int32(self.seqstart_py, "cpu"), non_blocking=True)

    def to(self, device: Any) -> Self:
        """These sequences with their numbers on a device."""
        return moved(self, device)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Where each sequence starts and ends."""
        yield from pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Rows [1, tokens, ...] as a list of [batch, length, ...].

        Args:
            x: rows.
            batch_sizes: how many sequences, which are equally long, each tensor of the list has;
                one where None.
        """
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"x: got {list(x.shape)}, takes [1, {self.seqstart_py[-1]}, ...]")
        num_sequences = len(self.seqstart_py) - 1
        sizes = [1] * num_sequences if batch_sizes is None else batch_sizes
        if sum(sizes) != num_sequences:
            raise ValueError(
                f"batch_sizes: got {sum(sizes)} in sum, takes the {num_sequences} sequences"
            )
        ends = [self.seqstart_py[end] for end in _offsets(sizes)]
        parts = [x[:, first:end] for first, end in pairwise(ends)]
        return [
            part.reshape(size, part.shape[1] // max(size, 1), *part.shape[2:])
            for part, size in zip(parts, sizes, strict=True)
        ]


@dataclass(eq=False)
class PaddedSeqLenInfo(SeqLenInfo):
    """Sequences in slabs of one length, each from the start of its slab.

    Of lengths [2, 3, 2] in slabs of 4: seqstart [0, 4, 8, 12], seqlen [2, 3, 2], padding 4.
    """

    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> Self:
        """Not for slabs, which have a length of their own: an error."""
        raise TypeError("seqlens: got no padding, takes from_seqlens_padded(seqlens, padding)")

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Iterable[int], padding: int, *, device: Any = None
    ) -> Self:
        """The sequences of these lengths in slabs of `padding` tokens."""
        lengths, device = whole_numbers("seqlens", seqlens), default_device(device)
        _check_padding(lengths, padding)
        start = [padding * index for index in range(len(lengths) + 1)]
        return cls(
            seqstart=int32(start, device),
            max_seqlen=longest_of(lengths),
            min_seqlen=shortest_of(lengths),
            seqstart_py=start,
            seqlen=int32(lengths, device),
            seqlen_py=lengths,
            padding=padding,
        )

    def from_seqlens_padded_inplace(self, seqlens: Iterable[int]) -> None:
        """Replace the lengths by as many others, none longer than the longest was."""
        lengths = whole_numbers("seqlens", seqlens)
        _check_padding(lengths, self.padding)
        _check_update(lengths, len(self.seqlen_py), self.max_seqlen)
        self.seqlen_py[:] = lengths
        self.seqlen.copy_(int32(lengths, "cpu"), non_blocking=True)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Where each sequence starts and ends, its padding left out."""
        for start, length in zip(self.seqstart_py[:-1], self.seqlen_py, strict=True):
            yield start, start + length

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Not of padded sequences: an error."""
        raise NotImplementedError("split: got padded sequences, takes sequences without padding")


@dataclass(eq=False)
class GappySeqInfo(SeqLenInfo):
    """Sequences with a start and a length each, and room that none uses between them.

    Of starts [0, 7, 12, 14] and lengths [6, 3, 1]: the last start is the end of the dimension. Over
    pages, starts count from each sequence's own first slot, and seqlen is where it ends there.
    """

    seqlen: Tensor
    seqlen_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> Self:
        """Not for sequences with starts: an error."""
        raise TypeError("seqlens: got no starts, takes from_seqlens_gappy(starts, seqlens, paged)")

    @classmethod
    def from_seqlens_gappy(
        cls,
        seqstarts: Iterable[int],
        seqlens: Iterable[int],
        paged: bool,
        *,
        device: Any = None,
    ) -> Self:
        """The sequences of these starts and lengths.

        Args:
            seqstarts: one for each sequence; and, unless they are paged, the dimension's end.
            seqlens: how many tokens each has.
            paged: whether starts count from each sequence's own first slot.
            device: of the tensors.
        """
        start, lengths = whole_numbers("seqstarts", seqstarts), whole_numbers("seqlens", seqlens)
        device = default_device(device)
        if len(start) != len(lengths) + (not paged):
            takes = len(lengths) + (not paged)
            raise ValueError(
                f"seqstarts: got {len(start)} for {len(lengths)} lengths, takes {takes}"
            )
        ends = lengths
        if paged:
            ends = [first + length for first, length in zip(start, lengths, strict=True)]
            start = [*start, -1]
        return cls(
            seqstart=int32(start, device),
            max_seqlen=longest_of(lengths),
            min_seqlen=shortest_of(lengths),
            seqstart_py=start,
            seqlen=int32(ends, device),
            seqlen_py=ends,
        )

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Where each sequence starts and ends; not over pages."""
        for start, length in zip(self.seqstart_py[:-1], self.seqlen_py, strict=True):
            yield start, start + length

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Not of sequences with gaps: an error."""
        raise NotImplementedError("split: got sequences with gaps, takes sequences without")


def _offsets(lengths: Sequence[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def _check_padding(lengths: list[int], padding: int) -> None:
    if longest_of(lengths) > padding:
        raise ValueError(f"seqlens: got {max(lengths)}, takes at most the padding, {padding}")


def _check_update(lengths: list[int], num_sequences: int, longest: int) -> None:
    if len(lengths) != num_sequences:
        raise ValueError(f"seqlens: got {len(lengths)} lengths, takes {num_sequences}, as before")
    if longest_of(lengths) > max(longest, 0):
        raise ValueError(
            f"seqlens: got {max(lengths)}, takes at most {longest}, the longest before"
        )

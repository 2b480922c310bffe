"""Hostile: calls whose offsets, lengths, page numbers and slots lead anywhere, memory guarded.

What such a call gives means nothing. It must end, and touch nothing but its own tensors. On a CPU
they are run by `python tests/hostile.py CALL ...` in a process of its own, which a wrong address
kills; the last name that it printed is that of the call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from guarded import ClosedPages, Hold, all_that_is_made
from torch import Tensor

import saccade
from saccade import masks, scores

MOST, LEAST = 2**31 - 1, -(2**31)


def offsets_of(tokens: int, sequences: int) -> Iterator[Tensor]:
    """Offsets of packed sequences as no caller should give them, but the first two."""
    middle = [tokens * n // sequences for n in range(sequences + 1)]
    yield from (
        torch.tensor(values, dtype=torch.int32)
        for values in (
            middle,
            [n // 2 for n in middle],
            middle[::-1],
            [tokens * 3 + n for n in middle],
            [-n for n in middle],
            [0, *[MOST] * sequences],
            [LEAST] * sequences + [MOST],
            [MOST] * sequences + [LEAST],
            [(n % 2) * tokens for n in range(sequences + 1)],
            [0] + [tokens, 1] * (sequences // 2) + [tokens] * (sequences % 2),
        )
    )
    chance = torch.Generator().manual_seed(tokens)
    yield torch.randint(-tokens, 2 * tokens, (sequences + 1,), generator=chance).int()
    yield torch.randint(LEAST, MOST, (sequences + 1,), generator=chance).int()


def numbers_of(shape: tuple[int, ...], end: int) -> Iterator[Tensor]:
    """Lengths, pages or slots that should be from 0 to end - 1."""
    for value in (end, -1, MOST, LEAST, end - 1):
        yield torch.full(shape, value, dtype=torch.int32)
    chance = torch.Generator().manual_seed(end)
    yield torch.randint(-end, 2 * end, shape, generator=chance, dtype=torch.int32)
    yield torch.randint(LEAST, MOST, shape, generator=chance, dtype=torch.int32)


class Calls:
    """Every kind of call, with sizes of its own for a device."""

    def __init__(self, hold: Hold, device: str, implementation: str, dtype: torch.dtype):
        self.hold, self.device, self.dtype = hold, device, dtype
        self.options: dict[str, Any] = {"implementation": implementation}
        self.scale = 1 if device == "cpu" else 8  # so many times as many tokens
        self.dim = 16 if device == "cpu" else 64

    def rows(self, *shape: int) -> Tensor:
        """Numbers in guarded memory."""
        chance = torch.Generator().manual_seed(sum(shape))
        found = torch.randn(*shape, generator=chance).to(self.device, self.dtype)
        return self.hold(found)

    def whole(self, numbers: Tensor) -> Tensor:
        """Whole numbers in guarded memory."""
        return self.hold(numbers.to(self.device))

    def both(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Tokens and keys, and offsets of each: hostile beside fair ones, by turns, and others."""
        tokens, keys, sequences = 19 * self.scale, 23 * self.scale, 3
        of_both = zip(offsets_of(tokens, sequences), offsets_of(keys, sequences), strict=True)
        fair = next(offsets_of(tokens, sequences)), next(offsets_of(keys, sequences))
        for turn, (of_queries, of_keys) in enumerate(of_both):
            pairs = [(of_queries, of_keys), (fair[0], of_keys), (of_queries, fair[1])]
            for mine, others in pairs if self.device != "cpu" else pairs[turn % 3 :: 3]:
                yield tokens, keys, self.whole(mine), self.whole(others)

    def attend(self, deterministic: bool, **more: Any) -> None:
        """Packed attention, forward and backward."""
        for tokens, keys, of_queries, of_keys in self.both():
            query = self.rows(tokens, 2, self.dim).requires_grad_()
            key, value = (self.rows(keys, 1, self.dim).requires_grad_() for _ in "kv")
            output, lse = saccade.attention_varlen(
                query, key, value, of_queries, of_keys, deterministic=deterministic,
                return_lse=True, **self.options, **more,
            )  # fmt: skip
            torch.autograd.backward([output, lse], [self.rows(*output.shape), lse.detach()])

    def attention(self) -> None:
        """Without a mask."""
        self.attend(False)

    def attention_ordered(self) -> None:
        """Equal bits, under a causal mask: on Hopper, tiles wait for each other's turns."""
        self.attend(True, mask=masks.causal())

    def attention_in_stretches(self) -> None:
        """Under a mask that captured a tensor of each sequence."""
        lengths = self.whole(torch.tensor([3, MOST, LEAST]))
        self.attend(False, mask=masks.key_lengths(lengths) & masks.window(9, 2))

    def attention_planned(self) -> None:
        """Under a mask whose tile ranges are planned, as it reads tensors along rows."""
        numbers = torch.arange(60 * self.scale).expand(3, -1).contiguous() // 7
        self.attend(True, mask=masks.documents(self.whole(numbers)))

    def attention_bias(self) -> None:
        """With a bias that wants a gradient, and sinks."""
        table = self.rows(1, 2, 20, 30).float().requires_grad_()
        sinks = self.rows(2).float().requires_grad_()
        self.attend(False, score=scores.bias(table), sinks=sinks)

    def linear(self) -> None:
        """Packed linear attention, forward and backward."""
        for causal in (True, False):
            for tokens, keys, of_queries, of_keys in self.both():
                query = self.rows(tokens, 2, self.dim).requires_grad_()
                key, value = (self.rows(keys, 1, self.dim).requires_grad_() for _ in "kv")
                decay = (-self.rows(keys, 1).abs()).requires_grad_() if causal else None
                output, state = saccade.linear_attention_varlen(
                    query, key, value, of_queries, of_keys, causal=causal, decay=decay,
                    return_state=True, **self.options,
                )  # fmt: skip
                given = [output, state.kv], [self.rows(*output.shape), state.kv.detach()]
                torch.autograd.backward(*given)

    def linear_lengths(self) -> None:
        """Linear attention whose key lengths lead anywhere."""
        tokens = 37 * self.scale
        rows = [self.rows(3, 2, tokens, self.dim) for _ in "qkv"]
        for numbers in numbers_of((3,), tokens):
            lengths = self.whole(numbers.long())
            saccade.linear_attention(*rows, key_lengths=lengths, **self.options)

    def linear_step(self) -> None:
        """A step whose states are anywhere in a pool."""
        rows = [self.rows(3, 2, 1, self.dim) for _ in "qkv"]
        for numbers in numbers_of((3,), 4):
            state = saccade.LinearState(
                self.rows(4, 2, self.dim, self.dim).float(), self.rows(4, 2, self.dim).float(), None
            )
            index = self.whole(numbers.long())
            with torch.no_grad():
                saccade.linear_attention_step(state, *rows, state_index=index, **self.options)

    def delta(self) -> None:
        """The packed gated delta rule, forward and backward."""
        tokens, chunk = 19 * self.scale, saccade.KernelConfig(kv_tile=16)
        for turn, offsets in enumerate(offsets_of(tokens, 3)):
            if self.device == "cpu" and turn not in (0, 3, 9):
                continue
            query, key = (self.rows(tokens, 1, self.dim).requires_grad_() for _ in "qk")
            value = self.rows(tokens, 2, self.dim).requires_grad_()
            beta = self.rows(tokens, 2).sigmoid().requires_grad_()
            channels = (self.dim,) if turn % 2 else ()
            decay = (-self.rows(tokens, 2, *channels).float().abs()).requires_grad_()
            state = self.rows(3, 2, self.dim, self.dim).float().requires_grad_()
            results = saccade.gated_delta_rule_varlen(
                query, key, value, beta, self.whole(offsets), decay=decay, initial_state=state,
                normalize_qk=True, return_state=True, config=chunk, **self.options,
            )  # fmt: skip
            torch.autograd.backward(results, [each.detach() for each in results])

    def delta_step(self) -> None:
        """A step of it whose states are anywhere in a pool."""
        rows = [self.rows(3, 1, 1, self.dim), self.rows(3, 1, 1, self.dim)]
        rows += [self.rows(3, 2, 1, self.dim), self.rows(3, 2, 1)]
        for numbers in numbers_of((3,), 4):
            state, index = self.rows(4, 2, self.dim, self.dim).float(), self.whole(numbers.long())
            with torch.no_grad():
                saccade.gated_delta_rule_step(state, *rows, state_index=index, **self.options)

    def pages(self, query: Tensor, dtype: torch.dtype | None = None, **more: Any) -> None:
        """Attention over pages: hostile tables, then hostile lengths, then both."""
        sequences = more["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in more else len(query)
        for size in (16,) if self.device == "cpu" else (16, 12, 64):
            shape = (6, 2, size, self.dim)
            keys, values = (self.rows(*shape) for _ in "kv")
            if dtype is not None:
                keys, values = (self.hold(pages.to(dtype)) for pages in (keys, values))
                factors = self.rows(*shape[:3]).float()
                more |= {"key_scales": factors, "value_scales": factors}
            tables = [*numbers_of((sequences, 4), 6)]
            lens = [*numbers_of((sequences,), 4 * size + 1)]
            fair = torch.zeros(sequences, 4).int(), torch.full((sequences,), 3 * size + 1).int()
            pairs = [(table, fair[1]) for table in tables] + [(fair[0], length) for length in lens]
            if self.device == "cpu":
                pairs = []
            for table, length in [*pairs, *zip(tables, lens, strict=True)]:
                with torch.no_grad():
                    saccade.attention_paged(
                        query, keys, values, self.whole(table), self.whole(length),
                        **self.options, **more,
                    )  # fmt: skip

    def decoding(self) -> None:
        """One new token of each sequence."""
        self.pages(self.rows(5, 4, 1, self.dim))

    def decoding_bits(self) -> None:
        """The same over eight-bit pages."""
        self.pages(self.rows(5, 4, 1, self.dim), torch.int8)

    def decoding_invariant(self) -> None:
        """The same with equal bits in any batch, under a mask."""
        query = self.rows(5, 4, 1, self.dim)
        self.pages(query, batch_invariant=True, mask=masks.window(20))

    def chunks(self) -> None:
        """Many new tokens of packed sequences, whose offsets are hostile too."""
        tokens = 20 * self.scale
        for offsets in list(offsets_of(tokens, 3))[:: 4 if self.device == "cpu" else 1]:
            query, ends = self.rows(tokens, 4, self.dim), self.whole(offsets)
            self.pages(query, cu_seqlens_q=ends, mask=masks.causal())
            if self.device != "cpu":
                self.pages(query, cu_seqlens_q=ends)

    def writing(self) -> None:
        """New tokens into slots that are anywhere."""
        from saccade.kv_cache import write_triton  # on a CPU, nobody else calls it

        for dtype in (self.dtype, torch.int8):
            keys, values = (self.hold(self.rows(6, 2, 16, self.dim).to(dtype)) for _ in "kv")
            scales = self.rows(6, 2, 16).float() if dtype == torch.int8 else None
            rows = self.rows(7, 2, self.dim), self.rows(7, 2, self.dim)
            for numbers in numbers_of((7,), 6 * 16):
                for slots in (numbers, numbers.long() << 31):
                    write_triton.write(
                        *rows, keys, values, self.whole(slots), scales, scales, None, None, False
                    )


NAMES = tuple(
    name
    for name in vars(Calls)
    if not name.startswith("_") and name not in ("rows", "whole", "both", "attend", "pages")
)


@contextlib.contextmanager
def nothing_looked_at() -> Iterator[None]:
    """Values of tensors count as unreadable, as those on a GPU are: nothing is refused."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("saccade") and hasattr(module, "values_readable"):
                stack.enter_context(mock.patch.object(module, "values_readable", lambda _: False))
        yield


@contextlib.contextmanager
def no_memory_of_calls() -> Iterator[None]:
    """Calls are prepared anew, so that the memory of their results is guarded too."""
    from saccade.ops.attention.hopper import host as hopper_host
    from saccade.ops.attention.triton import host as triton_host
    from saccade.ops.delta_rule.triton import passes as delta_passes
    from saccade.ops.linear_attention.triton import host as linear_host
    from saccade.ops.paged_attention.triton import host as paged_host
    from saccade.runtime import call_cache

    kept: list[tuple[Any, str]] = [
        (call_cache, "_calls"), (triton_host, "_forwards"), (triton_host, "_specs"),
        (triton_host, "_launches"), (linear_host, "_call_specs"), (delta_passes, "_call_specs"),
        (paged_host, "_forwards"), (hopper_host, "_forwards"), (hopper_host, "_kinds"),
        (hopper_host, "_backwards"),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module, name in kept:
            stack.enter_context(mock.patch.object(module, name, {}))
        yield


def run(
    name: str, hold: Any, device: str, implementation: str, dtype: torch.dtype = torch.float32
) -> None:
    """Make calls of one kind, and see that nothing was touched beside their tensors."""
    with no_memory_of_calls(), nothing_looked_at(), all_that_is_made(hold):
        call: Callable[[], None] = getattr(Calls(hold, device, implementation, dtype), name)
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    hold.check()


if __name__ == "__main__":
    from interpreter import hasten

    hasten()
    for call in sys.argv[1:]:
        print(call, flush=True)
        run(call, ClosedPages(), "cpu", "triton")

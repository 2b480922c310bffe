"""Forward pass of the gated delta rule on the CPU: blocks of chunks, with one running state.

Everything that does not need the state is computed for a block's chunks at once; then the chunks
take turns: what the state predicts of their keys, the triangular system of their updates, what
their queries read, and the state after them. `reference.py` has the equations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.ops.delta_rule.cpu.decay import ChannelDecay, ChunkDecay, HeadDecay, NoDecay
from saccade.runtime.delta_spec import NORM_EPS, DeltaVariant
from saccade.runtime.spec import accumulate_dtype


@dataclass
class DenseRows:
    """A dense call, on views [batch, heads, length, dim], as the two passes read it."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor  # [batch, value_heads, length]
    decay: Tensor | None  # [batch, value_heads, length] or with head_dim behind it
    variant: DeltaVariant

    def __post_init__(self) -> None:
        self.batch, self.value_heads, self.length, self.value_dim = self.value.shape
        self.key_heads, self.head_dim = self.key.shape[1], self.key.shape[3]
        self.group = self.value_heads // self.key_heads
        self.count = self.batch * self.value_heads
        self.wide = accumulate_dtype(self.query.dtype)

    def chunks(self, rows: Tensor, at: Span) -> Tensor:
        """Rows of a span in chunks, [chunks, batch · heads, chunk, …], 0 behind the last one."""
        rows = rows[:, :, at.start : at.stop].to(self.wide)
        missing = at.chunks * at.chunk - rows.shape[2]
        if missing:
            rows = torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 3) + (0, missing))
        sizes = (-1, at.chunks, at.chunk, *rows.shape[3:])
        return rows.reshape(rows.shape[0] * rows.shape[1], *sizes[1:]).transpose(0, 1)

    def write(self, into: Tensor, chunks: Tensor, at: Span) -> None:
        """Write chunks of a span, of each head of it, to rows [batch, heads, length, …]."""
        rows = chunks.unflatten(1, (self.batch, into.shape[1])).movedim(0, 2).flatten(2, 3)
        into[:, :, at.start : at.stop].copy_(rows[:, :, : at.stop - at.start])


@dataclass(frozen=True)
class Span:
    """Tokens that are computed at once: so many chunks, of which the last may end early."""

    start: int
    stop: int
    chunk: int

    @property
    def chunks(self) -> int:
        """Chunks in the span."""
        return -(-(self.stop - self.start) // self.chunk)


def spans_of(length: int, chunk: int, at_once: int) -> list[Span]:
    """A sequence in spans of at most so many chunks."""
    step = chunk * at_once
    return [Span(at, min(at + step, length), chunk) for at in range(0, length, step)]


class Block:
    """A span of chunks, as far as it needs no state.

    Rows are keys and, where the output is wanted, scaled queries; `pairs` are their products with
    keys, faded, and `new` they themselves as they meet the state before their chunk. `system` is
    beta times products of keys, of which what lies below the diagonal counts.
    """

    def __init__(self, dense: DenseRows, at: Span, queries: bool = True) -> None:
        """queries: whether they are wanted, which the state does without."""
        self.at, self.norms = at, []
        self.value, self.beta = dense.chunks(dense.value, at), dense.chunks(dense.beta, at)
        sizes = (at.chunks, dense.count, 1 + queries, at.chunk, dense.head_dim)
        self.rows = self.value.new_empty(sizes)
        tensors, scales = (dense.key, dense.query), (1.0, dense.variant.scale)
        for n in range(1 + queries):
            chunks, norm = chunks_and_norm(dense, tensors[n], at)
            self.norms.append(norm)
            factor = scales[n] if norm is None else (norm * scales[n]).unsqueeze(2)
            into = self.rows[:, :, n].unflatten(1, (-1, dense.group))
            torch.mul(chunks.unsqueeze(2).expand(into.shape), factor, out=into)
        self.key = self.rows[:, :, 0]
        self.decay = decay_of(dense, at, self.value)
        self.pairs = self.decay.of_pairs(self.rows, self.key)
        self.system = self.pairs[:, :, 0] * self.beta.unsqueeze(-1)
        decays = dense.decay is not None
        self.new = self.rows * self.decay.until.unsqueeze(2) if decays else self.rows
        self.old_key = self.key * self.decay.after if decays else self.key
        self.whole = self.decay.whole.expand(*self.key.shape[:2], -1, -1)

    def update(self, n: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """What chunk n writes for its keys, given the state before it; what rows read of that."""
        read = torch.bmm(self.new[n].flatten(1, 2), state)
        error = self.value[n] - read[:, : self.at.chunk]
        error.mul_(self.beta[n].unsqueeze(-1))
        return solve(self.system[n], error), read

    def advance(self, n: int, state: Tensor, update: Tensor) -> None:
        """Let the state fade by chunk n and take its updates in, in place."""
        state.mul_(self.whole[n]).baddbmm_(self.old_key[n].mT, update)


def decay_of(dense: DenseRows, at: Span, like: Tensor) -> ChunkDecay:
    """Factors of decay within the chunks of a span."""
    if dense.decay is None:
        return NoDecay(like)
    if dense.decay.dim() == 3:
        return HeadDecay(dense.chunks(dense.decay, at), dense.wide)
    return ChannelDecay(dense.chunks(dense.decay, at))


def chunks_and_norm(dense: DenseRows, rows: Tensor, at: Span) -> tuple[Tensor, Tensor | None]:
    """Chunks of queries or keys, and what each row is multiplied by to get length 1, if it is."""
    chunks = dense.chunks(rows, at)
    if not dense.variant.normalize_qk:
        return chunks, None
    return chunks, torch.rsqrt(chunks.square().sum(-1, keepdim=True).add_(NORM_EPS))


def solve(system: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """x of (1 + strictly lower system) · x = right, or of its transpose."""
    system = system.mT if transposed else system
    return torch.linalg.solve_triangular(system, right, upper=transposed, unitriangular=True)


def attend(dense: DenseRows, spans: list[Span], state: Tensor, output: Tensor) -> None:
    """Write output [batch, value_heads, length, value_dim]; change the state [count, …]."""
    for at in spans:
        before = state.clone()
        found = _read(dense, at, state)
        if not bool(found.sum().isfinite()):
            # Within a chunk a product carries NaN to rows before it, too: token by token none does.
            state.copy_(before)
            found = _read(dense, Span(at.start, at.stop, 1), state)
        dense.write(output, found, at)


def _read(dense: DenseRows, at: Span, state: Tensor) -> Tensor:
    """The output of a span, [chunks, count, chunk, value_dim]; the state takes it in."""
    block = Block(dense, at)
    found = state.new_empty(at.chunks, dense.count, at.chunk, dense.value_dim)
    for n in range(at.chunks):
        update, read = block.update(n, state)
        torch.baddbmm(read[:, at.chunk :], block.pairs[n, :, 1], update, out=found[n])
        block.advance(n, state, update)
    return found


def states_before(dense: DenseRows, spans: list[Span], state: Tensor) -> Iterator[list[Tensor]]:
    """For each span the states before its chunks; `state` becomes the one after the last."""
    for at in spans:
        block, states = Block(dense, at, queries=False), []
        for n in range(at.chunks):
            states.append(state.clone())
            block.advance(n, state, block.update(n, state)[0])
        yield states

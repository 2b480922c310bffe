"""Call specification of the gated delta rule: its tensors, its variant and its sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.runtime.spec import COUNTED_CHUNK, accumulate_dtype, empty_output


class DeltaInputs(NamedTuple):
    """The tensors of one call, in the order of the operator's arguments.

    Dense: query and key [batch, key_heads, length, head_dim], value [batch, value_heads, length,
    value_dim], beta [batch, value_heads, length], decay likewise or with head_dim behind it.
    Packed: [tokens, heads, dim], [tokens, value_heads] and [tokens, value_heads, head_dim].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor | None = None
    initial_state: Tensor | None = None  # [sequences, value_heads, head_dim, value_dim]
    cu_seqlens: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether sequences are laid end to end."""
        return self.cu_seqlens is not None

    @property
    def num_sequences(self) -> int:
        """Batch entries, or packed sequences."""
        return self.query.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def key_heads(self) -> int:
        """Heads of query and key."""
        return self.key.shape[1]

    @property
    def value_heads(self) -> int:
        """Heads of value, beta, decay, the state and the output."""
        return self.value.shape[1]

    @property
    def decay_by_channel(self) -> bool:
        """Whether each channel of the state has a decay of its own."""
        return self.decay is not None and self.decay.dim() == self.query.dim()


class DeltaVariant(NamedTuple):
    """The function of a call: plain values only, in the order of the operator's arguments."""

    normalize_qk: bool
    scale: float


class DeltaResults(NamedTuple):
    """The results of a forward pass; `state` comes after the last token."""

    output: Tensor
    state: Tensor


class DeltaGradients(NamedTuple):
    """One gradient for each input that can have one."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor | None
    initial_state: Tensor | None


NORM_EPS = 1e-6  # what normalize_qk adds to the sum of squares, as transformers and fla do


def empty_delta_results(inputs: DeltaInputs) -> DeltaResults:
    """Memory for the results, laid out as every implementation lays it out."""
    query, value_dim = inputs.query, inputs.value.shape[-1]
    output = empty_output(query, inputs.value_heads, value_dim, inputs.packed)
    shape = (inputs.num_sequences, inputs.value_heads, query.shape[-1], value_dim)
    return DeltaResults(output, query.new_empty(shape, dtype=accumulate_dtype(query.dtype)))


def empty_delta_gradients(inputs: DeltaInputs) -> DeltaGradients:
    """Contiguous memory for the gradients."""

    def like(tensor: Tensor) -> Tensor:
        return tensor.new_empty(tensor.shape)

    query, key, value, beta = map(like, inputs[:4])
    decay, state = (None if each is None else like(each) for each in inputs[4:6])
    return DeltaGradients(query, key, value, beta, decay, state)


DECAY_KINDS = ("none", "heads", "channels")


class DeltaProblem(NamedTuple):
    """The shape of a call: what implementations are chosen by. Holds no tensors.

    For packed sequences `batch` counts sequences, and `length` counts all tokens.
    """

    batch: int
    key_heads: int
    value_heads: int
    length: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    decay: str = "none"  # one of DECAY_KINDS
    normalize_qk: bool = False
    packed: bool = False
    state: bool = False
    configured: bool = False
    tma: bool = False  # whether TMA can read query, key and value as they lie

    @property
    def operation(self) -> str:
        """The operation's folder below saccade.ops."""
        return "delta_rule"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.length if self.packed else self.batch * self.length

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: inputs and output, each read or written once."""
        keys = 2 * self.key_heads * self.head_dim
        values = 2 * self.value_heads * self.value_dim
        widths = {"none": 0, "heads": 1, "channels": self.head_dim}
        factors = self.value_heads * (1 + widths[self.decay])
        return self.tokens * (keys + values + factors) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass in chunks of 64 rows.

        Each row of a head meets the state three times (what it predicts, what the query reads,
        what is written): 2 · head_dim · value_dim operations each. Within its chunk it meets 64
        rows in products of keys, of queries and keys, in the triangular system and in the sum of
        values: 2 · 64 · (2 · head_dim + 2 · value_dim).
        """
        product = 2 * self.head_dim * self.value_dim
        inside = 2 * COUNTED_CHUNK * (2 * self.head_dim + 2 * self.value_dim)
        return self.tokens * self.value_heads * (3 * product + inside)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of a backward pass in chunks of 64 rows.

        Two products with the state make its past again (what rows predict, what is written); six
        are the gradients' own. Within a chunk there are the forward pass's products of keys, of
        queries and keys, and its system; then two products over value_dim for gradients of pairs,
        one and a system for those of values, and four over head_dim for those of queries and keys.
        """
        product = 2 * self.head_dim * self.value_dim
        inside = 2 * COUNTED_CHUNK * (6 * self.head_dim + 5 * self.value_dim)
        return self.tokens * self.value_heads * (8 * product + inside)

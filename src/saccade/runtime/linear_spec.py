"""LinearProblem: what a call of linear attention asks for; the values that carry such a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.runtime.spec import accumulate_dtype, heads_inside

FUSED_MAPS = ("elu+1", "relu", "exp", "identity")
"""Feature maps that implementations apply themselves, channel by channel."""

NORMALIZERS = ("none", "sum", "clamp", "abs")
ALIGNMENTS = ("bottom_right", "top_left")


class LinearState(NamedTuple):
    """All that linear attention keeps of the past: sums over the keys seen so far.

    Attributes:
        kv: [batch, state_heads, feature_dim, value_dim]: the sum of key features times values.
        key_sum: [batch, state_heads, feature_dim]: the sum of key features.
        log_scale: [batch, state_heads] or None: both sums are to be multiplied by its exponential.
            Only feature maps that scale their features (`feature_maps.Favor`) have one. One that is
            returned is a constant to autograd: the sums have all of the gradient.
    """

    kv: Tensor
    key_sum: Tensor
    log_scale: Tensor | None = None

    def clone(self) -> LinearState:
        """A copy that shares no memory, for a sequence that branches off."""
        scale = None if self.log_scale is None else self.log_scale.clone()
        return LinearState(self.kv.clone(), self.key_sum.clone(), scale)


class LinearInputs(NamedTuple):
    """The tensors of one call, in the order of the operator's arguments.

    Dense: query [batch, heads, rows, dim], decay [batch, state_heads, kv_len]. Packed:
    [tokens, heads, dim] and [kv_tokens, state_heads]. A decay [state_heads] is constant.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    key_lengths: Tensor | None = None
    initial_kv: Tensor | None = None
    initial_key_sum: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether sequences are laid end to end."""
        return self.cu_seqlens_q is not None

    @property
    def num_sequences(self) -> int:
        """Batch entries, or packed sequences."""
        if self.cu_seqlens_q is None:
            return self.query.shape[0]
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def state_heads(self) -> int:
        """Heads of the state: one for each pair of a key head and a value head."""
        return max(self.key.shape[1], self.value.shape[1])

    @property
    def heads(self) -> int:
        """Heads of the output."""
        return max(self.query.shape[1], self.state_heads)


class LinearVariant(NamedTuple):
    """Which linear attention: plain values only, in the order of the operator's arguments."""

    causal: bool
    align: str
    feature_map: str  # one of FUSED_MAPS
    normalize: str  # one of NORMALIZERS
    eps: float
    scale: float


class LinearResults(NamedTuple):
    """What a forward pass gives.

    `normaliser`: [batch, heads, query_len] ([heads, tokens] if packed), each row's sum of scores
    before `eps` comes in; without a normaliser it has no elements.
    """

    output: Tensor
    normaliser: Tensor
    kv: Tensor
    key_sum: Tensor


class LinearGradients(NamedTuple):
    """One gradient for each input that can have one."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    initial_kv: Tensor | None
    initial_key_sum: Tensor | None


def empty_linear_results(inputs: LinearInputs, variant: LinearVariant) -> LinearResults:
    """Memory for the results, laid out as every implementation lays it out."""
    query, value_dim = inputs.query, inputs.value.shape[-1]
    wide, heads = accumulate_dtype(query.dtype), inputs.heads
    if inputs.packed:
        output = query.new_empty(query.shape[0], heads, value_dim)
        rows: tuple[int, ...] = (heads, query.shape[0])
    else:
        batch, _, length = query.shape[:3]
        rows = (batch, heads, length)
        if heads_inside(query):
            output = query.new_empty(batch, length, heads, value_dim).transpose(1, 2)
        else:
            output = query.new_empty(batch, heads, length, value_dim)
    normaliser = query.new_empty((0,) if variant.normalize == "none" else rows, dtype=wide)
    states = (inputs.num_sequences, inputs.state_heads, query.shape[-1])
    return LinearResults(
        output,
        normaliser,
        query.new_empty(*states, value_dim, dtype=wide),
        query.new_empty(states, dtype=wide),
    )


def empty_linear_gradients(inputs: LinearInputs) -> LinearGradients:
    """Contiguous memory for the gradients."""

    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_empty(tensor.shape)

    return LinearGradients(
        inputs.query.new_empty(inputs.query.shape),
        inputs.key.new_empty(inputs.key.shape),
        inputs.value.new_empty(inputs.value.shape),
        like(inputs.decay),
        like(inputs.initial_kv),
        like(inputs.initial_key_sum),
    )


COUNTED_CHUNK = 64  # rows of a chunk where operations are counted


class LinearProblem(NamedTuple):
    """The shape of a call: what implementations are chosen by. Holds no tensors.

    For packed sequences `batch` counts sequences, and `query_len` and `kv_len` count all tokens.
    """

    batch: int
    query_heads: int
    key_heads: int
    value_heads: int
    query_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    causal: bool = True
    feature_map: str = "elu+1"
    normalize: str = "sum"
    packed: bool = False
    decay: bool = False
    state: bool = False
    configured: bool = False
    tma: bool = False  # whether TMA can read query, key and value as they lie

    @property
    def operation(self) -> str:
        """The operation's folder below saccade.ops."""
        return "linear_attention"

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: inputs and output, each read or written once."""
        rows = 1 if self.packed else self.batch
        heads = max(self.query_heads, self.key_heads, self.value_heads)
        queries = (
            rows * self.query_len * (self.query_heads * self.head_dim + heads * self.value_dim)
        )
        keys = rows * self.kv_len
        keys *= self.key_heads * self.head_dim + self.value_heads * self.value_dim
        return (queries + keys) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass in chunks of 64 rows.

        Each query row reads the state and each key row is added to it: 2 · head_dim · value_dim
        operations each. A causal call also multiplies each query row with the keys and values of
        its chunk: 2 · 64 · (head_dim + value_dim).
        """
        rows = 1 if self.packed else self.batch
        heads = max(self.query_heads, self.key_heads, self.value_heads)
        state_heads = max(self.key_heads, self.value_heads)
        product = 2 * self.head_dim * self.value_dim
        inside = 2 * COUNTED_CHUNK * (self.head_dim + self.value_dim) if self.causal else 0
        queries = heads * self.query_len * (product + inside)
        return rows * (queries + state_heads * self.kv_len * product)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of a backward pass in chunks of 64 rows.

        The state is made again by the keys; its gradient takes the queries in; the gradients of
        queries, keys and values each read one of the two: five products with a state. Inside a
        chunk are five more, three of them over head_dim.
        """
        rows = 1 if self.packed else self.batch
        heads = max(self.query_heads, self.key_heads, self.value_heads)
        state_heads = max(self.key_heads, self.value_heads)
        product = 2 * self.head_dim * self.value_dim
        inside = 2 * COUNTED_CHUNK * (3 * self.head_dim + 2 * self.value_dim) if self.causal else 0
        queries = heads * self.query_len * (2 * product + inside)
        return rows * (queries + 3 * state_heads * self.kv_len * product)

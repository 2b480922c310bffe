"""Positions: where the rows of a call of linear attention meet, and where its states lie in memory.

Key row n has place n, a query row has the place of the last key that it sees. A query before the
first key has a negative place, one behind the last key (aligned at the top left) a larger one.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.gpu.features import where_also
from saccade.gpu.kernel_args import there_are
from saccade.gpu.packing import offset
from saccade.gpu.tensor_view import num_rows, wide
from saccade.ops.linear_attention.triton.call_spec import LinearCallSpec, plain
from saccade.runtime.spec import LinearInputs


class Sequence(NamedTuple):
    """Where rows meet: both sides as Views, and how far keys go."""

    queries: Any
    keys: Any
    lengths: Any  # int64 [batch] in memory, or None
    # float64 sums of decay before each key row: (address, batch step, head step), or None
    summed_decay: Any
    offsets: Any  # where packed sequences start in `summed_decay`, or None
    slots: Any  # int64 [batch]: where each sequence's state lies; None: in order
    num_states: Any  # None where slots are


class Sums(NamedTuple):
    """States in memory: [sequences, heads, segments, head_dim, value_dim] and a vector of each."""

    matrix: Any
    vector: Any


# ---- places ------------------------------------------------------------------------------------


@triton.jit
def bounds_of(sequence, batch, BOTTOM_RIGHT: tl.constexpr):
    """A sequence in places: that of the first query row; how many query rows, key rows, and keys
    that are there; the first place, and how many there are."""
    query_len, kv_len = num_rows(sequence.queries, batch), num_rows(sequence.keys, batch)
    shift = kv_len - query_len if BOTTOM_RIGHT else 0 * kv_len
    num_keys = kv_len
    if sequence.lengths is not None:
        num_keys = tl.minimum(kv_len, tl.load(sequence.lengths + batch).to(tl.int32))
    first = tl.minimum(shift, 0)
    return shift, query_len, kv_len, num_keys, first, tl.maximum(query_len + shift, kv_len) - first


@triton.jit
def queries_at(bounds, positions, STARTED: tl.constexpr, CAUSAL: tl.constexpr):
    """Query rows at places, which of them exist, and which of those have something to see."""
    rows = positions - bounds[0]
    exist = (rows >= 0) & (rows < bounds[1])
    see = exist
    if not STARTED:  # nothing before the first key, unless a state came before it
        see = where_also(see, bounds[3] > 0)
        if CAUSAL:
            see = see & (positions >= 0)
    return rows, exist, see


@triton.jit
def keys_at(bounds, positions):
    """Key rows at places, which of them exist, and which of those are there to be seen."""
    return (
        positions,
        (positions >= 0) & (positions < bounds[2]),
        (positions >= 0) & (positions < bounds[3]),
    )


@triton.jit
def summed_decay_until(sequence, batch, head, positions):
    """The sum of decay over all keys up to these places, them included, in float64."""
    inside = tl.minimum(tl.maximum(positions + 1, 0), num_rows(sequence.keys, batch))
    if sequence.offsets is not None:
        inside = inside + offset(sequence.keys.data, batch)
    base = sequence.summed_decay[0] + (
        wide(batch) * sequence.summed_decay[1] + wide(head) * sequence.summed_decay[2]
    )
    return tl.load(base + inside)


# ---- states in memory --------------------------------------------------------------------------


@triton.jit
def state_of(sequence, batch):
    """Which state of the memory is a sequence's: one that is there, whatever slots say."""
    slot = wide(batch)
    if sequence.slots is not None:
        slot = tl.load(sequence.slots + batch)
        slot = tl.minimum(tl.maximum(slot, 0), sequence.num_states - 1)
    return slot


@triton.jit
def sums_at(sums, number, keys, values, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Pointers to a state [values, keys] and to its vector of keys, and what of the two exists.

    `keys` and `values` are channels, of KEYS and VALUES in all; in memory those of keys come first.
    """
    position = keys[None, :] * VALUES + values[:, None]
    matrix = sums.matrix + (wide(number) * (KEYS * VALUES) + position)
    exists = (keys < KEYS)[None, :] & (values < VALUES)[:, None]
    return matrix, exists, sums.vector + (wide(number) * KEYS + keys), keys < KEYS


@triton.jit
def start_sums(
    sums, number, keys, values, KEYS: tl.constexpr, VALUES: tl.constexpr, STATE: tl.constexpr
):
    """Sums to add to: of nothing, or those that lie in memory if STATE."""
    matrix = tl.zeros([values.shape[0], keys.shape[0]], tl.float32)
    vector = tl.zeros([keys.shape[0]], tl.float32)
    if STATE:
        at, exists, vector_at, vector_exists = sums_at(sums, number, keys, values, KEYS, VALUES)
        matrix += tl.load(at, mask=exists, other=0.0).to(tl.float32)
        vector += tl.load(vector_at, mask=vector_exists, other=0.0).to(tl.float32)
    return matrix, vector


@triton.jit
def keep_sums(
    sums, number, keys, values, matrix, vector, mine, KEYS: tl.constexpr, VALUES: tl.constexpr
):
    """Write sums, if they are this program's to write."""
    at, exists, vector_at, vector_exists = sums_at(sums, number, keys, values, KEYS, VALUES)
    element: tl.constexpr = sums.matrix.dtype.element_ty
    tl.store(at, matrix.to(element), mask=where_also(exists, mine))
    tl.store(vector_at, vector.to(element), mask=where_also(vector_exists, mine))


# ---- fading ------------------------------------------------------------------------------------


@triton.jit
def decays_of(sequence, batch, head, start, CHUNK: tl.constexpr):
    """Within a chunk: the logarithm of how far the state has faded at each place, and over all."""
    positions = start + tl.arange(0, CHUNK)
    before = summed_decay_until(sequence, batch, head, start - 1)
    until = (summed_decay_until(sequence, batch, head, positions) - before).to(tl.float32)
    whole = (summed_decay_until(sequence, batch, head, start + CHUNK - 1) - before).to(tl.float32)
    return until, whole


# ---- rows ----------------------------------------------------------------------------------------
# What kernels of linear attention read of a call, and write beside it.

# ---- given ---------------------------------------------------------------------------------------
# States, gradients, flags.

State = tuple[Tensor, Tensor]  # matrices and vectors, float32


class LinearBackwardInputs(NamedTuple):
    """What a backward pass adds to the inputs."""

    grad_output: Tensor
    factors: Tensor | None  # 1 / divisor; None without a normaliser
    minus_delta: Tensor
    quotient: tuple[Tensor, Tensor] | None = None
    """Output and normaliser, where the pass over queries is to write the other two."""


class Recompute(NamedTuple):
    """What does a pass once more where a flag says so."""

    kernel: Any  # takes the flags, and what linear_sweep takes of rows and states
    nonfinite: Tensor  # int32 [sequences, heads, segments, parts]


def sums(state: State | None) -> Sums | None:
    """States as kernels take them."""
    if state is None:
        return None
    matrix, vector = state
    return Sums(matrix, vector)


class Rows(NamedTuple):
    """One call under way."""

    spec: LinearCallSpec
    inputs: LinearInputs
    summed_decay: Tensor | None
    slots: Tensor | None = None
    num_states: int = 0  # of the memory that slots say the places of

    def known(self) -> list[Tensor]:
        """The tensors that every kernel may read."""
        return there_are((*self.inputs, self.summed_decay, self.slots))

    def sequence(self) -> Sequence:
        """Where rows meet."""
        spec, inputs, summed_decay = self.spec, self.inputs, None
        if self.summed_decay is not None:
            head_step = self.summed_decay.shape[-1]
            batch_step = spec.state_heads * head_step if self.summed_decay.dim() == 3 else 0
            summed_decay = (self.summed_decay, batch_step, head_step)
        in_decayed = spec.packed and self.summed_decay is not None
        return Sequence(
            spec.side(None, inputs.cu_seqlens_q, keys=False),
            spec.side(None, inputs.cu_seqlens_k, keys=True),
            inputs.key_lengths,
            summed_decay,
            inputs.cu_seqlens_k if in_decayed and inputs.cu_seqlens_k is not None else None,
            self.slots,
            None if self.slots is None else self.num_states,
        )

    def queries(self) -> Any:
        """Queries, to be mapped and scaled."""
        view = self.query_side(self.inputs.query)
        return self.spec.features(view, True)

    def keys(self) -> Any:
        """Keys, to be mapped."""
        return self.spec.features(self.key_side(self.inputs.key), False)

    def values(self) -> Any:
        """Values, as they are."""
        return plain(self.key_side(self.inputs.value))

    def grad(self, given: LinearBackwardInputs) -> Any:
        """Gradients of the output, as they are."""
        return plain(self.query_side(given.grad_output))

    def factors(self, given: LinearBackwardInputs) -> Any:
        """1 / divisor, where there is one."""
        return None if given.factors is None else self.per_row(given.factors)

    def query_side(self, rows: Tensor) -> Any:
        """A View of rows beside the queries."""
        return self.spec.side(rows, self.inputs.cu_seqlens_q, keys=False)

    def key_side(self, rows: Tensor) -> Any:
        """A View of rows beside the keys."""
        return self.spec.side(rows, self.inputs.cu_seqlens_k, keys=True)

    def per_row(self, numbers: Tensor) -> Any:
        """A View of one number for each query row."""
        return self.spec.numbers(numbers, self.inputs.cu_seqlens_q, keys=False)

"""Rows: what kernels of linear attention read of a call, and write beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Pointer
from saccade.ops.linear_attention.triton.call_spec import LinearCallSpec, plain
from saccade.ops.linear_attention.triton.positions import Sequence, Sums
from saccade.runtime.linear_spec import LinearInputs

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


def sums(pointer: Pointer, state: State | None) -> Sums | None:
    """States as kernels take them."""
    if state is None:
        return None
    matrix, vector = state
    return Sums(pointer(matrix), pointer(vector))


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

    def sequence(self, pointer: Pointer) -> Sequence:
        """Where rows meet."""
        spec, inputs, summed_decay = self.spec, self.inputs, None
        if self.summed_decay is not None:
            head_step = self.summed_decay.shape[-1]
            batch_step = spec.state_heads * head_step if self.summed_decay.dim() == 3 else 0
            summed_decay = (pointer(self.summed_decay), batch_step, head_step)
        in_decayed = spec.packed and self.summed_decay is not None
        return Sequence(
            spec.side(pointer, None, inputs.cu_seqlens_q, keys=False),
            spec.side(pointer, None, inputs.cu_seqlens_k, keys=True),
            None if inputs.key_lengths is None else pointer(inputs.key_lengths),
            summed_decay,
            pointer(inputs.cu_seqlens_k)
            if in_decayed and inputs.cu_seqlens_k is not None
            else None,
            None if self.slots is None else pointer(self.slots),
            None if self.slots is None else self.num_states,
        )

    def queries(self, pointer: Pointer) -> Any:
        """Queries, to be mapped and scaled."""
        view = self.query_side(pointer, self.inputs.query)
        return self.spec.features(view, True)

    def keys(self, pointer: Pointer) -> Any:
        """Keys, to be mapped."""
        return self.spec.features(self.key_side(pointer, self.inputs.key), False)

    def values(self, pointer: Pointer) -> Any:
        """Values, as they are."""
        return plain(self.key_side(pointer, self.inputs.value))

    def grad(self, pointer: Pointer, given: LinearBackwardInputs) -> Any:
        """Gradients of the output, as they are."""
        return plain(self.query_side(pointer, given.grad_output))

    def factors(self, pointer: Pointer, given: LinearBackwardInputs) -> Any:
        """1 / divisor, where there is one."""
        return None if given.factors is None else self.per_row(pointer, given.factors)

    def query_side(self, pointer: Pointer, rows: Tensor) -> Any:
        """A View of rows beside the queries."""
        return self.spec.side(pointer, rows, self.inputs.cu_seqlens_q, keys=False)

    def key_side(self, pointer: Pointer, rows: Tensor) -> Any:
        """A View of rows beside the keys."""
        return self.spec.side(pointer, rows, self.inputs.cu_seqlens_k, keys=True)

    def per_row(self, pointer: Pointer, numbers: Tensor) -> Any:
        """A View of one number for each query row."""
        return self.spec.numbers(pointer, numbers, self.inputs.cu_seqlens_q, keys=False)

"""The gated delta rule by Triton kernels: the body that the operators run on GPUs.

forwards:   sums of decay, lengths of rows → pairs of all chunks → scan
backwards:  the same, the scan keeping states → scan back → gradients of all rows → sums over heads

Where few sequences are long, states between their segments come before a scan (segments.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from saccade.gpu import recording
from saccade.ops.delta_rule.triton.passes import DeltaCall
from saccade.runtime.delta_spec import (
    DeltaGradients,
    DeltaInputs,
    DeltaResults,
    DeltaVariant,
    empty_delta_gradients,
    empty_delta_results,
)
from saccade.runtime.spec import KernelConfig


def prepared(inputs: DeltaInputs, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
    """The forward pass of calls like one with these inputs."""
    return recording.prepared(forward, inputs, config)


def forward(inputs: DeltaInputs, variant: DeltaVariant, config: KernelConfig) -> DeltaResults:
    """Output and last state; see `saccade.gated_delta_rule`."""
    call = DeltaCall.of(inputs, variant, config).prepared()
    results = empty_delta_results(inputs)
    system, before = call.system(), call.initial()
    moves = call.moves(system, first=before is not None, last=False)
    call.scan(system, call.between(moves, before), output=results.output, after=results.state)
    return results


def backward(
    inputs: DeltaInputs,
    variant: DeltaVariant,
    config: KernelConfig,
    grad_output: Tensor,
    grad_state: Tensor | None,
) -> DeltaGradients:
    """Gradients of the inputs, the same bits in every run."""
    return gradients_by(DeltaCall.of(inputs, variant, config).prepared(), grad_output, grad_state)


def gradients_by(call: DeltaCall, grad_output: Tensor, grad_state: Tensor | None) -> DeltaGradients:
    """Gradients of the inputs of a call."""
    inputs = call.inputs
    gradients = empty_delta_gradients(inputs)
    if inputs.packed:  # no program has the tokens behind the last sequence
        call.clear_behind(gradients)
    if grad_output.stride(-1) != 1:
        grad_output = grad_output.contiguous()
    ending = None if grad_state is None else grad_state.float().contiguous()
    past = call.past(last=ending is not None)
    solved, grad_states = call.rows(inputs.value.shape[-1]), call.chunk_states()
    if past.moves is not None:
        call.scan_back(past.system, grad_output, first=past.moves.alone)
        ending = call.between(past.moves, ending, reverse=True)
    call.scan_back(
        past.system, grad_output, solved, grad_states, ending, into=gradients.initial_state
    )
    kept = past.updates, solved, past.states, grad_states
    call.gradients(grad_output, kept, gradients)
    return gradients


def step(
    state: Tensor, state_index: Tensor | None, inputs: DeltaInputs, variant: DeltaVariant
) -> Tensor:
    """Output of a few new rows; see `saccade.gated_delta_rule_step`.

    States change where they lie. A pool whose states do not lie in order is copied, and back.

    state_index: −1 (where it could not be looked at before) is a row of padding: nothing is written
        to any state, and its output is 0.
    """
    call = DeltaCall.of(inputs, variant, KernelConfig())
    output = empty_delta_results(inputs).output
    pool = state.contiguous()
    call.step(pool, state_index, output)
    if pool is not state:
        state.copy_(pool)
    return output

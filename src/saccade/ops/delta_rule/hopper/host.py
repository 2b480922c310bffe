"""The gated delta rule by Hopper kernels: what the operators run on GPUs of capability 9.0.

forwards:   sums of decay → one kernel for all else (forward.py) → NaN and inf (nonfinite.py)
backwards:  sums of decay → the same kernel, which keeps what it makes → the scan back of
            `saccade.ops.delta_rule.triton.passes` → gradients of rows (gradients.py) → its sums
            over heads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu import recording
from saccade.gpu.hopper.pipeline import Box, aligned, descriptor, readable
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import next_width
from saccade.ops.attention.triton import call_spec
from saccade.ops.delta_rule.hopper.forward import (
    DeltaForwardMeta,
    KeptDescriptors,
    Squares,
    delta_forward,
)
from saccade.ops.delta_rule.hopper.gradients import (
    ChunkGradientMeta,
    RowDescriptors,
    RowGradients,
    delta_chunk_gradients,
)
from saccade.ops.delta_rule.hopper.nonfinite import NanSafeMeta, delta_nan_safe
from saccade.ops.delta_rule.triton.host import gradients_by
from saccade.ops.delta_rule.triton.passes import DeltaCall, Past
from saccade.runtime.delta_spec import (
    DeltaGradients,
    DeltaInputs,
    DeltaResults,
    DeltaVariant,
    empty_delta_results,
)
from saccade.runtime.spec import KernelConfig

CHUNK = 64  # rows
KEY_CHANNELS = 128  # that a program computes with
VALUE_CHANNELS = 64  # of one of its two scans
COLUMNS = 32  # of a state whose output is computed token by token


class GradientSchedule(NamedTuple):
    """How gradients run."""

    add_registers: int
    load_registers: int

    def constants(self) -> dict[str, int]:
        """What the kernel is compiled for."""
        return {
            "ADD_REGISTERS": self.add_registers, "LOAD_REGISTERS": self.load_registers,
        }  # fmt: skip


class Schedule(NamedTuple):
    """How the kernel runs."""

    stages: int  # of rows
    solved: int  # of systems
    scan_registers: int
    solve_registers: int
    load_registers: int

    def constants(self) -> dict[str, int]:
        """What the kernel is compiled for."""
        return {
            "STAGES": self.stages, "SOLVED": self.solved, "SCAN_REGISTERS": self.scan_registers,
            "SOLVE_REGISTERS": self.solve_registers, "LOAD_REGISTERS": self.load_registers,
        }  # fmt: skip


SCHEDULE = Schedule(3, 2, 176, 120, 40)
OF_GRADIENTS = GradientSchedule(224, 56)
OF_PAST = Schedule(3, 2, 160, 152, 40)  # of what a backward pass needs: scans have no outputs


def prepared(inputs: DeltaInputs, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
    """The forward pass of calls like one with these inputs."""
    return recording.prepared(forward, inputs, config)


def forward(inputs: DeltaInputs, variant: DeltaVariant, config: KernelConfig) -> DeltaResults:
    """Output and last state; see `saccade.gated_delta_rule`."""
    call = HopperCall(*DeltaCall.of(aligned(inputs), variant, KernelConfig(kv_tile=CHUNK)))
    results = empty_delta_results(inputs)
    call.summed().run(results)
    return results


def backward(
    inputs: DeltaInputs,
    variant: DeltaVariant,
    config: KernelConfig,
    grad_output: Tensor,
    grad_state: Tensor | None,
) -> DeltaGradients:
    """Gradients of the inputs, the same bits in every run."""
    call = HopperCall(*DeltaCall.of(aligned(inputs), variant, KernelConfig(kv_tile=CHUNK)))
    return gradients_by(call.prepared(), readable(grad_output), grad_state)


class HopperCall(DeltaCall):
    """One call under way, and the kernels for Hopper that can be started for it."""

    def summed(self) -> HopperCall:
        """The call with sums of decay, if there is any."""
        return self._replace(sums=self._sums())

    def run(self, results: DeltaResults) -> None:
        """Write the output and the last state."""
        before = self.initial()
        self._forward(results.output, before, results.state, None)
        self._nan_safe(results, before)

    def past(self, *, last: bool) -> Past:
        """What `DeltaCall.past` makes, by one kernel where sequences are not cut."""
        if self.spec.segment:
            return super().past(last=last)
        updates, states = self.rows(self.inputs.value.shape[-1]), self.chunk_states()
        past = Past(self.empty_system(), updates, states, None)
        self._forward(updates, self.initial(), None, past)
        return past

    def _forward(
        self, output: Tensor, before: Tensor | None, after: Tensor | None, past: Past | None
    ) -> None:
        """Write the output and the last state; or updates in its place, and what comes with them.

        output: [batch, value_heads, length, value_dim] or packed.
        """
        spec, inputs = self.spec, self.inputs
        schedule = SCHEDULE if past is None else OF_PAST
        constants = {
            **spec.constants(), **schedule.constants(), "NORMALIZE": spec.variant.normalize_qk,
            "KEEPS": past is not None,
        }  # fmt: skip
        apart = before is None, after is None, past is None
        launch = self.launch(delta_forward, constants, 4, 1, DeltaForwardMeta, *apart)

        def moved(rows: Tensor, channels: int) -> Any:
            return descriptor(rows, Box.of(rows, spec.packed, CHUNK, channels))

        def arguments() -> tuple[Any, ...]:
            return (
                moved(inputs.query, KEY_CHANNELS), moved(inputs.key, KEY_CHANNELS),
                moved(inputs.value, VALUE_CHANNELS), moved(output, VALUE_CHANNELS),
                self.view(output), self.view(inputs.beta), self.decay(), before, after,
                *self._kept(past), spec.variant.scale,
            )  # fmt: skip

        tensors = [*self.known(), output, *there_are((before, after))]
        if past is not None:
            tensors += [*past.system.known(), past.states]
        launch(spec.sequences * spec.value_heads, spec.device, tensors, arguments)

    def _kept(self, past: Past | None) -> tuple[Any, ...]:
        """What a backward pass needs, as the kernel takes it."""
        if past is None:
            return None, None, None, None, None
        system, packed = past.system, self.spec.packed
        pair = system.inverse, system.weights
        squares = (descriptor(each, Box.of(each, packed, CHUNK, CHUNK)) for each in pair)
        halves = descriptor(past.states, Box.of(past.states, False, CHUNK, VALUE_CHANNELS))
        kept = KeptDescriptors(*squares, states=halves)
        factors = None if self.norms is None else self.factors()
        return Squares(*map(self.view, pair)), self.meeting(system), factors, system.left, kept

    def gradients_of_chunks(
        self, grad_output: Tensor, kept: tuple[Tensor, ...], written: tuple[Tensor | None, ...]
    ) -> None:
        """Write what `DeltaCall.gradients_of_chunks` does, by one kernel."""
        spec, inputs = self.spec, self.inputs
        updates, solved, *states = kept
        chunks = spec.extent(spec.value_heads).programs(CHUNK)
        launch = self.launch(
            delta_chunk_gradients, {**spec.constants(), **OF_GRADIENTS.constants()}, 4, 1,
            ChunkGradientMeta, grad_output.stride(),
        )  # fmt: skip

        def moved(rows: Tensor) -> Any:
            return descriptor(rows, Box.of(rows, spec.packed, CHUNK, VALUE_CHANNELS))

        def arguments() -> tuple[Any, ...]:
            rows = inputs.query, inputs.key, inputs.value, grad_output, updates, solved
            whole = [descriptor(each, Box.of(each, False, KEY_CHANNELS, VALUE_CHANNELS))
                     for each in states]  # fmt: skip
            return (
                RowDescriptors(*map(moved, rows), *whole, *map(moved, there_are(written[:3]))),
                None if self.norms is None else self.factors(), self.view(inputs.beta),
                self.decay(), RowGradients(*map(self.view, written)), self.view(updates),
                spec.variant.scale, chunks,
            )  # fmt: skip

        tensors = [*self.known(), grad_output, *kept, *there_are(written)]
        programs = min(chunks, call_spec.multiprocessors(inputs.query))
        launch(programs, spec.device, tensors, arguments)

    def _nan_safe(self, results: DeltaResults, before: Tensor | None) -> None:
        """Compute the output of a head token by token, where its last state is not finite."""
        spec, inputs = self.spec, self.inputs
        tile = min(COLUMNS, next_width(spec.value_dim))
        tiles = -(-spec.value_dim // tile)
        constants = {
            **spec.constants(), "HEAD_WIDTH": next_width(spec.head_dim), "VALUE_TILE": tile,
            "TILES": tiles, "NORMALIZE": spec.variant.normalize_qk,
        }  # fmt: skip
        launch = self.launch(delta_nan_safe, constants, 4, 1, NanSafeMeta, before is None)

        def arguments() -> tuple[Any, ...]:
            rows = (*inputs[:5], results.output)
            return (*map(self.view, rows), before, results.state, spec.variant.scale)

        tensors = [*there_are(inputs), *there_are((before,)), *results]
        launch(spec.sequences * spec.value_heads * tiles, spec.device, tensors, arguments)

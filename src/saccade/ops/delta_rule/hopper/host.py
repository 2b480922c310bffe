"""The gated delta rule by Hopper kernels: what the operators run on GPUs of capability 9.0.

forwards:   sums of decay → one kernel for all else (forward.py) → NaN and inf (nonfinite.py)
backwards:  as `saccade.ops.delta_rule.triton.host` has it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu import recording
from saccade.gpu.hopper.pipeline import Box, aligned, descriptor
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import next_width
from saccade.ops.delta_rule.hopper.forward import DeltaForwardMeta, delta_forward
from saccade.ops.delta_rule.hopper.nonfinite import NanSafeMeta, delta_nan_safe
from saccade.ops.delta_rule.triton.host import DeltaCall
from saccade.ops.delta_rule.triton.host import backward as backward
from saccade.runtime.delta_spec import (
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


def prepared(inputs: DeltaInputs, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
    """The forward pass of calls like one with these inputs."""
    return recording.prepared(forward, inputs, config)


def forward(inputs: DeltaInputs, variant: DeltaVariant, config: KernelConfig) -> DeltaResults:
    """Output and last state; see `saccade.gated_delta_rule`."""
    call = HopperCall(*DeltaCall.of(aligned(inputs), variant, KernelConfig(kv_tile=CHUNK)))
    results = empty_delta_results(inputs)
    call.summed().run(results)
    return results


class HopperCall(DeltaCall):
    """One call under way, and the kernels for Hopper that can be started for it."""

    def summed(self) -> HopperCall:
        """The call with sums of decay, if there is any."""
        return self._replace(sums=self._sums())

    def run(self, results: DeltaResults) -> None:
        """Write the output and the last state."""
        before = self.initial()
        self._forward(results, before)
        self._nan_safe(results, before)

    def _forward(self, results: DeltaResults, before: Tensor | None) -> None:
        spec, inputs = self.spec, self.inputs
        constants = {
            **spec.constants(), **SCHEDULE.constants(), "NORMALIZE": spec.variant.normalize_qk
        }  # fmt: skip
        launch = self.launch(delta_forward, constants, 4, 1, DeltaForwardMeta, before is None)

        def moved(rows: Tensor, channels: int) -> Any:
            return descriptor(rows, Box.of(rows, spec.packed, CHUNK, channels))

        def arguments() -> tuple[Any, ...]:
            return (
                moved(inputs.query, KEY_CHANNELS), moved(inputs.key, KEY_CHANNELS),
                moved(inputs.value, VALUE_CHANNELS), moved(results.output, VALUE_CHANNELS),
                self.view(results.output), self.view(inputs.beta), self.decay(), before,
                results.state, spec.variant.scale,
            )  # fmt: skip

        tensors = [*self.known(), *there_are((before,)), *results]
        launch(spec.sequences * spec.value_heads, spec.device, tensors, arguments)

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

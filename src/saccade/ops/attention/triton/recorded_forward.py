"""RecordedForward: a forward pass of calls of the same lengths, step by step or as it was recorded.

Both backends of kernels start one kernel, after those that plan; which one, and what it is handed,
is theirs to say.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from saccade.gpu.kernel_args import tensors_of
from saccade.gpu.launcher import Launch, compile_side_by_side
from saccade.gpu.planning import NO_PLAN, Planner, TileLists
from saccade.gpu.recording import RecordedPass
from saccade.ops.attention.triton.call_spec import CallSpec, ResultsMemory
from saccade.runtime.spec import Inputs, Results, Variant

Tensors = tuple[Tensor, ...]


class RecordedForward:
    """The forward pass of calls of the same lengths and strides.

    Attributes:
        alone: whether calls have no tensors but query, key and value, and need no plan.
        planner: of what the kernel visits; None: it finds that by itself.
        compiled: forms of the kernel that were compiled beside those that plan, of calls of any
            lengths.
    """

    spec: CallSpec
    programs: int
    alone: bool
    planner: Planner | None
    memory: ResultsMemory
    recorded: RecordedPass
    compiled: set[Any]

    @functools.cached_property
    def launch(self) -> Launch:
        """The kernel; calls that go step by step need it."""
        raise NotImplementedError

    def __call__(self, inputs: Inputs, variant: Variant) -> Results:
        """All results of such a call."""
        tensors = inputs[:3] if self.alone else tensors_of(inputs, variant)
        written = self.recorded(tensors, lambda: self._run(inputs, variant, tensors))
        return self.memory.results(written, inputs)

    def _run(self, inputs: Inputs, variant: Variant, brought: Tensors) -> Tensors:
        if self.planner is not None and self.launch.form not in self.compiled:
            self.compiled.add(self.launch.form)
            compile_side_by_side(lambda: self._start(inputs, variant, brought), self.spec.device)
        return self._start(inputs, variant, brought)

    def _start(self, inputs: Inputs, variant: Variant, brought: Tensors) -> Tensors:
        device = inputs.query.device
        written = tuple([memory.on(device) for memory in self.memory.there_are()])
        counters = self._counters(device)
        plan = NO_PLAN if self.planner is None else self.planner(inputs, variant)
        tensors = (*brought, *written, *plan.tensors, *counters)
        call = inputs, variant, written, plan, counters
        self.launch(self.programs, self.spec.device, tensors, lambda: self._arguments(*call))
        return written

    def _counters(self, device: torch.device) -> Tensors:
        """Where programs take numbers of tiles, if they do."""
        return ()

    def _arguments(
        self, inputs: Inputs, variant: Variant, written: Tensors, plan: TileLists, counters: Tensors
    ) -> tuple[Any, ...]:
        """What the kernel is handed."""
        raise NotImplementedError

"""Linear attention by Hopper kernels: the body that the operators run on GPUs of capability 9.0.

    forward           forward.py
    grad_query        backward_dq.py, which also finds what rows have as numbers
    grad_key_value    backward_dkdv.py, in one sweep
    the same of more than 128 channels    scan_d256.py, a sweep for each

Where heads are few, the length is cut into segments, the states of which come first
(chunk_state.py). A gradient that heads share is summed in float32, which Triton passes do; so are
long sequences of few heads whose chunks would begin elsewhere. Steps are those of
`saccade.ops.linear_attention.triton.host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import recording
from saccade.gpu.hopper.pipeline import Box, aligned, descriptor, readable
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.hopper.backward_dkdv import KeyGradientMeta, linear_backward_keys
from saccade.ops.linear_attention.hopper.backward_dq import (
    QueryGradientMeta,
    linear_backward_queries,
)
from saccade.ops.linear_attention.hopper.backward_rows import RowNumbers
from saccade.ops.linear_attention.hopper.chunk_state import (
    collect_keys,
    collect_queries,
    linear_nan_safe,
)
from saccade.ops.linear_attention.hopper.forward import LinearForwardMeta, linear_forward
from saccade.ops.linear_attention.hopper.program import (
    BLOCK_CHANNELS,
    WIDE,
    HeadSplit,
    Kept,
    is_balanced,
    moved,
    sizes,
    unlike_triton,
)
from saccade.ops.linear_attention.hopper.scan_d256 import WideMeta, linear_wide
from saccade.ops.linear_attention.triton.host import (
    chained,
    ending_of,
    gradients_by,
    initial_of,
    passes_of,
    recorded_gradients,
)
from saccade.ops.linear_attention.triton.host import step as step
from saccade.ops.linear_attention.triton.normalizer import upstream_of
from saccade.ops.linear_attention.triton.passes import (
    LinearBackwardInputs,
    LinearCallSpec,
    Passes,
    Recompute,
    State,
    sums,
)
from saccade.runtime.spec import (
    KernelConfig,
    LinearGradients,
    LinearInputs,
    LinearResults,
    LinearVariant,
    empty_linear_results,
)

INNER = 4 * BLOCK_CHANNELS  # channels of a and b in scan_d256.py, whether they exist or not
OUTER = 2 * BLOCK_CHANNELS  # channels of the result that a program computes there
WIDEST = 2 * BLOCK_CHANNELS  # channels of a state's side in the other kernels


class Schedule(NamedTuple):
    """How a kernel runs."""

    stages: int  # of rows
    consumer_registers: int
    mapper_registers: int
    output_stages: int | None = None

    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        constants = {
            "STAGES": self.stages,
            "CONSUMER_REGISTERS": self.consumer_registers,
            "MAPPER_REGISTERS": self.mapper_registers,
        }
        return constants | ({"OUTPUT_STAGES": self.output_stages} if self.output_stages else {})


OF_OUTPUT = Schedule(3, 168, 56, 2)
OF_QUERIES = Schedule(2, 168, 56, 1)  # rows take the rest of shared memory
OF_KEYS = Schedule(2, 176, 48)
OF_WIDE = Schedule(2, 208, 48)


_backwards: dict[Any, recording.RecordedPass] = {}


def prepared(inputs: LinearInputs, config: KernelConfig) -> Callable[..., tuple[Tensor, ...]]:
    """The forward pass of calls like one with these inputs."""
    return recording.prepared(forward, inputs, config)


def forward(inputs: LinearInputs, variant: LinearVariant, config: KernelConfig) -> LinearResults:
    """Output, normaliser and last state; see `saccade.linear_attention`."""
    inputs = aligned(inputs)
    passes = HopperPasses(*passes_of(inputs, variant, KernelConfig(kv_tile=BLOCK_CHANNELS)))
    results = empty_linear_results(inputs, variant)
    before, after = initial_of(passes), None
    split = HeadSplit.of(passes.spec)
    if split.segments == 1:
        after = results.kv, results.key_sum
    else:
        parts = collect_keys(passes, split)
        into = results.kv, results.key_sum
        before, _ = chained(passes, parts, before, split.segments, False, into)
    passes.output(split, results, (before, after))
    return results


def backward(
    inputs: LinearInputs,
    variant: LinearVariant,
    config: KernelConfig,
    output: Tensor,
    normaliser: Tensor,
    grad_output: Tensor,
    grad_kv: Tensor | None,
    grad_key_sum: Tensor | None,
) -> LinearGradients:
    """Gradients of the inputs, the same bits in every run."""
    given = output, normaliser, grad_output, grad_kv, grad_key_sum
    return recorded_gradients(
        _backwards, inputs, given, (variant,), lambda: _gradients(inputs, variant, *given)
    )


def _gradients(
    inputs: LinearInputs, variant: LinearVariant, output: Tensor, normaliser: Tensor,
    grad_output: Tensor, grad_kv: Tensor | None, grad_key_sum: Tensor | None,
) -> LinearGradients:  # fmt: skip
    passes = passes_of(aligned(inputs), variant, KernelConfig(kv_tile=BLOCK_CHANNELS))
    passes = HopperPasses(*passes)
    grad_output = readable(grad_output)
    split = split_of(passes.spec, keys=False)
    if variant.normalize == "none" or split is None or is_wide(passes.spec):
        upstream = upstream_of(passes, output, normaliser, grad_output)
    else:
        numbers = torch.empty_like(normaliser), torch.empty_like(normaliser)
        upstream = LinearBackwardInputs(grad_output, *numbers, (readable(output), normaliser))
    return gradients_by(passes, upstream, ending_of(passes, grad_kv, grad_key_sum))


def split_of(spec: LinearCallSpec, keys: bool) -> HeadSplit | None:
    """How gradients of queries, or of keys and values, are split; None: Triton kernels do it."""
    shared = (spec.state_heads, spec.key_heads, spec.value_heads) if keys else (spec.query_heads,)
    if any(heads != spec.heads for heads in shared):
        return None
    split = HeadSplit.whole(spec).cut(spec)
    return None if split.segments > 1 and unlike_triton(spec, keys) else split


def is_wide(spec: LinearCallSpec) -> bool:
    """Whether gradients are those of scan_d256.py."""
    return max(spec.head_dim, spec.value_dim) > WIDEST


class WidePass(NamedTuple):
    """What a pass of scan_d256.py reads and writes, with that file's names."""

    name: str
    a: Tensor
    b: Tensor
    c: Tensor
    result: Tensor
    source: Tensor | None = None  # what a gradient of features is of, before it is mapped
    upstream: LinearBackwardInputs | None = None
    totals: Tensor | None = None  # sums of scores, written with the output

    @property
    def parts(self) -> int:
        """Blocks of 64 channels of the result that programs have."""
        return 2 * -(-self.result.shape[-1] // OUTER)

    def described(self) -> Iterator[Any]:
        """All rows as TMA moves them: 64 of them, and so many channels."""
        for rows, channels in (
            (self.a, INNER), (self.b, INNER), (self.c, OUTER), (self.source, BLOCK_CHANNELS),
            (self.result, BLOCK_CHANNELS),
        ):  # fmt: skip
            if rows is None:
                yield None
            else:
                yield descriptor(rows, Box.of(rows, False, BLOCK_CHANNELS, channels))


class HopperPasses(Passes):
    """One call under way, and the kernels for Hopper that can be started for it.

    Each of them writes flags for what a nonfinite value may have reached, which a Triton kernel
    then computes once more.
    """

    def gradient_segments(self, keys: bool) -> int:
        """Into how many parts sequences are cut for gradients of queries, or of keys and values."""
        split = split_of(self.spec, keys)
        return super().gradient_segments(keys) if split is None else split.segments

    def collect(self, upstream: LinearBackwardInputs | None, segments: int) -> State:
        """The states of each segment alone: of keys, or of queries where there are gradients."""
        split = split_of(self.spec, keys=upstream is not None)
        if split is None or is_wide(self.spec):
            return super().collect(upstream, segments)
        if upstream is not None:
            return collect_queries(self, split, upstream)
        variant = self.spec.variant
        balanced = bool(is_balanced(variant.feature_map, variant.normalize))
        return collect_keys(self, split, balanced)

    def output(
        self, split: HeadSplit, results: LinearResults, states: tuple[State | None, State | None]
    ) -> None:
        """Write the output, sums of scores and, from states to start from, the last ones."""
        totals = None if self.spec.variant.normalize == "none" else results.normaliser
        if split.blocks == WIDE:
            wide = WidePass("output", *self.inputs[:3], results.output, totals=totals)
            recompute = self._wide(wide, *states, split.segments)
        else:
            recompute = self._output(split, results.output, totals, *states)
        # No value spoils the sums of scores, which are of queries and keys alone: they are kept.
        self.scan(
            "output", results.output, (states[0], None), split.segments, recompute, totals=totals,
            counted=totals is not None,
        )  # fmt: skip

    def grad_query(
        self, upstream: LinearBackwardInputs, result: Tensor, dots: Tensor | None,
        before: State | None, segments: int,
    ) -> None:  # fmt: skip
        """Write the gradients of queries, one for each output head."""
        split, recompute = split_of(self.spec, keys=False), None
        if split is not None and is_wide(self.spec):
            rows = upstream.grad_output, self.inputs.value, self.inputs.key
            wide = WidePass("grad_query", *rows, result, self._source(self.inputs.query), upstream)
            recompute = self._wide(wide, before, None, segments)
        elif split is not None:
            recompute = self._grad_query(split, upstream, result, before)
            # Done again from the first state on: segments may start from others than Triton's.
            recompute = recompute._replace(nonfinite=recompute.nonfinite.flatten(2))
            before, segments = initial_of(self), 1
        self.scan(
            "grad_query", result, (before, None), segments, recompute, upstream=upstream, dots=dots
        )

    def grad_key_value(
        self, upstream: LinearBackwardInputs, results: tuple[Tensor, Tensor], dots: Tensor | None,
        before: State | None, after: State | None, segments: int,
    ) -> None:  # fmt: skip
        """Write the gradients of keys and of values, and of the first states."""
        split = split_of(self.spec, keys=True)
        if split is None:
            super().grad_key_value(upstream, results, dots, before, after, segments)
            return
        query, key, value = self.inputs[:3]
        if is_wide(self.spec):
            rows = value, upstream.grad_output, query
            wide = WidePass("grad_key", *rows, results[0], self._source(key), upstream)
            of_keys = self._wide(wide, before, after, segments)
            rows = key, query, upstream.grad_output
            wide = WidePass("grad_value", *rows, results[1], None, upstream)
            of_values = self._wide(wide, before, None, segments)
        else:
            of_keys = of_values = self._grad_key_value(split, upstream, results, before, after)
        start = before, None
        self.scan("grad_key", results[0], start, segments, of_keys, upstream=upstream, dots=dots)
        self.scan("grad_value", results[1], start, segments, of_values, upstream=upstream)

    # ---- launches -----------------------------------------------------------------------------

    def _wide(
        self, wide: WidePass, before: State | None, after: State | None, segments: int
    ) -> Recompute:
        spec, recompute = self.spec, self._recompute(segments, wide.parts)
        operands = {"A": wide.a, "B": wide.b, "C": wide.c, "SOURCE": wide.source}

        def constants() -> dict[str, Any]:
            return {
                **{f"HEADS_PER_{name}": 1 if rows is None else self.heads_per(rows.shape[1])
                   for name, rows in operands.items()},
                "GROUP": spec.group,
                "HEAD_DIM": spec.head_dim,
                "VALUE_DIM": spec.value_dim,
                "TILES": wide.parts // 2,
                "SEGMENTS": segments,
                "PASS": wide.name,
                "BOTTOM_RIGHT": spec.bottom_right,
                "STARTED": spec.started,
                "FEATURE_MAP": spec.variant.feature_map,
                "SCALE": spec.variant.scale,
                "NORMALIZE": spec.variant.normalize,
                **OF_WIDE.constants(),
            }  # fmt: skip

        def arguments() -> tuple[Any, ...]:
            return (
                *wide.described(),
                None if wide.upstream is None else numbers_of(wide.upstream),
                Kept(wide.totals, self.inputs.key_lengths, recompute.nonfinite),
                sums(before), sums(after), sizes(spec, spec.heads), spec.variant.eps,
            )  # fmt: skip

        rows = there_are((*operands.values(), wide.result, wide.totals))
        programs = spec.sequences * spec.heads * (wide.parts // 2) * segments
        key = "wide", wide.name, segments, before is None, after is None, *strides_of(rows)
        tensors = (
            *rows,
            *(wide.upstream or ())[:3],
            recompute.nonfinite,
            *(before or ()),
            *(after or ()),
        )
        self._launch(linear_wide, WideMeta, key, constants, programs, tensors, arguments)
        return recompute

    def _output(
        self, split: HeadSplit, output: Tensor, totals: Tensor | None, before: State | None,
        after: State | None,
    ) -> Recompute:  # fmt: skip
        spec, recompute = self.spec, self._recompute(split.segments, split.parts)

        def constants() -> dict[str, Any]:
            return self._operands() | split.constants(spec) | OF_OUTPUT.constants() | {
                "SCALE": spec.variant.scale, "NORMALIZE": spec.variant.normalize,
            }  # fmt: skip

        def arguments() -> tuple[Any, ...]:
            return (
                *moved((*self.inputs[:3], output)),
                Kept(totals, self.inputs.key_lengths, recompute.nonfinite),
                sums(before), sums(after), sizes(spec, spec.heads), spec.variant.eps,
            )  # fmt: skip

        tensors = output, totals, recompute.nonfinite, *(before or ()), *(after or ())
        key, programs = ("output", split, before is None), split.programs(spec, spec.heads)
        self._launch(
            linear_forward, LinearForwardMeta, key, constants, programs, tensors, arguments
        )
        return recompute

    def _grad_query(
        self, split: HeadSplit, upstream: LinearBackwardInputs, result: Tensor, before: State | None
    ) -> Recompute:
        spec, recompute = self.spec, self._recompute(split.segments, split.parts)
        query, key, value = self.inputs[:3]
        output, normaliser = upstream.quotient or (None, None)

        def constants() -> dict[str, Any]:
            more = {"NORMALIZE": spec.variant.normalize, **OF_QUERIES.constants()}
            return self._operands() | self._of_gradients(split) | more

        def arguments() -> tuple[Any, ...]:
            return (
                *moved((query, upstream.grad_output, key, value)),
                None if output is None else next(moved((output,))),
                *moved((result,)),
                numbers_of(upstream),
                Kept(normaliser, self.inputs.key_lengths, recompute.nonfinite),
                sums(before), sizes(spec, spec.heads), spec.variant.eps,
            )  # fmt: skip

        rows = *upstream[:3], output, normaliser, result, recompute.nonfinite
        strides = strides_of(there_are((upstream.grad_output, output)))
        self._launch(
            linear_backward_queries, QueryGradientMeta,
            ("grad_query", split, before is None, *strides), constants,
            split.programs(spec, spec.heads), (*rows, *(before or ())), arguments,
        )  # fmt: skip
        return recompute

    def _grad_key_value(
        self, split: HeadSplit, upstream: LinearBackwardInputs, results: tuple[Tensor, Tensor],
        before: State | None, after: State | None,
    ) -> Recompute:  # fmt: skip
        spec, recompute = self.spec, self._recompute(split.segments, split.parts)
        query, key, value = self.inputs[:3]

        def constants() -> dict[str, Any]:
            heads = {"HEADS_PER_QUERY": self.heads_per(spec.query_heads)}
            return heads | self._of_gradients(split) | OF_KEYS.constants()

        def arguments() -> tuple[Any, ...]:
            return (
                *moved((query, upstream.grad_output, key, value, *results)),
                numbers_of(upstream),
                Kept(None, self.inputs.key_lengths, recompute.nonfinite),
                sums(before), sums(after), sizes(spec, spec.heads),
            )  # fmt: skip

        rows = *upstream[:3], *results, recompute.nonfinite, *(before or ()), *(after or ())
        self._launch(
            linear_backward_keys, KeyGradientMeta,
            ("grad_key_value", split, before is None, after is None, upstream.grad_output.stride()),
            constants, split.programs(spec, spec.heads), rows, arguments,
        )  # fmt: skip
        return recompute

    def _launch(
        self, kernel: Any, meta: type[tuple[Any, ...]], key: Any,
        constants: Callable[[], dict[str, Any]], programs: int, tensors: Sequence[Tensor | None],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        launch = remembered(
            self.spec.launches, ("hopper", key),
            lambda: Launch(kernel, constants(), {"num_warps": 4}, meta=meta),
        )  # fmt: skip
        launch(programs, self.spec.device, (*self.known(), *there_are(tensors)), arguments)

    def _operands(self) -> dict[str, int]:
        """How many output heads share each operand, and each state."""
        spec = self.spec
        return {
            "HEADS_PER_QUERY": self.heads_per(spec.query_heads),
            "HEADS_PER_KEY": self.heads_per(spec.key_heads),
            "HEADS_PER_VALUE": self.heads_per(spec.value_heads),
            "GROUP": spec.group,
        }

    def _of_gradients(self, split: HeadSplit) -> dict[str, Any]:
        constants = split.constants(self.spec)
        del constants["TILES"]  # one
        return constants | {"STARTED": self.spec.started, "SCALE": self.spec.variant.scale}

    def _source(self, rows: Tensor) -> Tensor | None:
        """Rows that a gradient goes through the feature map of, if it does more than scale."""
        return None if self.spec.variant.feature_map == "identity" else rows

    def _recompute(self, segments: int, parts: int) -> Recompute:
        """Memory for flags, and the kernel that reads them."""
        shape = self.spec.sequences, self.spec.heads, segments, parts
        flags = self.inputs.query.new_empty(shape, dtype=torch.int32)
        return Recompute(linear_nan_safe, flags)


def numbers_of(upstream: LinearBackwardInputs) -> RowNumbers:
    """What each query row has in the backward pass, as kernels take it."""
    return RowNumbers(upstream.factors, upstream.minus_delta)


def strides_of(rows: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """The strides of tensors, which kernels are compiled for."""
    return tuple(each.stride() for each in rows)

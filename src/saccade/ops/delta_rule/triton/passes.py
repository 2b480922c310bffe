"""Passes: the kernels of the gated delta rule, started with the rows that each of them reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.kernel_args import Extent, row_strides, there_are, view
from saccade.gpu.launcher import Launch, current_device, next_width
from saccade.ops.attention.triton import call_spec
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.delta_rule.triton import configs
from saccade.ops.delta_rule.triton.chunk_rows import (
    Decay,
    Factors,
    Faded,
    Meeting,
    delta_channel_sums,
    delta_norms,
    delta_sums,
)
from saccade.ops.delta_rule.triton.chunk_scan import (
    ScanMeta,
    delta_forward_scan,
    delta_reverse_scan,
)
from saccade.ops.delta_rule.triton.chunk_system import SystemMeta, delta_system
from saccade.ops.delta_rule.triton.configs import DeltaConfig, choose
from saccade.ops.delta_rule.triton.gradients import (
    GradientMeta,
    delta_clear_behind,
    delta_gradients,
    delta_sum_heads,
)
from saccade.ops.delta_rule.triton.recurrent_step import Pool, StepMeta, delta_step
from saccade.ops.delta_rule.triton.segments import (
    JoinMeta,
    SegmentsMeta,
    delta_join_segments,
    delta_segments,
)
from saccade.runtime.delta_spec import DeltaGradients, DeltaInputs, DeltaVariant
from saccade.runtime.spec import KernelConfig, precision

ROWS = 32  # at a time, of kernels that look at each row alone
SUMMED = 128  # channels at a time whose decay is summed up
SUMMED_HEADS = 8  # heads at a time, where their channels have the same
JOINED_TILE = 16  # channels of values at a time, of states that are joined
STEP_NUMBERS = 4096  # of a state, in registers of a program of the step

_call_specs: dict[Any, DeltaCallSpec] = {}


class DeltaCallSpec(NamedTuple):
    """Sizes of a call, and the kernels that were prepared for it."""

    packed: bool
    device: int | None
    sequences: int
    length: int  # rows of each dense sequence, or all packed ones
    key_heads: int
    value_heads: int
    head_dim: int
    value_dim: int
    by_channel: bool
    dtype: torch.dtype
    variant: DeltaVariant
    precision: str
    config: DeltaConfig
    segment: int  # rows; 0: sequences are not cut
    launches: dict[Any, Launch]

    @staticmethod
    def of(inputs: DeltaInputs, variant: DeltaVariant, config: KernelConfig) -> DeltaCallSpec:
        """The sizes and the config of a call."""
        query, value = inputs.query, inputs.value
        widths = next_width(max(query.shape[-1], 1)), next_width(max(value.shape[-1], 1))
        wide, by_channel = query.dtype == torch.float32, inputs.decay_by_channel
        found = choose(call_spec.architecture(query), *widths, wide, by_channel, config)
        return DeltaCallSpec(
            packed=inputs.packed,
            device=current_device(query),
            sequences=inputs.num_sequences,
            length=query.shape[0 if inputs.packed else 2],
            key_heads=inputs.key_heads,
            value_heads=inputs.value_heads,
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            by_channel=by_channel,
            dtype=query.dtype,
            variant=variant,
            precision=precision(query.dtype),
            config=found,
            segment=DeltaCallSpec.segment_of(inputs, found) * found.chunk,
            launches={},
        )

    @staticmethod
    def segment_of(inputs: DeltaInputs, config: DeltaConfig) -> int:
        """Chunks of a segment; 0: sequences are not cut."""
        sequences, value_dim = inputs.num_sequences, inputs.value.shape[-1]
        programs = sequences * inputs.value_heads * -(-value_dim // config.tile)
        if programs == 0:
            return 0
        length = inputs.query.shape[0] // sequences if inputs.packed else inputs.query.shape[2]
        chunks, moves = -(-length // config.chunk), inputs.query.shape[-1] / value_dim
        processors = call_spec.multiprocessors(inputs.query)
        return configs.segment(programs, chunks, moves, processors)

    @property
    def solved(self) -> str:
        """How a triangular system is inverted: exactly enough for the dtype it is held in."""
        return {torch.bfloat16: "bf16x2", torch.float16: "tf32x3"}.get(self.dtype, "ieee")

    @property
    def joined(self) -> str:
        """How products of states are computed: tf32 for half types, whose rounding is coarser."""
        return self.precision if self.dtype == torch.float32 else "tf32"

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // max(self.key_heads, 1)

    def extent(self, heads: int) -> Extent:
        """The rows of so many heads."""
        return Extent(self.sequences, self.length, heads, self.packed)

    def constants(self) -> dict[str, Any]:
        """What most kernels are told."""
        return {
            "GROUP": self.group,
            "HEADS": self.value_heads,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "CHUNK": self.config.chunk,
            "LEVELS": self.config.chunk.bit_length() - 1,
            "SEGMENT": self.segment,
            "BY_CHANNEL": self.by_channel,
            "PACKED": self.packed,
            "PRECISION": self.precision,
            "SOLVED": self.solved,
        }


class System(NamedTuple):
    """What was made of a call's rows before its scans."""

    inverse: Tensor  # as rows of value heads, of CHUNK numbers
    weights: Tensor
    faded: tuple[Tensor, Tensor, Tensor] | None  # by channel: queries, keys, keys that are kept
    meeting: tuple[Tensor, Tensor, Tensor] | None  # else: numbers of the same rows
    left: Tensor | None  # of states by each chunk, where they fade

    def known(self) -> list[Tensor]:
        """The tensors that scans read."""
        parts = *(self.faded or ()), *(self.meeting or ()), self.left
        return [self.inverse, self.weights, *there_are(parts)]


class Moves(NamedTuple):
    """What each segment and head makes of a state S before it: moved · S + alone."""

    moved: Tensor
    alone: Tensor


class Past(NamedTuple):
    """What a backward pass makes again of the forward one."""

    system: System
    updates: Tensor
    states: Tensor  # before each chunk
    moves: Moves | None


class DeltaCall(NamedTuple):
    """One call under way: its rows, and the kernels that can be started with them."""

    spec: DeltaCallSpec
    inputs: DeltaInputs
    sums: tuple[Tensor, Tensor] | None  # of decay
    norms: tuple[Tensor, Tensor] | None  # of queries and keys

    @staticmethod
    def of(inputs: DeltaInputs, variant: DeltaVariant, config: KernelConfig) -> DeltaCall:
        """A call, ready for its kernels."""
        inputs = with_unit_channels(inputs)
        key = (
            *((None if t is None else (t.shape, t.stride(), t.dtype)) for t in inputs),
            inputs.query.device, variant, config, precision(inputs.query.dtype),
        )  # fmt: skip
        spec = remembered(_call_specs, key, lambda: DeltaCallSpec.of(inputs, variant, config))
        return DeltaCall(spec, inputs, None, None)

    # ---- memory -------------------------------------------------------------------------------

    def rows(self, channels: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for rows of the value heads."""
        return self.inputs.value.new_empty(*self.inputs.beta.shape, channels, dtype=dtype)

    @property
    def sums_dtype(self) -> torch.dtype:
        """What sums are kept in between kernels. float16 ends at 65504: it would take factors."""
        dtype = self.inputs.value.dtype
        return torch.float32 if dtype == torch.float16 else dtype

    def numbers(self) -> Tensor:
        """Memory for a number for each row of the value heads."""
        beta = self.inputs.beta
        return torch.empty(beta.shape, dtype=torch.float32, device=beta.device)

    def chunk_slots(self) -> int:
        """How many chunks there may be, of all sequences."""
        spec = self.spec
        slots = spec.extent(1).slots(spec.config.chunk)
        return slots if spec.packed else slots * spec.sequences

    def chunk_states(self) -> Tensor:
        """Memory for a state before or behind each chunk, turned over, as products take it."""
        spec, value = self.spec, self.inputs.value
        shape = (self.chunk_slots(), spec.value_heads, spec.value_dim, spec.head_dim)
        return value.new_empty(shape, dtype=self.sums_dtype)

    # ---- arguments ----------------------------------------------------------------------------

    def view(self, rows: Tensor | None) -> Any:
        """A View of rows: of numbers, or of rows of channels; None where there are none."""
        if rows is None:
            return None
        strides = row_strides(rows, self.spec.packed)
        return view(rows, strides, self.spec.extent(rows.shape[1]), self.inputs.cu_seqlens)

    def factors(self) -> Factors:
        """Queries' and keys' lengths, as kernels take them."""
        return Factors(*(None, None) if self.norms is None else map(self.view, self.norms))

    def decay(self) -> Decay | None:
        """Sums of decay, as kernels take them."""
        return None if self.sums is None else Decay(*map(self.view, self.sums))

    def known(self) -> list[Tensor]:
        """The tensors that every kernel may read."""
        return there_are((*self.inputs, *(self.sums or ()), *(self.norms or ())))

    # ---- kernels ------------------------------------------------------------------------------

    def prepared(self) -> DeltaCall:
        """The call with sums of decay and lengths of rows, as far as it has them."""
        return self._replace(sums=self._sums(), norms=self._norms())

    def _sums(self) -> tuple[Tensor, Tensor] | None:
        spec, decay = self.spec, self.inputs.decay
        if decay is None:
            return None
        high = torch.empty(decay.shape, dtype=torch.float32, device=decay.device)
        low = torch.empty(decay.shape, dtype=torch.float16, device=decay.device)
        constants, groups = {"CHUNK": spec.config.chunk}, spec.value_heads
        if spec.by_channel:
            width = min(next_width(spec.head_dim), SUMMED)
            constants |= {"CHANNELS": spec.head_dim, "WIDTH": width}
            launch = self.launch(delta_channel_sums, constants, 1)
        else:
            at_once = min(1 << (spec.value_heads - 1).bit_length(), SUMMED_HEADS)
            groups = -(-spec.value_heads // at_once)
            constants |= {"HEADS": spec.value_heads, "AT_ONCE": at_once}
            launch = self.launch(delta_sums, constants, 1)
        extent = spec.extent(groups)

        def arguments() -> tuple[Any, ...]:
            of_groups = view(high, row_strides(high, spec.packed), extent, self.inputs.cu_seqlens)
            return self.view(decay), of_groups, self.view(low)

        tensors = [*there_are((self.inputs.cu_seqlens,)), decay, high, low]
        launch(extent.programs(spec.config.chunk), spec.device, tensors, arguments)
        return high, low

    def _norms(self) -> tuple[Tensor, Tensor] | None:
        spec, inputs = self.spec, self.inputs
        if not spec.variant.normalize_qk:
            return None
        found = []
        for name, rows in (("query", inputs.query), ("key", inputs.key)):
            factors = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
            found.append(factors)
            if not spec.by_channel:  # `delta_system` has whole rows before it needs these
                continue
            constants = {"TILE": ROWS, "DIM": spec.head_dim, "WIDTH": next_width(spec.head_dim)}
            launch = self.launch(delta_norms, constants, 4, name=name)
            programs = spec.extent(spec.key_heads).programs(ROWS)
            pair = (rows, factors)
            tensors = [*there_are((inputs.cu_seqlens,)), *pair]
            launch(programs, spec.device, tensors, lambda pair=pair: tuple(map(self.view, pair)))
        return found[0], found[1]

    def empty_system(self) -> System:
        """Memory for the triangular systems of all chunks, and what comes with them."""
        spec, chunk = self.spec, self.spec.config.chunk
        inverse, weights, faded, meeting = self.rows(chunk), self.rows(chunk), None, None
        if spec.by_channel:
            faded = self.rows(spec.head_dim), self.rows(spec.head_dim), self.rows(spec.head_dim)
        else:
            meeting = self.numbers(), self.numbers(), self.numbers()
        left = None
        if self.sums is not None:
            channels = spec.head_dim if spec.by_channel else 1
            shape = self.chunk_slots(), spec.value_heads, channels
            left = torch.empty(shape, dtype=torch.float32, device=inverse.device)
        return System(inverse, weights, faded, meeting, left)

    def system(self) -> System:
        """The triangular systems of all chunks, solved, and what queries weigh."""
        spec, inputs, config = self.spec, self.inputs, self.spec.config
        constants = {**spec.constants(), "KEY_TILE": config.system_tile}
        launch = self.launch(delta_system, constants, config.system_warps, meta=SystemMeta)
        programs = spec.extent(spec.value_heads).programs(config.chunk)
        found = self.empty_system()

        def arguments() -> tuple[Any, ...]:
            return (
                self.view(inputs.query), self.view(inputs.key), self.factors(),
                self.view(inputs.beta), self.decay(), self.view(found.inverse),
                self.view(found.weights), self.meeting(found), found.left,
                None if found.faded is None else Faded(*map(self.view, found.faded)),
                spec.variant.scale,
            )  # fmt: skip

        launch(programs, spec.device, [*self.known(), *found.known()], arguments)
        return found

    def meeting(self, system: System) -> Meeting:
        """What products of rows with states want still, as kernels take it."""
        return Meeting(*map(self.view, system.meeting or (None, None, None)))

    def _asking(self, system: System) -> tuple[Any, Any, Any]:
        """Views of queries and keys that ask a state, and of keys that are written to it."""
        query, key = self.inputs.query, self.inputs.key
        query, key, kept = system.faded or (query, key, key)
        return self.view(query), self.view(key), self.view(kept)

    def _scan_launch(
        self, kernel: Any, *absent: Any, nan_safe: bool = False, move_tiles: int = 0, **more: Any
    ) -> tuple[Launch, int]:
        """A scan, and how many programs it takes; absent: of what only some calls have.

        move_tiles: tiles besides those of channels of values.
        """
        spec, config = self.spec, self.spec.config
        tile, warps, stages = config.tile, config.num_warps, config.num_stages
        if kernel is delta_reverse_scan:
            tile, warps, stages = config.back
        elif nan_safe and tile > 16:  # it has more to hold
            tile, warps = tile // 2, max(warps // 2, 4) if stages > 1 else warps
        tiles = -(-spec.value_dim // tile)
        constants = {
            **spec.constants(), "HEAD_WIDTH": next_width(spec.head_dim), "VALUE_TILE": tile,
            "TILES": tiles, "NAN_SAFE": nan_safe, "MOVE_TILES": move_tiles, **more,
        }  # fmt: skip
        meta = SegmentsMeta if move_tiles else ScanMeta
        launch = self.launch(kernel, constants, warps, stages, meta, nan_safe, *absent)
        scans = spec.sequences * spec.value_heads
        if spec.segment:
            scans = spec.extent(spec.value_heads).programs(spec.segment)
        return launch, scans * (tiles + move_tiles)

    def initial(self) -> Tensor | None:
        """The states before the first tokens, as kernels take them."""
        before = self.inputs.initial_state
        return None if before is None else before.float().contiguous()

    def moves(self, system: System, *, first: bool, last: bool) -> Moves | None:
        """What segments make of states, where sequences are cut; the first segment's and the last
        one's only where something comes before and after them."""
        spec, inputs = self.spec, self.inputs
        if spec.segment == 0:
            return None
        tiles = -(-next_width(spec.head_dim) // spec.config.tile)
        ends = ("both" if last else "first") if first else ("last" if last else "none")
        launch, programs = self._scan_launch(delta_segments, ends, move_tiles=tiles, ENDS=ends)
        found = Moves(
            *(self.segment_states(columns) for columns in (spec.head_dim, spec.value_dim))
        )

        def arguments() -> tuple[Any, ...]:
            _, key, kept = self._asking(system)
            return (
                key, kept, self.view(inputs.value), self.meeting(system), system.left,
                self.view(inputs.beta), self.view(system.inverse), *found,
            )  # fmt: skip

        tensors = [*self.known(), *system.known(), *found]
        launch(programs, spec.device, tensors, arguments)
        return found

    def segment_states(self, columns: int) -> Tensor:
        """Memory for [head_dim, columns] of each segment and head."""
        spec = self.spec
        programs = spec.extent(spec.value_heads).programs(spec.segment)
        shape = (programs, spec.head_dim, columns)
        return self.inputs.value.new_empty(shape, dtype=torch.float32)

    def between(
        self, moves: Moves | None, outer: Tensor | None, reverse: bool = False
    ) -> Tensor | None:
        """The states before all segments, or gradients of those behind them, from the outermost."""
        spec, inputs = self.spec, self.inputs
        if moves is None:
            return outer
        tile = min(JOINED_TILE, next_width(spec.value_dim))
        tiles = -(-spec.value_dim // tile)
        constants = {
            **spec.constants(), "HEAD_WIDTH": next_width(spec.head_dim), "VALUE_TILE": tile,
            "TILES": tiles, "REVERSE": reverse, "JOINED": spec.joined,
        }  # fmt: skip
        launch = self.launch(delta_join_segments, constants, 4, 1, JoinMeta, reverse, outer is None)
        found = self.segment_states(spec.value_dim)
        tensors = there_are((inputs.cu_seqlens, inputs.beta, *moves, outer, found))
        launch(
            spec.sequences * spec.value_heads * tiles, spec.device, tensors,
            lambda: (self.view(inputs.beta), *moves, outer, found),
        )  # fmt: skip
        return found

    def scan(
        self, system: System, before: Tensor | None, output: Tensor | None = None,
        after: Tensor | None = None, updates: Tensor | None = None, states: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the output and the last state; or what gradients are made of, for each chunk.

        before: states before sequences, or their segments.
        """
        spec, inputs = self.spec, self.inputs
        absent = output is None, after is None, before is None
        launch, programs = self._scan_launch(delta_forward_scan, *absent)

        def arguments() -> tuple[Any, ...]:
            asks, (query, key, kept) = output is not None, self._asking(system)
            return (
                query if asks else None, key, kept, self.view(inputs.value),
                self.meeting(system), system.left, self.view(inputs.beta),
                self.view(system.inverse),
                self.view(system.weights) if asks else None,
                self.view(output), self.view(updates), states, before, after, spec.variant.scale,
            )  # fmt: skip

        tensors = there_are((*system.known(), output, after, updates, states, before))
        tensors = [*self.known(), *tensors]
        launch(programs, spec.device, tensors, arguments)
        if output is not None:
            launch, programs = self._scan_launch(delta_forward_scan, *absent, nan_safe=True)
            launch(programs, spec.device, tensors, arguments)

    def past(self, *, last: bool) -> Past:
        """Systems, updates and the states before all chunks; what moves states between segments.

        last: whether there is a gradient of the last state.
        """
        updates, states = self.rows(self.inputs.value.shape[-1]), self.chunk_states()
        system, before = self.system(), self.initial()
        moves = self.moves(system, first=before is not None, last=last)
        self.scan(system, self.between(moves, before), updates=updates, states=states)
        return Past(system, updates, states, moves)

    def scan_back(
        self, system: System, grad_output: Tensor, solved: Tensor | None = None,
        grad_states: Tensor | None = None, ending: Tensor | None = None,
        first: Tensor | None = None, into: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write `solved` and the gradients of states; of the initial one too, where there is one.

        ending: gradients of states behind sequences, or their segments; or None. first: without
        `solved`, memory for the gradient before each segment. into: what the gradient of the
        initial state is copied to.
        """
        spec, inputs = self.spec, self.inputs
        if into is not None:
            first = into.new_empty(into.shape, dtype=torch.float32)
        launch, programs = self._scan_launch(
            delta_reverse_scan, solved is None, ending is None, first is None,
            *grad_output.stride(),
        )  # fmt: skip

        def arguments() -> tuple[Any, ...]:
            return (
                *self._asking(system), self.view(grad_output), self.meeting(system), system.left,
                self.view(inputs.beta), self.view(system.inverse),
                self.view(system.weights), self.view(solved), grad_states, ending, first,
                spec.variant.scale,
            )  # fmt: skip

        tensors = there_are((*system.known(), grad_output, solved, grad_states, ending, first))
        launch(programs, spec.device, [*self.known(), *tensors], arguments)
        if into is not None and first is not None:
            into.copy_(first)

    def gradients(
        self, grad_output: Tensor, kept: tuple[Tensor, ...], gradients: DeltaGradients
    ) -> None:
        """Write the gradients of all rows."""
        spec, inputs = self.spec, self.inputs
        alone = spec.group == 1 and not spec.variant.normalize_qk
        of_query, of_key = gradients.query, gradients.key
        if not alone:
            of_query, of_key = (self.rows(spec.head_dim, self.sums_dtype) for _ in range(2))
        written = of_query, of_key, gradients.value, gradients.beta, gradients.decay
        self.gradients_of_chunks(grad_output, kept, written)
        if not alone:
            norms = self.norms or (None, None)
            self._sum_heads("query", of_query, inputs.query, norms[0], gradients.query)
            self._sum_heads("key", of_key, inputs.key, norms[1], gradients.key)

    def gradients_of_chunks(
        self, grad_output: Tensor, kept: tuple[Tensor, ...], written: tuple[Tensor | None, ...]
    ) -> None:
        """Write the gradients of the rows of all chunks: of queries and keys for each value head,
        of values, of beta, and of decay where there is any."""
        spec, inputs, config = self.spec, self.inputs, self.spec.config
        constants = {
            **spec.constants(), "KEY_TILE": config.gradient_tile,
            "VALUE_TILE": config.gradient_values,
        }  # fmt: skip
        updates, solved, *states = kept
        options = config.gradient_warps, config.gradient_stages, GradientMeta
        launch = self.launch(delta_gradients, constants, *options, *grad_output.stride())

        def arguments() -> tuple[Any, ...]:
            rows = inputs.query, inputs.key, inputs.value, grad_output
            return (
                *map(self.view, rows), self.factors(), self.view(inputs.beta), self.decay(),
                self.view(updates), self.view(solved), *states, *map(self.view, written),
                spec.variant.scale,
            )  # fmt: skip

        tensors = [*self.known(), grad_output, *kept, *there_are(written)]
        programs = spec.extent(spec.value_heads).programs(config.chunk)
        launch(programs, spec.device, tensors, arguments)

    def clear_behind(self, gradients: DeltaGradients) -> None:
        """Clear the gradients of packed rows behind the last sequence."""
        spec, inputs = self.spec, self.inputs
        constants = {
            "HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim,
            "HEAD_WIDTH": next_width(spec.head_dim), "VALUE_WIDTH": next_width(spec.value_dim),
            "BY_CHANNEL": spec.by_channel,
        }  # fmt: skip
        launch = self.launch(delta_clear_behind, constants, 4)
        rows = gradients[:5]
        launch(
            call_spec.multiprocessors(inputs.query), spec.device,
            there_are((inputs.cu_seqlens, *rows)), lambda: tuple(map(self.view, rows)),
        )  # fmt: skip

    def _sum_heads(
        self, name: str, found: Tensor, rows: Tensor, factors: Tensor | None, result: Tensor
    ) -> None:
        """Write gradients of queries or keys, from those of their value heads."""
        spec = self.spec
        constants = {
            "GROUP": spec.group, "TILE": ROWS, "DIM": spec.head_dim,
            "WIDTH": next_width(spec.head_dim),
        }  # fmt: skip
        launch = self.launch(delta_sum_heads, constants, 4, name=name)
        views = found, rows, factors, result
        launch(
            spec.extent(spec.key_heads).programs(ROWS), spec.device,
            there_are((self.inputs.cu_seqlens, *views)), lambda: tuple(map(self.view, views)),
        )  # fmt: skip

    def step(self, states: Tensor, slots: Tensor | None, output: Tensor) -> None:
        """Write the output of new rows, and change states where they lie."""
        spec, inputs = self.spec, self.inputs
        width = next_width(spec.head_dim)
        tile = min(max(STEP_NUMBERS // width, 16), next_width(spec.value_dim))
        tiles = -(-spec.value_dim // tile)
        constants = {
            **spec.constants(), "ROWS": spec.length, "HEAD_WIDTH": width, "VALUE_TILE": tile,
            "TILES": tiles, "NORMALIZE": spec.variant.normalize_qk,
        }  # fmt: skip
        entries = None if slots is None else len(states)
        launch = self.launch(delta_step, constants, 4, 1, StepMeta, entries, states.dtype)

        def arguments() -> tuple[Any, ...]:
            rows = (inputs.query, inputs.key, inputs.value, inputs.beta, inputs.decay, output)
            return (
                *map(self.view, rows), Pool(states, slots, entries), spec.variant.scale,
            )  # fmt: skip

        tensors = [*self.known(), output, *there_are((slots,)), states]
        launch(spec.sequences * spec.value_heads * tiles, spec.device, tensors, arguments)

    def launch(
        self, kernel: Any, constants: dict[str, Any], num_warps: int, num_stages: int = 1,
        meta: type[tuple[Any, ...]] | None = None, *apart: Any, name: str = "",
    ) -> Launch:  # fmt: skip
        """A kernel, prepared once. apart: what else tells its launches in calls like this apart."""

        def make() -> Launch:
            if meta is None:
                taken = constants
            else:
                fields: tuple[str, ...] = meta._fields  # type: ignore[attr-defined]
                taken = {key: constants[key] for key in fields}
            options = {"num_warps": num_warps, "num_stages": num_stages}
            return Launch(kernel, taken, options, meta)

        return remembered(self.spec.launches, (kernel, name, *apart), make)


def with_unit_channels(inputs: DeltaInputs) -> DeltaInputs:
    """The inputs with channels side by side in memory; copied where they are not."""

    def near(rows: Tensor | None) -> Tensor | None:
        if rows is None or rows.stride(-1) == 1 or rows.shape[-1] == 1:
            return rows
        return rows.contiguous()

    query, key, value = map(near, inputs[:3])
    decay = near(inputs.decay) if inputs.decay_by_channel else inputs.decay
    return inputs._replace(query=query, key=key, value=value, decay=decay)

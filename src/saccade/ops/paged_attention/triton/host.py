"""Attention over pages by Triton kernels, as the operator starts them on GPUs.

    (plan) → attention → merge        for sequences of few query rows, and again for those of many,
                                      unless these take the dense kernel

Calls like one another are prepared once, as in `ops/attention/triton/host.py`. Nothing is read by
the host, and what a call allocates depends on shapes only, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import paged_view
from saccade.gpu.kernel_args import (
    Rules,
    changes_scores,
    mask_argument,
    mask_functions,
    score_argument,
)
from saccade.gpu.language import tl
from saccade.gpu.launcher import Launch
from saccade.gpu.recording import RecordedPass, tensors_in
from saccade.gpu.tensor_view import View
from saccade.gpu.wide_heads import width_of
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.call_spec import memory_like, remembered
from saccade.ops.attention.triton.configs import NARROW, KernelProblem
from saccade.ops.attention.triton.forward import attention_forward
from saccade.ops.paged_attention.triton.call_spec import (
    ANY_NUMBER,
    PagedCallSpec,
    Pass,
    in_pairs,
    is_latent,
    made_regular,
    may_be_latent,
    signature,
)
from saccade.ops.paged_attention.triton.decode import (
    CombineMeta,
    DecodeMeta,
    Partials,
    attention_pages,
    merge_partials,
)
from saccade.ops.paged_attention.triton.split_kv import NOTE_SIZE, PLAN_ROW, plan_pages
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows


class PassLaunches:
    """The kernels of one pass over the sequences of few query rows, or of many."""

    def __init__(self, spec: PagedCallSpec, of: Pass, device: torch.device, changed: bool):
        """changed: whether the caller changes scores."""
        self.spec, self.of = spec, of
        config = of.config
        options = {"num_warps": config.num_warps, "num_stages": of.stages}
        tiles = {"QUERY_TILE": config.query_tile, "KV_TILE": config.kv_tile}
        shared = {**spec.constants, **tiles, "HEADS_IN_TILE": of.heads_in_tile}
        splits = {"AT_ONCE": of.groups_at_once, "LEAST": of.least_payload, "SPLITS": of.most_splits}
        splits["LONG"] = of.long
        last = {"WORK_TILES": of.few_work_tiles, "CHAINED": of.chains}
        last["PRODUCTS"] = spec.products(of.paired)
        last |= {"AHEAD": of.chunks, "PARTIAL_STAGES": of.partial_stages}
        early = {"launch_pdl": True} if of.chains else {}
        self.attention = Launch(
            attention_pages,
            {**shared, **splits, **last},
            options | early,
            meta=DecodeMeta,
        )
        names = ("GROUP", "VALUE_DIM", "VALUE_WIDTH")
        merge = {name: spec.constants[name] for name in names} | tiles
        merge |= {"HEADS_IN_TILE": of.heads_in_tile, "ROWS": of.merged_rows}
        merge |= {"ROW_PARTS": of.merge_parts, "PARTIALS": of.merged_at_once} | splits
        merge |= {"WORK_TILES": of.few_work_tiles, "CHAINED": of.chains}
        merge["NATURAL"] = changed
        warps = 1 if of.merges_by_one_warp else 4
        options = {"num_warps": warps, "num_stages": 1, **early}
        self.merge = Launch(merge_partials, merge, options, meta=CombineMeta)
        merged = of.few_work_tiles * of.groups or of.programs  # work tiles, or notes of programs
        self.merging = merged * of.merge_parts if of.may_cut else 0  # programs
        self.plan = Launch(plan_pages, of.plan_constants, {"num_warps": 1, "num_stages": 1})
        whole, single = (
            partial(torch.empty, dtype=dtype, device=device)
            for dtype in (torch.int32, torch.float32)
        )
        self.rows = partial(whole, of.groups * (1 + PLAN_ROW.value))  # memory, as all below
        self.numbers = partial(single, of.partial_numbers)
        self.notes = partial(whole, of.programs * NOTE_SIZE.value)

    def __call__(
        self, inputs: PagedInputs, variant: Variant, output: Tensor, lse: Tensor,
        tensors: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Compute the rows of the sequences that the pass is for."""
        of, device = self.of, self.spec.device
        if of.paired:
            inputs = in_pairs(inputs)
            tensors = (*tensors, inputs.key_pages, inputs.value_pages)
        rows = self.rows() if of.planned else None
        numbers, notes = self.numbers(), self.notes()
        call = _PassCall(self, inputs, variant, output, lse, rows, numbers, notes)
        if rows is not None:
            tensors = (*tensors, rows)
            self.plan(of.groups, device, tensors, call.of_plan)
        tensors = (*tensors, numbers, notes)
        self.attention(of.programs, device, tensors, call.of_attention)
        if self.merging:
            self.merge(self.merging, device, tensors, call.of_merge)


class _PassCall(NamedTuple):
    """One pass under way: the arguments of its kernels."""

    launches: PassLaunches
    inputs: PagedInputs
    variant: Variant
    output: Tensor
    lse: Tensor
    plan: Tensor | None
    numbers: Tensor
    notes: Tensor

    def of_plan(self) -> tuple[Any, ...]:
        spec, of = self.launches.spec, self.launches.of
        assert self.plan is not None
        return (
            spec.plan_rows(self.inputs, of.heads if of.varies_by else 1),
            spec.pages(self.inputs)[0],
            spec.plan_mask(self.variant),
            of.schedule(None),
            self.plan,
        )

    def of_attention(self) -> tuple[Any, ...]:
        variant, sinks = self.variant, self.inputs.sinks
        changes = mask_argument(variant), score_argument(variant)
        return (
            self.launches.spec.rows(self.inputs),
            self.launches.spec.query_scale(self.inputs),
            *self.launches.spec.pages(self.inputs),
            *self._results(),
            Rules(*changes, None, variant.scale),
            sinks,
            *self._schedule(),
        )

    def of_merge(self) -> tuple[Any, ...]:
        return (
            self.launches.spec.rows(self.inputs),
            self.launches.spec.pages(self.inputs)[0],
            *self._results(),
            *self._schedule(),
        )

    def _results(self) -> tuple[Any, ...]:
        return self.launches.spec.results(self.inputs, self.output, self.lse)

    def _schedule(self) -> tuple[Any, ...]:
        of = self.launches.of
        partials = self.numbers, of.softmax_position, self.notes
        return of.schedule(self.plan), Partials(*partials)


class PagedForward:
    """Attention over pages for calls like one another, prepared."""

    def __init__(
        self, inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
    ):
        self.regular = made_regular(inputs) is inputs
        inputs, self.requested = made_regular(inputs), config
        self.batch_invariant, self.may_be_latent = batch_invariant, may_be_latent(inputs)
        self.passes = self._started(inputs, variant, latent=False)
        self.latent_passes: list[Any] | None = None
        packed = inputs.cu_seqlens_q is not None
        self.output, self.lse = map(
            memory_like, empty_rows(inputs.query, inputs.value_pages.shape[3], packed)
        )
        self.done = RecordedPass(inputs.query)
        self.brought = tensors_in(inputs)

    def _started(self, inputs: PagedInputs, variant: Variant, latent: bool) -> list[Any]:
        """What starts the kernels of each pass."""
        spec = PagedCallSpec.of(inputs, latent)
        passes = spec.passes(inputs, variant, self.requested, self.batch_invariant)
        return [
            self.launches(spec, of, inputs, variant)
            for of in with_long_chunks(spec, passes, inputs, variant, self.requested)
        ]

    def launches(self, spec: PagedCallSpec, of: Pass, inputs: PagedInputs, variant: Variant) -> Any:
        """What starts the kernels of a pass."""
        if chunks_unsupported(spec, of, inputs, variant, self.requested) is None:
            return ChunkLaunch(spec, of, inputs, variant, self.requested)
        return PassLaunches(spec, of, inputs.query.device, changes_scores(variant))

    def __call__(self, inputs: PagedInputs, variant: Variant) -> tuple[Tensor, ...]:
        """Output and lse of a call like the one that was prepared."""
        tensors = self.brought(inputs)
        captured = variant.mask_captured.tensors, variant.score_captured.tensors
        if captured != NO_TENSORS:
            tensors = (*tensors, *captured[0], *captured[1])
        return self.done(tensors, lambda: self._run(inputs, variant))

    def _run(self, inputs: PagedInputs, variant: Variant) -> tuple[Tensor, Tensor]:
        if not self.regular:
            inputs = made_regular(inputs)
        output, lse = self.output(), self.lse()
        captured = *variant.mask_captured.tensors, *variant.score_captured.tensors
        tensors = (*self.brought(inputs), *captured, output, lse)
        passes = self.passes
        if self.may_be_latent and is_latent(inputs):
            if self.latent_passes is None:
                self.latent_passes = self._started(inputs, variant, latent=True)
            passes = self.latent_passes
        for launches in passes:
            launches(inputs, variant, output, lse, tensors)
        return output, lse


NO_TENSORS = ((), ())
_forwards: dict[Any, PagedForward] = {}


def prepared(
    inputs: PagedInputs,
    variant: Variant,
    config: KernelConfig,
    batch_invariant: bool,
    by: type[PagedForward] = PagedForward,
) -> PagedForward:
    """`forward` for calls like this one, prepared as `by` has it; call it with such inputs."""
    key = by, signature(inputs, variant), config, batch_invariant
    return remembered(_forwards, key, lambda: by(inputs, variant, config, batch_invariant))


def forward(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> tuple[Tensor, ...]:
    """Output and lse; see `saccade.attention_paged`."""
    return prepared(inputs, variant, config, batch_invariant)(inputs, variant)


# ---- chunks of prompts --------------------------------------------------------------------------
# Where a pass over sequences of many query rows has tiles enough to keep the device busy, nothing
# is cut along the keys, so nothing has to be shared out or merged: the dense forward kernel serves
# it, with Views that say where a row of keys lives (gpu/paged_view.py).

BUSY = 6  # warps on each multiprocessor: fewer are slower than what splits keys
# Query rows of a sequence that leave tiles of one head too empty, where its own number decides.
SHORT = 63


class ChunkLaunch:
    """The dense kernel for a pass over the sequences of many query rows."""

    def __init__(
        self,
        spec: PagedCallSpec,
        of: Pass,
        inputs: PagedInputs,
        variant: Variant,
        requested: KernelConfig,
    ):
        self.spec, self.fewest = spec, of.rows[0]
        config = chunk_config(spec, variant, requested)
        constants = dict(spec.constants)
        self.page_size = constants.pop("PAGE_SIZE")
        constants["HEADS_PER_KV_HEAD"] = constants.pop("GROUP")
        constants |= {"QUERY_TILE": config.query_tile, "KV_TILE": config.kv_tile, "ONE_LOOP": False}
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self.launch = Launch(attention_forward, constants, options)
        self.programs = spec.queries.programs(config.query_tile)

    def __call__(
        self, inputs: PagedInputs, variant: Variant, output: Tensor, lse: Tensor,
        tensors: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Compute the rows of the sequences that the pass is for."""

        def arguments() -> tuple[Any, ...]:
            changes = mask_argument(variant), score_argument(variant)
            return (
                self._queries(inputs),
                *self._pages(inputs),
                *self.spec.results(inputs, output, lse),
                None,  # no residual: nothing over pages has a gradient
                None,
                Rules(*changes, None, variant.scale),
                inputs.sinks,
            )

        self.launch(self.programs, self.spec.device, tensors, arguments)

    def _queries(self, inputs: PagedInputs) -> View:
        queries = self.spec.rows(inputs)
        if not self.spec.queries.packed:
            return queries
        data = (*queries.data, self.fewest)
        return queries._replace(find=paged_view.chunk_program, data=data)

    def _pages(self, inputs: PagedInputs) -> list[View | None]:
        size = tl.constexpr(self.page_size)
        return [
            view
            and view._replace(
                data=(*view.data, size), ahead=paged_view.pages_ahead, rows=paged_view.in_pages
            )
            for view in self.spec.pages(inputs)[:2]
        ]


def with_long_chunks(
    spec: PagedCallSpec,
    passes: list[Pass],
    inputs: PagedInputs,
    variant: Variant,
    requested: KernelConfig,
) -> list[Pass]:
    """The passes, where packed sequences get equal bits in any batch: long chunks are another."""
    if not passes or not passes[-1].splits or not spec.queries.packed:
        return passes
    last = passes[-1]
    short, long = (
        last._replace(rows=rows) for rows in ((last.rows[0], SHORT), (SHORT, ANY_NUMBER))
    )
    if (
        last.rows[0] >= SHORT
        or chunks_unsupported(spec, long, inputs, variant, requested) is not None
    ):
        return passes
    return [*passes[:-1], short, long]


def chunk_config(spec: PagedCallSpec, variant: Variant, requested: KernelConfig) -> KernelConfig:
    """The config of the dense kernel: the same for any batch, packed or not."""
    width = width_of(spec.constants)
    masked = variant.mask != ""
    latent = spec.latent and width > NARROW
    problem = KernelProblem(spec.architecture, "forward", width, spec.wide, masked, latent=latent)
    return configs.choose(problem, requested, configs.tuned())


def chunks_unsupported(
    spec: PagedCallSpec, of: Pass, inputs: PagedInputs, variant: Variant, requested: KernelConfig
) -> str | None:
    """Why a pass is shared out along the keys instead, or None.

    Where the caller asks for the same bits in any batch, this depends on nothing but what is asked
    of each sequence.
    """
    if not of.chunks:
        return "sequences of few query rows are bound by memory"
    if spec.fp8:
        return "products are of e4m3 numbers, and values take scales that weights must be given"
    if inputs.key_pages.dtype != inputs.query.dtype:
        return "pages hold numbers that are converted"
    if variant.mask and mask_functions(variant.mask).spans_read:
        return "the mask reads tensors along rows, which is planned ahead"
    if of.splits:  # batch_invariant
        fewest = of.rows[0] + 1 if spec.queries.packed else spec.queries.length
        return None if fewest > SHORT else "sequences of few query rows fill no tiles of one head"
    config, queries = chunk_config(spec, variant, requested), spec.queries
    tiles = queries.length // config.query_tile * queries.heads * queries.sequences
    if tiles * config.num_warps < BUSY * spec.multiprocessors:
        return "there are few query rows: keys are split, to keep the GPU busy"
    if queries.programs(config.query_tile) > 2 * tiles:
        return "most sequences have few query rows"
    return None

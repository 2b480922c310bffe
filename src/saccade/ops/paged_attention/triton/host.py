"""Attention over pages by Triton kernels: the body that the operator runs on GPUs.

    (plan) → attention → merge        for sequences of few query rows, and again for those of many,
                                      unless these take the dense kernel (chunks.py)

A kind of call is prepared once, as in `ops/attention/api.py`. Nothing is read by the host, and what
a call allocates depends on shapes only, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.kernel_args import mask_argument, score_argument
from saccade.gpu.launcher import Launch
from saccade.gpu.rules import Rules
from saccade.ops.attention.triton.call_spec import memory_like, remembered
from saccade.ops.paged_attention.triton import chunks as paged_chunks
from saccade.ops.paged_attention.triton import passes as paged_pass
from saccade.ops.paged_attention.triton.call_spec import (
    PagedCallSpec,
    in_pairs,
    made_regular,
    signature,
)
from saccade.ops.paged_attention.triton.combine import CombineMeta, merge_partials
from saccade.ops.paged_attention.triton.decode import DecodeMeta, Partials, attention_pages
from saccade.ops.paged_attention.triton.passes import Pass
from saccade.ops.paged_attention.triton.split_kv import NOTE_SIZE, PLAN_ROW, plan_pages
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows


class PassLaunches:
    """The kernels of one pass over the sequences of few query rows, or of many."""

    def __init__(self, spec: PagedCallSpec, of: Pass, device: torch.device):
        self.spec, self.of = spec, of
        config = of.config
        options = {"num_warps": config.num_warps, "num_stages": of.stages}
        tiles = {"QUERY_TILE": config.query_tile, "KV_TILE": config.kv_tile}
        shared = {**spec.constants, **tiles, "HEADS_IN_TILE": of.heads_in_tile}
        splits = {"AT_ONCE": of.groups_at_once, "LEAST": of.least_share, "SPLITS": of.most_splits}
        splits["LONG"] = of.most_units > paged_pass.MOST_UNITS
        paired = spec.way_of_pairs if of.paired else 0
        last = {"WORK_TILES": of.few_work_tiles, "PAIRED": paired, "CHAINED": of.chains}
        last |= {"AHEAD": of.chunks, "PARTIAL_STAGES": of.partial_stages}
        early = {"launch_pdl": True} if of.chains else {}
        self.attention = Launch(
            attention_pages,
            {**shared, **splits, **last},
            options | (early if of.planned else {}),
            meta=DecodeMeta,
        )
        names = ("GROUP", "VALUE_DIM", "VALUE_WIDTH")
        merge = {name: spec.constants[name] for name in names} | tiles
        merge |= {"HEADS_IN_TILE": of.heads_in_tile, "ROWS": of.merged_rows}
        merge |= {"ROW_PARTS": of.merge_parts, "PARTIALS": of.merged_at_once} | splits
        merge |= {"WORK_TILES": of.few_work_tiles, "CHAINED": of.chains}
        self.merge = Launch(
            merge_partials, merge, {"num_warps": 4, "num_stages": 1, **early}, meta=CombineMeta
        )
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
            *self.launches.spec.pages(self.inputs),
            *self._results(),
            Rules(*changes, None, variant.scale),
            sinks,
            *self._shares(),
        )

    def of_merge(self) -> tuple[Any, ...]:
        return (
            self.launches.spec.rows(self.inputs),
            self.launches.spec.pages(self.inputs)[0],
            *self._results(),
            *self._shares(),
        )

    def _results(self) -> tuple[Any, ...]:
        return self.launches.spec.results(self.inputs, self.output, self.lse)

    def _shares(self) -> tuple[Any, ...]:
        of = self.launches.of
        partials = self.numbers, of.softmax_position, self.notes
        return of.schedule(self.plan), Partials(*partials)


class PagedForward:
    """Attention over pages for calls like one another, prepared."""

    def __init__(
        self, inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
    ):
        self.regular = made_regular(inputs) is inputs
        inputs, self.given = made_regular(inputs), config
        spec = PagedCallSpec.of(inputs)
        passes = spec.passes(inputs, variant, config, batch_invariant)
        self.passes = [
            self.launches(spec, of, inputs, variant)
            for of in paged_chunks.varies_by(spec, passes, inputs, variant, config)
        ]
        packed = inputs.cu_seqlens_q is not None
        self.output, self.lse = map(
            memory_like, empty_rows(inputs.query, inputs.value_pages.shape[3], packed)
        )

    def launches(self, spec: PagedCallSpec, of: Pass, inputs: PagedInputs, variant: Variant) -> Any:
        """What starts the kernels of a pass."""
        if paged_chunks.unsupported(spec, of, inputs, variant, self.given) is None:
            return paged_chunks.ChunkLaunch(spec, of, inputs, variant, self.given)
        return PassLaunches(spec, of, inputs.query.device)

    def __call__(self, inputs: PagedInputs, variant: Variant) -> tuple[Tensor, Tensor]:
        """Output and lse of a call of this kind."""
        if not self.regular:
            inputs = made_regular(inputs)
        output, lse = self.output(), self.lse()
        captured = variant.mask_captured.tensors, variant.score_captured.tensors
        given = (*inputs, *captured[0], *captured[1], output, lse)
        tensors = tuple([tensor for tensor in given if tensor is not None])
        for launches in self.passes:
            launches(inputs, variant, output, lse, tensors)
        return output, lse


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
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_paged`."""
    return prepared(inputs, variant, config, batch_invariant)(inputs, variant)

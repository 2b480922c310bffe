"""Attention over pages by portable kernels: the body that the operator runs on GPUs.

    (plan) → attention → merge        for sequences of few query rows, and again for those of many

A kind of call is prepared once, as in `attention.py`. Nothing is read by the host, and what a call
allocates depends on shapes only, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.kernels.launch import Launch, Pointer
from saccade.kernels.rules import Rules
from saccade.kernels.schedule import NOTE_SIZE, PLAN_ROW
from saccade.kernels.tiles import ADDED
from saccade.portable.arguments import mask_argument, score_argument
from saccade.portable.kind import memory_like, remembered
from saccade.portable.merge import merge_partials
from saccade.portable.paged_forward import Partials, attention_pages
from saccade.portable.paged_kind import PagedKind, made_regular, signature
from saccade.portable.paged_pass import Pass
from saccade.portable.paged_plan import plan_pages
from saccade.problem import Config, PagedInputs, Variant, empty_rows


class PassLaunches:
    """The kernels of one pass over the sequences of few query rows, or of many."""

    def __init__(self, kind: PagedKind, of: Pass):
        self.kind, self.of = kind, of
        config = of.config
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        tiles = {"QUERY_TILE": config.query_tile, "KV_TILE": config.kv_tile}
        shared = {**kind.constants, **tiles, "HEADS_IN_TILE": of.heads_in_tile}
        cuts = {"AT_ONCE": of.groups_at_once, "LEAST": of.least_share, "CUTS": of.most_cuts}
        self.attention = Launch(attention_pages, {**shared, **cuts}, options)
        names = ("GROUP", "VALUE_DIM", "VALUE_WIDTH")
        merge = {name: kind.constants[name] for name in names} | tiles
        merge |= {"HEADS_IN_TILE": of.heads_in_tile, "ROWS": of.merged_rows}
        merge |= {"ROW_PARTS": of.merge_parts, "AT_ONCE": of.merged_at_once}
        self.merge = Launch(merge_partials, merge, {"num_warps": 4, "num_stages": 1})
        self.plan = Launch(plan_pages, of.plan_constants, {"num_warps": 4, "num_stages": 1})

    def __call__(
        self, inputs: PagedInputs, variant: Variant, output: Tensor, lse: Tensor,
        tensors: list[Tensor],
    ) -> None:  # fmt: skip
        """Compute the rows of the sequences that the pass is for."""
        kind, of, device = self.kind, self.of, inputs.query.device
        plan = None
        if of.planned:
            size = of.groups * (1 + PLAN_ROW.value)
            plan = torch.empty(size, dtype=torch.int32, device=device)
            tensors = [*tensors, plan]
            heads = of.heads if of.told_apart else 1
            self.plan(
                of.groups, kind.device, tensors,
                lambda p: (
                    kind.plan_rows(p, inputs, heads), kind.pages(p, inputs)[0],
                    kind.plan_mask(variant, p), of.schedule(p, None), p(plan),
                ),
            )  # fmt: skip
        numbers = torch.empty(of.partial_numbers, dtype=torch.float32, device=device)
        notes = torch.empty(of.programs * NOTE_SIZE.value, dtype=torch.int32, device=device)
        tensors = [*tensors, numbers, notes]

        def results(pointer: Pointer) -> tuple[Any, ...]:
            return kind.results(pointer, inputs, output, lse)

        def partials(pointer: Pointer) -> Partials:
            return Partials(pointer(numbers), of.softmax_place + ADDED.value, pointer(notes))

        self.attention(
            of.programs, kind.device, tensors,
            lambda p: (
                kind.rows(p, inputs), *kind.pages(p, inputs), *results(p),
                Rules(
                    mask_argument(variant, p), score_argument(variant, p), None, variant.scale
                ),
                None if inputs.sinks is None else p(inputs.sinks),
                of.schedule(p, plan), partials(p),
            ),
        )  # fmt: skip
        if of.may_cut:
            self.merge(
                of.programs * of.merge_parts, kind.device, tensors,
                lambda p: (
                    kind.rows(p, inputs), kind.pages(p, inputs)[0], *results(p),
                    of.schedule(p, plan), partials(p),
                ),
            )  # fmt: skip


class PagedForward:
    """Attention over pages for one kind of call, prepared."""

    def __init__(
        self, inputs: PagedInputs, variant: Variant, config: Config, batch_invariant: bool
    ):
        self.regular = made_regular(inputs) is inputs
        inputs = made_regular(inputs)
        kind = PagedKind.of(inputs)
        self.passes = [
            PassLaunches(kind, of) for of in kind.passes(inputs, variant, config, batch_invariant)
        ]
        packed = inputs.cu_seqlens_q is not None
        self.output, self.lse = map(
            memory_like, empty_rows(inputs.query, inputs.value_pages.shape[3], packed)
        )

    def __call__(self, inputs: PagedInputs, variant: Variant) -> tuple[Tensor, Tensor]:
        """Output and lse of a call of this kind."""
        if not self.regular:
            inputs = made_regular(inputs)
        output, lse = self.output(), self.lse()
        captured = variant.mask_captured.tensors, variant.score_captured.tensors
        given = (*inputs, *captured[0], *captured[1], output, lse)
        tensors = [tensor for tensor in given if tensor is not None]
        for launches in self.passes:
            launches(inputs, variant, output, lse, tensors)
        return output, lse


_forwards: dict[Any, PagedForward] = {}


def forward(
    inputs: PagedInputs, variant: Variant, config: Config, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_paged`."""
    key = signature(inputs, variant), config, batch_invariant
    prepared = remembered(
        _forwards, key, lambda: PagedForward(inputs, variant, config, batch_invariant)
    )
    return prepared(inputs, variant)

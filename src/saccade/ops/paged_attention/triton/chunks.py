"""Chunks of prompts over pages: the dense forward kernel, whose keys lie in pages.

Where a pass over sequences of many query rows has tiles enough to keep the device busy, nothing is
cut along the keys, so nothing has to be shared out or merged. What is left of a call over pages is
where a row of keys lives, and that a View says (gpu/paged_view.py).
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from saccade.gpu import paged_view
from saccade.gpu.compose import mask_functions
from saccade.gpu.kernel_args import mask_argument, score_argument
from saccade.gpu.launcher import Launch
from saccade.gpu.rules import Rules
from saccade.gpu.tensor_view import View
from saccade.ops.attention.triton import configs, tuned_configs
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.ops.attention.triton.forward import attention_forward
from saccade.ops.paged_attention.triton.call_spec import ANY_NUMBER, PagedCallSpec
from saccade.ops.paged_attention.triton.passes import Pass
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant

BUSY = 6  # warps on each multiprocessor: fewer are slower than what shares keys out
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
        given: KernelConfig,
    ):
        self.spec, self.fewest = spec, of.rows[0]
        config = config_of(spec, variant, given)
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

    def _pages(self, inputs: PagedInputs) -> list[View]:
        views = (view for view in self.spec.pages(inputs)[:2] if view is not None)
        size = tl.constexpr(self.page_size)
        return [
            view._replace(
                data=(*view.data, size), ahead=paged_view.pages_ahead, rows=paged_view.in_pages
            )
            for view in views
        ]


def varies_by(
    spec: PagedCallSpec,
    passes: list[Pass],
    inputs: PagedInputs,
    variant: Variant,
    given: KernelConfig,
) -> list[Pass]:
    """The passes, where packed sequences get equal bits in any batch: long chunks are another."""
    if not passes or not passes[-1].splits or not spec.queries.packed:
        return passes
    last = passes[-1]
    short, long = (
        last._replace(rows=rows) for rows in ((last.rows[0], SHORT), (SHORT, ANY_NUMBER))
    )
    if last.rows[0] >= SHORT or unsupported(spec, long, inputs, variant, given) is not None:
        return passes
    return [*passes[:-1], short, long]


def config_of(spec: PagedCallSpec, variant: Variant, given: KernelConfig) -> KernelConfig:
    """The config of the dense kernel: the same for any batch, packed or not."""
    width = max(spec.constants["HEAD_WIDTH"], spec.constants["VALUE_WIDTH"])
    masked = variant.mask != ""
    problem = KernelProblem(spec.architecture, "forward", width, spec.wide, masked)
    return configs.choose(problem, given, tuned_configs.load())


def unsupported(
    spec: PagedCallSpec, of: Pass, inputs: PagedInputs, variant: Variant, given: KernelConfig
) -> str | None:
    """Why a pass is shared out along the keys instead, or None.

    Where the caller asks for the same bits in any batch, this depends on nothing but what is asked
    of each sequence.
    """
    if not of.chunks:
        return "sequences of few query rows are bound by memory"
    if inputs.key_pages.dtype != inputs.query.dtype:
        return "pages hold numbers that are converted"
    if variant.mask and mask_functions(variant.mask).spans_read:
        return "the mask reads tensors along rows, which is planned ahead"
    if of.splits:  # batch_invariant
        fewest = of.rows[0] + 1 if spec.queries.packed else spec.queries.length
        return None if fewest > SHORT else "sequences of few query rows fill no tiles of one head"
    config, queries = config_of(spec, variant, given), spec.queries
    tiles = queries.length // config.query_tile * queries.heads * queries.sequences
    if tiles * config.num_warps < BUSY * spec.multiprocessors:
        return "there are few query rows: keys are cut into shares, to keep the GPU busy"
    if queries.programs(config.query_tile) > 2 * tiles:
        return "most sequences have few query rows"
    return None

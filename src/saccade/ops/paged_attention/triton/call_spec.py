"""CallSpec of a call over pages: its Views, and the passes over its sequences.

A pass has one tile size. Dense queries are all alike, so they take one; packed ones take one pass
for sequences of few query rows and one for those of many, since only the device knows which
are which. What a sequence gets depends on its own number of query rows, so that it gets the same
in any batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import paged_view as pages
from saccade.gpu.kernel_args import (
    Extent,
    kind_of_captured,
    mask_argument,
    mask_functions,
    number_strides,
    row_strides,
    view,
)
from saccade.gpu.language import tl
from saccade.gpu.launcher import current_device, next_width
from saccade.gpu.planning import varies_by
from saccade.gpu.signature import Stride
from saccade.gpu.tensor_view import View
from saccade.gpu.tile_ranges import Mask
from saccade.gpu.wide_heads import tile_width, width_of
from saccade.ops.attention.triton import call_spec
from saccade.ops.paged_attention.triton import configs as paged_configs
from saccade.ops.paged_attention.triton import decode, fp8_products, split_kv
from saccade.ops.paged_attention.triton.configs import PagedConfig, PagedProblem
from saccade.ops.paged_attention.triton.split_kv import SplitSchedule
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, precision

ANY_NUMBER = 2**30  # of query rows
LEAST_OF_FP8 = 32  # channels, or keys, that a product of e4m3 numbers adds up at least
LARGEST_PAIRED = 32  # rows of a tile; larger ones take what they are multiplied with from memory
# What pages of eight bits are when they are read in pairs (gpu/paged_view.py).
PAIRS = {torch.int8: torch.int16, torch.float8_e4m3fn: torch.uint16}


class PagedCallSpec(NamedTuple):
    """What the kernels of calls like one another over pages share."""

    queries: Extent
    device: int | None
    architecture: str
    multiprocessors: int
    constants: dict[str, Any]  # of the attention kernel
    wide: bool
    latent: bool  # whether a value is the first channels of its key, and is read once with it
    fp8: bool = False  # whether products are of e4m3 numbers

    @staticmethod
    def of(inputs: PagedInputs, latent: bool = False) -> PagedCallSpec:
        """What a call shares with others, from its tensors."""
        query, packed = inputs.query, inputs.cu_seqlens_q is not None
        length = query.shape[0] if packed else query.shape[2]
        heads, kv_heads = query.shape[1], inputs.key_pages.shape[1]
        head_dim, value_dim = query.shape[-1], inputs.value_pages.shape[3]
        constants = {
            "GROUP": max(heads // max(kv_heads, 1), 1),
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "HEAD_WIDTH": max(tile_width(head_dim), LEAST_OF_FP8 if inputs.fp8 else 0),
            "VALUE_WIDTH": max(tile_width(value_dim), LEAST_OF_FP8 if inputs.fp8 else 0),
            "PAGE_SIZE": inputs.page_size,
            "PRECISION": precision(query.dtype),
        }
        return PagedCallSpec(
            Extent(inputs.batch, length, heads, packed), current_device(query),
            call_spec.architecture(query), call_spec.multiprocessors(query), constants,
            query.dtype == torch.float32, latent, inputs.fp8,
        )  # fmt: skip

    def passes(
        self, inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
    ) -> list[Pass]:
        """The passes of a call."""
        if inputs.query.shape[:-1].numel() == 0:
            return []
        known = not self.queries.packed and not batch_invariant
        rows = self.queries.length * self.constants["GROUP"] if known else 0
        few, many = (
            self._config(inputs, variant, chunks, rows, config) for chunks in (False, True)
        )
        border = few.query_tile // self._heads_in_tile(few)  # query rows that one tile holds
        length, packed = self.queries.length, self.queries.packed
        decoding = packed and not batch_invariant and length <= self.queries.batch
        if length <= border or decoding or config.query_tile:
            parts = [(few, False, (0, ANY_NUMBER))]
        elif not packed:
            parts = [(many, True, (0, ANY_NUMBER))]
        else:
            parts = [(few, False, (0, border)), (many, True, (border, ANY_NUMBER))]
        return [self._pass(inputs, variant, batch_invariant, *part) for part in parts]

    def _pass(
        self, inputs: PagedInputs, variant: Variant, batch_invariant: bool,
        config: PagedConfig, chunks: bool, rows: tuple[int, int],
    ) -> Pass:  # fmt: skip
        functions = mask_functions(variant.mask) if variant.mask else None
        group, heads_in_tile = self.constants["GROUP"], self._heads_in_tile(config)
        heads = inputs.key_pages.shape[1] * -(-group // heads_in_tile)
        apart = functions is not None and varies_by(functions, variant)[1]
        planned = functions is not None or batch_invariant
        groups = self.queries.batch
        if planned:
            tokens = config.query_tile // heads_in_tile
            groups = self.queries._replace(heads=heads if apart else 1).programs(tokens)
        longest = 1 + -(-inputs.page_table.shape[1] * inputs.page_size // config.kv_tile)
        splits, programs = 0, config.programs * self.multiprocessors
        if batch_invariant:
            most = 1 if chunks else paged_configs.MOST_SPLITS
            splits = min(most, -(-longest // paged_configs.FIXED_PAYLOAD))
            programs = groups * splits * (1 if apart else heads)
        most_work_tiles = self.queries._replace(heads=heads).programs(
            config.query_tile // heads_in_tile
        )
        along = functions is not None and functions.spans_read == 1
        packed = self.queries.packed
        return Pass(
            config, chunks, rows, groups, heads, group, heads_in_tile, programs, splits, planned,
            apart, 32 if along else 128, self.constants["VALUE_WIDTH"],
            0 if packed else self.queries.length,
            not chunks and config.query_tile <= LARGEST_PAIRED and self._in_pairs(inputs),
            most_work_tiles * longest, functions is not None,
            self.architecture in paged_configs.CHAINS,
        )  # fmt: skip

    def products(self, paired: bool) -> int:
        """What products are of; paired: whether pages hold pairs. The interpreter runs no PTX."""
        if not paired:
            return fp8_products.OF_FP8.value if self.fp8 else 0
        known = self.device is not None or self.architecture != "sm_75"
        ptx = known and self.architecture.startswith("sm_")
        return (decode.BY_PTX if ptx else decode.BY_TRITON).value

    def _in_pairs(self, inputs: PagedInputs) -> bool:
        """Whether pages can be read as pairs of eight-bit numbers."""
        widths = self.constants["HEAD_WIDTH"], self.constants["VALUE_WIDTH"]
        pages = inputs.key_pages, inputs.value_pages
        steps = [n for tensor in pages for n in (*tensor.stride()[:3], tensor.storage_offset())]
        dims = [tensor.shape[3] for tensor in pages]
        quantised = inputs.quantised and not (self.wide or self.fp8)
        whole = min(widths) >= 32 and max(dims) <= max(widths)  # a rest is not read so
        return quantised and whole and not self.latent and not any(n % 2 for n in (*steps, *dims))

    def _config(
        self,
        inputs: PagedInputs,
        variant: Variant,
        chunks: bool,
        rows: int,
        requested: KernelConfig,
    ) -> PagedConfig:
        width = width_of(self.constants)
        problem = PagedProblem(
            self.architecture, chunks, width, self.wide, self.constants["GROUP"], rows,
            inputs.key_pages.dtype.itemsize == 1 and not self.fp8, reads_by_pair(variant),
            not (variant.mask or variant.score), self.latent, self.fp8,
        )  # fmt: skip
        return paged_configs.choose(problem, requested)

    def _heads_in_tile(self, config: PagedConfig) -> int:
        return min(self.constants["GROUP"], config.query_tile)

    # ---- arguments of kernels ----------------------------------------------------------------

    def rows(self, inputs: PagedInputs) -> View:
        """A View of the query."""
        query, packed = inputs.query, self.queries.packed
        batch, head, row = row_strides(query, packed)
        if not packed and query.shape[2] == 1:
            # A constant of kernels. Of a single row it says nothing, and PyTorch may leave anything
            # there, such as how many sequences lie beside each other.
            row = query.shape[3]
        return view(query, (batch, head, row), self.queries, inputs.cu_seqlens_q)

    def query_scale(self, inputs: PagedInputs) -> View | None:
        """A View of the scale of each head's queries."""
        scale = inputs.query_scale
        if scale is None:
            return None
        steps = scale.stride(0), scale.stride(1), 0
        return view(scale, steps, Extent(inputs.batch, 1, self.queries.heads, False), None)

    def plan_rows(self, inputs: PagedInputs, heads: int) -> View:
        """The query rows as a View of no memory, with as many heads as a plan tells apart."""
        extent = self.queries._replace(heads=heads)
        return view(None, (0, 0, 0), extent, inputs.cu_seqlens_q)

    def results(self, inputs: PagedInputs, output: Tensor, lse: Tensor) -> tuple[View, View]:
        """Views of output and lse."""
        packed, offsets = self.queries.packed, inputs.cu_seqlens_q
        of_output, of_lse = row_strides(output, packed), number_strides(lse, packed)
        return (
            view(output, of_output, self.queries, offsets),
            view(lse, of_lse, self.queries, offsets),
        )

    def pages(self, inputs: PagedInputs) -> tuple[View | None, ...]:
        """Views of the pages of keys and values, and of their scales if there are any; None where
        values are read with keys."""
        table = inputs.page_table
        num_pages, _, page_size, _ = inputs.key_pages.shape
        reached = table.shape[1] * page_size if num_pages else 0
        limits = pages.as_limit(reached), pages.as_limit(num_pages)
        data = (table, table.stride(0), inputs.kv_lens, *limits)

        def of(memory: Tensor | None) -> View | None:
            if memory is None:
                return None
            page, head, slot = memory.stride()[:3]
            # Nothing in it may be None, or Triton (3.6) cannot tell that there is a View.
            # A page's step is known when compiling, as each row may need its product.
            steps: Any = (tl.constexpr(page), Stride(head))
            step = tl.constexpr(slot)
            return View(memory, steps, step, pages.paged, pages.paged, data)

        return tuple(
            map(
                of,
                (
                    inputs.key_pages,
                    None if self.latent else inputs.value_pages,
                    inputs.key_scales,
                    inputs.value_scales,
                ),
            )
        )

    def plan_mask(self, variant: Variant) -> Mask:
        """The mask with what classifies whole tiles without reading single pairs."""
        mask = mask_argument(variant)
        if variant.mask:
            mask = mask._replace(classify=mask_functions(variant.mask).coarse_classify)
        return mask


def reads_by_pair(variant: Variant) -> bool:
    """Whether a mask or score may read a captured tensor for each pair."""
    of_mask = any(table.dim() > 2 for table in variant.mask_captured.tensors)
    return of_mask or any(table.dim() > 1 for table in variant.score_captured.tensors)


def may_be_latent(inputs: PagedInputs) -> bool:
    """Whether values can be the first channels of keys, by all but their addresses."""
    key, value = inputs.key_pages, inputs.value_pages
    widths = [tile_width(pages.shape[3]) for pages in (key, value)]
    return (
        value.shape[3] <= key.shape[3]
        and widths[0] == widths[1]
        and key.shape[:3] == value.shape[:3]
        and key.stride() == value.stride()
    )


def is_latent(inputs: PagedInputs) -> bool:
    """Whether pages hold values once, as the first channels of keys, where they may."""
    return inputs.key_pages.data_ptr() == inputs.value_pages.data_ptr()


def made_regular(inputs: PagedInputs) -> PagedInputs:
    """The inputs with channels, and entries of tables, side by side; copied where they are not.

    Pages of float8_e4m3fn are bytes on GPUs that do not convert it.
    """
    changes = {}
    for name in ("query", "key_pages", "value_pages", "page_table", "kv_lens", "cu_seqlens_q"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            changes[name] = tensor.contiguous()
    eight_bits = inputs.key_pages.dtype == torch.float8_e4m3fn
    if eight_bits and call_spec.architecture(inputs.query) not in paged_configs.CONVERTS_FP8:
        for name in ("key_pages", "value_pages"):
            changes[name] = changes.get(name, getattr(inputs, name)).view(torch.uint8)
    return inputs._replace(**changes) if changes else inputs


def in_pairs(inputs: PagedInputs) -> PagedInputs:
    """The inputs with pages whose numbers are pairs of eight-bit ones."""
    dtype_of_pair = PAIRS[inputs.key_pages.dtype]
    pages = (tensor.view(dtype_of_pair) for tensor in (inputs.key_pages, inputs.value_pages))
    return inputs._replace(**dict(zip(("key_pages", "value_pages"), pages, strict=True)))


def signature(inputs: PagedInputs, variant: Variant) -> tuple[Any, ...]:
    """What tells calls like one another from another: everything but addresses."""
    captured = ()
    if variant.mask or variant.score:
        captured = tuple(map(kind_of_captured, (variant.mask_captured, variant.score_captured)))
    query = inputs.query
    shapes = [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in inputs
    ]
    return (
        *shapes, query.device, variant.mask, variant.score, variant.scale, captured,
        precision(query.dtype),
    )  # fmt: skip


MOST_AT_ONCE = split_kv.MOST_AT_ONCE.value
MOST_STEPS = 2**30  # that 32 bits count, payloads past the end included


class Pass(NamedTuple):
    """One launch of the kernels: which sequences it is for, and how its work is shared out."""

    config: PagedConfig
    chunks: bool  # whether its sequences have many query rows
    rows: tuple[int, int]  # query rows of its sequences: more than the first, at most the second
    groups: int  # see ops/paged_attention/triton/split_kv.py
    heads: int  # key heads, each as often as its group needs tiles
    group: int  # query heads of a key head
    heads_in_tile: int
    programs: int
    splits: int  # programs of a work tile; 0: the line of all work tiles is cut
    planned: bool
    varies_by: bool  # whether the plan has rows of its own for each head
    classified_at_once: int  # tiles of keys that a planning program classifies together
    value_width: int
    query_len: int  # of each sequence, if dense, else 0
    paired: bool  # whether pages of eight bits are read in pairs
    most_steps: int  # at most so many are there in all
    masked: bool  # whether a mask tells pairs apart
    chains: bool  # whether a kernel can start before the one that it waits for has ended

    @property
    def tokens(self) -> int:
        """Query rows of a tile."""
        return self.config.query_tile // self.heads_in_tile

    @property
    def stages(self) -> int:
        """Stages of Triton's pipeline; where it looks pages up too, these take as many more."""
        return self.config.num_stages if self.chunks else 2 * self.config.num_stages - 1

    @property
    def partial_stages(self) -> int | None:
        """Stages of partial tiles, which take more memory; None: as many as of full ones."""
        if not self.masked:
            return 1
        return None if self.chunks else max(self.stages - 2, 1)

    @property
    def least_payload(self) -> int:
        """Steps of a payload at least."""
        if self.splits:
            return paged_configs.FIXED_PAYLOAD
        long_tiles = self.config.kv_tile >= paged_configs.LONG_TILE
        return 1 if long_tiles else paged_configs.LEAST_PAYLOAD

    @property
    def most_splits(self) -> int:
        """Parts of a work tile at most, where work tiles are cut on their own."""
        return 1 if self.chunks else paged_configs.MOST_SPLITS

    @property
    def long(self) -> bool:
        """Whether all steps together may be more than 32 bits count."""
        return self.most_steps > MOST_STEPS

    @property
    def may_cut(self) -> bool:
        """Whether any work tile can have parts."""
        return self.programs > 1 if not self.splits else self.splits > 1

    @property
    def groups_at_once(self) -> int:
        """Groups that a program counts together."""
        return min(MOST_AT_ONCE, next_width(self.groups)) if self.groups > 1 else 1

    @property
    def few_work_tiles(self) -> int:
        """Items of each group, where all are known to be no more than programs; else 0."""
        if not self.query_len or (not self.splits and self.groups_at_once >= MOST_AT_ONCE):
            return 0
        of_group = 1 if self.varies_by else self.heads
        if not self.planned:
            of_group *= -(-self.query_len // self.tokens)
        return of_group if of_group * self.groups <= self.programs else 0

    @property
    def positions(self) -> int:
        """How many partial results there is memory for."""
        return self.programs if self.splits else 2 * self.programs

    @property
    def softmax_position(self) -> int:
        """Where the numbers of the softmax begin, behind all sums."""
        return self.positions * self.config.query_tile * self.value_width

    @property
    def partial_numbers(self) -> int:
        """Numbers of all partial results."""
        return self.softmax_position + self.positions * self.config.query_tile * 2

    @property
    def merged_rows(self) -> int:
        """Rows that a program merges."""
        return 1 if self.config.query_tile <= 16 else 8

    @property
    def merge_parts(self) -> int:
        """Programs that share the rows of a work tile."""
        rows = self.tokens * self.heads_in_tile
        if self.query_len:
            rows = min(rows, self.query_len * self.heads_in_tile)
        return -(-rows // self.merged_rows)

    @property
    def merges_by_one_warp(self) -> bool:
        """Whether a merging program is one warp, whose numbers fit its registers: programs that
        wait beside those that attend to few rows slow them down less."""
        return not self.chunks and self.value_width <= 128

    @property
    def merged_at_once(self) -> int:
        """Partial results that are added together. Of equal bits in any batch there are as many at
        once in all calls."""
        if self.merges_by_one_warp:
            return 32 if self.few_work_tiles and not self.splits else 16
        most = 64 if self.value_width <= 128 else 32
        parts = (  # as many as a work tile has if all are alike
            self.programs // max(self.few_work_tiles * self.groups, 1) if self.few_work_tiles else 1
        )
        return min(max(next_width(parts), 16), most)

    @property
    def plan_constants(self) -> dict[str, Any]:
        """The constants of the kernel that plans."""
        return {
            "TOKENS": self.tokens,
            "TOKEN_TILE": 1 << (self.tokens - 1).bit_length(),
            "KV_TILE": self.config.kv_tile,
            "GROUP": self.group,
            "HEADS_IN_TILE": self.heads_in_tile,
            "HEADS": min(self.heads_in_tile, self.group) if self.varies_by else 1,
            "AT_ONCE": self.classified_at_once,
            "CHAINED": self.chains,
        }

    def schedule(self, plan: Tensor | None) -> SplitSchedule:
        """The schedule as kernels take it."""
        begin, cut = split_kv.equal_payloads, split_kv.split_of_programs
        if self.splits:
            begin, cut = split_kv.fixed_splits, split_kv.split_of_work_tile
        count, work_tile = split_kv.count_lengths, split_kv.work_tile_of_lengths
        heads, data = self.heads, ()
        if plan is not None:
            count, work_tile, data = (
                split_kv.count_planned,
                split_kv.work_tile_of_plan,
                (plan,),
            )
            heads = 1 if self.varies_by else self.heads
        begun = 0 if self.splits else self.programs
        numbers = (self.groups, heads, self.programs, self.splits, begun, *self.rows)
        return SplitSchedule(begin, cut, count, work_tile, (*numbers, *data))

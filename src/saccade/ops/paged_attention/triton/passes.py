"""Pass over the sequences of a call over pages: which of them, and how their work is shared out."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu.launcher import next_width
from saccade.ops.paged_attention.triton import configs as paged_configs
from saccade.ops.paged_attention.triton import split_kv
from saccade.ops.paged_attention.triton.configs import PagedConfig
from saccade.ops.paged_attention.triton.split_kv import SplitSchedule

MOST_AT_ONCE = split_kv.MOST_AT_ONCE.value
MOST_UNITS = 2**30  # that 32 bits count, shares past the end included


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
    most_units: int  # at most so many are there in all
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
        """The same for partial tiles, whose tiles take more memory; None: as many."""
        if not self.masked:
            return 1
        return None if self.chunks else max(self.stages - 2, 1)

    @property
    def least_share(self) -> int:
        """Units of a share at least."""
        return paged_configs.FIXED_SHARE if self.splits else paged_configs.LEAST_SHARE

    @property
    def most_splits(self) -> int:
        """Parts of a work tile at most, where work tiles are cut on their own."""
        return 1 if self.chunks else paged_configs.MOST_SPLITS

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
    def merged_at_once(self) -> int:
        """Partial results that are added together: as many as a work tile has if all are alike."""
        most = 64 if self.value_width <= 128 else 32
        parts = (
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
        begin, cut = split_kv.equal_shares, split_kv.split_of_programs
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

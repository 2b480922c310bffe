"""Cached keys: xformers' block-diagonal biases for keys in slabs, with gaps, and in pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from saccade.integrations.xformers.block_diagonal import PackedBias, check_shape, query_sequences
from saccade.integrations.xformers.reach import Causal, SlidingWindow, TwoSidedWindow, written_out
from saccade.integrations.xformers.seqlen_info import (
    GappySeqInfo,
    PaddedSeqLenInfo,
    SeqLenInfo,
    default_device,
    listed,
)

# ---- keys in slabs, and with gaps ----------------------------------------------------------------


@dataclass(eq=False)
class BlockDiagonalPaddedKeysMask(PackedBias):
    """Keys in slabs of one length, of which each sequence uses the first; a query sees these.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([2, 3], 8, [6, 4])
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    k_seqinfo: PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Iterable[int],
        kv_padding: int,
        kv_seqlen: Iterable[int],
        causal_diagonal: Any = None,
        *,
        device: Any = None,
    ) -> Self:
        """The mask of queries of these lengths, and of keys in slabs of `kv_padding` rows.

        Args:
            q_seqlen, kv_seqlen: lengths of each sequence.
            kv_padding: rows of a slab.
            causal_diagonal: not used, in xformers neither.
            device: of the tensors.
        """
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        paged_type: type[PagedBlockDiagonalPaddedKeysMask],
    ) -> PagedBlockDiagonalPaddedKeysMask:
        """This mask for keys in pages.

        Args:
            block_tables: int32 [batch, pages of a sequence].
            page_size: rows of a page.
            paged_type: the class of the mask over pages; a window goes with it.
        """
        slabs = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(
            self.q_seqinfo, slabs, block_tables, page_size, **_windows(self, paged_type)
        )


def _padded(
    q_seqlen: Iterable[int], kv_padding: int, kv_seqlen: Iterable[int], device: Any
) -> tuple[SeqLenInfo, PaddedSeqLenInfo]:
    queries, keys = listed(q_seqlen), listed(kv_seqlen)
    q_seqinfo = query_sequences(queries, keys, device)
    slabs = PaddedSeqLenInfo.from_seqlens_padded(keys, kv_padding, device=device)
    return q_seqinfo, slabs


def _gappy(
    q_seqlen: Iterable[int], kv_seqstarts: Sequence[int], kv_seqlen: Iterable[int], paged: bool,
    device: Any,
) -> tuple[SeqLenInfo, GappySeqInfo]:  # fmt: skip
    queries, keys = listed(q_seqlen), listed(kv_seqlen)
    q_seqinfo = query_sequences(queries, keys, device)
    gappy = GappySeqInfo.from_seqlens_gappy(kv_seqstarts, keys, paged, device=device)
    return q_seqinfo, gappy


def _windows(bias: Any, kind: Any) -> dict[str, int]:
    """What a bias knows of the window that another class takes."""
    names = {field.name for field in fields(kind)} & {"_window_size", "window_left", "window_right"}
    return {name: getattr(bias, name) for name in sorted(names)}


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetPaddedKeysMask(Causal, BlockDiagonalPaddedKeysMask):
    """Keys in slabs; each sequence is causal, its last query at the last key that it uses.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        ...     [2, 3], 8, [6, 4]
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    causal_diagonal: Any = None


@dataclass(eq=False)
class BlockDiagonalLocalAttentionPaddedKeysMask(TwoSidedWindow, BlockDiagonalPaddedKeysMask):
    """Keys in slabs, with a window to both sides, the last query at the last key used.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
        ...     [2, 3], 8, [6, 4], window_left=2, window_right=1
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Iterable[int],
        kv_padding: int,
        kv_seqlen: Iterable[int],
        window_left: int,
        window_right: int,
        *,
        device: Any = None,
    ) -> Self:
        """The mask of these lengths, slabs and windows."""
        slabs = _padded(q_seqlen, kv_padding, kv_seqlen, device)
        return cls(*slabs, window_left, window_right)


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(SlidingWindow, BlockDiagonalPaddedKeysMask):
    """Keys in slabs, with a sliding window, the last query at the last key used.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
        ...     [2, 3], 8, [6, 4], window_size=3
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Iterable[int],
        kv_padding: int,
        kv_seqlen: Iterable[int],
        window_size: int,
        *,
        device: Any = None,
    ) -> Self:
        """The mask of these lengths, slabs and a window."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device), window_size)


@dataclass(eq=False)
class BlockDiagonalGappyKeysMask(PackedBias):
    """Keys of sequences that start anywhere; a query sees those of its own.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], [1, 9, 16], [6, 4])
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    k_seqinfo: GappySeqInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Iterable[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Iterable[int],
        *,
        device: Any = None,
    ) -> Self:
        """The mask of these lengths; keys have starts, and the end of all keys after them."""
        return cls(*_gappy(q_seqlen, kv_seqstarts, kv_seqlen, False, device))

    def make_local_attention_from_bottomright(
        self, window_left: int, window_right: int
    ) -> BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask:
        """This mask with a window to both sides, the last query at the last key."""
        kind = BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask
        return kind(self.q_seqinfo, self.k_seqinfo, window_left, window_right)

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type[PagedBlockDiagonalGappyKeysMask],
    ) -> PagedBlockDiagonalGappyKeysMask:
        """This mask for keys in pages, where they were in slabs of `notional_padding` rows.

        Nothing is read from a device.

        Args:
            block_tables: int32 [batch, pages of a sequence].
            page_size: rows of a page.
            notional_padding: rows of a slab; a multiple of page_size.
            paged_type: the class of the mask over pages.
        """
        if notional_padding % page_size:
            raise ValueError(
                f"notional_padding: got {notional_padding}, takes a multiple of the page_size, "
                f"{page_size}"
            )
        gappy, room = self.k_seqinfo, block_tables.shape[1] * page_size
        slab = torch.arange(len(gappy.seqstart), dtype=torch.int32, device=gappy.seqstart.device)
        start_py = [start - i * notional_padding for i, start in enumerate(gappy.seqstart_py[:-1])]
        end_py = [start + length for start, length in zip(start_py, gappy.seqlen_py, strict=True)]
        for start, end in zip(start_py, end_py, strict=True):
            if not 0 <= start <= end <= room:
                raise ValueError(
                    f"block_tables: got room for {room} rows, takes room for each sequence, one of "
                    f"which lies from {start} to {end} in its slab"
                )
        start = gappy.seqstart - slab * notional_padding
        found = GappySeqInfo(
            seqstart=start,
            max_seqlen=gappy.max_seqlen,
            min_seqlen=gappy.min_seqlen,
            seqstart_py=[*start_py, -1],
            seqlen=gappy.seqlen + start[:-1],
            seqlen_py=end_py,
        )
        return paged_type(self.q_seqinfo, found, block_tables, page_size)


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetGappyKeysMask(Causal, BlockDiagonalGappyKeysMask):
    """Keys that start anywhere; each sequence is causal, its last query at its last key.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        ...     [2, 3], [1, 9, 16], [6, 4]
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """


@dataclass(eq=False)
class BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask(
    TwoSidedWindow, BlockDiagonalGappyKeysMask
):
    """Keys that start anywhere, with a window to both sides, the last query at the last key.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> bias = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens(
        ...     [2, 3], [1, 9, 16], [6, 4]
        ... ).make_local_attention_from_bottomright(2, 0)
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    window_left: int
    window_right: int


# ---- keys in pages -------------------------------------------------------------------------------


@dataclass(eq=False)
class PagedBias(PackedBias):
    """Keys [1, pages * page_size, ...] in pages, which each sequence has a table of.

    Args:
        block_tables: int32 [batch, pages of a sequence].
        page_size: rows of a page.
    """

    block_tables: Tensor
    page_size: int

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The bias written out, to look at it: 0 where a pair is visible, else -inf.

        Args:
            shape: [..., tokens of queries, batch * pages of a sequence * page_size].

        Returns:
            [..., tokens of queries, rows of all pages up to the last in a table].
        """
        table = self.block_tables.tolist()
        tokens = self.q_seqinfo.seqstart_py[-1]
        check_shape(shape, (tokens, self.block_tables.numel() * self.page_size))
        rows = (int(self.block_tables.max()) + 1) * self.page_size
        visible = torch.zeros(tokens, rows, dtype=torch.bool)
        sequences = zip(self.q_seqinfo.intervals(), table, self._used(), strict=True)
        for (first, end), pages, (first_key, end_key) in sequences:
            part = self._visible(end - first, end_key - first_key)
            for column, key in enumerate(range(first_key, end_key)):
                page, slot = pages[key // self.page_size], key % self.page_size
                visible[first:end, page * self.page_size + slot] = part[:, column]
        return written_out(visible, shape, dtype, device)

    def _used(self) -> list[tuple[int, int]]:
        """From where to where each sequence uses its pages."""
        raise NotImplementedError


@dataclass(eq=False)
class PagedBlockDiagonalPaddedKeysMask(PagedBias):
    """Keys in pages, of which each sequence uses the first rows; a query sees these.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)  # pages of 4 rows
        >>> bias = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        ...     [2, 3], [6, 4], tables, 4
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    k_seqinfo: PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Iterable[int],
        kv_seqlen: Iterable[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Any = None,
    ) -> Self:
        """The mask of these lengths over the pages of a table."""
        device = default_device(device)
        padding = block_tables.shape[1] * page_size
        return cls(*_padded(q_seqlen, padding, kv_seqlen, device), block_tables, page_size)

    def _used(self) -> list[tuple[int, int]]:
        return [(0, length) for length in self.k_seqinfo.seqlen_py]


@dataclass(eq=False)
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(Causal, PagedBlockDiagonalPaddedKeysMask):
    """Keys in pages; each sequence is causal, its last query at the last key that it uses.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)  # pages of 4 rows
        >>> bias = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        ...     [2, 3], [6, 4], tables, 4
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """


@dataclass(eq=False)
class PagedBlockDiagonalCausalLocalPaddedKeysMask(SlidingWindow, PagedBlockDiagonalPaddedKeysMask):
    """Keys in pages, with a sliding window, the last query at the last key used.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)  # pages of 4 rows
        >>> slabs = attn_bias.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
        ...     [2, 3], 8, [6, 4], window_size=3
        ... )
        >>> paged = attn_bias.PagedBlockDiagonalCausalLocalPaddedKeysMask
        >>> bias = slabs.make_paged(tables, 4, paged)
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    _window_size: int


@dataclass(eq=False)
class PagedBlockDiagonalGappyKeysMask(PagedBias):
    """Keys in pages, which each sequence uses from a start to an end of its own.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)  # pages of 4 rows
        >>> bias = attn_bias.PagedBlockDiagonalGappyKeysMask.from_seqlens(
        ...     [2, 3], [0, 1], [6, 4], tables, 4
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

    k_seqinfo: GappySeqInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Iterable[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Iterable[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Any = None,
    ) -> Self:
        """The mask of these lengths over the pages of a table.

        Args:
            kv_seqstarts: where each sequence starts in its own pages.
        """
        device = block_tables.device if device is None else device
        sequences = _gappy(q_seqlen, kv_seqstarts, kv_seqlen, True, device)
        return cls(*sequences, block_tables, page_size)

    def _used(self) -> list[tuple[int, int]]:
        return [*zip(self.k_seqinfo.seqstart_py[:-1], self.k_seqinfo.seqlen_py, strict=True)]


@dataclass(eq=False)
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(Causal, PagedBlockDiagonalGappyKeysMask):
    """Keys in pages from a start on; each sequence is causal, its last query at its last key.

    Examples:
        >>> from saccade.integrations import xformers
        >>> from saccade.integrations.xformers import attn_bias
        >>> tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)  # pages of 4 rows
        >>> bias = attn_bias.PagedBlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        ...     [2, 3], [0, 1], [6, 4], tables, 4
        ... )
        >>> query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 16, 4, 16)
        >>> xformers.memory_efficient_attention(query, key, key, bias).shape
        torch.Size([1, 5, 4, 16])
    """

"""Rows: keys and values of a layer, described by the pages that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import saccade
from saccade.integrations.transformers.deferred import Deferred


@dataclass
class Step:
    """New tokens of every sequence, which every layer writes at the same slots."""

    first: int  # position of the first new token
    count: int
    slots: Tensor
    table: Tensor
    lens: Tensor


class PagedRows(Deferred):
    """The keys or the values of one layer, [batch, kv_heads, length, dim], in their pages.

    Args:
        pages: [num_pages, kv_heads, page_size, dim]. scales: of eight-bit pages, else None.
        step: whose table and lengths hold.
        dtype: of the keys that were written.
    """

    pages: Tensor
    scales: Tensor | None
    step: Step

    @staticmethod
    def __new__(cls, pages: Tensor, scales: Tensor | None, step: Step, dtype: Any) -> PagedRows:
        """Rows that are gathered when somebody computes with them."""
        shape = (step.table.shape[0], pages.shape[1], step.first + step.count, pages.shape[3])
        made = Deferred.empty_shell(cls, shape, dtype, pages.device)
        made.pages, made.scales, made.step = pages, scales, step
        return made

    def attended(self, query: Tensor, value: PagedRows, **options: Any) -> Tensor:
        """Attention of [batch, heads, length, dim] to these keys and their values."""
        if value.step is not self.step:
            raise ValueError("value: got pages of another step than the keys', takes the same")
        return saccade.attention_paged(
            query, self.pages, value.pages, self.step.table, self.step.lens,
            key_scales=self.scales, value_scales=value.scales, **options,
        )  # fmt: skip

    def written_out(self) -> Tensor:
        """The rows, gathered."""
        pages = self.step.table.long()
        rows = self.pages[pages].transpose(1, 2).flatten(2, 3).to(self.dtype)
        if self.scales is not None:
            rows = rows * self.scales[pages].transpose(1, 2).flatten(2, 3).unsqueeze(3)
        return rows[:, :, : self.shape[2]].to(self.dtype)


def paged_rows(pages: Any, step: Step, dtype: Any) -> tuple[PagedRows, PagedRows]:
    """A layer's keys and values, of the dtype that was written."""
    return (
        PagedRows(pages.key_pages, pages.key_scales, step, dtype),
        PagedRows(pages.value_pages, pages.value_scales, step, dtype),
    )

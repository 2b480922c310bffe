"""Cache: keys and values of transformers' generate in pages.

One `saccade.PagedCache` serves all layers, with one table for those of one window. The first
layer of a step makes room for the new tokens, each layer writes its own, and attention reads pages
where they lie. What is behind a sliding layer's window is let go of; a chunk longer than the window
would need more pages than are left in the end, so it is attended to where it is.

How attention finds the pages: `update` returns `PagedRows` in place of keys and values, which know
them. A layer's number finds them only with a global context beside it, and a Python attribute on a
key is lost by the first operation, and the new keys alone would then be taken for all. `PagedRows`
turn into gathered rows where a model computes with them, so any attention is right, and saccade's
is fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

import saccade
from saccade.integrations.transformers.deferred import Deferred

EIGHT_BITS = torch.int8, torch.float8_e4m3fn
MOST_DRAFTS = 128  # tokens behind a long chunk that sliding layers can take back


def windows_of(config: Any) -> list[int | None]:
    """How many tokens each layer sees before a token itself; None: all of them."""
    kinds, reach = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return [
        reach - 1 if kinds and kinds[layer] == "sliding_attention" and reach else None
        for layer in range(config.num_hidden_layers)
    ]


def _check_count(name: str, number: object) -> None:
    """Refuse what is no whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name}: got {number!r}, takes a whole number of at least 1")
    if number < 1:
        raise ValueError(f"{name}: got {number}, takes a whole number of at least 1")


def most_pages(max_tokens: int, window: int | None, page_size: int) -> int:
    """The most pages that a sequence of so many tokens holds in layers of a window."""
    if window is not None:
        # A chunk of a window behind a window; and then what is kept of a longer one, which is
        # taken before they are let go of. Each begins and ends within a page.
        kept = 3 * (window + 1) + MOST_DRAFTS + 3 * page_size
        max_tokens = min(max_tokens, kept)
    return math.ceil(max_tokens / page_size)


PAGED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass
class PagedStep:
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
    step: PagedStep

    @staticmethod
    def __new__(
        cls, pages: Tensor, scales: Tensor | None, step: PagedStep, dtype: Any
    ) -> PagedRows:
        """Rows that are gathered when an operation computes with them."""
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


def paged_rows(pages: Any, step: PagedStep, dtype: Any) -> tuple[PagedRows, PagedRows]:
    """A layer's keys and values, of the dtype that was written."""
    return (
        PagedRows(pages.key_pages, pages.key_scales, step, dtype),
        PagedRows(pages.value_pages, pages.value_scales, step, dtype),
    )


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedGenerationCache`; what concerns all layers is done by the cache."""

    is_sliding = False  # it keeps what is behind a window, so its masks are as long as any
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedGenerationCache, number: int):
        super().__init__()
        self._cache, self._number, self.length = cache, number, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pages of all layers are made together."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [batch, kv_heads, length, dim]; give all, or their pages."""
        step = self._cache.step_of(self._number, self.length, key_states, value_states)
        pages = self._cache.write(self._number, key_states, value_states, step)
        before = self._cache.step_before(self._number)
        self.length += step.count
        if step.first == 0:  # the new rows are all there are
            return key_states, value_states
        if before is None:
            return paged_rows(pages, step, key_states.dtype)
        # Pages that were freed just now are unchanged: none have been taken since.
        key, value = paged_rows(pages, before, key_states.dtype)
        return torch.cat([key, key_states], 2), torch.cat([value, value_states], 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the layer will return for so many new tokens, and the first one's position."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each sequence."""
        return self.length

    def get_max_length(self) -> int:
        """-1: what there is room for depends on all sequences together."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Refused: sequences belong to all layers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("call reset of the cache, not of a layer: sequences are common")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: sequences belong to all layers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("call reorder_cache of the cache: sequences are common")


class PagedGenerationCache(Cache):
    """Keys and values of `generate` in pages; beams share what they have in common.

    Made for one model, with `for_model`. Memory is taken at the first forward pass, which shows how
    many heads there are and of what dtype. Works in eager mode, with saccade's attention without
    gathering, with any other by gathering.

    Args:
        num_layers: of the model.
        num_pages: pages for each group of layers, by its window, or one number for every group.
        windows: for each layer the tokens that a token sees before itself, or None where it sees
            everything; None: all layers do.
        page_size: 1 to 1024 tokens.
        dtype: of the pages; the keys' own where None. int8 and float8_e4m3fn come with scales.

    Raises:
        saccade.OutOfPagesError: by the forward pass that needs more pages than there are.

    Examples:
        >>> import transformers
        >>> from saccade.integrations.transformers import PagedGenerationCache, register
        >>> register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=2, max_position_embeddings=64, attn_implementation="saccade",
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> cache = PagedGenerationCache.for_model(model, max_tokens=32)
        >>> prompt = torch.tensor([[1, 5, 9]])
        >>> model.generate(prompt, past_key_values=cache, max_new_tokens=4, eos_token_id=None).shape
        torch.Size([1, 7])
    """

    paged_layers: list[PagedLayer]
    num_pages: int | Mapping[int | None, int]
    page_size: int
    windows: Sequence[int | None]

    def __init__(
        self,
        num_layers: int,
        *,
        num_pages: int | Mapping[int | None, int],
        windows: Sequence[int | None] | None = None,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
    ):
        self.paged_layers = [PagedLayer(self, number) for number in range(num_layers)]
        super().__init__(layers=[*self.paged_layers])
        self.num_pages, self.page_size, self._dtype = num_pages, page_size, dtype
        self.windows = [None] * num_layers if windows is None else list(windows)
        self.pages: saccade.PagedCache | None = None
        self.sequences: list[int] = []
        self._steps: list[PagedStep] | None = None  # by group of layers
        self._before: list[PagedStep | None] = []  # the same for what was there before a long chunk

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        num_pages: int | Mapping[int | None, int] | None = None,
        max_tokens: int | None = None,
        batch_size: int = 1,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
    ) -> PagedGenerationCache:
        """A cache with as many layers as a model has, and room for what is asked.

        Args:
            model: a causal language model of transformers.
            num_pages: pages for each group of layers; or instead
            max_tokens: of the longest sequence, prompt and padding included (sliding layers get
                as many pages as their window makes use of), and
            batch_size: how many there are (times beams or returned sequences).
            page_size, dtype: as in the class.

        Raises:
            TypeError: unless exactly one of `num_pages` and `max_tokens` is given, and for numbers
                that are not whole.
            ValueError: for numbers below 1, and for a model with layers that keep something else
                than keys and values.
        """
        if (num_pages is None) == (max_tokens is None):
            raise TypeError(
                f"num_pages, max_tokens: got {num_pages} and {max_tokens}, takes one of the two"
            )
        for name, number in (
            ("page_size", page_size), ("max_tokens", max_tokens), ("batch_size", batch_size),
        ):  # fmt: skip
            if number is not None:
                _check_count(name, number)
        config = model.config.get_text_config(decoder=True)
        others = set(getattr(config, "layer_types", None) or ()) - PAGED_LAYERS
        if others or model.config.is_encoder_decoder:
            got = ", ".join(sorted(others)) or "an encoder and a decoder"
            raise ValueError(f"model: got layers of {got}, takes {', '.join(sorted(PAGED_LAYERS))}")
        reaches = windows_of(config)
        if max_tokens is not None:
            num_pages = {
                window: batch_size * most_pages(max_tokens, window, page_size)
                for window in set(reaches)
            }
        assert num_pages is not None  # one of the two was given
        return cls(
            config.num_hidden_layers, num_pages=num_pages, windows=reaches, page_size=page_size,
            dtype=dtype,
        )  # fmt: skip

    # ---- one step ----------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; give all of them, or their pages."""
        if layer_idx >= len(self.paged_layers):
            raise ValueError(
                f"num_layers: got {len(self.paged_layers)} for a model whose layer {layer_idx} "
                "writes, takes as many as the model has; for_model counts them"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def step_of(self, layer: int, length: int, key: Tensor, value: Tensor) -> PagedStep:
        """The step that a layer of this length is at; the first layer of a step begins it.

        Raises:
            OutOfPagesError: if pages are too few for all new tokens; nothing has changed then.
            TypeError: for a dtype of pages that keys do not go into.
            ValueError: if a layer was left out, or another batch came.
        """
        batch, count = key.shape[0], key.shape[2]
        if self.pages is None:
            if self._dtype not in (None, key.dtype, *EIGHT_BITS):
                raise TypeError(
                    f"dtype: got {self._dtype} for keys of {key.dtype}, takes None (theirs), "
                    "torch.int8 or torch.float8_e4m3fn"
                )
            self.pages = saccade.PagedCache(
                self.num_pages, self.page_size, windows=self.windows,
                kv_heads=key.shape[1], head_dim=key.shape[3], value_dim=value.shape[3],
                dtype=self._dtype or key.dtype, device=key.device, prefix_caching=False,
            )  # fmt: skip
        if not self.sequences:
            self.sequences = [self.pages.allocate() for _ in range(batch)]
        if batch != len(self.sequences):
            raise ValueError(
                f"key_states: got a batch of {batch}, takes the cache's {len(self.sequences)}; "
                "reset() lets another batch begin"
            )
        held = self.pages.length(self.sequences[0])
        if length == held:
            self._begin_step(self.pages, length, count)
        step = self._steps[self.pages.addresses[layer].group] if self._steps else None
        if step is None or (step.first, step.count) != (length, count):
            raise ValueError(
                f"key_states: got {count} tokens for a layer of {length}, takes what other layers "
                f"got, which have {held} now: every layer writes every token once"
            )
        return step

    def _begin_step(self, pages: saccade.PagedCache, length: int, count: int) -> None:
        outgrown = [window is not None and count > window + 1 for window in pages.windows]
        before = pages.tables(self.sequences) if any(outgrown) and length else None
        spare = [MOST_DRAFTS if each else None for each in outgrown]
        slots = pages.append(dict.fromkeys(self.sequences, count), spare=spare)
        tables = pages.tables(self.sequences)
        self._steps = [
            PagedStep(length, count, *each)
            for each in zip(slots, *zip(*tables, strict=True), strict=True)
        ]
        self._before = [
            PagedStep(0, length, slots[group], *before[group])
            if before is not None and each
            else None
            for group, each in enumerate(outgrown)
        ]

    def step_before(self, layer: int) -> PagedStep | None:
        """What a layer held before a chunk longer than its window, as a step; else None."""
        return self._before[self.pages.addresses[layer].group] if self.pages is not None else None

    def write(self, layer: int, key: Tensor, value: Tensor, step: PagedStep) -> Any:
        """Write a layer's new tokens; its pages."""
        assert self.pages is not None  # the step made them
        key, value = (each.detach().transpose(1, 2).flatten(0, 1) for each in (key, value))
        pages = self.pages.pages(layer)
        saccade.write_kv_cache(
            key, value, pages.key_pages, pages.value_pages, step.slots,
            key_scales=pages.key_scales, value_scales=pages.value_scales,
        )  # fmt: skip
        return pages

    # ---- what generate does to all sequences ---------------------------------------------------

    def _replace(self, sources: list[int]) -> None:
        """Sequence number i becomes what number sources[i] was; pages are shared, not copied."""
        if self.pages is None or not self.sequences:
            return
        before = self.sequences
        self.sequences = [self.pages.fork(before[source]) for source in sources]
        for sequence in before:
            self.pages.free(sequence)
        self._steps = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let beam i go on from what beam beam_idx[i] was. Pages are copied on the first write."""
        self._replace(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every sequence go on `repeats` times."""
        self._replace([each for each in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at these indices (or where a bool tensor is True)."""
        self._replace(torch.arange(len(self.sequences))[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every sequence.

        Args:
            tokens_to_remove: minus the number of tokens to remove; or, as transformers 5.17 has
                it, the number of tokens to keep, if greater than 0. A tensor of one does too.
        """
        change, length = int(tokens_to_remove), self.get_seq_length()
        target = max(length + change, 0) if change <= 0 else min(change, length)
        if self.pages is None or target == length:
            return
        for sequence in self.sequences:
            self.pages.trim(sequence, target)
        for layer in self.paged_layers:
            layer.length = target
        self._steps = None

    def reset(self) -> None:
        """End all sequences; their pages are free for another batch."""
        if self.pages is not None:
            for sequence in self.sequences:
                self.pages.free(sequence)
        self.sequences, self._steps = [], None
        for layer in self.paged_layers:
            layer.length = 0

    @property
    def batch_size(self) -> int:
        """How many sequences there are; -1 before the first forward pass."""
        return len(self.sequences) or -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """What `get_max_length` was called before."""
        return self.get_max_length(layer_idx)

"""PagedCache: keys and values of many sequences in pages, for all layers of a model."""

from __future__ import annotations

import array
import itertools
import operator
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from saccade.kv_cache import sequences as changes
from saccade.kv_cache.arguments import (
    check_latent,
    check_options,
    check_order,
    check_pages,
    new_tokens,
    pages_of_windows,
    sequence_list,
    sizes_of,
    slots_of_group,
    spares_of,
    states_of,
    token_list,
    windows_of,
)
from saccade.kv_cache.pool import at_once, locked
from saccade.kv_cache.sequences import Change, Group, GroupGrowth, PageList
from saccade.kv_cache.storage import (
    LayerPages,
    PageMemory,
    PageSizes,
    StateMemory,
    on_device,
    write_kv_cache,
)
from saccade.masks import as_mask
from saccade.masks import window as window_mask
from saccade.ops.paged_attention.api import attention_paged
from saccade.runtime.arguments import check_flag, check_whole_number
from saccade.runtime.call_cache import observed

MOST_TABLES = 16  # of other sequences, groups and streams, that are known at once


@dataclass(frozen=True)
class CacheStatistics:
    """What a cache holds now, and what it has done so far; everything but tokens in pages.

    Attributes:
        used, idle, free: pages that sequences hold, that only the prefix cache knows, and others.
        host_used: pages on the host that hold what was swapped out.
        states_used, host_states_used: the same of states of whole sequences.
        sequences, tokens: sequences, and tokens in them, shared ones counted each time.
        asked, matched: tokens that allocations named, and those of them that were found.
        copied: pages copied on write. evicted: idle pages that were given away.
        released: pages let go of behind the window. moved: by compaction.
        swapped_out, swapped_in: pages copied to the host, and back.
    """

    used: int
    idle: int
    free: int
    host_used: int
    sequences: int
    tokens: int
    asked: int
    matched: int
    copied: int
    evicted: int
    released: int
    moved: int
    swapped_out: int
    swapped_in: int
    states_used: int = 0
    host_states_used: int = 0


@dataclass(frozen=True)
class SequenceStatistics:
    """One sequence: its tokens, how many of them were found in the prefix cache, its pages on the
    device, pages copied on write for it, and whether it is swapped out."""

    length: int
    cached: int
    pages: int
    copied: int
    swapped_out: bool


class LayerAddress(NamedTuple):
    """Where a layer's pages are: in which group, and as which layer of it."""

    group: int
    layer: int


class _Tables(NamedTuple):
    """Tables of some sequences, and what they were made of: a list of pages is never changed."""

    pages: list[list[int | None]]
    lengths: list[int]
    table: Tensor
    kv_lens: Tensor


class PagedCache:
    """Keys and values of many sequences in pages of one pool, for all layers of a model.

    A sequence is a number. `append` says where new tokens go, `write` puts them there layer by
    layer, `attend` reads them. Every method may be called from any thread; slots and tables hold
    until the next call that changes their sequence, or `compact`.

    Layers of unlike windows (`windows`) form groups, each with a pool of its own: layers with a
    sliding window give pages back while others keep theirs. All groups have the same sequences, and
    a call changes all of them or none. Slots, tables and counts of pages then come in a list, one
    entry for each group.

    Layers that keep a state of a whole sequence (recurrent ones, convolutions) have their tensors
    in `states`: a sequence holds one number of them, which is copied, swapped and freed with its
    pages. A state cannot go back to an earlier token, so a beginning is shared only as far as its
    state was kept (`keep` of `append`); forks share one until either of the two grows.

    Args:
        num_pages: pages of the pool; each holds `page_size` tokens in every layer. With `windows`
            of each group, or a mapping from windows to numbers.
        page_size: 1 to 1024 tokens.
        num_layers: of the model, where all layers have one window.
        kv_heads, head_dim: of the model, or a number for each layer. value_dim: likewise; head_dim
            unless given.
        latent: whether values are the first value_dim channels of keys, as in latent attention in
            its absorbed form: pages hold a token once, and `write` takes no value.
        dtype: of the pages; int8 and float8_e4m3fn come with a scale for each token and head.
        device: where the pages lie.
        host_pages: pages of host memory (page-locked beside a GPU) for what is swapped out; as
            num_pages.
        window: tokens that a token sees before itself, as in `masks.window(window)`: pages behind
            it are let go, and `attend` applies the mask. None: everything is seen.
        windows: instead of num_layers and window, a window or None for each layer.
        prefix_caching: whether full pages are found again by equal beginnings.
        states: the shape and dtype of each tensor that a sequence has beside its pages.
        num_states, host_states: such states that there can be at once, on the device and on the
            host: one for each sequence, and what is kept for others as far as there is room.

    Attributes:
        windows: the window of each group: None first, then the widest.
        addresses: where each layer's pages are. num_pages: of each group.
        states: tensors [num_states, ...], read and written at `state_numbers`. They hold anything
            until they are written: a sequence that begins has no state.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Source: PagedAttention (Kwon et al. 2023), section 4.

    Examples:
        >>> cache = saccade.PagedCache(64, page_size=4, num_layers=1, kv_heads=2, head_dim=16)
        >>> prompt = [3, 1, 4, 1, 5]
        >>> sequence = cache.allocate(prompt)
        >>> slots = cache.append({sequence: prompt})
        >>> cache.write(0, torch.randn(5, 2, 16), torch.randn(5, 2, 16), slots)
        >>> query = torch.randn(1, 8, 5, 16)
        >>> cache.attend(0, query, [sequence], mask=masks.causal()).shape
        torch.Size([1, 8, 5, 16])
    """

    windows: tuple[int | None, ...]
    num_pages: tuple[int, ...]
    page_size: int
    device: torch.device
    groups: list[Group]
    addresses: list[LayerAddress]
    latent: bool
    states: list[Tensor]
    num_states: int

    def __init__(
        self,
        num_pages: int | Mapping[int | None, int],
        page_size: int = 16,
        *,
        num_layers: int | None = None,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        value_dim: int | Sequence[int] | None = None,
        latent: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        host_pages: int | Mapping[int | None, int] = 0,
        window: int | None = None,
        windows: Sequence[int | None] | None = None,
        prefix_caching: bool = True,
        states: Sequence[tuple[Sequence[int], torch.dtype]] = (),
        num_states: int = 0,
        host_states: int = 0,
    ):
        check_pages(page_size, dtype)
        check_flag("latent", latent)
        check_flag("prefix_caching", prefix_caching)
        self._grouped = windows is not None
        sizes_of_states = states_of(states, num_states, host_states)
        of_layers = windows_of(num_layers, window, windows, paged=not sizes_of_states)
        value_dim = head_dim if value_dim is None else value_dim
        sizes = sizes_of(
            len(of_layers), {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        )
        if latent:
            check_latent(sizes, dtype)
        some = {each for each in of_layers if each is not None}
        everything: list[int | None] = [None] if None in of_layers else []
        self.windows = (*everything, *sorted(some, reverse=True))
        self.num_pages = pages_of_windows("num_pages", num_pages, self.windows, least=1)
        of_host = pages_of_windows("host_pages", host_pages, self.windows, least=0)
        self.page_size, self.device = page_size, torch.device(device)
        self.groups = []
        for each, pages, on_host in zip(self.windows, self.num_pages, of_host, strict=True):
            of_group = [size for size, of in zip(sizes, of_layers, strict=True) if of == each]
            memory = PageMemory(
                PageSizes(page_size, of_group, dtype, latent), pages, on_host, self.device
            )
            self.groups.append(Group(memory, self._tokens_of_page, each, prefix_caching))
        self.addresses = [
            LayerAddress(self.windows.index(each), of_layers[:layer].count(each))
            for layer, each in enumerate(of_layers)
        ]
        self.latent = latent
        of_states = StateMemory(sizes_of_states, num_states, host_states, self.device)
        self.states, self.num_states = of_states.pools, num_states if sizes_of_states else 0
        self._states = [
            Group(of_states, self._tokens_of_page, None, prefix_caching, whole=True)
        ] if sizes_of_states else []  # fmt: skip
        self._everything = [*self.groups, *self._states]  # that a call changes
        self._numbers = itertools.count()
        self._known: dict[tuple[Any, ...], _Tables] = {}  # of calls of `attend`, the last ones
        self._lock = threading.RLock()

    @locked
    def allocate(self, tokens: Sequence[int] = (), *, salt: bytes = b"") -> int:
        """Begin a sequence; it starts with the pages that hold the beginning of `tokens`, if any.

        Append what is left, tokens[length(sequence):]; that is one token at least.

        Args:
            tokens: the whole prompt; where it is left out nothing is shared.
            salt: sequences of unlike salt (an adapter's name, a tenant's) share no pages.

        Returns:
            The sequence's number.
        """
        if not isinstance(salt, bytes):
            raise TypeError(f"salt: got {type(salt).__name__}, takes bytes")
        number, tokens = next(self._numbers), token_list(tokens)
        changes.enter(changes.begun(self._everything, number, tokens, salt))
        return number

    @locked
    def fork(self, sequence: int) -> int:
        """A second sequence with the same tokens; pages are shared until one of the two writes."""
        number = next(self._numbers)
        changes.enter([changes.forked(group, number, sequence) for group in self._everything])
        return number

    def __reduce__(self) -> NoReturn:
        """A cache is neither pickled nor copied."""
        raise TypeError(
            "PagedCache: got a copy or a pickle of one, takes neither: sequences of both would "
            "share a lock and numbers; make one in each process"
        )

    @locked
    def append(
        self,
        tokens: Mapping[int, int | Sequence[int]],
        *,
        spare: Sequence[int | None] | None = None,
        keep: Collection[int] = (),
    ) -> Any:
        """Make room for new tokens of any number of sequences, in one step.

        A last page that others hold too is copied first. What was appended before counts as
        written from now on, and its full pages can be found by others (see `commit`).

        Args:
            tokens: for each sequence its new tokens, or only how many (then its pages are not
                found by others from there on).
            spare: for each group None, or, where these tokens are attended to where they are and
                not in pages, how many of them may be trimmed: a group with a window keeps what is
                seen from there on. Tokens before that have slots of -1, and take no pages.
            keep: sequences whose states, as they are before these tokens, others may find that
                begin alike. They end with a full page of tokens that were named; others are left
                out, and so is what there is no room for.

        Returns:
            int64 [tokens]: the slot of each new token, sequence after sequence, as `write_kv_cache`
            takes them; with `windows` a list of such, one for each group.

        Raises:
            OutOfPagesError: if there are too few pages for all of it; then nothing has changed.
            KeyError, ValueError: for a sequence that is not there, or is swapped out.
        """
        slots = self.grow(tokens, spare=spare, keep=keep)
        of_groups = slots if self._grouped else [slots]
        return self._by_group(
            [torch.tensor(each, dtype=torch.int64, device=self.device) for each in of_groups]
        )

    @locked
    def grow(
        self,
        tokens: Mapping[int, int | Sequence[int]],
        *,
        spare: Sequence[int | None] | None = None,
        keep: Collection[int] = (),
    ) -> Any:
        """`append` whose slots are plain numbers: nothing waits for the device."""
        new = new_tokens(tokens)
        spares = [None] * len(self.groups) if spare is None else spares_of(spare, len(self.groups))
        if keep and not isinstance(keep, Collection):
            raise TypeError(f"keep: got {type(keep).__name__}, takes a list or set of sequences")
        growths = [
            GroupGrowth(group, new, spared, keep)
            for group, spared in zip(
                self._everything, [*spares, *[None] * len(self._states)], strict=True
            )
        ]
        for growth in growths:  # before anything is evicted to make room
            growth.require()
        grown = [growth.grown() for growth in growths]
        changes.enter([change for change, _ in grown])
        return self._by_group([slots for _, slots in grown[: len(self.groups)]])

    @locked
    def name(self, sequence: int, tokens: Sequence[int]) -> None:
        """Say which tokens a sequence begins with, where only their number was appended.

        They are written by now: their full pages may be found by others.

        Args:
            tokens: from its beginning; what was named before is not compared.

        Raises:
            ValueError: for more tokens than it has.
        """
        held = [group.find(sequence) for group in self._everything]
        check_order(tokens)
        if len(tokens) > held[0].length:
            raise ValueError(f"tokens: got {len(tokens)}, takes at most {held[0].length}")
        fresh = [token_list(tokens[len(each.tokens) :]) for each in held]
        at_once(partial(each.tokens.extend, new) for each, new in zip(held, fresh, strict=True))
        changes.enter(
            [
                Change(group, written=[each])
                for group, each in zip(self._everything, held, strict=True)
            ]
        )

    @locked
    def commit(self, sequence: int) -> None:
        """Say that all tokens so far are written: their full pages may be found by others."""
        changes.enter([Change(group, written=[group.find(sequence)]) for group in self._everything])

    @locked
    def forget(self, sequence: int) -> None:
        """Take a sequence's pages out of the prefix cache, and others of the same tokens.

        For what turns out to be wrong: another sequence that begins so is computed again.
        """
        for group, held in [(group, group.find(sequence)) for group in self._everything]:
            group.forget(held)

    @locked
    def trim(self, sequence: int, length: int) -> None:
        """Forget all but the first tokens (drafts that were not accepted, say).

        Raises:
            ValueError: if there are fewer, if a window would reach back to released pages, or if
                there is a state, which only the beginning is before.
        """
        held = self.length(sequence)
        check_whole_number("length", length, least=0)
        if self.states and length not in (0, held):
            raise ValueError(
                f"length: got {length} for a sequence with a state of {held} tokens, takes "
                f"{held} or 0: a state cannot go back"
            )
        changes.enter([changes.trimmed(group, sequence, length) for group in self._everything])

    @locked
    def free(self, sequence: int) -> None:
        """End a sequence; its pages that hold a known beginning stay until room is needed."""
        changes.enter([changes.ended(group, sequence) for group in self._everything])

    @locked
    def clear(self) -> None:
        """End every sequence, as `free` ends one."""
        for sequence in list(self._everything[0].sequences):
            self.free(sequence)

    @locked
    def swap_out(self, sequence: int) -> None:
        """Move a sequence's pages to the host; shared pages are copied there.

        Raises:
            OutOfPagesError: if the host has too few pages; then nothing has changed.
        """
        for group in self._everything:
            group.host_pool.require(len(group.find(sequence).kept))
        changes.enter([changes.swapped_out(group, sequence) for group in self._everything])

    @locked
    def swap_in(self, sequence: int) -> None:
        """Move a sequence's pages back from the host.

        Raises:
            OutOfPagesError: if there are too few pages; then nothing has changed.
            ValueError: if it is not swapped out.
        """
        for group in self._everything:
            group.pool.require(len(group.find(sequence, on_device=False).kept_on_host))
        changes.enter([changes.swapped_in(group, sequence) for group in self._everything])

    @locked
    def compact(self) -> int:
        """Move all pages to the lowest numbers, each sequence's side by side; how many moved.

        Slots and tables that were handed out before no longer hold.
        """
        return sum(map(changes.compact, self._everything))

    @locked
    def tables(self, sequences: Sequence[int]) -> Any:
        """page_table int32 [batch, max_pages] and kv_lens int32 [batch] for `attention_paged`; with
        `windows` a list of such pairs, one for each group.

        A released page is replaced by one that the sequence holds: its mask must be the window's.
        """
        numbers = sequence_list(sequences)
        return self._by_group(
            [self._tables([group.find(each) for each in numbers]) for group in self.groups]
        )

    @locked
    def page_numbers(self, sequence: int) -> Any:
        """A sequence's pages in order, as `tables` has them; with `windows` a list of such lists,
        one for each group."""
        return self._by_group([_page_numbers(group.find(sequence)) for group in self.groups])

    @property
    def replaced_pages(self) -> int:
        """How many pages of sequences were replaced by others so far: copied on write, moved, or
        swapped in. Between equal numbers a sequence's pages only get more behind them, and are let
        go of in front."""
        names = "copied", "moved", "swapped_in"
        return sum([group.counts[name] for group in self.groups for name in names])

    @locked
    def state_numbers(self, sequences: Sequence[int]) -> list[int]:
        """Where in `states` each sequence has its own; they hold until it changes, as slots do.

        Raises:
            KeyError, ValueError: for a sequence that is not there, is swapped out or has no token.
        """
        if not self.states:
            raise ValueError("sequences: got some of a cache without states, takes one with states")
        found = []
        for sequence in sequence_list(sequences):
            held = self._everything[-1].find(sequence).kept
            if not held:
                raise ValueError(
                    f"sequences: got {sequence}, which has no token, takes one that has"
                )
            found += held
        return found

    @locked
    def state_borders(self, sequence: int, length: int) -> list[int]:
        """Where a state is worth keeping while a sequence grows to so many tokens.

        That is after its last full page that others can find (one token is left to compute), and
        where pages were known of its beginning but no state.
        """
        held = self._everything[-1].find(sequence)
        check_whole_number("length", length, least=0)
        if not any(group.prefix_caching for group in self._states):
            return []
        last = max(length - 1, 0) // self._tokens_of_page * self._tokens_of_page
        return sorted({each for each in (held.known, last) if held.length < each <= last})

    def pages(self, layer: int) -> LayerPages:
        """A layer's tensors, by the names of `attention_paged`'s arguments."""
        address = self._address(layer)
        return self.groups[address.group].memory.layers[address.layer]

    @locked
    def write(
        self, layer: int, key: Tensor, value: Tensor | None, slots: Tensor | Sequence[Tensor],
        **options: Any,
    ) -> None:  # fmt: skip
        """`saccade.write_kv_cache` into a layer's pages; slots as `append` gave them. Where values
        are the first channels of keys, value is None."""
        pages = self.pages(layer)
        if not isinstance(slots, Tensor):
            slots = slots_of_group(slots, self._address(layer).group, len(self.groups))
        scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
        check_options(options)
        if self.latent and value is not None:
            raise TypeError("value: got a tensor, takes None: values are a part of keys here")
        if value is None and not self.latent:
            raise TypeError("value: got None, takes a tensor; None is for a cache with latent=True")
        value_pages = None if value is None else pages.value_pages
        write_kv_cache(key, value, pages.key_pages, value_pages, slots, **scales, **options)

    def attend(self, layer: int, query: Tensor, sequences: Sequence[int], **options: Any) -> Any:
        """`saccade.attention_paged` over a layer's pages, under the mask of its window, if any.

        Raises:
            ValueError: also for more rows of a sequence than were appended last, where the window
                of one reaches back to released pages.
        """
        pages, group = self.pages(layer), self.groups[self._address(layer).group]
        sequences = sequence_list(sequences)
        if group.window is not None:
            check_released(group, sequences, query, options.get("cu_seqlens_q"))
            seen, mask = window_mask(group.window), options.get("mask")
            options["mask"] = seen if mask is None else as_mask(mask) & seen
        scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
        check_options(options)
        return attention_paged(
            query, pages.key_pages, pages.value_pages, *self._known_tables(layer, sequences),
            **scales, **options,
        )  # fmt: skip

    @locked
    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._everything[0].find(sequence, on_device=False).length

    @locked
    def available(self) -> Any:
        """Pages that can be had; with `windows` a list, one number for each group."""
        return self._by_group([group.pool.available for group in self.groups])

    @locked
    def statistics(self) -> CacheStatistics:
        """What the cache holds now, and what it has done so far.

        Pages of all groups are added up; each token counts once.
        """
        pools = [group.pool for group in self.groups]
        hosts = [group.host_pool for group in self.groups]
        first = self._everything[0]
        counts = {name: sum(group.counts[name] for group in self.groups) for name in first.counts}
        of_tokens = {name: first.counts[name] for name in ("asked", "matched")}
        return CacheStatistics(
            used=sum(pool.used for pool in pools),
            idle=sum(len(pool.idle) for pool in pools),
            free=sum(len(pool.free) for pool in pools),
            host_used=sum(pool.used for pool in hosts),
            sequences=len(first.sequences),
            tokens=sum(held.length for held in first.sequences.values()),
            evicted=sum(pool.evictions for pool in pools),
            states_used=sum(group.pool.used for group in self._states),
            host_states_used=sum(group.host_pool.used for group in self._states),
            **(counts | of_tokens),
        )

    @locked
    def sequence_statistics(self, sequence: int) -> SequenceStatistics:
        """What one sequence holds, pages of all groups added up."""
        found = [group.find(sequence, on_device=False) for group in self._everything]
        paged = found[: len(self.groups)]
        return SequenceStatistics(
            length=found[0].length,
            cached=found[0].cached,
            pages=sum(len(held.kept) for held in paged),
            copied=sum(held.copies for held in paged),
            swapped_out=found[0].host_pages is not None,
        )

    @locked
    def check(self) -> None:
        """Check that every page is counted once, and that all groups have the same sequences.

        Raises:
            AssertionError: saying what is broken.
        """
        found = []
        names = [f"layers of window {window}" for window in self.windows]
        for name, group in zip([*names, "states"], self._everything, strict=False):
            prefix = f"{name}: " if self._grouped or group not in self.groups else ""
            found += [f"{prefix}{fault}" for fault in group.faults()]
            if group.sequences.keys() != self._everything[0].sequences.keys():
                found.append(f"{name} have other sequences")
        for sequence in self._everything[0].sequences:
            held = [group.sequences.get(sequence) for group in self._everything]
            if len({each and (each.length, each.host_pages is None) for each in held}) > 1:
                found.append(f"sequence {sequence} is not the same in all groups")
        if found:
            raise AssertionError("PagedCache: " + "; ".join(found))

    @property
    def _tokens_of_page(self) -> int:
        """Tokens of a sequence that a page stands for, where others hold some of them."""
        return self.page_size

    def _address(self, layer: int) -> LayerAddress:
        count = len(self.addresses)
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layer: got {layer!r}, takes a whole number")
        if not -count <= layer < count:
            raise IndexError(f"layer: got {layer}, takes 0 to {count - 1}")
        return self.addresses[layer]

    @locked
    def _known_tables(self, layer: int, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`_tables` of some sequences for a layer, which must not be written to: those of the last
        such call as far as they still hold, so that the layers of a step share them."""
        number = self._address(layer).group
        held = [self.groups[number].find(sequence) for sequence in sequences]
        if _is_captured(self.device) or observed():  # of which nothing may be left for others
            return self._tables(held)
        pages, lengths = [each.pages for each in held], [each.length for each in held]
        key = (number, _stream(self.device), *sequences)
        known = self._known.pop(key, None)
        if known is None or not all(map(operator.is_, known.pages, pages)):
            known = _Tables(pages, lengths, *self._tables(held))
        elif known.lengths != lengths:
            known = _Tables(pages, lengths, known.table, self._kv_lens(lengths))
        self._known[key] = known
        if len(self._known) > MOST_TABLES:
            del self._known[next(iter(self._known))]
        return known.table, known.kv_lens

    def _tables(self, held: Sequence[PageList]) -> tuple[Tensor, Tensor]:
        """page_table and kv_lens of some sequences in one group."""
        width = max((len(each.pages) for each in held), default=0)
        rows = [array.array("i", _page_numbers(each)) for each in held]
        padded = bytearray().join([each.tobytes().ljust(4 * width, b"\0") for each in rows])
        table = on_device(padded, torch.int32, self.device).view(len(held), width)
        return table, self._kv_lens([each.length for each in held])

    def _kv_lens(self, lengths: Sequence[int]) -> Tensor:
        """kv_lens of sequences of so many tokens."""
        return on_device(lengths, torch.int32, self.device)

    def _mend(self) -> None:
        """Count again what an exception in the middle of the last call left half counted."""
        for group in self._everything:
            group.mend()

    def _by_group(self, found: list[Any]) -> Any:
        """A list, one entry for each group; without `windows` the one entry."""
        return found if self._grouped else found[0]


def _stream(device: torch.device) -> Any:
    """The stream that work of a device goes to now; others do not wait for what it makes."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _is_captured(device: torch.device) -> bool:
    """Whether work goes into a CUDA graph, whose memory holds nothing before that runs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_released(group: Group, sequences: Sequence[int], query: Any, offsets: Any) -> None:
    """Refuse rows whose window reaches back to released pages, as far as no device is asked.

    Other pages stand in for those: their tokens would be read in place of the released ones. What
    is no query and no offsets is left for the call to refuse.
    """
    if not isinstance(query, Tensor):
        return
    if offsets is None:
        rows = [query.shape[2] if query.dim() == 4 else 0] * len(sequences)
    elif isinstance(offsets, Tensor) and offsets.dim() == 1 and offsets.device.type == "cpu":
        rows = offsets.diff().tolist()
    else:
        return
    for sequence, count in zip(sequences, rows, strict=False):
        held, window = group.find(sequence), group.window or 0
        # Looked up, not counted: this is done for every layer of a step.
        if held.has_released(held.length - count - window, group.page_size):
            most = held.length - held.released * group.page_size - window
            raise ValueError(
                f"query: got {count} rows of sequence {sequence}, takes {max(most, 0)} at most: "
                f"tokens that the row before sees within its window of {window} are "
                "released; attend to tokens before others are appended"
            )


def _page_numbers(held: PageList) -> list[int]:
    """The pages of a sequence; one that it holds in the place of each that was released."""
    if None not in held.pages:
        return [*held.pages]  # pyright: ignore[reportReturnType]  # there is no None
    other = next(iter(held.kept), 0)
    return [other if page is None else page for page in held.pages]

"""Decode steps: a next token for each of many requests, in a form that can be a CUDA graph.

Everything that such a step reads lies at addresses that never change: what the host says of each
row (`Inbox`) and what the device knows itself (`Lanes`, the last tokens among it). So the host
fills a buffer, copies it and replays a graph; where there are no graphs, the same code runs
eagerly. Batches come in a few sizes. Rows behind the last one have the position -1, a length of 0
and the slot -1: they read no page and write none.

Attention counts its work from lengths on the device, so a graph holds for all of them.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import track
from torch import Tensor

import saccade
from saccade.serving import decoding
from saccade.serving.decoding import (
    Chosen,
    Lanes,
    RowSettings,
    Sampling,
    Traits,
    check_number,
)
from saccade.serving.model import LayerCall, LayerCalls, PackedModel, Rows, written
from saccade.serving.request import Request
from saccade.serving.scheduler import Chunk
from saccade.serving.states import StepStates

WHOLE, REAL = 7, 6  # words of a row: the token, its position and settings; what is no whole number
WORDS = WHOLE + REAL
DEVICES_OWN = -1  # as a token: the last one that the row's lane got


class Row(NamedTuple):
    """One row of a step: which token it reads, and how the next one is chosen.

    Attributes:
        token: or DEVICES_OWN. position: of it; -1 where nothing is written.
        counter: how many new tokens the request had before this one.
    """

    token: int
    position: int
    counter: int
    lane: int
    sampling: Sampling


class Inbox:
    """What the host says of a step: one buffer there, one copy, the same buffer on the device.

    Args:
        rows: at most. widths: pages of the longest sequence, for each group of layers.
    """

    def __init__(self, rows: int, widths: Sequence[int], vocabulary: int, device: torch.device):
        self._rows, self._vocabulary, self._device = rows, vocabulary, device
        self.tables = [
            torch.zeros(rows, width, dtype=torch.int32, device=device) for width in widths
        ]
        self._of_rows = rows * WORDS * 8
        size = self._of_rows + sum(table.nbytes for table in self.tables)
        # Of zeros, so that what is not written is the number of a page all the same.
        self._host = torch.zeros(
            size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
        )
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        words = self._there[: self._of_rows]
        whole, real = (
            words.view(dtype).view(rows, WORDS) for dtype in (torch.int64, torch.float64)
        )
        self._whole, self._real = whole[:, :WHOLE], real[:, WHOLE:]
        address = self._host.data_ptr()
        self._host_whole = (ctypes.c_int64 * (rows * WORDS)).from_address(address)
        self._host_real = (ctypes.c_double * (rows * WORDS)).from_address(address)
        self._host_tables = (ctypes.c_int32 * ((size - self._of_rows) // 4)).from_address(
            address + self._of_rows
        )
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def tokens(self, rows: int) -> Int[Tensor, " rows"]:
        """The token of each row, or DEVICES_OWN."""
        return self._whole[:rows, 0]

    def positions(self, rows: int) -> Int[Tensor, " rows"]:
        """The position of each row, or -1."""
        return self._whole[:rows, 1]

    def settings(self, rows: int) -> RowSettings:
        """How the next token of each row is chosen."""
        whole, real = self._whole[:rows, 2:], self._real[:rows]
        return RowSettings(*whole.unbind(1), *real.unbind(1))

    def wait(self) -> None:
        """Wait until the last copy has read the host's buffer, which may then be written."""
        if self._copied is not None:
            self._copied.synchronize()

    def write(self, row: int, said: Row) -> None:
        """Say everything of a row."""
        at, sampling = row * WORDS, said.sampling
        self._host_whole[at : at + WHOLE] = [
            said.token, said.position, said.counter, said.lane, sampling.key,
            min(sampling.top_k or self._vocabulary, self._vocabulary), sampling.min_new_tokens,
        ]  # fmt: skip
        self._host_real[at + WHOLE : at + WORDS] = [
            sampling.temperature, sampling.top_p, sampling.min_p,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
        ]  # fmt: skip

    def advance(self, row: int, position: int, counter: int) -> None:
        """The request of a row stays: it reads the token that the device has for it."""
        at = row * WORDS
        self._host_whole[at : at + 3] = [DEVICES_OWN, position, counter]

    def write_pages(self, place: int, pages: Sequence[int]) -> None:
        """Page numbers, from a place among all tables on."""
        self._host_tables[place : place + len(pages)] = pages

    def send(self, rows: int, widths: Sequence[int]) -> None:
        """Copy what was written of rows, and of so many pages of each in every group."""
        used = self._of_rows + 4 * rows * sum(widths)
        self._there[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        begin = self._of_rows
        for table, width in zip(self.tables, widths, strict=True):
            end = begin + 4 * rows * width
            pages = self._there[begin:end].view(torch.int32).view(rows, width)
            table[:rows, :width].copy_(pages)
            begin = end


class DecodeStep:
    """One step over a batch of that many rows, at fixed addresses: what a model calls to attend.

    Args:
        cache: where keys and values go. layers: for each call of an attention layer in a pass its
            number there.
        options: of `saccade.attention_paged`.

    Attributes:
        states: of the rows' sequences, where layers keep some.
    """

    layers_are_checked = True  # by the same layers, called with a `BatchStep` before

    def __init__(
        self, cache: saccade.PagedCache, layers: Mapping[LayerCall, int],
        options: Mapping[str, Any], inbox: Inbox, lanes: Lanes, rows: int,
    ):  # fmt: skip
        self._cache, self._calls, self._options = cache, LayerCalls(layers), options
        self._inbox, self._lanes, self.rows = inbox, lanes, rows
        self.states: StepStates | None = None
        self._tables = [table[:rows] for table in inbox.tables]
        self.settings = inbox.settings(rows)
        self.last_rows = torch.arange(rows, device=cache.device)

    def begin(self) -> tuple[Int[Tensor, "1 rows"], Int[Tensor, "1 rows"]]:
        """The rows' tokens and positions; slots and lengths follow from these."""
        self._calls.begin()
        given, positions = self._inbox.tokens(self.rows), self._inbox.positions(self.rows)
        own = self._lanes.last_tokens.index_select(0, self.settings.lanes)
        tokens = torch.where(given >= 0, given, own)
        real = positions >= 0
        self._lens = (positions + 1).to(torch.int32)
        positions = positions.clamp_min(0)
        size = self._cache.page_size
        number, slot = (positions // size).unsqueeze(1), positions % size
        self._slots = [
            torch.where(real, table.gather(1, number).squeeze(1) * size + slot, -1)
            for table in self._tables
        ]
        return tokens.unsqueeze(0), positions.unsqueeze(0)

    def end(self) -> None:
        """All layers were called."""
        self._calls.end()

    def attend(
        self, layer_index: int | None, query: Rows, key: Rows, value: Rows, **options: Any
    ) -> Float[Tensor, "1 rows heads value_dim"]:
        """Write a layer's new keys and values, and attend over all of each sequence."""
        layer = self._calls.next(layer_index)
        pages, group, scales = written(self._cache, layer, key, value, self._slots)
        output = saccade.attention_paged(
            query.permute(2, 1, 0, 3), pages.key_pages, pages.value_pages, self._tables[group],
            self._lens, **options, **scales, **self._options,
        )  # fmt: skip
        return output.permute(2, 0, 1, 3)


def follow(chunks: Sequence[Chunk], before: Sequence[Chunk]) -> bool:
    """Whether each chunk begins where another one of its request ends, in the same order."""
    return len(chunks) == len(before) and all([
        chunk.request is other.request and chunk.start == other.stop
        for chunk, other in zip(chunks, before, strict=True)
    ])  # fmt: skip


def batch_sizes(most: int) -> list[int]:
    """Sizes of batches: 1, 2, 4, 8, then in steps of 8 or about a quarter."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + (4 if last < 8 else max(8, 1 << (last.bit_length() - 3))))
    return [*[size for size in sizes if size < most], most]


def read_batch_sizes(sizes: Sequence[int] | None, most: int, *, padded: bool) -> list[int] | None:
    """The sizes that batches are padded to, ascending; None where they are not padded.

    Raises:
        TypeError, ValueError: for what are no whole numbers, and without max_sequences.
    """
    if sizes is None:
        return batch_sizes(most) if padded else None
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"batch_sizes: got {type(sizes).__name__}, takes whole numbers")
    for size in sizes:
        check_number("batch_sizes", size, least=1)
    if not sizes or max(sizes) != most:
        raise ValueError(
            f"batch_sizes: got {[*sizes]}, takes whole numbers of which max_sequences, {most}, is "
            "the largest"
        )
    return sorted(set(sizes))


def why_eager(model: PackedModel, asked: bool | None, ranks: int = 1) -> str:
    """Why steps are not captured; "" where they are.

    Args:
        asked: None: where there are graphs.
        ranks: that share the model.

    Raises:
        ValueError: where graphs are asked for and there are none.
    """
    device = model.device
    if device.type != "cuda":
        if asked:
            raise ValueError(f"cuda_graphs: got True for a model on {device}, takes it on a GPU")
        return f"the model is on {device}, where there are no CUDA graphs"
    if model.states:
        return "layers keep states, of which the host says in each step which are whose"
    if ranks > 1 and asked is None:
        return f"{ranks} ranks send messages in a step; cuda_graphs=True captures these as well"
    return "cuda_graphs is False" if asked is False else ""


# What the choice of tokens is captured for; other rows are chosen for eagerly.
CAPTURED = (Traits(), Traits(drawn=True), Traits(drawn=True, cut=True))


class Decoder:
    """Takes decode steps: by CUDA graphs, or eagerly where there are none.

    Args:
        model, cache, options: as in `BatchStep`.
        lanes: of the requests.
        longest: tokens of the longest sequence.
        sizes: of batches, ascending; others are padded to the next. None: every size is one.
        reason: why steps run eagerly; "" where they do not.
    """

    def __init__(
        self, model: PackedModel, cache: saccade.PagedCache, options: Mapping[str, Any],
        lanes: Lanes, longest: int, sizes: Sequence[int] | None, reason: str,
    ):  # fmt: skip
        self._model, self._cache, self._options = model, cache, options
        self._lanes, self.sizes, self.reason = lanes, sizes, reason
        self.most = lanes.spare if sizes is None else sizes[-1]
        width = -(-longest // cache.page_size)
        if None in cache.windows:  # which keeps all that a sequence has
            width = min(width, cache.num_pages[cache.windows.index(None)])
        widths = [width] * len(cache.windows)
        self.inbox = Inbox(self.most, widths, lanes.vocabulary, cache.device)
        self._widths = [0] * len(widths)  # pages of each row that the host's buffer has room for
        self._lanes_said: Sequence[int] = []  # of the requests whose rows it holds
        self._replaced_pages = 0  # in the cache, when their pages were said
        self._chunks: Sequence[Chunk] = []  # of the step that was said
        self._size = 0
        self._steps: dict[int, DecodeStep] = {}
        self._passes: dict[int, Callable[[], Tensor]] = {}
        self._choices: dict[tuple[int, Traits], Callable[[], Chosen]] = {}
        self._logits: Tensor | None = None  # of all captured passes
        self._pool: Any = None
        self.seconds = 0.0  # that capturing took, or trying

    @property
    def has_graphs(self) -> bool:
        """Whether steps are captured, and so read weights where they lay then."""
        return bool(self._passes)

    # ---- what the host says ----------------------------------------------------------------------

    def say(self, chunks: Sequence[Chunk], lanes: Sequence[int]) -> None:
        """Tell the device the rows of a step, each of which is one token.

        Rows that follow those of the step before read the tokens that it gave.
        """
        before, lanes_before = self._chunks, self._lanes_said
        self._chunks = chunks
        number = len(chunks)
        size = number if self.sizes is None else next(n for n in self.sizes if n >= number)
        width = self._pages_of_longest(chunks)
        same = size == self._size and lanes == lanes_before and follow(chunks, before)
        replaced, self._replaced_pages = self._replaced_pages, self._cache.replaced_pages
        same = same and replaced == self._replaced_pages
        self._lanes_said = []  # until all is written
        self.inbox.wait()
        if not same or any([width > room for room in self._widths]):
            rows = [
                Row(
                    chunk.request.last_token if chunk.known else DEVICES_OWN, chunk.start,
                    chunk.given - 1, lane, chunk.request.sampling,
                )
                for chunk, lane in zip(chunks, lanes, strict=True)
            ]  # fmt: skip
            self._write(chunks, rows, size)
        else:
            for row, chunk in enumerate(chunks):
                self.inbox.advance(row, chunk.start, chunk.given - 1)
                if chunk.start % self._cache.page_size == 0:
                    self._write_pages(row, chunk, size)
        self._lanes_said, self._size = lanes, size
        self.inbox.send(size, self._widths)

    def forget_rows(self) -> None:
        """Let the next step be said anew: what lanes hold may be of others."""
        self._lanes_said = []

    def say_rows(self, rows: Sequence[Row]) -> RowSettings:
        """Tell the device only how tokens are chosen."""
        self._lanes_said = []
        self.inbox.wait()
        for number, row in enumerate(rows):
            self.inbox.write(number, row)
        self.inbox.send(len(rows), [0] * len(self._widths))
        return self.inbox.settings(len(rows))

    def say_sequences(self, chunks: Sequence[Chunk], rows: Sequence[Row]) -> None:
        """Tell the device of as many sequences as there may be; those behind the last are padding.

        Args:
            rows: where each chunk begins, and how a token is chosen from its last row.
        """
        self._lanes_said = []
        size = self.most
        self.inbox.wait()
        self._write(chunks, rows, size)
        self.inbox.send(size, self._widths)

    def _pages_of_longest(self, chunks: Sequence[Chunk]) -> int:
        return -(-max([chunk.stop for chunk in chunks]) // self._cache.page_size)

    def _write(self, chunks: Sequence[Chunk], rows: Sequence[Row], size: int) -> None:
        room = 1 << (self._pages_of_longest(chunks) - 1).bit_length()
        self._widths = [min(room, table.shape[1]) for table in self.inbox.tables]
        for number, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            self.inbox.write(number, row)
            self._write_pages(number, chunk, size)
        for number in range(len(chunks), size):
            self.inbox.write(number, self.padding)

    def _write_pages(self, row: int, chunk: Chunk, size: int) -> None:
        assert chunk.request.sequence is not None  # it runs
        found = self._cache.page_numbers(chunk.request.sequence)
        before = 0
        for pages, width in zip(found, self._widths, strict=True):
            self.inbox.write_pages(before + row * width, pages)
            before += size * width

    @property
    def padding(self) -> Row:
        """A row that nobody asked for."""
        return Row(0, -1, 0, self._lanes.spare, Sampling())

    # ---- what the device does --------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, traits: Traits) -> Chosen:
        """The step that was said, and a token for each of its rows."""
        size = self._size
        take = self._passes.get(size)
        if take is None:
            step = self._step(size)
            return decoding.choose(self._model.logits(step), step.settings, traits, self._lanes)
        return self.choose(take(), traits)

    @torch.inference_mode()
    def choose(self, logits: Tensor, traits: Traits) -> Chosen:
        """A token from each row of logits, as was said of these rows.

        Args:
            logits: where graphs have them, if there are graphs.
        """
        size = len(logits)
        fitting = (
            self._choices[size, captured] for captured in CAPTURED
            if (size, captured) in self._choices
            and all(has or not asked for has, asked in zip(captured, traits, strict=True))
        )  # fmt: skip
        chosen = next(fitting, None)
        if chosen is not None:
            return chosen()
        return decoding.choose(logits, self.inbox.settings(size), traits, self._lanes)

    def _step(self, size: int) -> DecodeStep:
        """A step of so many rows; one is enough, but for the states of its sequences."""
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = DecodeStep(
                self._cache, self._model.numbers, self._options, self.inbox, self._lanes, size
            )
        if self._model.states:
            counts = self._model.states_of_layers
            step.states = StepStates(self._cache, counts, self._chunks, size)
        return step

    # ---- graphs ----------------------------------------------------------------------------------

    def warm_up(self, tries: bool, progress: bool) -> None:
        """Capture steps of all sizes, or try them where there are no graphs.

        A model that cannot be captured, since it reads numbers on the host say, is left to run
        eagerly, and `reason` says why.

        Args:
            tries: whether steps are tried that are not captured.
            progress: whether to show a bar, if the standard error is a terminal.
        """
        begin = time.perf_counter()
        if self.reason or self.sizes is None:
            if tries:
                self._try_eagerly(progress)
                self.seconds = time.perf_counter() - begin
            return
        try:
            # The largest first: others then fit into its memory.
            for size in shown(self.sizes[::-1], "Capturing decode steps", progress):
                self._capture(size)
        except Exception as error:  # whatever a model's code raises
            self._passes, self._choices, self._logits = {}, {}, None
            said = (str(error) or type(error).__name__).splitlines()[0]
            self.reason = f"{self._model.name} cannot be captured: {said}"
        self.seconds = time.perf_counter() - begin

    @torch.inference_mode()
    def _try_eagerly(self, progress: bool) -> None:
        """Take steps of rows that nobody asked for, which compiles what steps need."""
        sizes = self.sizes or batch_sizes(self._lanes.spare)
        for size in shown(sizes, "Compiling for decode steps", progress):
            self._model.logits(self._padded_step(size))

    def _padded_step(self, size: int) -> DecodeStep:
        """A step of padding alone."""
        self.say_nothing()
        return self._step(size)

    def say_nothing(self) -> None:
        """Tell the device of no request: all rows are padding."""
        self._lanes_said, self._size, self._chunks = [], 0, []
        self.inbox.wait()
        for number in range(self.most):
            self.inbox.write(number, self.padding)
        self.inbox.send(self.most, [0] * len(self._widths))

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        step = self._padded_step(size)
        if self._logits is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._logits = torch.empty_like(self._model.logits(step))
        logits = self._logits[:size]
        take = self.captured_pass(step, size)
        for traits in CAPTURED:
            chosen = captured(
                lambda traits=traits: decoding.choose(logits, step.settings, traits, self._lanes),
                self._pool,
            )
            self._choices[size, traits] = chosen
        self._passes[size] = take

    @torch.inference_mode()
    def captured_pass(self, step: Any, rows: int) -> Callable[[], Tensor]:
        """A pass of a step as a graph, that gives so many rows of logits where all graphs do."""
        assert self._logits is not None  # steps that decode are captured first
        logits = self._logits[:rows]
        return captured(lambda: logits.copy_(self._model.logits(step)), self._pool)

    def explain(self) -> str:
        """How steps run, and why."""
        if self.reason:
            said = f"decode steps run eagerly: {self.reason}"
        else:
            sizes = ", ".join(map(str, sorted(self._passes)))
            said = f"decode steps are CUDA graphs for {sizes} sequences ({self.seconds:.1f} s)"
        return said


def captured(work: Callable[[], Any], pool: Any) -> Callable[[], Any]:
    """Work as a CUDA graph: called again it does the same at the same addresses.

    Whatever it returns holds the last call's numbers until the next. The work itself is kept: a
    graph does not keep alive what it reads.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # kernels are compiled and loaded, libraries take their memory
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = work()

    kept = work, result

    def replay() -> Any:
        graph.replay()
        return kept[1]

    return replay


def shown(sizes: Sequence[Any], doing: str, progress: bool) -> Iterable[Any]:
    """Sizes one by one, with a bar on the standard error if that is a terminal."""
    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal)
    return track(sizes, doing, console=console, transient=True, disable=hidden)


class LaneNumbers:
    """Which request has which lane; a request that runs for the first time takes a free one."""

    def __init__(self, lanes: Lanes):
        self._lanes = lanes
        self._lane_of: dict[int, int] = {}
        self._free = list(range(lanes.spare))

    def keep(self, requests: Iterable[Request]) -> None:
        """Let go of the lanes of all others."""
        numbers = {request.number for request in requests}
        for number in [number for number in self._lane_of if number not in numbers]:
            self._free.append(self._lane_of.pop(number))

    def of(self, request: Request) -> int:
        """A request's lane, which holds what came before."""
        lane = self._lane_of.get(request.number)
        if lane is None:
            lane = self._free.pop()
            self._lane_of[request.number] = lane
            self._lanes.begin(
                lane, request.sampling, request.prompt, request.generated,
                request.limits.stop_tokens,
            )  # fmt: skip
        return lane

    def clear(self) -> None:
        """Let go of all of them."""
        self._lane_of, self._free = {}, list(range(self._lanes.spare))


def everyone(requests: Iterable[Request]) -> Iterable[Request]:
    """Requests and those that wait for their prompts."""
    return itertools.chain.from_iterable((each, *each.followers) for each in requests)

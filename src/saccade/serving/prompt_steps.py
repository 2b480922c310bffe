"""Steps that read prompts: chunks of them, and one row of each request that writes, in one pass.

Run eagerly, a pass over some hundred rows takes the host longer than a GPU. So such steps come at
fixed addresses too, in a few numbers of rows, and can be CUDA graphs: the host says how many rows
each sequence has and which tokens they are, and positions, slots, offsets and lengths follow on the
device. Rows behind the last one belong to no sequence and have the slot -1: they see nothing and
write nothing.

Steps of more rows keep a GPU busy for longer than the host takes. They are packed anew each time
(`model.BatchStep`).
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

import saccade
from saccade.serving.decode_steps import DEVICES_OWN, Decoder, Inbox, Row, shown
from saccade.serving.decoding import Lanes, Sampling, check_number
from saccade.serving.model import BatchStep, LayerCall, PackedModel, PackedRows
from saccade.serving.request import Limits, Request
from saccade.serving.scheduler import Chunk, StepPlan

# Rows of captured steps. Beyond the last of them 8 billion parameters take an H200 as long as they
# take the host; rows of padding cost nothing as long as weights take longer to read.
SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024)


def read_prompt_sizes(sizes: Sequence[int] | None, most: int, *, padded: bool) -> list[int] | None:
    """The numbers of rows that steps with prompts are padded to, ascending; None: they are not.

    Args:
        most: rows of a step.
        padded: whether they are if nothing is asked for.

    Raises:
        TypeError, ValueError: for what are no whole numbers up to `most`.
    """
    if sizes is None:
        return [size for size in SIZES if size < most] + [min(most, SIZES[-1])] if padded else None
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"prompt_sizes: got {type(sizes).__name__}, takes whole numbers")
    for size in sizes:
        check_number("prompt_sizes", size, least=1)
    if sizes and max(sizes) > most:
        raise ValueError(
            f"prompt_sizes: got {[*sizes]}, takes whole numbers up to max_batch_tokens, {most}"
        )
    return sorted(set(sizes)) or None


class PackedTokens:
    """The tokens of a packed step: one buffer of the host, one copy, the same on the device.

    Args:
        rows, sequences: at most.
    """

    def __init__(self, rows: int, sequences: int, device: torch.device):
        self._sequences, on_gpu = sequences, device.type == "cuda"
        self._host = torch.empty(
            sequences + rows, dtype=torch.int64, device="cpu", pin_memory=on_gpu
        )
        self._there = torch.zeros(sequences + rows, dtype=torch.int64, device=device)
        self._words = (ctypes.c_int64 * (sequences + rows)).from_address(self._host.data_ptr())
        self._copied = torch.cuda.Event() if on_gpu else None

    @property
    def counts(self) -> Int[Tensor, " sequences"]:
        """How many rows each sequence has."""
        return self._there[: self._sequences]

    def tokens(self, rows: int) -> Int[Tensor, " rows"]:
        """The token of each row, or DEVICES_OWN."""
        return self._there[self._sequences :][:rows]

    def send(self, counts: Sequence[int], tokens: Sequence[int]) -> None:
        """Say both; sequences behind the last have no rows."""
        if self._copied is not None:
            self._copied.synchronize()
        self._words[: self._sequences] = [*counts, *[0] * (self._sequences - len(counts))]
        used = self._sequences + len(tokens)
        self._words[self._sequences : used] = tokens
        self._there[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class PromptStep(PackedRows):
    """One pass over so many rows of several sequences, at fixed addresses.

    Args:
        cache, layers, options: as in `PackedRows`.
        inbox: says where each sequence begins, and its pages. packed: says its tokens.
    """

    layers_are_checked = True  # by the same layers, called with a `BatchStep` before
    states = None

    def __init__(
        self, cache: saccade.PagedCache, layers: Mapping[LayerCall, int],
        options: Mapping[str, Any], inbox: Inbox, lanes: Lanes, packed: PackedTokens, rows: int,
    ):  # fmt: skip
        super().__init__(cache, layers, options)
        self._packed, self._last_tokens, self.rows = packed, lanes.last_tokens, rows
        sequences = len(packed.counts)
        self._starts, self._lanes = inbox.positions(sequences), inbox.settings(sequences).lanes
        self._page_tables = [table[:sequences] for table in inbox.tables]
        self._row_numbers = torch.arange(rows, device=cache.device)

    def begin(self) -> tuple[Int[Tensor, "1 rows"], Int[Tensor, "1 rows"]]:
        """The rows' tokens and positions; slots, offsets and lengths follow from these."""
        self._calls.begin()
        counts, given = self._packed.counts, self._packed.tokens(self.rows)
        ends = counts.cumsum(0)
        self._offsets = F.pad(ends, (1, 0)).to(torch.int32)
        self.last_rows = (ends - 1).clamp_min(0)
        of_row = torch.searchsorted(ends, self._row_numbers, right=True)
        real = of_row < len(counts)
        of_row = of_row.clamp_max(len(counts) - 1)
        first_positions = self._starts - (ends - counts)  # of the first row of all
        positions = first_positions.index_select(0, of_row) + self._row_numbers
        positions = torch.where(real, positions, 0)
        own = self._last_tokens.index_select(0, self._lanes).index_select(0, of_row)
        tokens = torch.where(real, torch.where(given >= 0, given, own), 0)
        lens = torch.where(counts > 0, self._starts + counts, 0).to(torch.int32)
        size = self._cache.page_size
        number, slot = positions // size, positions % size
        self._slots = [
            torch.where(real, table[of_row, number] * size + slot, -1)
            for table in self._page_tables
        ]
        self._tables = [(table, lens) for table in self._page_tables]
        return tokens.unsqueeze(0), positions.unsqueeze(0)


class PromptSteps:
    """Takes steps that read prompts: padded to a few sizes, or packed anew each time.

    Args:
        model, cache, options: as in `BatchStep`.
        decoder: that takes the steps without prompts. Where it has graphs, so has this.
        sizes: numbers of rows, ascending; steps of more rows are packed anew. None: all are.
    """

    def __init__(
        self, model: PackedModel, cache: saccade.PagedCache, options: Mapping[str, Any],
        lanes: Lanes, decoder: Decoder, sizes: Sequence[int] | None,
    ):  # fmt: skip
        self._model, self._cache, self._options = model, cache, options
        self._lanes, self._decoder = lanes, decoder
        self.sizes = None if model.states or model.long_rotations else sizes
        self._passes: dict[int, Callable[[], Tensor]] = {}
        self._packed: PackedTokens | None = None
        if self.sizes:
            self._packed = PackedTokens(self.sizes[-1], decoder.most, cache.device)
        self.reason = ""  # why none is captured although steps that decode are
        self.seconds = self._tried = 0.0  # that capturing took, and trying

    def size_of(self, plan: StepPlan) -> int | None:
        """The rows that a step is padded to; None where it is packed anew."""
        return next((size for size in self.sizes or () if size >= plan.rows), None)

    def packed(self, plan: StepPlan, lanes: Sequence[int]) -> Tensor:
        """The logits of each chunk's last row, by a step that is packed anew.

        Args:
            lanes: of the chunks' requests, where tokens lie that the host has not seen.
        """
        step = BatchStep(
            self._cache, plan, self._model.numbers, self._options, self._model.states_of_layers
        )
        if not all([chunk.known for chunk in plan.chunks]):
            step.take_last(self._lanes.last_tokens, lanes)
        return self._model.logits(step)

    @torch.inference_mode()
    def padded(self, plan: StepPlan, rows: Sequence[Row], size: int) -> Tensor:
        """The logits of each chunk's last row, by a step of so many rows.

        Behind those of the chunks come logits that mean nothing, one for each sequence that there
        might be.

        Args:
            rows: where each chunk begins, and how a token is chosen from its last row.
        """
        self._decoder.say_sequences(plan.chunks, rows)
        self._send(plan.chunks)
        take = self._passes.get(size)
        return self._model.logits(self._step(size)) if take is None else take()

    def _send(self, chunks: Sequence[Chunk]) -> None:
        assert self._packed is not None  # there are sizes
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.tokens if chunk.known else [DEVICES_OWN]
        self._packed.send([chunk.rows for chunk in chunks], tokens)

    def _step(self, size: int) -> PromptStep:
        assert self._packed is not None  # there are sizes
        return PromptStep(
            self._cache, self._model.numbers, self._options, self._decoder.inbox, self._lanes,
            self._packed, size,
        )  # fmt: skip

    # ---- before requests come --------------------------------------------------------------------

    def warm_up(self, rows: int, progress: bool) -> None:
        """Capture steps of all sizes where there are graphs, and try what is not captured.

        Steps without prompts come first: graphs of the others give their logits where those do.

        Args:
            rows: of steps, at most; 0: nothing is tried.
            progress: whether to show a bar, if the standard error is a terminal.
        """
        self._decoder.warm_up(rows > 0, progress)
        begin = time.perf_counter()
        if self.sizes and not self._decoder.reason:
            try:
                for size in shown(self.sizes[::-1], "Capturing steps that read prompts", progress):
                    self._decoder.say_nothing()
                    self._send([])
                    take = self._decoder.captured_pass(self._step(size), self._decoder.most)
                    self._passes[size] = take
            except Exception as error:  # whatever a model's code raises
                self._passes, self.sizes = {}, None
                said = (str(error) or type(error).__name__).splitlines()[0]
                self.reason = f"{self._model.name} cannot be captured: {said}"
        self.seconds = time.perf_counter() - begin
        if rows:
            least = 1 if self.sizes is None else self.sizes[-1] + 1
            self._tried = warm_up_packed(
                self._model, self._cache, self._options, range(least, rows + 1), self._lanes.spare,
                progress=progress,
            )  # fmt: skip

    def explain(self) -> str:
        """How steps run, and why."""
        said = []
        if self._passes:
            sizes = ", ".join(map(str, sorted(self._passes)))
            said.append(
                f"steps that read prompts are CUDA graphs for {sizes} rows ({self.seconds:.1f} s)"
            )
        elif self.reason:
            said.append(f"steps that read prompts run eagerly: {self.reason}")
        elif self.sizes:
            said.append(f"steps that read prompts are padded to {[*self.sizes]} rows")
        if self._tried:
            tried, seconds = "steps that read prompts", self._tried
            if self._decoder.reason:
                tried, seconds = "steps of all sizes", seconds + self._decoder.seconds
            elif self._passes:
                tried = "larger ones"
            said.append(f"{tried} were tried ({seconds:.1f} s)")
        return "\n".join(said)


# Which kernels a packed step needs follows from how many rows and sequences there are, in powers of
# two: so one step of each size compiles all of them.


def packed_sizes(rows: range, sequences: int) -> list[tuple[int, int]]:
    """Sizes of packed steps, of rows and of sequences, between which no other kernel is needed."""

    def powers(most: int) -> list[int]:
        return [*(1 << power for power in range((most - 1).bit_length())), most]

    return [
        (row, each) for row in powers(rows.stop - 1) if row in rows
        for each in powers(sequences) if each <= row
    ]  # fmt: skip


def warm_up_packed(
    model: PackedModel, cache: saccade.PagedCache, options: Mapping[str, Any],
    rows: range, sequences: int, *, progress: bool,
) -> float:  # fmt: skip
    """Take a packed step of each size, in free pages of the cache; the seconds that it took.

    What has no room in the cache is left out: it will never come.
    """
    begin = time.perf_counter()
    if not rows:
        return 0.0
    for of_step, among in shown(packed_sizes(rows, sequences), "Compiling for prompts", progress):
        numbers = [cache.allocate() for _ in range(among)]
        ends = [of_step * each // among for each in range(among + 1)]
        counts = [stop - start for start, stop in itertools.pairwise(ends)]
        try:
            slots = cache.grow(dict(zip(numbers, counts, strict=True)))
            chunks = []
            for number, count in zip(numbers, counts, strict=True):
                request = Request(number, [0] * count, Sampling(), Limits(1), sequence=number)
                chunks.append(Chunk(request, 0, count, True))
            plan = StepPlan(chunks, slots)
            model.logits(BatchStep(cache, plan, model.numbers, options, model.states_of_layers))
        except saccade.OutOfPagesError:
            continue
        finally:
            for number in numbers:
                cache.free(number)
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
    return time.perf_counter() - begin

"""Worker: takes an engine's steps, each of which is planned, computed and looked at."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from saccade import PagedCache
from saccade.serving import decoding
from saccade.serving.caller_modes import without_callers_modes
from saccade.serving.decode_steps import Decoder, LaneNumbers, Row, everyone
from saccade.serving.decoding import Chosen, Lanes, Sampling, Traits
from saccade.serving.model import PackedModel
from saccade.serving.prompt_steps import PromptSteps
from saccade.serving.request import Counts, EngineStatistics, Request, RequestState, TokenLogprob
from saccade.serving.scheduler import Chunk, Scheduler, StepPlan

R = TypeVar("R")

log = logging.getLogger("saccade.engine")
MOST_FAILURES = 3  # steps of a request that fail with nothing computed between; then it ends
UNUSED = Sampling()  # of a row that is only looked at


class Drawn(NamedTuple):
    """Tokens drawn from the logits of a chunk's last row, for its request and its followers.

    `tokens` is empty where a logit is NaN or inf.
    """

    chunk: Chunk
    requests: list[Request]
    tokens: list[int]
    logprobs: list[TokenLogprob | None]


def wait_for(done: Any, seconds: float | None) -> None:
    """Wait for an event of a device.

    Raises:
        RuntimeError: where it has not come after so many seconds.
    """
    if seconds is None:
        done.synchronize()
        return
    end = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > end:
            raise RuntimeError(f"the device has not finished a step in {seconds:g} s")
        time.sleep(0)  # lets other threads of this process run


class UnderWay(NamedTuple):
    """A step that the device computes, or has computed, and nobody has looked at.

    Attributes:
        requests: that draw from each chunk's last row.
        chosen: their tokens one after the other, on the host once `done` has come.
    """

    plan: StepPlan
    requests: list[list[Request]]
    chosen: Chosen
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, plan: StepPlan, requests: list[list[Request]], chosen: Chosen) -> UnderWay:
        """What is copied to the host as soon as it is there."""
        # A graph writes the next step's tokens to the same addresses.
        copies = (
            None if each is None else each.to("cpu", non_blocking=True, copy=True)
            for each in chosen
        )
        copied = Chosen(*copies)  # pyright: ignore[reportArgumentType]  # tokens are always there
        if chosen.tokens.device.type != "cuda":
            return cls(plan, requests, copied, None)
        done = torch.cuda.Event()
        done.record()
        return cls(plan, requests, copied, done)

    def look(self, seconds: float | None = None) -> list[Drawn]:
        """Wait for the tokens, and give each chunk its own.

        Args:
            seconds: that the device may take. None: without end.

        Raises:
            RuntimeError: where it takes longer.
        """
        if self.done is not None:
            wait_for(self.done, seconds)
        tokens, stop = self.chosen.tokens.tolist(), 0
        found = []
        for chunk, requests in zip(self.plan.chunks, self.requests, strict=True):
            start, stop = stop, stop + len(requests)
            drawn = tokens[start:stop]
            logprobs: list[TokenLogprob | None] = [None] * len(requests)
            if self.chosen.logprobs is not None:
                logprobs = [
                    self._logprob(row, tokens[row], request)
                    for row, request in enumerate(requests, start)
                ]
            found.append(Drawn(chunk, requests, [] if -1 in drawn else drawn, logprobs))
        return found

    def _logprob(self, row: int, token: int, request: Request) -> TokenLogprob | None:
        most = request.sampling.logprobs
        if most is None or self.chosen.logprobs is None or self.chosen.likeliest is None:
            return None
        of_chosen, *others = self.chosen.logprobs[row, : 1 + most].tolist()
        likeliest = self.chosen.likeliest[row, :most].tolist()
        return TokenLogprob(token, of_chosen, list(zip(likeliest, others, strict=True)))


class Worker:
    """Takes a step: plans it, computes it, checks the logits and hands out tokens.

    An exception or interrupt in any line of that loses no request: all that is kept of a request
    is its prompt and what it has written. The next call begins again from there, and finds most of
    what was computed in the prefix cache. A request whose steps fail again and again is ended.

    Args:
        ahead: whether a step is begun before the tokens of the one before are looked at.
    """

    tries_again = True  # after a step that failed
    device_seconds: float | None = None  # that a step may take there; None: without end

    def __init__(
        self, model: PackedModel, cache: PagedCache, scheduler: Scheduler, decoder: Decoder,
        prompts: PromptSteps, lanes: Lanes, *, ahead: bool,
    ):  # fmt: skip
        self._model, self._cache, self._scheduler = model, cache, scheduler
        self._decoder, self._prompts, self._lanes = decoder, prompts, lanes
        self._lane_numbers = LaneNumbers(lanes)
        self._ahead = ahead
        self._under_way: UnderWay | None = None
        scheduler.weights_version = model.weights_version()
        self._counts = Counts()
        # Requests that no step has seen yet: submitting waits for no step that is being computed.
        self._submitted: deque[Request] = deque()
        self._lock = threading.RLock()
        self._half_done = False  # whether an exception now leaves a step half done
        self._changed = False  # whether the last look at the model was refused

    def submit(self, request: Request) -> None:
        """One more request, with those that follow it; from any thread."""
        self._submitted.append(request)

    def step(self) -> bool:
        """Take one step; False if there was nothing to do.

        One that fails counts against the requests that took part: in the next steps each of them is
        computed alone, and ends where these fail too. Interrupts count against nobody.
        """
        with self._lock:
            try:
                return self._exclusively(self._take_step)
            except Exception as error:
                self._blame(error)
                raise

    def step_on(self) -> bool:
        """Take one step for somebody who waits for a request, and goes on after one that failed."""
        try:
            return self.step()
        except Exception:
            if not self.tries_again:
                raise
            log.warning("a step failed, and is tried again", exc_info=True)
            return True

    def _blame(self, error: Exception) -> None:
        """Count a step that failed, and end the requests at fault."""
        under_way = [] if self._under_way is None else self._under_way.plan.chunks
        trying = [*(chunk.request for chunk in under_way), *self._scheduler.trying]
        if not trying:
            self._take_in()
        ended = [each for each in self._scheduler.blame(trying) if each.failures >= MOST_FAILURES]
        if not ended:
            return
        traceback.clear_frames(error.__traceback__)  # they hold what the step computed
        for request in ended:
            request.fault = error
        try:
            self._recover()
        except Exception:  # nothing works any more, but nobody waits for ever
            for request in ended:
                request.finish("error", error)

    def cancel(self, request: Request) -> None:
        """End a request that is not wanted any more."""

        def cancelled() -> None:
            if request.state is not RequestState.DONE:
                self._take_in()
                self._end(request, "cancelled")

        self._exclusively(cancelled)

    def statistics(self) -> EngineStatistics:
        """What there is now, and what was done so far."""
        with self._lock:
            self._recover()
            counts = self._counts
            return EngineStatistics(
                waiting=len(self._scheduler.waiting) + len(self._submitted),
                running=len(self._scheduler.running),
                preemptions=self._scheduler.preemptions,
                pages=sum(self._cache.num_pages),
                states=self._cache.num_states,
                tokens_per_second=counts.new_tokens / counts.busy if counts.busy else 0.0,
                cache=self._cache.statistics(),
                **vars(counts),
            )

    @without_callers_modes
    def _exclusively(self, work: Callable[[], R]) -> R:
        """Do something that changes the engine, while no other thread does."""
        with self._lock:
            self._recover()
            self._half_done = True
            result = work()
            self._half_done = False
            return result

    def _recover(self) -> None:
        """Begin again with all requests that are not done, if a step is left half done."""
        if not self._half_done:
            return
        self._under_way = None  # what it gives is drawn again, by the same numbers
        self._lane_numbers.clear()
        self._decoder.forget_rows()
        for request in self._scheduler.recover():
            try:
                request.restart()
                reason, error = request.outcome(), None
                if reason is None and request.fault is not None:
                    reason, error = "error", request.fault
            except Exception as problem:  # of the tokenizer
                reason, error = "error", problem
            if reason is not None:
                self._end(request, reason, error)
        self._half_done = False

    def _look_at_weights(self) -> None:
        """Begin again with all requests if weights were written: what was computed is by others."""
        self._model.check_same(addresses_matter=self._decoder.has_graphs)
        version = self._model.weights_version()
        if version != self._scheduler.weights_version:
            self._scheduler.weights_version = version
            self._recover()
            self._half_done = True

    def _take_in(self) -> None:
        while self._submitted:
            if not self._scheduler.knows(self._submitted[0]):
                self._scheduler.add(self._submitted[0])
            self._submitted.popleft()  # the last, so that an interrupt loses none

    def _take_step(self) -> bool:
        """Take a step of a model that is what it was."""
        self._scheduler.trying = []
        if self._submitted or self._changed or not self._model.seems_same():
            self._changed = True  # in each step, until a look finds nothing
            self._look_at_weights()
            self._changed = False
        if self._model.module.training:
            self._model.check_mode()
        self._take_in()
        try:
            return self._advance()
        except Exception as error:  # a changed model may fail before its change was looked for
            try:
                self._model.check_same(addresses_matter=self._decoder.has_graphs)
            except RuntimeError as changed:
                raise changed from error
            raise

    def _advance(self) -> bool:
        """Begin a step, and look at what one before it gave: at the same if nothing is to follow
        before that."""
        begin = time.perf_counter()
        under_way, following = self._under_way, None
        if under_way is None:
            plan = self._scheduler.plan()
            if plan is None:
                return False
            self._lane_numbers.keep(everyone(self._scheduler.running))
            under_way = self._begin(plan)
            if self._ahead and plan.can_be_followed:
                self._under_way = under_way
                self._counts.busy += time.perf_counter() - begin
                return True
        else:
            plan = self._scheduler.plan_ahead(under_way.plan)
            self._lane_numbers.keep(everyone(self._scheduler.running))
            following = None if plan is None else self._begin(plan)
        self._finish(under_way)
        self._under_way = following
        self._counts.busy += time.perf_counter() - begin
        return True

    def _begin(self, plan: StepPlan) -> UnderWay:
        """Hand the device the forward pass, and what draws tokens from the rows' logits."""
        self._counts.steps += 1
        self._counts.rows += plan.rows
        if plan.decodes:
            requests = [chunk.request for chunk in plan.chunks]
            lanes = [self._lane_numbers.of(request) for request in requests]
            self._decoder.say(plan.chunks, lanes)
            traits = Traits.of_any([request.sampling.traits for request in requests])
            chosen = self._decoder.run(traits)
            return UnderWay.of(plan, [[request] for request in requests], chosen)
        return self._begin_prompts(plan)

    def _begin_prompts(self, plan: StepPlan) -> UnderWay:
        size = self._prompts.size_of(plan)
        drawing = [
            [chunk.request, *chunk.request.followers] if chunk.draws else [chunk.request]
            for chunk in plan.chunks
        ]
        if size is None:
            lanes = [
                self._lanes.spare if chunk.known else self._lane_numbers.of(chunk.request)
                for chunk in plan.chunks
            ]
            logits = self._prompts.packed(plan, lanes)
        else:
            rows = [self._row(chunk, chunk.request) for chunk in plan.chunks]
            logits = self._prompts.padded(plan, rows, size)
            if plan.can_be_followed:  # every chunk is one row of what is drawn
                traits = Traits.of_any([row.sampling.traits for row in rows])
                return UnderWay.of(plan, drawing, self._decoder.choose(logits, traits))
        rows = [
            self._row(chunk, request)
            for chunk, requests in zip(plan.chunks, drawing, strict=True)
            for request in requests
        ]
        of_chunk = [number for number, requests in enumerate(drawing) for _ in requests]
        settings = self._decoder.say_rows(rows)
        traits = Traits.of_any([row.sampling.traits for row in rows])
        with torch.inference_mode():
            if len(rows) > len(plan.chunks):
                logits = logits[of_chunk]
            chosen = decoding.choose(logits, settings, traits, self._lanes)
        return UnderWay.of(plan, drawing, chosen)

    def _row(self, chunk: Chunk, request: Request) -> Row:
        """How a token is drawn from a chunk's last row; where none is, it is only looked at."""
        given = chunk.given - 1
        if not chunk.draws:
            return Row(0, chunk.start, given, self._lanes.spare, UNUSED)
        return Row(0, chunk.start, given, self._lane_numbers.of(request), request.sampling)

    def _finish(self, under_way: UnderWay) -> None:
        """Look at what a step gave; requests that ended meanwhile are none of its business."""
        drawn = [
            each for each in under_way.look(self.device_seconds)
            if each.chunk.request.state is not RequestState.DONE
        ]  # fmt: skip
        # Other requests may find what was computed only if its logits are finite.
        self._scheduler.commit([each.chunk for each in drawn if each.tokens])
        for each in drawn:
            if each.tokens and each.chunk.draws and each.chunk.request.followers:
                self._scheduler.fork(each.chunk.request)
        for each in drawn:
            if not each.tokens:
                self._fail(each)
            elif each.chunk.draws:
                given = zip(each.requests, each.tokens, each.logprobs, strict=True)
                for request, token, logprob in given:
                    self._accept(request, token, logprob)

    def _accept(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """Hand a request its new token; an error in that ends this request alone."""
        first = not request.generated
        try:
            reason = request.accept(token, logprob)
        except Exception as error:
            self._end(request, "error", error)
            return
        self._counts.new_tokens += 1
        if first:
            self._counts.prompt_tokens += len(request.prompt)
            self._counts.cached_tokens += request.computed_from_cache
        if reason is not None:
            self._end(request, reason)

    def _fail(self, drawn: Drawn) -> None:
        """End a request whose logits are NaN or inf, or leave no token that it may take, and those
        that wait for its prompt."""
        error = FloatingPointError(
            "logits: the model gave NaN or inf for this request, or its options allow no token; "
            "pages that it computed or shared are not used again"
        )
        self._scheduler.forget_computed(drawn.chunk.request)
        for request in reversed([*everyone([drawn.chunk.request])]):
            self._end(request, "error", error)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        request.finish(reason, error)
        self._scheduler.remove(request)
        self._counts.done += 1

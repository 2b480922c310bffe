"""Worker: takes the steps of an engine, and keeps it whole whatever is raised in one of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from saccade import PagedCache
from saccade.serving import completion
from saccade.serving.completion import Counts, EngineStatistics
from saccade.serving.model import BatchStep, PackedModel
from saccade.serving.request import Request, RequestState
from saccade.serving.sampling import Draw, Sampling, choose
from saccade.serving.scheduler import Scheduler, Share, StepPlan

R = TypeVar("R")

UNUSED = Draw(Sampling(), 0.0)  # of a row that is only looked at


class Drawn(NamedTuple):
    """What a share's last row gave to its request and those that follow it.

    `tokens` is empty where the logits are no numbers.
    """

    share: Share
    requests: list[Request]
    tokens: list[int]

    @property
    def sound(self) -> bool:
        """Whether the model gave numbers."""
        return bool(self.tokens)


class Worker:
    """Plans a step, computes it, looks at what came, and hands it out.

    An exception in any line of that, an interrupt too, loses no request: all that is kept of one
    is what it was asked and what it has written. The next call begins again from there, and finds
    most of what was computed in the prefix cache.

    Args:
        options: of `saccade.attention_paged`.
    """

    def __init__(
        self, model: PackedModel, cache: PagedCache, scheduler: Scheduler,
        options: Mapping[str, Any],
    ):  # fmt: skip
        self._model, self._cache, self._scheduler = model, cache, scheduler
        self._options = options
        self._counts = Counts()
        # Those that no step has seen yet: submitting waits for no step that is being computed.
        self._submitted: deque[Request] = deque()
        self._lock = threading.RLock()
        self._torn = False  # whether an exception now leaves a step half done

    def submit(self, request: Request) -> None:
        """One more request, with those that follow it; from any thread."""
        self._submitted.append(request)

    def step(self) -> bool:
        """Take one step; False if there was nothing to do."""
        return self._alone(self._take_step)

    def cancel(self, request: Request) -> None:
        """End a request that is not wanted any more."""

        def cancelled() -> None:
            if request.state is not RequestState.DONE:
                self._take_in()
                self._end(request, "cancelled")

        self._alone(cancelled)

    def statistics(self) -> EngineStatistics:
        """What there is now, and what was done so far."""
        with self._lock:
            self._mend()
            return completion.of_engine(
                self._counts,
                waiting=len(self._scheduler.waiting) + len(self._submitted),
                running=len(self._scheduler.running),
                preemptions=self._scheduler.preemptions,
                pages=sum(self._cache.num_pages),
                cache=self._cache,
            )

    def _alone(self, work: Callable[[], R]) -> R:
        """Do something that changes the engine, while no other thread does."""
        with self._lock:
            self._mend()
            self._torn = True
            result = work()
            self._torn = False
            return result

    def _mend(self) -> None:
        """Begin again with everybody who is not done, if an exception left a step half done."""
        if not self._torn:
            return
        for request in self._scheduler.recover():
            try:
                request.restart()
                reason, error = request.outcome(), None
            except Exception as problem:  # of the tokenizer
                reason, error = "error", problem
            if reason is not None:
                self._end(request, reason, error)
        self._torn = False

    def _take_in(self) -> None:
        while self._submitted:
            if not self._scheduler.knows(self._submitted[0]):
                self._scheduler.add(self._submitted[0])
            self._submitted.popleft()  # the last, so that an interrupt loses none

    def _take_step(self) -> bool:
        self._take_in()
        begin = time.perf_counter()
        plan = self._scheduler.plan()
        if plan is None:
            return False
        drawn = self._compute(plan)
        # Others may find what was computed once it is seen to have given numbers.
        self._scheduler.commit([each.share for each in drawn if each.sound])
        for each in drawn:
            if each.sound and each.share.draws:
                self._scheduler.fork(each.share.request)
        self._counts.steps += 1
        self._counts.rows += plan.slots[0].shape[0]
        for each in drawn:
            if not each.sound:
                self._fail(each)
            elif each.share.draws:
                for request, token in zip(each.requests, each.tokens, strict=True):
                    self._accept(request, token)
        self._counts.busy += time.perf_counter() - begin
        return True

    def _compute(self, plan: StepPlan) -> list[Drawn]:
        """The forward pass, and tokens from the last row of each share."""
        step = BatchStep(self._cache, plan, self._model.numbers, self._options)
        logits = self._model.logits(step)
        rows, draws, everyone = [], list[Draw](), list[list[Request]]()
        for row, share in enumerate(plan.shares):
            requests = [share.request, *share.request.followers]
            wanted = [each.draw() for each in requests] if share.draws else [UNUSED]
            everyone.append(requests)
            rows += [row] * len(wanted)
            draws += wanted
        if len(rows) > len(plan.shares):
            logits = logits[rows]
        tokens: list[list[int]] = [[] for _ in plan.shares]
        for row, token in zip(rows, choose(logits, draws), strict=True):
            if token is not None:
                tokens[row].append(token)
        return [Drawn(*each) for each in zip(plan.shares, everyone, tokens, strict=True)]

    def _accept(self, request: Request, token: int) -> None:
        """Hand a request its new token. What goes wrong with it harms no other request."""
        first = not request.generated
        try:
            reason = request.accept(token)
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
        """End a request, and those that wait for its prompt, whose logits are no numbers."""
        error = FloatingPointError(
            "logits: the model gave NaN or inf for this request; pages that it computed or shared "
            "are not used again"
        )
        self._scheduler.distrust(drawn.share.request)
        for request in reversed(drawn.requests):
            self._end(request, "error", error)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        request.finish(reason, error)
        self._scheduler.remove(request)
        self._counts.done += 1

"""Engine: many requests at once through one Hugging Face causal model, on Saccade's pages."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from typing_extensions import Unpack

from saccade import PagedCache
from saccade.serving import decoding
from saccade.serving.compiled_layers import compile_layers, read_compile
from saccade.serving.decode_steps import (
    Decoder,
    LaneNumbers,
    Row,
    everyone,
    read_batch_sizes,
    why_eager,
)
from saccade.serving.decoding import (
    Chosen,
    Lanes,
    Sampling,
    TextStream,
    Tokenizer,
    Traits,
    check_number,
)
from saccade.serving.merged_products import check_merged
from saccade.serving.model import BatchStep, PackedModel
from saccade.serving.request import (
    Completion,
    Counts,
    EngineStatistics,
    Generated,
    Limits,
    Prompt,
    Request,
    RequestOptions,
    RequestState,
    TokenLogprob,
    check_options,
    list_prompts,
    read_limits,
    read_prompt,
    read_sampling,
)
from saccade.serving.scheduler import (
    Capacity,
    Chunk,
    Preemption,
    Scheduler,
    StepPlan,
    make_capacity,
)
from saccade.serving.states import explain_states

R = TypeVar("R")

UNUSED = Sampling()  # of a row that is only looked at


class Drawn(NamedTuple):
    """Tokens drawn from the logits of a chunk's last row, for its request and its followers.

    `tokens` is empty where a logit is NaN or inf.
    """

    chunk: Chunk
    requests: list[Request]
    tokens: list[int]
    logprobs: list[TokenLogprob | None]

    @property
    def finite(self) -> bool:
        """Whether the logits were finite."""
        return bool(self.tokens)


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

    def look(self) -> list[Drawn]:
        """Wait for the tokens, and give each chunk its own."""
        if self.done is not None:
            self.done.synchronize()
        tokens, row = self.chosen.tokens.tolist(), 0
        found = []
        for chunk, requests in zip(self.plan.chunks, self.requests, strict=True):
            rows = range(row, row + len(requests))
            row = rows.stop
            drawn = [tokens[number] for number in rows if tokens[number] >= 0]
            logprobs = [
                self._logprob(number, tokens[number], request)
                for number, request in zip(rows, requests, strict=True)
            ]
            found.append(Drawn(chunk, requests, drawn, logprobs))
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
    what was computed in the prefix cache.

    Args:
        options: of `saccade.attention_paged`.
        ahead: whether a step is begun before the tokens of the one before are looked at.
    """

    def __init__(
        self, model: PackedModel, cache: PagedCache, scheduler: Scheduler, decoder: Decoder,
        lanes: Lanes, options: Mapping[str, Any], *, ahead: bool,
    ):  # fmt: skip
        self._model, self._cache, self._scheduler = model, cache, scheduler
        self._decoder, self._lanes, self._options = decoder, lanes, options
        self._lane_numbers = LaneNumbers(lanes)
        self._ahead = ahead
        self._under_way: UnderWay | None = None
        scheduler.weights_version = model.weights_version()
        self._counts = Counts()
        # Requests that no step has seen yet: submitting waits for no step that is being computed.
        self._submitted: deque[Request] = deque()
        self._lock = threading.RLock()
        self._half_done = False  # whether an exception now leaves a step half done

    def submit(self, request: Request) -> None:
        """One more request, with those that follow it; from any thread."""
        self._submitted.append(request)

    def step(self) -> bool:
        """Take one step; False if there was nothing to do."""
        return self._exclusively(self._take_step)

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
        for request in self._scheduler.recover():
            try:
                request.restart()
                reason, error = request.outcome(), None
            except Exception as problem:  # of the tokenizer
                reason, error = "error", problem
            if reason is not None:
                self._end(request, reason, error)
        self._half_done = False

    def _look_at_weights(self) -> None:
        """Begin again with all requests if weights were written: what was computed is by others."""
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
        """Begin a step, and look at what one before it gave: at the same if nothing is to follow
        before that."""
        if self._submitted:
            self._look_at_weights()
        self._take_in()
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
            self._decoder.say(plan.chunks, lanes, ahead=plan.ahead)
            traits = Traits.of_any([request.sampling.traits for request in requests])
            chosen = self._decoder.run(traits)
            return UnderWay.of(plan, [[request] for request in requests], chosen)
        return self._begin_prompts(plan)

    def _begin_prompts(self, plan: StepPlan) -> UnderWay:
        step = BatchStep(
            self._cache, plan, self._model.numbers, self._options, self._model.states_of_layers
        )
        if not all([chunk.known for chunk in plan.chunks]):
            lanes = [
                self._lanes.spare if chunk.known else self._lane_numbers.of(chunk.request)
                for chunk in plan.chunks
            ]
            step.take_last(self._lanes.last_tokens, lanes)
        logits = self._model.logits(step)
        drawing: list[list[Request]] = []
        rows: list[Row] = []
        of_chunk: list[int] = []
        for number, chunk in enumerate(plan.chunks):
            requests = [chunk.request, *chunk.request.followers] if chunk.draws else [chunk.request]
            drawing.append(requests)
            for request in requests:
                lane = self._lane_numbers.of(request) if chunk.draws else self._lanes.spare
                sampling = request.sampling if chunk.draws else UNUSED
                rows.append(Row(0, -1, chunk.given - 1, lane, sampling))
                of_chunk.append(number)
        if len(rows) > len(plan.chunks):
            logits = logits[of_chunk]
        settings = self._decoder.say_rows(rows)
        traits = Traits.of_any([row.sampling.traits for row in rows])
        with torch.inference_mode():
            chosen = decoding.choose(logits, settings, traits, self._lanes)
        return UnderWay.of(plan, drawing, chosen)

    def _finish(self, under_way: UnderWay) -> None:
        """Look at what a step gave; requests that ended meanwhile are none of its business."""
        drawn = [
            each for each in under_way.look()
            if each.chunk.request.state is not RequestState.DONE
        ]  # fmt: skip
        # Other requests may find what was computed only if its logits are finite.
        self._scheduler.commit([each.chunk for each in drawn if each.finite])
        for each in drawn:
            if each.finite and each.chunk.draws:
                self._scheduler.fork(each.chunk.request)
        for each in drawn:
            if not each.finite:
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
        """End a request whose logits are NaN or inf, and those that wait for its prompt."""
        error = FloatingPointError(
            "logits: the model gave NaN or inf for this request; pages that it computed or shared "
            "are not used again"
        )
        self._scheduler.forget_computed(drawn.chunk.request)
        for request in reversed([*everyone([drawn.chunk.request])]):
            self._end(request, "error", error)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        request.finish(reason, error)
        self._scheduler.remove(request)
        self._counts.done += 1


class Engine:
    """Serves many requests at once through one causal model of transformers, used as it is.

    Requests join and leave between steps. A step is one forward pass over the next token of every
    request that writes and a chunk of those whose prompt is still read. Equal beginnings of
    prompts are computed once. When pages run out, the youngest request waits.

    Args:
        model: a causal language model of transformers, on any device; it is put into
            evaluation mode, and its attention implementation is set to "saccade".
        tokenizer: its tokenizer; None where prompts are token numbers and no text is wanted.
        num_pages: pages for each group of layers with the same sliding window, or without one;
            sliding layers get no more than they can use. None: as many as `memory` holds.
        memory: bytes for keys and values. None: room for `max_sequences` of the greatest length,
            at most 1 GiB (on a GPU 80 % of the memory that is free).
        page_size: tokens of a page.
        page_dtype: of the pages (float8_e4m3fn and int8 too); the model's unless given.
        max_batch_tokens: tokens of one step; longer prompts are read in chunks.
        max_sequences: requests that run at once.
        max_length: tokens of a prompt and what follows it. None: the model's limit.
        preemption: "swap" moves the pages of a request that must wait to host memory,
            "recompute" gives them up.
        host_pages: the same of host memory. None: as many as on the device with "swap", else none.
        batch_invariant: attention gives a sequence the same bits alone and in any batch. (The
            model's own products may round differently in batches of other sizes.)
        implementation: of `saccade.attention_paged`.
        batch_sizes: of steps in which every request writes its next token; others are padded to
            the next. None: a few with cuda_graphs, else every size.
        cuda_graphs: whether such steps are captured now, and replayed. None: on a GPU.
        compile: whether the model's layers are compiled by `torch.compile`, all as one, so that
            their small kernels are joined. "auto": with cuda_graphs. Results are rounded otherwise
            than by the model as it is. A model that cannot be compiled is run as it is.
        merge_products: whether layers that are given the same rows (q, k and v; gate and up)
            multiply them by all their weights at once, which are moved to lie side by side; the
            model's parameters are then views of these. Not with compiled layers.
        run_ahead: whether a step begins before the tokens of the one before are looked at, so that
            a GPU need not wait for the host. None: with cuda_graphs.
        warm_up: whether a step of each size in which prompts are read is tried now, so that its
            kernels are compiled before requests come. None: with cuda_graphs.
        progress: whether a bar is shown on the standard error, if that is a terminal, while
            kernels are compiled and steps captured.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes; also for a model
            that would be served wrongly, by its name or since a few packed passes, which are
            tried here, give other logits than a plain one.

    Source: continuous batching as in Orca (Yu et al. 2022); pages as in PagedAttention (Kwon et
    al. 2023), section 4.

    Examples:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=2, max_position_embeddings=64,
        ... )
        >>> model = transformers.LlamaForCausalLM(config)  # in earnest: from_pretrained(folder)
        >>> engine = saccade.Engine(model, num_pages=16)
        >>> results = engine.generate([[1, 5, 9], [2, 6]], max_new_tokens=4)
        >>> [len(result.tokens) for result in results]
        [4, 4]
    """

    cache: PagedCache
    num_pages: int

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        num_pages: int | None = None,
        memory: int | None = None,
        page_size: int = 16,
        page_dtype: Any = None,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        max_length: int | None = None,
        preemption: Preemption = "swap",
        host_pages: int | None = None,
        batch_invariant: bool = False,
        implementation: str | None = None,
        batch_sizes: Sequence[int] | None = None,
        cuda_graphs: bool | None = None,
        compile: bool | Literal["auto"] = "auto",
        merge_products: bool = False,
        run_ahead: bool | None = None,
        warm_up: bool | None = None,
        progress: bool = True,
    ):
        if preemption not in ("swap", "recompute"):
            raise ValueError(f'preemption: got {preemption!r}, takes "swap" or "recompute"')
        check_number("max_sequences", max_sequences, least=1)
        check_number("max_batch_tokens", max_batch_tokens, least=max_sequences)
        self._model = PackedModel(model)
        capacity = Capacity(num_pages, memory, page_size, page_dtype, host_pages)
        if max_length is None:
            max_length = self._model.longest or 2**20
        check_number("max_length", max_length, least=2)
        self.max_length = max_length
        self.cache = make_capacity(
            capacity, self._model, sequences=max_sequences, longest=max_length,
            rows=max_batch_tokens, swaps=preemption == "swap",
        )  # fmt: skip
        self.num_pages, self._tokenizer = sum(self.cache.num_pages), tokenizer
        # Where there are states, there is one for each sequence that runs.
        self.max_sequences: int = min(max_sequences, self.cache.num_states or max_sequences)
        self._scheduler = Scheduler(
            self.cache, max_batch_tokens=max_batch_tokens, max_sequences=self.max_sequences,
            preemption=preemption,
        )  # fmt: skip
        options = {"batch_invariant": batch_invariant, "implementation": implementation}
        reason = why_eager(self._model, cuda_graphs)
        asked = read_compile(compile, by_default=not reason)
        self._layers = check_merged(self._model, page_size, options, merge_products, asked)
        self._layers += compile_layers(self._model, page_size, options, progress) if asked else ""
        lanes = Lanes(max_sequences, self._model.num_logits, self._model.device)
        sizes = read_batch_sizes(batch_sizes, max_sequences, padded=not reason)
        self._decoder = Decoder(self._model, self.cache, options, lanes, max_length, sizes, reason)
        tries = not reason if warm_up is None else warm_up
        self._decoder.warm_up(max_batch_tokens if tries else 0, progress)
        self._worker = Worker(
            self._model, self.cache, self._scheduler, self._decoder, lanes, options,
            ahead=not reason if run_ahead is None else run_ahead,
        )  # fmt: skip
        self._arrivals = itertools.count()

    def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Hand in a prompt; from any thread, without waiting.

        Args:
            prompt: text, or token numbers.
            max_new_tokens: None: as many as max_length leaves room for.
            temperature, top_k, top_p, min_p, seed: how tokens are drawn; greedy unless a
                temperature is given. Equal seeds give equal numbers, whatever else the engine
                serves.
            repetition_penalty, presence_penalty, frequency_penalty, logit_bias, min_new_tokens:
                what changes logits before that.
            logprobs: how many of the likeliest tokens are given with their log probabilities,
                beside the chosen one's. None: not even that.
            stop: texts at which a request ends; they are not part of its text.
            stop_tokens: tokens at which it ends. None: those that the model's settings name.

        Returns:
            A handle to iterate for text as it comes, to wait for, and to cancel.

        Raises:
            TypeError, ValueError: naming the argument, what it got and what it takes; also for a
                prompt that can never fit.

        Examples:
            >>> completion = engine.submit([1, 5, 9], max_new_tokens=4, temperature=0.8)
            >>> len(completion.result().tokens)
            4
        """
        return self.submit_samples(prompt, 1, **options)[0]

    def submit_samples(
        self, prompt: Prompt, n: int, **options: Unpack[RequestOptions]
    ) -> list[Completion]:
        """Several continuations of one prompt, which is computed once.

        The samples share the prompt's pages and copy one only where they write into it. Sample i
        has the seed `seed + i`; the other options are those of `submit`.
        """
        check_number("n", n, least=1)
        if n > self.max_sequences:
            raise ValueError(f"n: got {n}, takes at most max_sequences, {self.max_sequences}")
        check_options(options)
        self._model.check_mode()
        options = options.copy()
        seed = options.pop("seed", 0)
        check_number("seed", seed, least=None)
        tokens, limits = self._checked(prompt, options)
        samples = []
        for sample in range(n):
            sampling = read_sampling(options, seed + sample, self._model.vocabulary)
            stream = TextStream(self._tokenizer, limits.stop_strings) if self._tokenizer else None
            samples.append(Request(next(self._arrivals), tokens, sampling, limits, stream))
        leader, *leader.followers = samples
        self._worker.submit(leader)
        return [Completion(request, self.step, self._worker.cancel) for request in samples]

    def generate(
        self, prompts: Prompt | Iterable[Prompt], **options: Unpack[RequestOptions]
    ) -> list[Generated]:
        """Continue all prompts; results in their order. Options are those of `submit`, for all.

        A text, or a list of token numbers, is one prompt. If anything fails, all are cancelled.
        """
        completions: list[Completion] = []
        try:
            for prompt in list_prompts(prompts):
                completions.append(self.submit(prompt, **options))
            return [completion.result() for completion in completions]
        except BaseException:
            for completion in completions:
                completion.cancel()
            raise

    def run(self) -> None:
        """Take steps until nothing is left to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """Take one step; False if there was nothing to do.

        An exception loses no request, in whichever line it comes: with the next call all begin
        again, from what they have written so far.
        """
        return self._worker.step()

    def statistics(self) -> EngineStatistics:
        """What the engine holds now, and what it has done so far."""
        return self._worker.statistics()

    def explain(self) -> str:
        """How steps run, and why."""
        said = self._decoder.explain(), self._layers, explain_states(self._model, self.cache)
        return "\n".join(filter(None, said))

    def _checked(self, prompt: Prompt, options: RequestOptions) -> tuple[list[int], Limits]:
        """The prompt's tokens, and when the request is done; refuses what can never be served."""
        tokens = read_prompt(prompt, self._tokenizer, self._model.vocabulary)
        limits = read_limits(
            options, len(tokens), self.max_length, self._model.stop_tokens,
            self._model.vocabulary, with_text=self._tokenizer is not None,
        )  # fmt: skip
        needed = self._scheduler.pages_for(len(tokens) + limits.max_new_tokens - 1)
        for pages, there_are in zip(needed, self.cache.num_pages, strict=True):
            if pages > there_are:
                raise ValueError(
                    f"prompt: got {len(tokens)} tokens with max_new_tokens "
                    f"{limits.max_new_tokens}, which need {pages} pages; takes what fits into "
                    f"{there_are}"
                )
        return tokens, limits

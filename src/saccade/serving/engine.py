"""Engine: many requests at once through one Hugging Face causal model, on Saccade's pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn

from typing_extensions import Unpack

from saccade import PagedCache
from saccade.serving.caller_modes import without_callers_modes
from saccade.serving.capacity import Capacity, make_capacity
from saccade.serving.compiled_layers import compile_layers, read_compile
from saccade.serving.decode_steps import Decoder, read_batch_sizes, why_eager
from saccade.serving.decoding import (
    Lanes,
    Sampling,
    TextStream,
    Tokenizer,
    check_flag,
    check_number,
    check_tokenizer,
)
from saccade.serving.merged_products import check_merged, read_merge
from saccade.serving.model import PackedModel
from saccade.serving.positions import read_max_length
from saccade.serving.prompt_steps import PromptSteps, read_prompt_sizes
from saccade.serving.rank_sums import make_peer_memory
from saccade.serving.rank_workers import FollowingWorker, worker_for
from saccade.serving.ranks import Arrival, read_ranks
from saccade.serving.request import (
    Completion,
    EngineStatistics,
    Generated,
    Limits,
    Prompt,
    Request,
    RequestOptions,
    check_options,
    list_prompts,
    plain_options,
    read_limits,
    read_prompt,
    read_sampling,
)
from saccade.serving.scheduler import Preemption, Scheduler
from saccade.serving.states import explain_states

MAX_BATCH_TOKENS = 384
"""Of a step, unless more is asked for: one of 8 billion parameters then takes an H200 less than
three times one that only decodes."""


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
        max_length: tokens of a prompt and what follows it, at most as many as the model has
            positions for, if it looks them up in a table, or turns alike however long others are
            (rope type "dynamic" does not, past a length, nor does "longrope" with cuda_graphs).
            None: the model's limit.
        preemption: "swap" moves the pages of a request that must wait to host memory,
            "recompute" gives them up.
        host_pages: the same of host memory, which beside a GPU is page-locked. None: none with
            "recompute"; with "swap" as many as on the device, but at most 4 GiB, and a quarter of
            the memory that the host has left. Where they are full, requests are computed again.
        batch_invariant: attention gives a sequence the same bits alone and in any batch. (The
            model's own products may round differently in batches of other sizes.)
        implementation: of `saccade.attention_paged`.
        batch_sizes: of steps in which every request writes its next token; others are padded to
            the next. None: a few with cuda_graphs, else every size.
        prompt_sizes: rows of steps in which prompts are read; others are padded to the next, and
            larger ones are not. None: a few up to 1024 with cuda_graphs and warm_up, else none.
        cuda_graphs: whether steps of these sizes are captured now, and replayed. None: on a GPU.
        compile: whether the model's layers are compiled by `torch.compile`, all as one, so that
            their small kernels are joined. "auto": with cuda_graphs. Results are rounded otherwise
            than by the model as it is. A model that cannot be compiled is run as it is.
        merge_products: whether layers that are given the same rows (q, k and v; gate and up)
            multiply them by all their weights at once, which are moved to lie side by side; the
            model's parameters are then views of these. "auto": with cuda_graphs and compiled
            layers.
        run_ahead: whether a step begins before the tokens of the one before are looked at, so that
            a GPU need not wait for the host. None: with cuda_graphs.
        warm_up: whether steps of all sizes that are not captured are tried now, so that their
            kernels are compiled before requests come. None: with cuda_graphs.
        progress: whether a bar is shown on the standard error, if that is a terminal, while
            kernels are compiled and steps captured.
        rank_timeout: seconds that ranks wait for one another, of a model that is shared out.

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

    @without_callers_modes
    def __init__(  # breaks function-length: a third of it lists arguments
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        num_pages: int | None = None,
        memory: int | None = None,
        page_size: int = 16,
        page_dtype: Any = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        max_sequences: int = 64,
        max_length: int | None = None,
        preemption: Preemption = "swap",
        host_pages: int | None = None,
        batch_invariant: bool = False,
        implementation: str | None = None,
        batch_sizes: Sequence[int] | None = None,
        prompt_sizes: Sequence[int] | None = None,
        cuda_graphs: bool | None = None,
        compile: bool | Literal["auto"] = "auto",
        merge_products: bool | Literal["auto"] = "auto",
        run_ahead: bool | None = None,
        warm_up: bool | None = None,
        progress: bool = True,
        rank_timeout: float = 300.0,
    ):
        if preemption not in ("swap", "recompute"):
            raise ValueError(f'preemption: got {preemption!r}, takes "swap" or "recompute"')
        check_tokenizer(tokenizer)
        for name, flag in (
            ("cuda_graphs", cuda_graphs), ("run_ahead", run_ahead), ("warm_up", warm_up),
        ):  # fmt: skip
            if flag is not None:
                check_flag(name, flag)
        check_number("max_sequences", max_sequences, least=1)
        check_number("max_batch_tokens", max_batch_tokens, least=1)
        if max_batch_tokens < max_sequences:
            raise ValueError(
                f"max_batch_tokens: got {max_batch_tokens}, takes {max_sequences} or more, which "
                "is max_sequences"
            )
        self._ranks = read_ranks(model, rank_timeout)
        self._model = PackedModel(model, latents=self._ranks is None)
        capacity = Capacity(num_pages, memory, page_size, page_dtype, host_pages)
        reason = why_eager(self._model, cuda_graphs, self.ranks)
        if reason:  # graphs know nothing of how long sequences are
            self._model.turn_by_rows()
        max_length = read_max_length(self._model, max_length)
        self.max_length: int = max_length
        self.cache = make_capacity(
            capacity, self._model, sequences=max_sequences, longest=max_length,
            rows=max_batch_tokens, swaps=preemption == "swap", ranks=self._ranks,
        )  # fmt: skip
        self.num_pages, self._tokenizer = sum(self.cache.num_pages), tokenizer
        # Where there are states, there is one for each sequence that runs.
        self.max_sequences: int = min(max_sequences, self.cache.num_states or max_sequences)
        self._scheduler = Scheduler(
            self.cache, max_batch_tokens=max_batch_tokens, max_sequences=self.max_sequences,
            preemption=preemption, first_length=self._model.first_length,
        )  # fmt: skip
        options = {"batch_invariant": batch_invariant, "implementation": implementation}
        asked = read_compile(compile, by_default=not reason)
        merges = read_merge(
            merge_products, by_default=asked and not reason, shared_out=self.ranks > 1 and not asked
        )
        sizes = read_batch_sizes(batch_sizes, max_sequences, padded=not reason)
        tries = not reason if warm_up is None else warm_up
        rows = read_prompt_sizes(prompt_sizes, max_batch_tokens, padded=tries and not reason)
        if self._ranks is not None:  # before any of them takes a step
            self._ranks.agree({
                "model": f"{self._model.name}, {self._model.layers}", "options": options,
                "tokenizer": "none" if tokenizer is None else type(tokenizer).__name__,
                "pages": (self.cache.num_pages, page_size, page_dtype, preemption, host_pages),
                "sizes": (max_batch_tokens, max_sequences, max_length, sizes, rows),
                "run_ahead": run_ahead, "warm_up": warm_up, "compile": asked, "steps": reason,
                "merge_products": merges,
            })  # fmt: skip
        said = [check_merged(self._model, page_size, options, merges)]
        sums = ""  # why none go by memory that ranks read of one another
        if self._ranks is not None:
            dtype = self._model.layers[0].dtype
            sums = "nothing is compiled"
            if asked:
                sums = make_peer_memory(self._ranks, self._model.device, dtype)
        if asked:
            by_memory = self._ranks is not None and not sums
            said.append(compile_layers(self._model, page_size, options, progress, sums=by_memory))
        self._layers = "\n".join(filter(None, said))
        lanes = Lanes(max_sequences, self._model.num_logits, self._model.device)
        self._decoder = Decoder(self._model, self.cache, options, lanes, max_length, sizes, reason)
        self._prompts = PromptSteps(self._model, self.cache, options, lanes, self._decoder, rows)
        self._prompts.warm_up(max_batch_tokens if tries else 0, progress)
        self._model.watch()
        ahead = not reason if run_ahead is None else run_ahead
        if self._ranks is not None:
            layers = "compiled" if self._model.step_layers is not None else "the model's"
            steps = self._decoder.reason or "captured", self._prompts.sizes
            self._ranks.agree({"steps": steps, "layers": layers})
            self._ranks.sums = sums or ("" if layers == "compiled" else "layers are not compiled")
        self._worker = worker_for(
            self._ranks, self._model, self.cache, self._scheduler, self._decoder, self._prompts,
            lanes, ahead=ahead,
        )  # fmt: skip
        self._arrivals = itertools.count()

    def __reduce__(self) -> NoReturn:
        """An engine is neither pickled nor copied."""
        raise TypeError(
            "Engine: got a copy or a pickle of one, takes neither: it has threads, and a model "
            "that they call; make one in each process"
        )

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
            stop: texts at which a request ends, before `min_new_tokens` too; they are not part of
                its text. None: at none.
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
        check_options(options)  # `n` is an argument of submit_samples
        return self.submit_samples(prompt, 1, **options)[0]

    def submit_samples(
        self, prompt: Prompt, n: int, **options: Unpack[RequestOptions]
    ) -> list[Completion]:
        """Several continuations of one prompt, which is computed once.

        The samples share the prompt's pages and copy one only where they write into it. Sample i
        has the seed `seed + i`; the other options are those of `submit`.
        """
        self._check_rank("submit")
        check_number("n", n, least=1)
        if n > self.max_sequences:
            raise ValueError(f"n: got {n}, takes at most max_sequences, {self.max_sequences}")
        check_options(options)
        self._model.check_mode()
        options = plain_options(options)
        seed = options.pop("seed", 0)
        check_number("seed", seed, least=None)
        tokens, limits = self._checked(prompt, options)
        samples = []
        for sample in range(n):
            sampling = read_sampling(
                options, seed + sample, limits.max_new_tokens, self._model.vocabulary
            )
            samples.append(self._request(next(self._arrivals), tokens, sampling, limits))
        leader, *leader.followers = samples
        self._worker.submit(leader)
        worker = self._worker
        return [Completion(request, worker.step_on, worker.cancel) for request in samples]

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
        again, from what they have written so far. After an error (not an interrupt) requests that
        took part have steps alone at first, and one of which three fail on end is done, for the
        reason "error".
        """
        self._check_rank("step")
        return self._worker.step()

    def follow(self) -> None:
        """Take the steps that rank 0 takes, until it closes its engine: on all other ranks.

        Raises:
            RuntimeError: where rank 0 has failed or ended, or this rank has.
        """
        if not isinstance(self._worker, FollowingWorker):
            raise RuntimeError(
                f"follow: got rank {self.rank} of {self.ranks}, takes another rank than 0, "
                "which takes requests and steps"
            )
        self._worker.follow(self._arrived)

    def close(self) -> None:
        """End: other ranks return from `follow`. One process alone has nothing to end."""
        if self._ranks is not None:
            self._ranks.close()

    @property
    def ranks(self) -> int:
        """How many processes share the model."""
        return 1 if self._ranks is None else self._ranks.count

    @property
    def rank(self) -> int:
        """Which of them this is; requests come in at rank 0."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def failure(self) -> str:
        """Why this engine takes no more steps, as a rank has failed; "" where it does."""
        return "" if self._ranks is None else self._ranks.failure

    def statistics(self) -> EngineStatistics:
        """What the engine holds now, and what it has done so far."""
        return self._worker.statistics()

    def explain(self) -> str:
        """How steps run, and why."""
        said = [
            self._decoder.explain(), self._prompts.explain(), self._layers,
            explain_states(self._model, self.cache),
        ]  # fmt: skip
        if self._ranks is not None:
            said.append(self._ranks.explain([layer.kv_heads for layer in self._model.layers]))
        return "\n".join(filter(None, said))

    def _check_rank(self, name: str) -> None:
        if self.rank:
            raise RuntimeError(
                f"{name}: got rank {self.rank} of {self.ranks}, takes rank 0: the others follow()"
            )

    def _request(
        self, number: int, tokens: list[int], sampling: Sampling, limits: Limits
    ) -> Request:
        stream = TextStream(self._tokenizer, limits.stop_strings) if self._tokenizer else None
        return Request(number, tokens, sampling, limits, stream)

    def _arrived(self, arrival: Arrival) -> Request:
        """A request that came in at rank 0, with those that follow it."""
        leader, *leader.followers = [
            self._request(number, arrival.prompt, sampling, arrival.limits)
            for number, sampling in arrival.samplings.items()
        ]
        return leader

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

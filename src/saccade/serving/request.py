"""Request: one prompt with its options and progress, and the completion that its caller holds."""

from __future__ import annotations

import difflib
import enum
import numbers
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, SupportsIndex, TypedDict, cast

from torch import Tensor

from saccade.serving.decoding import Sampling, TextStream, Tokenizer, check_number


class RequestState(enum.Enum):
    """What a request waits for, or does."""

    WAITING = "waiting"  # for its turn, with no pages
    RUNNING = "running"
    SWAPPED = "swapped"  # its pages lie on the host
    DONE = "done"


@dataclass(frozen=True)
class Limits:
    """When a request is done: after so many new tokens, or at a token or a text."""

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


class TokenLogprob(NamedTuple):
    """A new token's log probability, by the logits as the model gave them.

    Attributes:
        likeliest: the likeliest tokens and theirs, as many as were asked for.
    """

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


@dataclass
class Times:
    """Seconds on the clock of `time.perf_counter`; None for what has not happened."""

    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)  # two requests may be alike in everything and are two all the same
class Request:
    """One request, as the engine and its scheduler see it.

    Attributes:
        number: counted in the order of arrival; smaller ones are older and go first.
        prompt: its tokens.
        generated: the tokens that came so far.
        logprobs: of these, by their number, where they are wanted.
        sequence: its number in the cache, while it has one there.
        computed: how many of its tokens have their keys and values there.
        followers: requests that share the prompt and begin where it ends (n samples of one).
        computed_from_cache: prompt tokens that the prefix cache held when it first started.
        recomputed: tokens that were computed again after it lost its pages.
        most_pages: the most pages that it held at once.
        borders: where chunks of it end, so that a state can be kept there.
        is_long: whether its sequence is computed as those past the model's first length are.
        reached: the most of its tokens that were ever computed.
        failures: steps that failed since that last grew; fault: what the last of them raised, once
            they are as many as end it.
        reason: why it is done: "length", "stop_token", "stop_string", "cancelled" or "error".
    """

    number: int
    prompt: list[int]
    sampling: Sampling
    limits: Limits
    stream: TextStream | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    state: RequestState = RequestState.WAITING
    sequence: int | None = None
    computed: int = 0
    followers: list[Request] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    computed_from_cache: int = 0
    preemptions: int = 0
    recomputed: int = 0
    most_pages: int = 0
    borders: list[int] = field(default_factory=list)
    is_long: bool = False
    reached: int = 0
    failures: int = 0
    fault: Exception | None = None
    reason: str | None = None
    error: BaseException | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and what came after it."""
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.prompt) + len(self.generated)

    @property
    def left(self) -> int:
        """How many tokens are to be computed before the next one can be drawn."""
        return self.num_tokens - self.computed

    @property
    def width(self) -> int:
        """How many requests it is: itself, and those that wait for its prompt."""
        return 1 + len(self.followers)

    @property
    def last_token(self) -> int:
        """The last token that there is."""
        return (self.generated or self.prompt)[-1]

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Tokens start … stop - 1."""
        if start >= len(self.prompt):
            return self.generated[start - len(self.prompt) : stop - len(self.prompt)]
        return self.tokens[start:stop]

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> str | None:
        """One new token; why the request is done with it, or None."""
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()
        if logprob is not None:
            self.logprobs[len(self.generated)] = logprob
        self.generated.append(token)
        if self.stream is not None and token not in self.limits.stop_tokens:
            self.stream.push(token)
        return self.outcome()

    def outcome(self) -> str | None:
        """Why the request is done with the tokens that it has, or None."""
        if self.generated and self.generated[-1] in self.limits.stop_tokens:
            return "stop_token"
        if self.stream is not None and self.stream.stopped:
            return "stop_string"
        return "length" if len(self.generated) >= self.limits.max_new_tokens else None

    def lose_pages(self) -> None:
        """Wait for a turn, with no pages: all of its tokens are computed again."""
        self.recomputed += self.computed
        self.sequence, self.computed, self.state = None, 0, RequestState.WAITING

    def restart(self) -> None:
        """The same; what follows from its tokens is worked out anew, too."""
        self.lose_pages()
        if self.stream is not None:
            self.stream.replay(
                [token for token in self.generated if token not in self.limits.stop_tokens]
            )

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        if self.stream is not None and error is None:
            self.stream.finish()
            if reason == "length" and self.stream.stopped:  # before an unfinished character
                reason = "stop_string"
        self.times.finished = time.perf_counter()
        self.reason, self.error = reason, error
        self.state = RequestState.DONE  # the last, for other threads


Prompt = str | Sequence[int] | Tensor


class RequestOptions(TypedDict, total=False):
    """The options of `Engine.submit`, for type checkers."""

    max_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_new_tokens: int
    seed: int
    logprobs: int | None
    stop: str | Iterable[str] | None
    stop_tokens: Iterable[int] | None


def check_options(options: RequestOptions) -> None:
    """Refuse what is no option.

    Raises:
        TypeError: naming it, and the option of the nearest name.
    """
    known = list(RequestOptions.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise TypeError(f"{name}: is no option of a request{meant}, takes {', '.join(known)}")


def plain_options(options: RequestOptions) -> RequestOptions:
    """The options with numbers of other libraries (NumPy's) as Python's own."""
    plain: Any = {name: _plain(value) for name, value in options.items()}
    biases = plain.get("logit_bias")
    if isinstance(biases, Mapping):
        plain["logit_bias"] = {_plain(token): _plain(bias) for token, bias in biases.items()}
    return plain


def _plain(value: Any) -> Any:
    """A number as Python's own; anything else as it is."""
    if isinstance(value, (int, float)) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Prompts one by one, where one alone may be given: a text, or token numbers.

    Raises:
        TypeError: for what is neither prompts nor one prompt.
    """
    takes = "prompts, each of them text or token numbers, or one of them"
    if isinstance(prompts, str):
        return [prompts]
    if not _may_be_tokens(prompts):
        raise TypeError(f"prompts: got {_kind(prompts)}, takes {takes}")
    if isinstance(prompts, Tensor):
        return [prompts] if prompts.dim() == 1 else list(prompts)
    several = list(prompts)
    if several and not any(_is_iterable(each) for each in several):
        return [cast("list[int]", several)]
    return cast("list[Prompt]", several)


def _is_iterable(value: object) -> bool:
    """Whether there is something in it: a tensor or array without dimensions is a number."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def _may_be_tokens(value: object) -> bool:
    """Whether it has an order, and is not a text's bytes, each of which would be a token."""
    return _is_iterable(value) and not isinstance(value, (Mapping, Set, bytes, bytearray))


def _kind(value: object) -> str:
    """What a value is, for an error to say."""
    alone = isinstance(value, Iterable) and not _is_iterable(value)
    return type(value).__name__ + (" without dimensions" if alone else "")


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """A prompt as tokens that the model knows."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("prompt: got text, takes token numbers where tokenizer is None")
        prompt = tokenizer.encode(read_text("prompt", prompt))
    if not _may_be_tokens(prompt):
        raise TypeError(f"prompt: got {_kind(prompt)}, takes text or token numbers")
    tokens: list[Any] = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not tokens:
        raise ValueError("prompt: got no token, takes at least one")
    return [read_token("prompt", token, vocabulary) for token in tokens]


def read_text(name: str, text: str) -> str:
    """A text that tokenizers take: half of a surrogate pair has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"half of a surrogate pair at {error.start}"
        raise ValueError(f"{name}: got {got}, takes text that has UTF-8") from None
    return text


def read_token(name: str, token: object, vocabulary: int) -> int:
    """A token number that the model knows, as Python's own."""
    takes = "text or token numbers" if name == "prompt" else "token numbers"
    if isinstance(token, bool) or not hasattr(token, "__index__") or isinstance(token, Tensor):
        raise TypeError(f"{name}: got {type(token).__name__}, takes {takes}")
    try:
        number = operator.index(cast("SupportsIndex", token))
    except TypeError:  # an array of several
        raise TypeError(f"{name}: got {type(token).__name__}, takes {takes}") from None
    if not 0 <= number < vocabulary:
        raise ValueError(f"{name}: got token {number}, takes 0 to {vocabulary - 1}")
    return number


def read_stop_tokens(
    tokens: Iterable[int] | None, of_model: frozenset[int], vocabulary: int
) -> frozenset[int]:
    """The tokens at which a request ends."""
    if tokens is None:
        return of_model
    if isinstance(tokens, (str, bytes, bytearray, Mapping)) or not _is_iterable(tokens):
        raise TypeError(f"stop_tokens: got {_kind(tokens)}, takes a list of token numbers")
    tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    return frozenset(read_token("stop_tokens", token, vocabulary) for token in tokens)


def read_limits(
    options: RequestOptions, prompt_tokens: int, max_length: int, stop_tokens: frozenset[int],
    vocabulary: int, *, with_text: bool,
) -> Limits:  # fmt: skip
    """When a request is done."""
    room = max_length - prompt_tokens
    most = options.get("max_new_tokens")
    if room < 1:
        raise ValueError(
            f"prompt: got {prompt_tokens} tokens, takes fewer than max_length, {max_length}"
        )
    if most is None:
        most = room
    check_number("max_new_tokens", most, least=1)
    if most > room:
        raise ValueError(
            f"max_new_tokens: got {most} after a prompt of {prompt_tokens}, takes at most {room} "
            f"(max_length is {max_length})"
        )
    stop_tokens = read_stop_tokens(options.get("stop_tokens"), stop_tokens, vocabulary)
    stop = read_stop(options.get("stop"))
    if stop and not with_text:
        raise ValueError("stop: got texts where tokenizer is None, takes none there")
    return Limits(most, stop_tokens, stop)


def read_stop(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """The texts at which a request ends."""
    if stop is None:
        return ()
    if isinstance(stop, (bytes, Mapping)) or not _is_iterable(stop):
        raise TypeError(f"stop: got {_kind(stop)}, takes a text, or a list of texts")
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop: got {texts!r}, takes texts that are not empty")
    return texts


SAMPLING_OPTIONS = {each.name for each in fields(Sampling)} - {"seed"}


def read_sampling(
    options: RequestOptions, seed: int, max_new_tokens: int, vocabulary: int
) -> Sampling:
    """How a request draws its tokens, of which there are max_new_tokens at most."""
    chosen: dict[str, Any] = {name: options[name] for name in options if name in SAMPLING_OPTIONS}
    sampling = Sampling(**chosen, seed=seed)
    if sampling.min_new_tokens > max_new_tokens:
        raise ValueError(
            f"min_new_tokens: got {sampling.min_new_tokens}, takes at most max_new_tokens, "
            f"{max_new_tokens}"
        )
    for token in sampling.logit_bias:
        read_token("logit_bias", token, vocabulary)
    return sampling


CacheStatistics = Any  # saccade.PagedCache.statistics()'s; the class itself has no public name


@dataclass(frozen=True)
class RequestStatistics:
    """One request, so far or in the end; times in seconds.

    Attributes:
        state: "waiting", "running", "swapped" or "done".
        reason: why it is done: "length", "stop_token", "stop_string", "cancelled" or "error".
        prompt_tokens, new_tokens: how many.
        cached_tokens: prompt tokens that were found in the cache and not computed.
        queued: until it started (so far, if it has not).
        to_first_token: from its arrival to its first new token; None before that.
        total: from its arrival to its end, or until now.
        tokens_per_second: new tokens after the first, over the time since the first.
        preemptions: how often it was preempted; recomputed_tokens: what that cost.
        pages: the most pages that it held.
    """

    state: str
    reason: str | None
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    queued: float
    to_first_token: float | None
    total: float
    tokens_per_second: float | None
    preemptions: int
    recomputed_tokens: int
    pages: int


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine holds now, and what it has done so far; times in seconds.

    Attributes:
        waiting, running, done: requests.
        steps: forward passes. rows: tokens computed in them.
        prompt_tokens, cached_tokens, new_tokens: of the requests that were started.
        preemptions: how often a request was preempted.
        busy: the time spent in steps. tokens_per_second: new tokens over that time.
        pages: of all groups of layers. states: of whole sequences, beside them.
        cache: `saccade.PagedCache.statistics()`.
    """

    waiting: int
    running: int
    done: int
    steps: int
    rows: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    preemptions: int
    busy: float
    tokens_per_second: float
    pages: int
    states: int
    cache: CacheStatistics


@dataclass
class Counts:
    """What an engine counts as it goes."""

    done: int = 0
    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    busy: float = 0.0


def of_request(request: Request) -> RequestStatistics:
    """One request, so far or in the end."""
    times, now = request.times, time.perf_counter()
    end = times.finished or now
    speed = None
    if times.first_token is not None and len(request.generated) > 1 and end > times.first_token:
        speed = (len(request.generated) - 1) / (end - times.first_token)
    return RequestStatistics(
        state=request.state.value,
        reason=request.reason,
        prompt_tokens=len(request.prompt),
        new_tokens=len(request.generated),
        cached_tokens=request.computed_from_cache,
        queued=(times.started or end) - times.submitted,
        to_first_token=None if times.first_token is None else times.first_token - times.submitted,
        total=end - times.submitted,
        tokens_per_second=speed,
        preemptions=request.preemptions,
        recomputed_tokens=request.recomputed,
        pages=request.most_pages,
    )


@dataclass(frozen=True)
class Generated:
    """What a request gave in the end.

    Attributes:
        tokens: the new tokens, a stop token included.
        text: their text without special tokens, up to a stop string; None without a tokenizer.
        reason: "length", "stop_token", "stop_string" or "cancelled".
        statistics: of the request.
        logprobs: of each new token, where they were asked for.
    """

    tokens: list[int]
    text: str | None
    reason: str
    statistics: RequestStatistics
    logprobs: list[TokenLogprob] | None = None


class Fresh(NamedTuple):
    """What came of a request since somebody last asked.

    Attributes:
        text: that nothing can change any more. tokens: how many.
        logprobs: of these, where they are wanted. reason, error: why nothing more comes.
    """

    text: str
    tokens: int
    logprobs: list[TokenLogprob]
    reason: str | None
    error: BaseException | None


class Completion:
    """One submitted request. Waiting for it takes the engine's steps, with all other requests.

    Iterating gives pieces of text as they come (token numbers, if the engine has no tokenizer);
    each piece is given once, to one iterator.

    Examples:
        >>> completion = engine.submit([1, 5, 9], max_new_tokens=4)
        >>> len([token for token in completion])  # as they come
        4
    """

    def __init__(
        self, request: Request, step: Callable[[], bool], cancel: Callable[[Request], None]
    ):
        self._request, self._step, self._cancel = request, step, cancel
        self._seen = 0  # tokens, by `fresh`

    def __iter__(self) -> Iterator[Any]:
        return self.tokens() if self._request.stream is None else self.texts()

    def tokens(self) -> Iterator[int]:
        """The new tokens, as they come; always from the first one on."""
        count = 0
        while True:
            done = self.done  # looked at before, or the last ones might be missed
            generated = self._request.generated
            yield from generated[count : (count := len(generated))]
            if done:
                return self._raise_error()
            self._wait_beyond(count)

    def texts(self) -> Iterator[str]:
        """Pieces of text, as soon as nothing that follows can change them.

        Raises:
            ValueError: if the engine has no tokenizer.
        """
        stream = self._request.stream
        if stream is None:
            raise ValueError("tokenizer: got None, takes a tokenizer where text is wanted")
        while True:
            done, seen = self.done, len(self._request.generated)
            piece = stream.piece()
            if piece:
                yield piece
            if done:
                return self._raise_error()
            self._wait_beyond(seen)

    def result(self) -> Generated:
        """Wait until it is done.

        Raises:
            RuntimeError: if nothing can come any more.
            Exception: what made the request fail, if anything did.
        """
        while not self.done:
            self._go_on()
        self._raise_error()
        request = self._request
        text = None if request.stream is None else request.stream.text
        assert request.reason is not None  # it is done
        tokens, logprobs = [*request.generated], None
        if request.sampling.logprobs is not None:
            logprobs = [request.logprobs[number] for number in range(len(tokens))]
        return Generated(tokens, text, request.reason, self.statistics, logprobs)

    def cancel(self) -> None:
        """Ask for no more; its pages are free when this returns. What came so far stays."""
        self._cancel(self._request)

    def fresh(self) -> Fresh:
        """What came since the last call; this waits for nothing."""
        request, done = self._request, self.done  # looked at before, or the last might be missed
        text = "" if request.stream is None else request.stream.piece()
        seen, self._seen = self._seen, len(request.generated)
        logprobs = []
        if request.sampling.logprobs is not None:
            logprobs = [request.logprobs[number] for number in range(seen, self._seen)]
        reason = request.reason if done else None
        return Fresh(text, self._seen - seen, logprobs, reason, request.error if done else None)

    def text_so_far(self) -> str:
        """The text that has come; the end of it may still change. "" without a tokenizer."""
        return "" if self._request.stream is None else self._request.stream.text

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self._request.state is RequestState.DONE

    @property
    def statistics(self) -> RequestStatistics:
        """Its times and counts, so far."""
        return of_request(self._request)

    def _wait_beyond(self, tokens: int) -> None:
        """Take steps until there are more new tokens than that."""
        while not self.done and len(self._request.generated) <= tokens:
            self._go_on()

    def _go_on(self) -> None:
        """Take a step.

        Raises:
            RuntimeError: if there is none to take and this is not done: waiting would never end.
        """
        if not self._step() and not self.done:
            raise RuntimeError(
                f"request {self._request.number}: the engine has nothing to do, and this is not "
                "done; submit it again"
            )

    def _raise_error(self) -> None:
        if self._request.error is not None:
            raise self._request.error

"""An engine under load: requests that arrive by a Poisson process, and how long they wait.

The load is an open loop: arrivals are drawn before anything is served and wait for nothing. A
request's clock starts when it arrives, even if the engine is in the middle of a step then, so an
engine that falls behind shows it. (A closed loop, in which a client sends its next request once it
has the last answer, slows down with the engine and hides its queue. Here it serves to warm up, and
to measure the capacity.)

Time 0 is when counting begins. The load begins before that, so that the engine is not empty, and
goes on after `seconds` until every counted request has its first token, at most as long again.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

import saccade
from saccade.bench import models
from saccade.bench.case import BenchCase
from saccade.bench.cases import machine
from saccade.bench.results import Result, record
from saccade.bench.timing import Timing

SECONDS = 30.0
TOKENS = (64, 64)
SEED = 0
SPREAD = 0.7  # standard deviation of the logarithm of lengths
LEAD = 0.25  # of the seconds: how long the load lasts before they begin
CLOSED = 0.5  # of the seconds: how long the closed loop lasts, of which the second half counts
FRACTIONS = (0.25, 0.5, 0.75, 1.0)  # of the capacity: the rates where none are named
LONGEST_SLEEP = 0.1  # seconds, so that the bar goes on
FIRST_TOKEN = "first token"  # the pass in files


class SteadyClock:
    """The system's clock, in seconds."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


class Arrival(NamedTuple):
    """A request of the load: when it comes, in seconds, and what it wants."""

    seconds: float
    prompt: list[int]
    new_tokens: int


class RequestDraw:
    """Draws requests: log-normal lengths, and tokens that are all equally likely.

    So no two prompts begin alike, and none is found in the prefix cache.

    Args:
        means: tokens of a prompt, and new ones, in the mean.
        max_length: of a prompt and its new tokens; each has at most half of it.
    """

    def __init__(self, means: tuple[int, int], max_length: int, vocabulary: int, seed: str) -> None:
        self.means, self.longest, self.vocabulary = means, max_length // 2, vocabulary
        self.random = Random(seed)

    def arrival(self, seconds: float = 0.0) -> Arrival:
        """The next request, which arrives then."""
        prompt, new_tokens = (self._length(mean) for mean in self.means)
        tokens = [self.random.randrange(self.vocabulary) for _ in range(prompt)]
        return Arrival(seconds, tokens, new_tokens)

    def arrivals(self, rate: float, begin: float, end: float) -> list[Arrival]:
        """A Poisson process: the times between arrivals are independent and exponential."""
        found, seconds = [], begin + self.random.expovariate(rate)
        while seconds < end:
            found.append(self.arrival(seconds))
            seconds += self.random.expovariate(rate)
        return found

    def _length(self, mean: int) -> int:
        drawn = self.random.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
        return min(max(1, round(drawn)), self.longest)


@dataclasses.dataclass
class Served:
    """One request of a load, and when its tokens came; None of what did not come."""

    arrived: float
    completion: Any = None
    first: float | None = None
    last: float | None = None
    finished: float | None = None


class Token(NamedTuple):
    """When a token came, and how long after its request's last one; None of a first token."""

    seconds: float
    gap: float | None


class LoadRun:
    """An engine with what it was handed, and when each token came.

    Times are those at which a step that gave the token was over.

    Attributes:
        requests: all. present: those that are not done, in the order in which they came.
    """

    def __init__(self, engine: Any, clock: Any, zero: float) -> None:
        self.engine, self.clock, self.zero = engine, clock, zero
        self.requests: list[Served] = []
        self.present: list[Served] = []
        self.tokens: list[Token] = []

    def now(self) -> float:
        """Seconds since time 0."""
        return self.clock.now() - self.zero

    def submit(self, arrival: Arrival) -> None:
        """Hand the engine a request, however late that is."""
        served = Served(arrival.seconds)
        served.completion = self.engine.submit(
            arrival.prompt, max_new_tokens=arrival.new_tokens, stop_tokens=()
        )
        self.requests.append(served)
        self.present.append(served)

    def step(self) -> bool:
        """Take a step and look at what it gave; False if there was nothing to do."""
        if not self.engine.step():
            return False
        now, done = self.now(), False
        # Nothing overtakes in an engine: what runs are the oldest requests that are not done.
        for served in self.present[: self.engine.max_sequences]:
            done = self._look(served, now) or done
        if done:
            self.present = [served for served in self.present if served.finished is None]
        return True

    def cancel(self) -> None:
        """Let the engine forget what it has not done."""
        for served in self.present:
            served.completion.cancel()

    def _look(self, served: Served, now: float) -> bool:
        """Note the tokens that came; whether the request is done."""
        fresh = served.completion.fresh()
        if fresh.error is not None:
            raise fresh.error
        for _ in range(fresh.tokens):
            gap = None if served.last is None else now - served.last
            self.tokens.append(Token(now, gap))
            served.first = now if served.first is None else served.first
            served.last = now
        if fresh.reason is None:
            return False
        served.finished = now
        return True


Show = Callable[[float, LoadRun], None]  # is told the time, now and then


def open_loop(
    engine: Any, arrivals: Sequence[Arrival], seconds: float, lead: float, clock: Any, show: Show
) -> LoadRun:
    """Serve arrivals from -lead on, until those before `seconds` have their first token.

    At most as long again: a request that has none by then has waited too long to be waited for.
    """
    run = LoadRun(engine, clock, clock.now() + lead)
    coming = deque(arrivals)
    counted = [arrival for arrival in arrivals if 0 <= arrival.seconds < seconds]
    while True:
        now = run.now()
        while coming and coming[0].seconds <= now:
            run.submit(coming.popleft())
        show(now, run)
        late = now >= seconds and now < 2 * seconds and len(counted) > _begun(run, seconds)
        if now >= seconds and not late:
            run.cancel()
            return run
        if not run.step():
            until = coming[0].seconds if coming else seconds
            clock.sleep(min(max(until - now, 1e-6), LONGEST_SLEEP))


def _begun(run: LoadRun, seconds: float) -> int:
    """How many of the counted requests have a first token."""
    return sum(0 <= each.arrived < seconds and each.first is not None for each in run.requests)


def closed_loop(
    engine: Any, draw: RequestDraw, seconds: float, clock: Any, show: Show
) -> tuple[float, float]:
    """Keep the engine full; requests and tokens a second in the second half, in whole steps.

    Requests are counted by their tokens, as few of them begin and end within a short time.
    """
    run = LoadRun(engine, clock, clock.now())
    begin, before = None, 0  # the time and the tokens from which on they count
    now, counted = 0.0, 0
    while now < seconds or not counted:
        show(now, run)
        while len(run.present) < engine.max_sequences:
            run.submit(draw.arrival(now))
        run.step()
        now = run.now()
        if begin is not None:
            counted = len(run.tokens) - before
        elif now >= seconds / 2:
            begin, before = now, len(run.tokens)
    run.cancel()
    tokens_per_second = counted / (now - (begin or 0.0))
    wanted = [draw.arrival().new_tokens for _ in range(1000)]
    return tokens_per_second * len(wanted) / sum(wanted), tokens_per_second


class Percentile(NamedTuple):
    """A value that some part of all values does not exceed.

    at_least: the true one may be greater, as some values are only known to be above something.
    """

    value: float
    at_least: bool = False


def percentile(values: Sequence[float], part: float, bounds: Sequence[float] = ()) -> Percentile:
    """The smallest of all values that at least this part of them does not exceed.

    bounds: lower bounds of further values. Each counts as if it were the value, so what is found
    may be too small, but not if all bounds are above it.
    """
    everything = sorted((*values, *bounds))
    found = everything[math.ceil(part * len(everything)) - 1]
    return Percentile(found, any(bound <= found for bound in bounds))


class LoadFigures(NamedTuple):
    """What came of a load within the seconds that count; times in seconds.

    Attributes:
        waits: to the first token of every request that arrived. bounds: how long those that never
            had one were waited for.
        gaps: between tokens of a request, of every token that came and was not a request's first.
        done: requests that ended. running, waiting: that were there at the end of the seconds, with
            a first token and without.
    """

    waits: list[float]
    bounds: list[float]
    gaps: list[float]
    tokens_per_second: float
    done: int
    running: int
    waiting: int

    @property
    def arrived(self) -> int:
        """Requests that arrived."""
        return len(self.waits) + len(self.bounds)

    @classmethod
    def of(cls, run: LoadRun, seconds: float) -> LoadFigures:
        """Sum up a run that is over."""
        end = run.now()
        counted = [each for each in run.requests if 0 <= each.arrived < seconds]
        came = [each for each in run.requests if each.arrived < seconds]
        waiting = [each for each in came if _after(each.first, seconds)]
        unfinished = [each for each in came if _after(each.finished, seconds)]
        tokens = [token for token in run.tokens if 0 < token.seconds <= seconds]
        return cls(
            [each.first - each.arrived for each in counted if each.first is not None],
            [end - each.arrived for each in counted if each.first is None],
            [token.gap for token in tokens if token.gap is not None],
            len(tokens) / seconds,
            sum(each.finished is not None and 0 < each.finished <= seconds for each in came),
            len(unfinished) - len(waiting),
            len(waiting),
        )

    def numbers(self) -> dict[str, Any]:
        """The figures by the names in result files; times in milliseconds."""
        found: dict[str, Any] = {}
        at_least = []
        measured = {"first_token": (self.waits, self.bounds), "between_tokens": (self.gaps, ())}
        for what, (values, bounds) in measured.items():
            for name, part in (("median", 0.5), ("p99", 0.99)):
                if values or bounds:
                    of_all = percentile(values, part, bounds)
                    found[f"{what}_{name}_ms"] = of_all.value * 1e3
                    at_least += [f"{what}_{name}_ms"] * of_all.at_least
        counts = {name: getattr(self, name) for name in ("arrived", "done", "running", "waiting")}
        return found | {"tokens_per_second": self.tokens_per_second, "at_least": at_least} | counts


def _after(time: float | None, seconds: float) -> bool:
    """Whether something came later than that, or not at all."""
    return time is None or time > seconds


class LoadPlan(NamedTuple):
    """A load: rates (none: by the capacity), the seconds of each, and the tokens of requests."""

    rates: list[float]
    seconds: float = SECONDS
    tokens: tuple[int, int] = TOKENS

    @property
    def names(self) -> list[str]:
        """What is done one after the other."""
        rates = [f"{rate:g} requests a second" for rate in self.rates] or [
            f"{fraction:.0%} of the capacity" for fraction in FRACTIONS
        ]
        return ["a closed loop", *rates]

    @property
    def expected_seconds(self) -> list[float]:
        """How long each of these takes, at least."""
        return [CLOSED * self.seconds, *[(1 + LEAD) * self.seconds] * (len(self.names) - 1)]

    def arrivals(self, draw: RequestDraw, rate: float) -> list[Arrival]:
        """The requests of one rate, some of which count.

        Raises:
            ValueError: if none counts.
        """
        found = draw.arrivals(rate, -LEAD * self.seconds, 2 * self.seconds)
        if not any(0 <= arrival.seconds < self.seconds for arrival in found):
            raise ValueError(
                f"--rates: got {rate:g}, at which no request arrives within the {self.seconds:g} "
                "seconds that count; takes a higher one, or more --seconds"
            )
        return found


def read_plan(rates: Sequence[str], seconds: float | None, tokens: Sequence[str]) -> LoadPlan:
    """A load as the command line's options name it.

    Raises:
        ValueError: naming the option, what it got and what it takes.
    """
    takes = "requests a second such as 0.5,1,2, or auto"
    read = [] if list(rates) == ["auto"] else [_number("--rates", r, float, takes) for r in rates]
    plan = LoadPlan(list(dict.fromkeys(read)))
    if seconds is not None:
        if not 0 < seconds < math.inf:
            raise ValueError(f"--seconds: got {seconds:g}, takes how long each rate counts")
        plan = plan._replace(seconds=seconds)
    if tokens:
        takes = "those of a prompt and new ones in the mean, such as 512,128"
        if len(tokens) != 2:
            raise ValueError(f"--tokens: got {','.join(tokens)!r}, takes {takes}")
        prompt, new_tokens = (_number("--tokens", word, int, takes) for word in tokens)
        plan = plan._replace(tokens=(int(prompt), int(new_tokens)))
    return plan


def _number(option: str, word: str, kind: Callable[[str], float], takes: str) -> float:
    try:
        found = kind(word)
    except ValueError:
        found = 0
    if not 0 < found < math.inf:
        raise ValueError(f"{option}: got {word!r}, takes {takes}")
    return found


class LoadedModel(NamedTuple):
    """A model, and the engine that serves it."""

    model: Any
    engine: Any

    @classmethod
    def of(cls, folder: Path, plan: LoadPlan, where: torch.device) -> LoadedModel:
        """The folder's model on a device.

        Raises:
            ValueError: if there is none, or if it takes no requests of the plan's lengths.
        """
        models.require_model(folder)
        model = models.load(folder).to(where)
        engine = saccade.Engine(model)
        if 2 * max(plan.tokens) > engine.max_length:
            raise ValueError(
                f"--tokens: got {plan.tokens[0]},{plan.tokens[1]}, takes at most half of the "
                f"model's length each, and that is {engine.max_length}"
            )
        return cls(model, engine)

    def draw(self, plan: LoadPlan, seed: object) -> RequestDraw:
        """What draws requests; others for each seed, so that no rate finds another's prompts."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        return RequestDraw(plan.tokens, self.engine.max_length, vocabulary, f"{SEED}, {seed}")


def measure_load(
    loaded: LoadedModel, plan: LoadPlan, where: torch.device, bar: Any,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Result]:  # fmt: skip
    """A result for each rate, from one engine that has been warmed up by a closed loop."""
    model, engine = loaded
    most, seconds, clock = engine.max_sequences, plan.seconds, SteadyClock
    loads = {rate: plan.arrivals(loaded.draw(plan, rate), rate) for rate in plan.rates}
    shown = LoadBar(bar, plan)
    full = closed_loop(engine, loaded.draw(plan, "full"), CLOSED * seconds, clock, shown.show)
    shown.next()
    say(f"closed loop: {full[0]:.3g} requests, {full[1]:,.0f} tokens a second, {most} at once")
    rates = plan.rates or [float(f"{fraction * full[0]:.3g}") for fraction in FRACTIONS]
    run_name = ""
    for rate in rates:
        arrivals = loads.get(rate) or plan.arrivals(loaded.draw(plan, rate), rate)
        run = open_loop(engine, arrivals, seconds, LEAD * seconds, clock, shown.show)
        shown.next()
        figures = LoadFigures.of(run, seconds)
        about = {"rate": rate, "seconds": seconds, "capacity": full[0], "max_sequences": most}
        about |= {"seed": SEED} | _drawn(arrivals) | figures.numbers()
        case = _case(model, plan, rate, where, most)
        (result,) = record(case, FIRST_TOKEN, {models.ENGINE: _timing(figures)}, where)
        run_name = run_name or result.run
        yield dataclasses.replace(result, run=run_name, load=about)


class LoadBar:
    """Shows how far a load is, a few times a second: each time costs the engine some."""

    def __init__(self, bar: Any, plan: LoadPlan) -> None:
        self.bar, self.names = bar, plan.names
        self.left = plan.expected_seconds
        self.number, self.last = 0, -math.inf

    def show(self, now: float, run: LoadRun) -> None:
        """Say what there is, unless that was said just now."""
        if now - self.last < 2 * LONGEST_SLEEP:
            return
        passed = 0.0 if self.last == -math.inf else now - self.last
        passed = min(passed, self.left[self.number])
        self.left[self.number] -= passed
        self.last = now
        self.bar.now(f"{self.names[self.number]}: {len(run.present)} requests to be done")
        self.bar.done(passed)

    def next(self) -> None:
        """Go on to what comes next."""
        self.bar.case_done()
        self.number, self.last = self.number + 1, -math.inf


def _case(
    model: Any, plan: LoadPlan, rate: float, where: torch.device, sequences: int
) -> BenchCase:
    prompt, new_tokens = plan.tokens
    name = f"{machine(where.type)}-serving-poisson-{prompt}x{new_tokens}-{rate:g}"
    return models.attention_of(model, name, sequences, prompt + new_tokens)


def _drawn(arrivals: Sequence[Arrival]) -> dict[str, float]:
    """The means of what was drawn."""
    count = len(arrivals)
    return {
        "prompt_tokens": sum(len(arrival.prompt) for arrival in arrivals) / count,
        "new_tokens": sum(arrival.new_tokens for arrival in arrivals) / count,
    }


def _timing(figures: LoadFigures) -> Timing:
    """The times to the first token in the form that every result has."""
    everything = [*figures.waits, *figures.bounds]
    median = percentile(figures.waits, 0.5, figures.bounds).value
    return Timing(median * 1e3, min(everything) * 1e3, max(everything) * 1e3, len(everything))

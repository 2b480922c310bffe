"""The load on an engine: arrivals wait for nothing, and what is said of them is arithmetic."""

import dataclasses
import io
import json
import math
from collections import namedtuple

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from saccade.bench import display, serving_load
from saccade.bench.command import bench
from saccade.bench.results import Result, read
from saccade.bench.serving_load import (
    Arrival,
    LoadFigures,
    LoadPlan,
    Percentile,
    RequestDraw,
    closed_loop,
    open_loop,
    percentile,
)
from saccade.demo.model import ByteModel, DemoModelShape, export

# Every result of a load has one.
# pyright: reportOptionalSubscript=false

app = typer.Typer()
app.command()(bench)

Fresh = namedtuple("Fresh", "tokens reason error")


class FakeClock:
    """Time passes when somebody sleeps, and when the engine takes a step."""

    def __init__(self):
        self.time = 100.0  # of no meaning

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class FakeCompletion:
    """A request that gives a token a step."""

    def __init__(self, prompt, new_tokens, submitted):
        self.prompt, self.new_tokens, self.submitted = prompt, new_tokens, submitted
        self.given = self.seen = 0
        self.over = False

    def fresh(self):
        tokens, self.seen = self.given - self.seen, self.given
        return Fresh(tokens, "length" if self.over else None, None)

    def cancel(self):
        self.over = True


class FakeEngine:
    """The oldest requests run; steps take as long as is said, and then as long as the last one."""

    def __init__(self, clock, step_seconds, max_sequences):
        self.clock, self.max_sequences = clock, max_sequences
        self.step_seconds = list(step_seconds)
        self.submitted = []

    def submit(self, prompt, max_new_tokens, stop_tokens):
        assert stop_tokens == ()  # a request is as long as was drawn
        self.submitted.append(FakeCompletion(prompt, max_new_tokens, self.clock.now()))
        return self.submitted[-1]

    def step(self):
        running = [each for each in self.submitted if not each.over][: self.max_sequences]
        if not running:
            return False
        seconds = self.step_seconds
        self.clock.time += seconds.pop(0) if len(seconds) > 1 else seconds[0]
        for each in running:
            each.given += 1
            each.over = each.given == each.new_tokens
        return True


def served(arrivals, seconds, *step_seconds, lead=0.0, max_sequences=1):
    clock = FakeClock()
    engine = FakeEngine(clock, step_seconds, max_sequences)
    run = open_loop(engine, arrivals, seconds, lead, clock, lambda now, run: None)
    return engine, run, LoadFigures.of(run, seconds)


def at(*times, new_tokens=1):
    return [Arrival(seconds, [1], new_tokens) for seconds in times]


def test_a_clock_starts_at_the_arrival_however_late_the_engine_is():
    _, _, figures = served(at(0, 1, 2), 4, 3.0)  # steps end at 3, 6 and 9
    assert (figures.waits, figures.bounds) == ([3, 5, 7], [])
    assert (figures.done, figures.running, figures.waiting) == (1, 0, 2)
    assert figures.tokens_per_second == 1 / 4


def test_an_engine_without_work_waits_for_the_next_arrival():
    engine, _, figures = served(at(0.5, 2), 4, 0.25)
    assert figures.waits == pytest.approx([0.25, 0.25], abs=1e-5)  # the shortest sleep is 1e-6
    assert [each.submitted - 100 for each in engine.submitted] == pytest.approx([0.5, 2], abs=1e-5)


def test_who_never_had_a_token_counts_with_what_was_waited():
    engine, _, figures = served(at(0, 1, 2), 4, 5.0)  # after the step that ends at 10 it is over
    assert (figures.waits, figures.bounds) == ([5, 9], [8])
    numbers = figures.numbers()
    assert (numbers["first_token_median_ms"], numbers["first_token_p99_ms"]) == (8000, 9000)
    assert numbers["at_least"] == ["first_token_median_ms", "first_token_p99_ms"]
    assert "between_tokens_median_ms" not in numbers
    assert (numbers["arrived"], numbers["done"], numbers["waiting"]) == (3, 0, 3)
    assert all(each.over for each in engine.submitted)  # and the next rate finds nobody


def test_what_is_before_and_behind_the_seconds_does_not_count():
    arrivals = at(-1, 1, 3.9, 5, new_tokens=4)
    engine, run, figures = served(
        arrivals, 4, 0.5, 0.5, 0.5, 1.0, 0.5, 2.0, 0.5, 0.5, lead=1.0, max_sequences=2
    )
    # The first writes at -0.5, 0, 0.5 and 1.5; the second, which came in its last step, at 2, 4
    # and then beside the third, which came in the step to 4 and whose first token ends the run.
    assert [token.seconds for token in run.tokens] == pytest.approx(
        [-0.5, 0, 0.5, 1.5, 2, 4, 4.5, 4.5]
    )
    assert figures.waits == pytest.approx([1, 0.6])
    assert figures.gaps == [0.5, 1, 2]  # the gap to the token at 4.5 is not over by then
    assert figures.tokens_per_second == 4 / 4
    assert (figures.arrived, figures.done, figures.running, figures.waiting) == (2, 1, 1, 1)
    assert len(engine.submitted) == 3


def test_percentiles_are_values_of_all():
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.5) == Percentile(50)
    assert percentile(values, 0.99) == Percentile(99)
    assert percentile([7.0], 0.99) == Percentile(7)
    assert percentile(values, 0.5, [60.0] * 4) == Percentile(52)  # all of them are above
    assert percentile(values, 0.5, [1.0]) == Percentile(50, at_least=True)
    assert percentile(values, 0.99, [500.0, 600.0]) == Percentile(500, at_least=True)


def test_arrivals_are_a_poisson_process():
    rate, seconds = 50.0, 100.0
    found = RequestDraw((64, 16), 10_000, 97, "a").arrivals(rate, -20.0, 80.0)
    count, times = rate * seconds, [arrival.seconds for arrival in found]
    five = 5 / math.sqrt(count)  # standard deviations, as a part
    assert len(found) == pytest.approx(count, rel=five)
    assert times == sorted(times) and times[0] > -20 and times[-1] < 80
    gaps = torch.tensor(times).diff()
    assert float(gaps.std() / gaps.mean()) == pytest.approx(1, abs=five)  # exponential
    early, late = gaps[:-1], gaps[1:]
    assert abs(float(torch.corrcoef(torch.stack([early, late]))[0, 1])) < five
    spread = math.sqrt(math.exp(serving_load.SPREAD**2) - 1)
    for mean, lengths in (
        (64, [len(arrival.prompt) for arrival in found]),
        (16, [arrival.new_tokens for arrival in found]),
    ):
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=five * spread)
    assert {token for arrival in found for token in arrival.prompt} == set(range(97))


def test_arrivals_are_drawn_by_their_seed_and_fit():
    draws = [RequestDraw((30, 30), 64, 97, seed).arrivals(9.0, 0.0, 20.0) for seed in "aab"]
    assert draws[0] == draws[1] != draws[2]
    lengths = [length for each in draws[0] for length in (len(each.prompt), each.new_tokens)]
    assert max(lengths) == 32 and min(lengths) >= 1


def test_arrivals_are_independent_of_the_engine():
    arrivals = RequestDraw((8, 8), 64, 97, "a").arrivals(4.0, -2.0, 16.0)
    runs = []
    for step_seconds in (2**-10, 0.5):
        engine, run, figures = served(arrivals, 8, step_seconds, lead=2.0, max_sequences=4)
        count = len(run.requests)
        assert [each.arrived for each in run.requests] == [
            each.seconds for each in arrivals[:count]
        ]
        assert [each.prompt for each in engine.submitted] == [a.prompt for a in arrivals[:count]]
        late = [
            each.submitted - 102 - a.seconds
            for each, a in zip(engine.submitted, arrivals, strict=False)
        ]
        assert min(late) >= 0 and max(late) <= step_seconds + 1e-5
        runs.append(figures)
    fast, slow = runs
    assert fast.arrived == slow.arrived
    assert max(fast.waits) < 3 * 2**-10  # the step under way, and its own
    assert (
        slow.waiting > 8 and min(slow.waits) >= 0.5
    )  # 8 tokens a second, of 32 that are asked for
    assert slow.tokens_per_second == 4 / 0.5


def test_a_closed_loop_keeps_the_engine_full():
    clock = FakeClock()
    engine = FakeEngine(clock, [0.25], 4)
    draw = RequestDraw((8, 6), 64, 97, "a")
    requests, tokens = closed_loop(engine, draw, 40.0, clock, lambda now, run: None)
    assert tokens == 4 / 0.25
    deviation = math.sqrt(math.exp(serving_load.SPREAD**2) - 1)
    assert requests == pytest.approx(16 / 6, rel=5 * deviation / math.sqrt(1000))
    assert all(each.over for each in engine.submitted)
    engine = FakeEngine(clock, [3.0], 4)  # its steps are longer than that
    assert closed_loop(engine, draw, 1.0, clock, lambda now, run: None)[1] == 4 / 3


def test_an_error_of_a_request_is_raised(monkeypatch):
    failed = Fresh(0, "error", FloatingPointError("logits"))
    monkeypatch.setattr(FakeCompletion, "fresh", lambda completion: failed)
    with pytest.raises(FloatingPointError, match="logits"):
        served(at(0), 4, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = ByteModel(DemoModelShape(32, 4, 2, 48, windows=(8, None), context=96))
    return export(model, tmp_path_factory.mktemp("exported"))


def run(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [*map(str, arguments), "--device", "cpu"])


def test_a_load_on_a_real_engine(folder, tmp_path):
    file, image, page = (tmp_path / name for name in ("load.jsonl", "load.png", "load.html"))
    done = run(
        "--serving", folder, "--rates", "20,40", "--seconds", 0.4, "--tokens", "8,4",
        "--json", file, "--plot", image, "--report", page,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "closed loop:" in done.output and "cpu-serving-poisson-8x4" in done.output
    found = read(file)
    assert [result.load["rate"] for result in found] == [20, 40]
    assert [result.case["name"] for result in found] == [
        f"cpu-serving-poisson-8x4-{rate}" for rate in (20, 40)
    ]
    assert len({result.run for result in found}) == 1
    for result in found:
        load = result.load
        assert result.which_pass == "first token" and result.who == "saccade/engine"
        assert result.median_ms == load["first_token_median_ms"] <= load["first_token_p99_ms"]
        assert 0 < result.min_ms <= result.median_ms <= result.max_ms
        assert result.rounds == load["arrived"] > 0
        assert load["tokens_per_second"] > 0 and load["capacity"] > 0
    assert image.read_bytes()[:4] == b"\x89PNG"
    assert "An engine under load" in page.read_text(encoding="utf-8")
    again = run("--read", file)
    assert again.exit_code == 0 and "waiting" in again.output


def test_rates_follow_from_the_capacity(folder, monkeypatch):
    monkeypatch.setattr(serving_load, "closed_loop", lambda *arguments: (20.0, 80.0))
    plan = LoadPlan([], 0.2, (8, 4))
    loaded = serving_load.LoadedModel.of(folder, plan, torch.device("cpu"))
    bar = display.Bar(Console(file=io.StringIO()), plan.names, plan.expected_seconds)
    found = [*serving_load.measure_load(loaded, plan, torch.device("cpu"), bar)]
    assert [result.load["rate"] for result in found] == [5, 10, 15, 20]
    assert bar.bar.tasks[0].percentage == 100


LOAD = {
    "rate": 2.0, "seconds": 8.0, "capacity": 4.0, "max_sequences": 64, "seed": 0,
    "prompt_tokens": 8.0, "new_tokens": 4.0, "first_token_median_ms": 12.5,
    "first_token_p99_ms": 5000.0, "tokens_per_second": 1234.5, "arrived": 17, "done": 16,
    "running": 2, "waiting": 3, "at_least": ["first_token_p99_ms"],
}  # fmt: skip


def result(run="1", **changes):
    fields = {
        "date": "2026-01-02T03:04:05Z", "commit": "abc", "device": "a CPU", "threads": 2,
        "versions": {}, "case": {"name": "cpu-serving-poisson-8x4-2"}, "which_pass": "first token",
        "who": "saccade/engine", "median_ms": 12.5, "min_ms": 1.0, "max_ms": 5000.0, "rounds": 17,
        "run": run, "load": {**LOAD, **changes},
    }  # fmt: skip
    return Result(**fields)


def test_the_table_says_what_is_only_a_bound():
    console = Console(width=120, record=True, file=io.StringIO())
    for table in display.load_tables([result("0", rate=9.0), result("1"), result("1", rate=1.0)]):
        console.print(table)
    text = console.export_text()
    assert "≥ 5000" in text and "≥ 12.5" not in text and "1,234" in text
    assert text.index("25%") < text.index("50%") and "225%" not in text  # of the last run alone
    assert "–" in text  # no request had two tokens


def test_loads_of_other_lengths_are_drawn_beside_each_other(tmp_path):
    case = {"head_dim": 8, "dtype": "float32", "mask": "full"}
    names = [f"cpu-serving-poisson-{lengths}" for lengths in ("8x4", "9x9")]
    both = [
        dataclasses.replace(result(run, rate=rate), case={**case, "name": f"{name}-{rate}"})
        for run, rate, name in zip("12", (2.0, 3.0), names, strict=True)
    ]
    assert [name for _, name in display.loads_of(both)] == names
    display.plot(both, tmp_path / "both.svg")
    text = (tmp_path / "both.svg").read_text(encoding="utf-8")
    assert "cpu-serving-poisson-9x9, capacity" in text and "tokens asked for" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": None}, "load: rate: got None"),
        ({"capacity": 0}, "load: capacity: got 0, takes more than 0"),
        ({"between_tokens_p99_ms": "1"}, "load: between_tokens_p99_ms: got '1'"),
        ({"at_least": 3}, "load: at_least: got 3, takes a list"),
    ],
)
def test_a_load_of_another_kind_is_named(changes, message):
    line = json.loads(result().line())
    line["load"] |= changes
    assert Result.parse(result().line()) == result()
    with pytest.raises(ValueError, match=message):
        Result.parse(json.dumps(line))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "0"], "--rates: got '0', takes requests a second such as 0.5,1,2, or auto"),
        (["--rates", "1,x"], "--rates: got 'x', takes"),
        (
            ["--rates", "1e-9", "--tokens", "8,8"],
            "--rates: got 1e-09, at which no request arrives within the 30",
        ),
        (["--rates", "1", "--tokens", "8"], "--tokens: got '8', takes those of a prompt and new"),
        (["--rates", "1", "--tokens", "8,0.5"], "--tokens: got '0.5', takes"),
        (["--rates", "1", "--tokens", "49,8"], "--tokens: got 49,8, takes at most half of the"),
        (["--rates", "1", "--seconds", "0"], "--seconds: got 0, takes how long each"),
        (["--rates", "1", "--seconds", "nan"], "--seconds: got nan, takes how long each"),
        (["--rates", "1", "--who", "sdpa"], "--serving leaves --who unused"),
        (["--seconds", "1"], "--serving without --rates leaves --seconds unused"),
        (["--plot", "a.png"], "--serving without --rates leaves --plot unused"),
    ],
)
def test_mistakes_are_answered(folder, arguments, message):
    done = run("--serving", folder, *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_a_load_wants_a_model():
    assert "a run without --serving leaves --rates unused" in run("--rates", "1").output
    done = run("--serving", ".", "--rates", "1")
    assert done.exit_code == 2 and "holds no config.json" in done.output

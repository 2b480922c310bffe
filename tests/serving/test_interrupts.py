"""Interrupts at any line of the engine lose no request and change no token."""

import itertools
import random
import signal
import sys
import time
import weakref

import interrupts
import pytest
import served

import saccade
from saccade.serving.decoding import Sampling
from saccade.serving.request import Completion, Limits, Request

NEW = 5
STOP = "7"
STRIDE = 1500  # lines, on average; a step runs some hundreds
PROMPTS = [served.prompts()[n] for n in (1, 3, 4, 8)]


def options(number):
    """Greedy and drawn requests, with an end in the text and without."""
    drawn = {"temperature": 1.1, "seed": number} if number % 2 else {}
    stops = {"stop": STOP} if number == 2 else {}
    return {"max_new_tokens": NEW, "stop_tokens": (), **drawn, **stops}


def make(number=0):
    """An engine under load; of odd number one that begins a step before it looks at another."""
    ways = {"run_ahead": True, "batch_sizes": [2, 4]} if number % 2 else {}
    engine = served.engine(
        num_pages=14, max_sequences=4, tokenizer=served.LetterTokenizer(), **ways
    )
    completions = [engine.submit(prompt, **options(n)) for n, prompt in enumerate(PROMPTS)]
    samples = engine.submit_samples(PROMPTS[0], 2, **options(5))
    return engine, [*completions, *samples]


def outcome(completion):
    found = completion.result()
    return found.tokens, found.text, found.reason


def steady():
    engine, completions = make()
    engine.run()
    return [outcome(each) for each in completions]


def test_an_interrupt_at_any_line_changes_no_token():
    wanted = steady()
    chance = random.Random(0)
    line, came = 0, 0
    with interrupts.ends_within(900):
        while True:
            interrupt = interrupts.Interrupt(line, "serving", "kv_cache")
            engine, completions = make(line)
            for _ in range(500):
                try:
                    with interrupt.armed():
                        if not engine.step():
                            break
                except KeyboardInterrupt:
                    came += 1
                    engine.cache.check()
            assert [outcome(each) for each in completions] == wanted
            served.assert_nothing_is_held(engine)
            if not interrupt.came:
                break
            line += 1 + chance.randrange(2 * STRIDE)
    assert came > 12


def test_an_interrupt_while_one_is_cancelled_leaves_the_others():
    wanted, line = steady(), 0
    for line in itertools.count(step=9):
        interrupt = interrupts.Interrupt(line, "serving", "kv_cache")
        engine, completions = make(line)
        for _ in range(3):
            engine.step()
        for number in (0, 1, 4):  # one of two samples, and two that run or wait
            try:
                with interrupt.armed():
                    completions[number].cancel()
            except KeyboardInterrupt:
                engine.cache.check()
                completions[number].cancel()
        engine.run()
        for number in (2, 3, 5):
            assert outcome(completions[number]) == wanted[number]
        assert all(completions[number].done for number in (0, 1, 4))
        served.assert_nothing_is_held(engine)
        if not interrupt.came:
            break
    assert line > 100


def test_an_interrupt_in_generate_cancels_what_nobody_waits_for():
    for line in (0, 40, 400, 3000):
        engine = served.engine()
        with pytest.raises(KeyboardInterrupt), interrupts.Interrupt(line, "serving").armed():
            engine.generate(PROMPTS, max_new_tokens=NEW, stop_tokens=())
        assert not engine.step()
        served.assert_nothing_is_held(engine)


def test_signals_at_random_moments_lose_nothing():
    wanted = steady()
    chance = random.Random(1)
    came, numbers = 0, itertools.count()
    with interrupts.ends_within(300):
        while came < 30:  # on a fast machine more engines are done before an alarm
            number = next(numbers)
            engine, completions = make(number)
            for _ in range(4):
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.03))
                    engine.run()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    came += 1
                finally:  # an alarm is no business of whoever reports an error
                    signal.setitimer(signal.ITIMER_REAL, 0)
            assert [outcome(each) for each in completions] == wanted
            served.assert_nothing_is_held(engine)


@pytest.fixture(autouse=True)
def alarms_interrupt():
    """An alarm raises KeyboardInterrupt, as Ctrl-C does, and interrupts no other process.

    Python runs signal handlers between any two instructions of the main thread, also in a
    callback of a weak reference or in `__del__`. Those have no caller that an exception could
    reach, so Python reports it to `sys.unraisablehook` and goes on: such an alarm interrupts
    nothing. It is set again for the code that the callback ran in.
    """

    def unraisable(report):
        if report.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0.0002)
        else:
            hook_before(report)

    hook_before, sys.unraisablehook = sys.unraisablehook, unraisable
    handler_before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler_before)
    sys.unraisablehook = hook_before


def test_an_alarm_in_a_weakref_callback_interrupts_the_code_around_it():
    class Referent:
        pass

    referent = Referent()
    reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(KeyboardInterrupt):
        del referent
        time.sleep(60)
    assert reference() is None


def test_waiting_for_what_can_never_come_ends():
    lost = Request(7, [1], Sampling(), Limits(3))
    completion = Completion(lost, lambda: False, lambda request: None)
    for wait in (completion.result, lambda: list(completion)):
        with (
            interrupts.ends_within(60),
            pytest.raises(RuntimeError, match="7: the engine has nothing to do"),
        ):
            wait()


def test_an_error_of_the_model_loses_nothing(monkeypatch):
    wanted = steady()
    engine, completions = make(1)
    engine.step()
    real, begin = saccade.attention_paged, time.perf_counter()
    turns = itertools.count()

    def failing(*tensors, **options):
        if next(turns) % 5 == 0:
            raise RuntimeError("out of memory")
        return real(*tensors, **options)

    with monkeypatch.context() as patch:
        patch.setattr(saccade, "attention_paged", failing)
        while time.perf_counter() - begin < 60:
            try:
                if not engine.step():
                    break
            except RuntimeError:
                engine.cache.check()
    assert next(turns) > 20
    assert [outcome(each) for each in completions] == wanted
    served.assert_nothing_is_held(engine)

"""An engine to which everything happens at once: arrivals, cancels, faults and interrupts."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import interrupts
import served

import saccade
from saccade.serving.decode_steps import Inbox

OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"repetition_penalty": 1.3}, {"logit_bias": {5: 2.0}},
]  # fmt: skip
NEW = 12


class Fault(RuntimeError):
    pass


def ask(engine: saccade.Engine, prompt: list[int], options: dict[str, Any]) -> Any:
    return engine.submit(prompt, max_new_tokens=NEW, stop_tokens=(), **options)


def disturb(engine: saccade.Engine, steps: int, chance: random.Random, patch: Any) -> list[Any]:
    """Take steps while everything happens; each request with its prompt and options.

    Returns:
        Of the requests that nobody cancelled, all done, but for those that faults ended: prompt,
        options and tokens.
    """
    asked: list[tuple[list[int], dict[str, Any], Any]] = []
    done = 0
    for _ in range(steps):
        if len(asked) - done < 8 and chance.random() < 0.4:
            prompt, options = chance.choice(served.prompts()), chance.choice(OPTIONS)
            asked.append((prompt, options, ask(engine, prompt, options)))
        if asked and chance.random() < 0.03:
            asked.pop(chance.randrange(len(asked)))[2].cancel()
        take_step(engine, chance, patch)
        done = sum(completion.statistics.reason is not None for *_, completion in asked)
    engine.run()
    served.assert_nothing_is_held(engine)
    found = []
    for prompt, options, each in asked:
        with suppress(Fault):  # met in three steps on end, which is the end of a request
            found.append((prompt, options, each.result().tokens))
    return found


def take_step(engine: saccade.Engine, chance: random.Random, patch: Any) -> None:
    """One step, in which something may go wrong in any line."""
    kind = chance.random()
    if kind < 0.1:
        interrupt = interrupts.Interrupt(chance.randrange(600), "serving", "kv_cache")
        with suppress(KeyboardInterrupt), interrupt.armed():
            engine.step()
    elif kind < 0.2:
        place = chance.choice([(Inbox, "send"), (engine.cache, "grow"), (engine.cache, "name")])
        with patch.context() as broken, suppress(Fault):
            broken.setattr(*place, failing(getattr(*place), after=chance.random() < 0.5))
            engine.step()
    else:
        engine.step()


def failing(real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """A function that fails before its work, or after it."""

    def call(*args: Any, **options: Any) -> Any:
        if after:
            real(*args, **options)
        raise Fault

    return call

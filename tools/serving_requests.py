"""Time whole requests of `saccade.Engine` on a GPU: many, those under load, and the first.

Usage: python tools/serving_requests.py [CASE ...] [--model 8b] [--json FILE] [--seconds 400]

The cases:
  start         a fresh process with empty caches, then one with full ones: seconds from the
                engine's making to its first token, the weights apart
  batch         64 requests of 512 random tokens and 128 new ones, from the first to the last one
  transformers  the same by transformers' own `generate_batch`
  arrivals      32 requests decode while prompts of 8,000 tokens arrive, one every 40 steps: the
                time between the tokens of those 32, with the engine's own largest step (512)
  large-steps   the same with steps of at most 4,096 tokens

Each runs in a process of its own. Models are those of tools/serving_steps.py, weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving_steps import MODELS, in_a_process, model_of, prompts_of, seconds_of

CASES = ("start", "batch", "transformers", "arrivals", "large-steps")
REQUESTS, PROMPT, NEW = 64, 512, 128
RUNNING, ARRIVING, EVERY, ARRIVALS = 32, 8000, 40, 6  # requests, tokens, steps, prompts


def main() -> int:
    """Run every case, and show what each found; 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--json", type=Path, help="a file for one line a case")
    parser.add_argument("--seconds", type=float, default=400, help="for all of it")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(FOUND_BY[asked.here](asked.model)))
        return 0
    if unknown := set(asked.cases) - set(CASES):
        parser.error(f"CASE: got {', '.join(sorted(unknown))}, takes {', '.join(CASES)}")
    end, failed = time.monotonic() + asked.seconds, 0
    for case in asked.cases:
        found = (start if case == "start" else found_by)(case, asked.model, end)
        failed += "failed" in found
        row = {"case": f"serving-{asked.model}-{case}", **found}
        print(json.dumps(row), flush=True)
        if asked.json is not None:
            with asked.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return int(failed > 0)


def found_by(
    case: str, model: str, end: float, caches: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a case gives, in a process of its own."""
    arguments = [__file__, "--here", case, "--model", model]
    return in_a_process(arguments, end - time.monotonic(), caches)


def start(case: str, model: str, end: float) -> dict[str, Any]:
    """The first token of a process with empty caches, and of one after it."""
    with tempfile.TemporaryDirectory() as folder:
        names = "SACCADE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
        caches = {name: f"{folder}/{name}" for name in names}
        found = {}
        for which in ("empty", "full"):
            found[which] = found_by("first token", model, end, caches)
            if "failed" in found[which]:
                return found[which]
    return {f"{name} ({which})": s for which, all in found.items() for name, s in all.items()}


def served(model: str, **options: Any) -> tuple[Any, Any]:
    """A model and its engine, which has tried its steps."""
    import saccade

    made = model_of({**MODELS[model], "max_position_embeddings": 16_384})
    sequences = options.pop("max_sequences", REQUESTS)
    engine = saccade.Engine(
        made, max_sequences=sequences, max_length=ARRIVING + 1000, progress=False, **options
    )
    return made, engine


def first_token(model: str) -> dict[str, Any]:
    """Seconds of the engine's making, and until it gave a token."""
    import torch

    made = model_of({**MODELS[model], "max_position_embeddings": 16_384})
    torch.cuda.synchronize()
    import saccade

    begin = time.perf_counter()
    engine = saccade.Engine(made, max_sequences=8, max_length=4096, progress=False)
    ready = time.perf_counter() - begin
    (prompt,) = prompts_of(made, [PROMPT])
    engine.generate([prompt], max_new_tokens=1, stop_tokens=())
    return {"made_s": ready, "first_token_s": time.perf_counter() - begin}


def batch(model: str) -> dict[str, Any]:
    """Seconds for all requests, by the engine."""
    made, engine = served(model)
    prompts = prompts_of(made, [PROMPT] * REQUESTS)
    found: list[Any] = []
    options = {"max_new_tokens": NEW, "stop_tokens": ()}
    took = seconds_of(lambda: found.extend(engine.generate(prompts, **options)))
    assert all(len(each.tokens) == NEW for each in found)
    return {"seconds": took, "tokens_s": REQUESTS * NEW / took, "explain": engine.explain()}


def transformers_batch(model: str) -> dict[str, Any]:
    """Seconds for all requests, by transformers, after two requests that it may compile for."""
    import transformers

    made = model_of({**MODELS[model], "max_position_embeddings": 16_384})
    made.set_attn_implementation("paged|sdpa")
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = prompts_of(made, [PROMPT] * REQUESTS)

    def generate(some: list[list[int]]) -> dict[str, Any]:
        return made.generate_batch(inputs=some, generation_config=config, progress_bar=False)

    generate([prompt[:64] for prompt in prompts[:2]])
    found: dict[str, Any] = {}
    took = seconds_of(lambda: found.update(generate(prompts)))
    lengths = [len(each.generated_tokens) for each in found.values()]
    assert lengths == [NEW] * REQUESTS, lengths
    return {
        "seconds": took, "tokens_s": REQUESTS * NEW / took, "transformers":
        transformers.__version__,
    }  # fmt: skip


def arrivals(model: str, **options: Any) -> dict[str, Any]:
    """The time between the tokens of requests that decode while long prompts arrive."""
    made, engine = served(model, max_sequences=RUNNING + ARRIVALS, **options)
    steps = ARRIVALS * EVERY
    running = [
        engine.submit(prompt, max_new_tokens=8 * steps, stop_tokens=())
        for prompt in prompts_of(made, [PROMPT] * RUNNING)
    ]
    long = prompts_of(made, [ARRIVING] * ARRIVALS)
    while min(each.statistics.new_tokens for each in running) < 4:
        engine.step()
    had, between, last = running[0].statistics.new_tokens, list[float](), time.perf_counter()
    waiting = list[Any]()
    for step in range(8 * steps):
        if step % EVERY == 0 and long:
            waiting.append(engine.submit(long.pop(), max_new_tokens=1, stop_tokens=()))
        engine.step()
        if running[0].statistics.new_tokens > had:
            had, now = running[0].statistics.new_tokens, time.perf_counter()
            between.append(now - last)
            last = now
        if step >= steps and all(each.statistics.new_tokens for each in waiting):
            break
    between.sort()
    middle = statistics.median(between)
    p99 = between[int(0.99 * len(between))]
    return {
        "median_ms": 1e3 * middle, "p99_ms": 1e3 * p99, "worst_ms": 1e3 * between[-1],
        "p99_over_median": p99 / middle, "tokens": len(between),
    }  # fmt: skip


FOUND_BY: dict[str, Any] = {
    "first token": first_token,
    "batch": batch,
    "transformers": transformers_batch,
    "arrivals": arrivals,
    "large-steps": lambda model: arrivals(model, max_batch_tokens=4096),
}

if __name__ == "__main__":
    sys.exit(main())

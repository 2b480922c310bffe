"""Time whole requests of `saccade.Engine`: many, those under load, and the first.

Usage: python tools/serving_requests.py [CASE ...] [--model 8b] [--json FILE] [--seconds 400]

The cases:
  start         a fresh process with empty caches, then one with full ones: seconds from the
                engine's making to its first token, the weights apart
  batch         64 requests of 512 random tokens and 128 new ones, from the first to the last one
  transformers  the same by transformers' own `generate_batch`, in its second call
  arrivals      32 requests decode while prompts of 8,000 tokens arrive, one every 40 steps: the
                time between the tokens of those 32, with the engine's own largest step (512)
  large-steps   the same with steps of at most 4,096 tokens
  padded-128    on a CPU, of hidden size 128: 24 requests by the engine, and by transformers'
                `generate` on one padded batch, by turns; tokens must be equal. Ratios are medians
                of time on the processor, as other programs may run beside. Not without its name.
  padded-512    the same of hidden size 512

Each runs in a process of its own. Models are those of tools/serving_steps.py, weights are random.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serving_steps import MODELS, in_a_process, model_of, prompts_of, seconds_of

CASES = ("start", "batch", "transformers", "arrivals", "large-steps")
ON_CPU = ("padded-128", "padded-512")
REQUESTS, PROMPT, NEW = 64, 512, 128
RUNNING, ARRIVING, EVERY, ARRIVALS = 32, 8000, 40, 6  # requests, tokens, steps, prompts


def main() -> int:
    """Run every case, and show what each found; 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*CASES, *ON_CPU)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help=", ".join(known))
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--json", type=Path, help="a file for one line a case")
    parser.add_argument("--seconds", type=float, default=400, help="for all of it")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(FOUND_BY[asked.here](asked.model)))
        return 0
    if unknown := set(asked.cases) - set(known):
        parser.error(f"CASE: got {', '.join(sorted(unknown))}, takes {', '.join(known)}")
    end, failed = time.monotonic() + asked.seconds, 0
    for case in asked.cases:
        found = (start if case == "start" else found_by)(case, asked.model, end)
        failed += "failed" in found
        name = f"cpu-serving-{case}" if case in ON_CPU else f"serving-{asked.model}-{case}"
        row = {"case": name, **found}
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
    """Seconds for all requests by transformers, after as many others that it captures graphs for.

    Its manager is kept between the two, so the second call begins with all that the first made.
    """
    import transformers

    made = model_of({**MODELS[model], "max_position_embeddings": 16_384})
    # Later versions take the name without its prefix, and none with it.
    prefixed = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
    made.set_attn_implementation("paged|sdpa" if prefixed else "sdpa")
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = prompts_of(made, [PROMPT] * 2 * REQUESTS)

    def generate(some: list[list[int]]) -> None:
        found = made.generate_batch(
            inputs=some, generation_config=config, progress_bar=False, persistent_manager=True
        )
        lengths = [len(each.generated_tokens) for each in found.values()]
        assert lengths == [NEW] * REQUESTS, lengths

    first = seconds_of(lambda: generate(prompts[REQUESTS:]))
    took = seconds_of(lambda: generate(prompts[:REQUESTS]))
    made.destroy_cached_continuous_batching_manager()
    return {
        "seconds": took, "tokens_s": REQUESTS * NEW / took, "first_call_s": first,
        "transformers": transformers.__version__,
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


PADDED, LAYERS, VOCABULARY, NEW_PADDED, ROUNDS = 24, 4, 2048, 64, 9  # requests, then sizes


def padded(hidden: int) -> dict[str, Any]:
    """Tokens a second of the engine over those of `generate` on one padded batch, on a CPU."""
    import torch
    import transformers

    ways = ways_of(hidden)
    wanted = ways["generate"]()
    assert all(way() == wanted for way in ways.values())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name in rotated(list(ways), number):
            begin = time.process_time()
            ways[name]()
            seconds[name].append(time.process_time() - begin)
    ratios = {
        f"{name}_over_generate": statistics.median(
            theirs / ours for theirs, ours in zip(seconds["generate"], seconds[name], strict=True)
        )
        for name in ("engine", "merged")
    }
    medians = {f"{name}_cpu_s": statistics.median(of) for name, of in seconds.items()}
    return {
        "requests": PADDED, "new_tokens": NEW_PADDED, "rounds": ROUNDS, **ratios, **medians,
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip


def ways_of(hidden: int) -> dict[str, Callable[[], list[list[int]]]]:
    """What gives new tokens for the same prompts: `generate`, and engines with options."""
    import torch
    import transformers

    import saccade

    heads = hidden // (32 if hidden < 512 else 64)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=LAYERS, num_attention_heads=heads, num_key_value_heads=heads // 2,
        max_position_embeddings=1024,
    )  # fmt: skip
    made: Any = transformers.LlamaForCausalLM(config).eval()
    peer, other = copy.deepcopy(made), copy.deepcopy(made)
    peer.set_attn_implementation("sdpa")
    sizes: dict[str, Any] = {"max_sequences": PADDED, "max_length": 256}
    engines = {
        "engine": saccade.Engine(made, **sizes),
        "merged": saccade.Engine(other, **sizes, merge_products=True),
    }
    chance = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 65, (PADDED,), generator=chance).tolist()
    prompts, longest = prompts_of(made, lengths), max(lengths)
    rows = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    seen = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])

    def by_generate() -> list[list[int]]:
        with torch.inference_mode():
            found = peer.generate(
                rows, attention_mask=seen, max_new_tokens=NEW_PADDED, do_sample=False,
                min_new_tokens=NEW_PADDED, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        return found[:, longest:].tolist()

    def by_engine(engine: Any) -> list[list[int]]:
        engine.cache.clear()  # of what it knows of these prompts
        found = engine.generate(prompts, max_new_tokens=NEW_PADDED, stop_tokens=())
        return [each.tokens for each in found]

    return {
        "generate": by_generate,
        **{name: functools.partial(by_engine, engine) for name, engine in engines.items()},
    }


def rotated(names: list[str], by: int) -> list[str]:
    """Names in an order that changes from round to round."""
    by %= len(names)
    return names[by:] + names[:by]


FOUND_BY: dict[str, Any] = {
    "padded-128": lambda model: padded(128),
    "padded-512": lambda model: padded(512),
    "first token": first_token,
    "batch": batch,
    "transformers": transformers_batch,
    "arrivals": arrivals,
    "large-steps": lambda model: arrivals(model, max_batch_tokens=4096),
}

if __name__ == "__main__":
    sys.exit(main())

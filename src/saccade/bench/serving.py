"""Many requests through `saccade.Engine`, beside transformers' generate one by one.

Before anything is timed, the engine's tokens are compared with greedy generation that has no cache
at all: every token from a pass over everything before it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import saccade
from saccade.bench.case import BenchCase
from saccade.bench.results import Result, record
from saccade.bench.timing import Runnable, TimingPlan, WallClock, rotate

ENGINE, ONE_BY_ONE = "saccade/engine", "transformers/generate"
REQUESTS, NEW_TOKENS = 64, 128
PROMPT_TOKENS = (16, 65)  # from, and to but one
PIECE = 200  # characters, which are more tokens than a prompt has
PLAN = TimingPlan(rounds=3, sample_seconds=0.0, limit_seconds=600.0)


class Work(NamedTuple):
    """What is served: prompts as tokens, and how many new ones each wants."""

    prompts: list[list[int]]
    new_tokens: int


def measure_serving(
    folder: Path, requests: int = REQUESTS, new_tokens: int = NEW_TOKENS, plan: TimingPlan = PLAN,
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:  # fmt: skip
    """Times of all requests together.

    Raises:
        ValueError: for a folder without a model, and if the engine's tokens are not those of
            generation without a cache.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"--serving: {folder} holds no config.json; a model's folder has one")
    served, alone, tokenizer = load(folder), load(folder), tokenizer_of(folder)
    work = Work(prompts_of(tokenizer, requests), new_tokens)
    check(serve(served, work), without_cache(alone, work))
    say(f"{requests * new_tokens:,} tokens are those of greedy generation without a cache.")
    candidates = {
        ENGINE: Runnable(lambda: serve(served, work)),
        ONE_BY_ONE: Runnable(lambda: one_by_one(alone, work)),
    }
    timings = rotate(candidates, WallClock(), plan)
    for who, timing in timings.items():
        speed = requests * new_tokens / timing.median_ms * 1e3
        say(f"{who}: {speed:,.0f} new tokens a second")
    ratio = timings[ONE_BY_ONE].median_ms / timings[ENGINE].median_ms
    say(f"The engine gives {ratio:.1f} times as many (wanted: at least 5).")
    return record(case_of(alone, work), "generate", timings, torch.device("cpu"))


def load(folder: Path) -> Any:
    """The folder's model, which no token stops."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    return model


def tokenizer_of(folder: Path) -> Any:
    """The folder's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Pieces of unlike length of the source of Python's textwrap."""
    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - PIECE, (count,), generator=random).tolist()
    lengths = torch.randint(*PROMPT_TOKENS, (count,), generator=random).tolist()
    pieces = [tokenizer.encode(text[start : start + PIECE]) for start in starts]
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


def serve(model: Any, work: Work) -> list[list[int]]:
    """All requests at once, by a new engine: an old one would know the prompts."""
    engine = saccade.Engine(model, max_sequences=len(work.prompts))
    generated = engine.generate(work.prompts, max_new_tokens=work.new_tokens, stop_tokens=())
    return [each.tokens for each in generated]


@torch.inference_mode()
def one_by_one(model: Any, work: Work) -> list[list[int]]:
    """One request after the other, by transformers' generate with its own cache and attention."""
    found = []
    for prompt in work.prompts:
        tokens = torch.tensor([prompt])
        output = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=work.new_tokens, pad_token_id=0,
        )  # fmt: skip
        found.append(output[0, len(prompt) :].tolist())
    return found


@torch.inference_mode()
def without_cache(model: Any, work: Work) -> list[list[int]]:
    """Greedy generation, every token from a pass over everything before it."""
    found = []
    for prompt in work.prompts:
        tokens = list(prompt)
        for _ in range(work.new_tokens):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def check(found: list[list[int]], wanted: list[list[int]]) -> None:
    """Refuse tokens that differ."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours != theirs:
            at = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            raise ValueError(
                f"request {number}: new token {at} is {ours[at]}, and {theirs[at]} without a cache"
            )


def case_of(model: Any, work: Work) -> BenchCase:
    """The work in the numbers of result files; lengths are those of the longest request."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    longest = max(map(len, work.prompts))
    dtype = str(model.dtype).removeprefix("torch.")
    total = sum(map(len, work.prompts))
    name = f"cpu-serving-{len(work.prompts)}x{work.new_tokens}-prompts-{total}"
    length = longest + work.new_tokens
    return BenchCase(name, len(work.prompts), heads, kv_heads, length, length, dim, dim, dtype)

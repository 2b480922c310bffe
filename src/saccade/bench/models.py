"""Whole models under the bench: training steps, and many requests through `saccade.Engine`.

Training steps of a Llama-like model run under PyTorch's attention and ours, eager and compiled. For
each attention there is a model; all share one set of random weights, so that only activations
count twice, and what differs between two steps is the attention alone. Every variant first takes
the same steps from the same weights, and its losses and gradient norms are kept beside those of the
others. Then all variants of a length and mode take turns.

Requests run beside transformers' generate one by one. Before anything is timed, the engine's tokens
are compared with greedy generation that has no cache at all: every token from a pass over
everything before it.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.bench.case import CAUSAL, SHORT_DTYPES, BenchCase, short
from saccade.bench.peers import ours
from saccade.bench.results import Absence, Result, first_line, record
from saccade.bench.timing import Runnable, Timing, TimingPlan, WallClock, clock_of, rotate

OPTIMIZER = "AdamW, fused, learning rate 1e-4"
LEARNING_RATE = 1e-4  # at 3e-4 the first steps of a wide model diverge
WEIGHTS_DEVIATION = 0.02  # of the normal distribution that weights are drawn from, as Llama's were
SEED = 0
INSTALL = "--training needs transformers 5.17 or newer: pip install 'saccade[transformers]'"


class ModelShape(NamedTuple):
    """The sizes of a model, and what one step of it takes.

    Attributes:
        tokens: of a step; a longer sequence is a batch of one, with activation checkpointing.
        lengths: of the sequences, where none are named.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: str
    tokens: int
    lengths: tuple[int, ...]


SHAPES = {
    "gpu": ModelShape(2560, 8960, 12, 20, 5, 32_000, "bfloat16", 2**14, (2048, 8192, 32768)),
    "cpu": ModelShape(256, 704, 4, 4, 2, 2048, "float32", 1024, (256, 1024, 2048)),
}


class Workload(NamedTuple):
    """Steps of a model on sequences of one length."""

    machine: str  # "gpu" or "cpu": the first word of the case's name
    shape: ModelShape
    length: int

    @property
    def batch(self) -> int:
        """How many sequences a step takes."""
        return max(1, self.shape.tokens // self.length)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return self.length > self.shape.tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    def case(self) -> BenchCase:
        """The attention of one layer, under the workload's name."""
        shape, length = self.shape, self.length
        dim = shape.hidden // shape.heads
        name = f"{self.machine}-training-{SHORT_DTYPES[shape.dtype]}-d{dim}-{short(length)}"
        heads, lengths, dims = (shape.heads, shape.kv_heads), (length, length), (dim, dim)
        return BenchCase(name, self.batch, *heads, *lengths, *dims, shape.dtype, CAUSAL)

    def flops(self, parameters: int) -> int:
        """Operations of a step: 6 for each token and each weight of a product, and attention's.

        What checkpointing computes again does not count.
        """
        multiplied = parameters - self.shape.vocabulary * self.shape.hidden  # an embedding is read
        attention = self.shape.layers * self.case().flops("forward+backward")
        return 6 * multiplied * self.num_tokens + attention


class Models:
    """One set of weights, and for each attention a model that computes with them.

    Raises:
        ModuleNotFoundError: without transformers, saying how to get it.
    """

    def __init__(self, work: Workload, attentions: Sequence[str], device: torch.device) -> None:
        self.work, self.device = work, device
        self.by_attention = {name: _model(work, name, device) for name in attentions}
        first, *others = self.by_attention.values()
        for model in others:
            model.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        self.weights: list[Tensor] = list(first.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=LEARNING_RATE, fused=True)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(weights.numel() for weights in self.weights)

    @torch.no_grad()
    def start(self) -> None:
        """Draw the weights, always the same ones; the optimizer forgets what it has seen."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        generator = torch.Generator(self.device).manual_seed(SEED)
        for weights in self.weights:
            if weights.dim() > 1:
                weights.normal_(0.0, WEIGHTS_DEVIATION, generator=generator)
            else:
                weights.fill_(1.0)  # of a norm

    def update(self) -> None:
        """Take a step of the optimizer and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients, added up in float32."""
        norms = [
            torch.linalg.vector_norm(weights.grad, dtype=torch.float32)
            for weights in self.weights
            if weights.grad is not None
        ]
        return float(torch.linalg.vector_norm(torch.stack(norms)))


def require_transformers() -> None:
    """Refuse before anything is measured, if there is no model to train."""
    try:
        from saccade.integrations.transformers import (  # breaks public-names-only: an extra's door
            register,
        )
    except ImportError as error:
        raise ModuleNotFoundError(f"{INSTALL} ({error})") from None
    register()


def _model(work: Workload, attention: str, device: torch.device) -> Any:
    require_transformers()
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = work.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=work.length,
        tie_word_embeddings=False,
    )
    with device:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=getattr(torch, shape.dtype)
        )
    if work.checkpointing:
        with warnings.catch_warnings():  # a later transformers calls it activation checkpointing
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batches(work: Workload, count: int, device: torch.device) -> list[Tensor]:
    """Tokens of steps, [batch, length] each: a few are frequent, as words are (Zipf's law)."""
    generator = torch.Generator().manual_seed(SEED)
    frequency = 1 / torch.arange(1, work.shape.vocabulary + 1)
    drawn = torch.multinomial(
        frequency, count * work.num_tokens, replacement=True, generator=generator
    )
    return list(drawn.view(count, work.batch, work.length).to(device))


ATTENTIONS = ("sdpa", "saccade")
MODES = {"eager": "training step", "compiled": "training step, compiled"}  # -> the pass in files
COMPARED_STEPS = 5


class Course(NamedTuple):
    """Losses, gradient norms and costs of a variant's first steps."""

    losses: list[float]
    gradient_norms: list[float]
    peak_mb: float | None  # all that is allocated, on a GPU, from the second step on
    first_seconds: float  # of the first step, which compiles


def workloads(machine: str, lengths: Sequence[str]) -> list[Workload]:
    """The workloads of the lengths, such as 2k or 1536.

    Raises:
        ValueError: for what is no length.
    """
    shape = SHAPES[machine]
    return [Workload(machine, shape, _length(text)) for text in lengths] or [
        Workload(machine, shape, length) for length in shape.lengths
    ]


def _length(text: str) -> int:
    number = text.removesuffix("k")
    if not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(f"--lengths: got {text!r}, takes lengths such as 2k,8k or 1536")
    return int(number) * (1024 if text.endswith("k") else 1)


def chosen(option: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The known ones that are named, or all of them if none is."""
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: got {name!r}, takes {', '.join(known)} with --training")
    return [name for name in known if name in names or not names]


def measure_training(
    works: Sequence[Workload], attentions: Sequence[str], modes: Sequence[str],
    device: torch.device, plan: TimingPlan, say: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[list[Result], list[Absence]]]:  # fmt: skip
    """For each length and mode, the results of all variants, and why some have none."""
    for work in works:
        for mode in modes:
            try:
                yield _measure(work, attentions, mode, device, plan, say)
            except Exception as error:  # whatever one case raises, the others are to be measured
                reason = f"{mode}: {first_line(error)}"
                absences = [Absence(work.case().name, who, reason) for who in attentions]
            else:
                continue
            _forget(device)  # after the exception, whose frames hold the model
            yield [], absences


def _measure(
    work: Workload, attentions: Sequence[str], mode: str, device: torch.device, plan: TimingPlan,
    say: Callable[[str], None],
) -> tuple[list[Result], list[Absence]]:  # fmt: skip
    models, case = Models(work, attentions, device), work.case()
    tokens = batches(work, COMPARED_STEPS, device)
    runs: dict[str, Callable[[], object]] = {}
    courses: dict[str, Course] = {}
    absences = []
    for attention in attentions:
        who = ours.chosen(case, device) if attention == "saccade" else attention
        say(f"{case.name}, {mode}: the first steps of {who} ...")
        found = _first_steps(models, attention, mode, tokens)
        if isinstance(found, str):
            absences.append(Absence(case.name, who, f"{mode}: {found}"))
            _forget(device)
            continue
        runs[who], courses[who] = found
    say(f"{case.name}, {mode}: in turns ...")
    for run in runs.values():  # compiled code may compile anew once others have come
        run()
    candidates = {who: Runnable(run) for who, run in runs.items()}
    timings = rotate(candidates, clock_of(device), plan) if candidates else {}
    results = _results(work, mode, timings, courses, device, models.num_parameters)
    del models, runs, candidates
    _forget(device)
    return results, absences


def _first_steps(
    models: Models, attention: str, mode: str, tokens: list[Tensor]
) -> tuple[Callable[[], object], Course] | str:
    """A step, and the course of the first ones from the same weights; or why there are none."""
    on_gpu = models.device.type == "cuda"
    model = models.by_attention[attention]
    forward = torch.compile(model, dynamic=False) if mode == "compiled" else model
    models.start()
    losses: list[float] = []
    norms: list[float] = []
    start, first = time.perf_counter(), 0.0
    try:
        for number, batch in enumerate(tokens):
            losses.append(float(_differentiated(forward, batch)))
            norms.append(models.gradient_norm())
            models.update()
            if number == 0:
                first = time.perf_counter() - start
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats(models.device)
    except Exception as error:  # whatever one variant raises, the others are to be measured
        models.start()  # so that no gradient of the failed step is kept
        return first_line(error)
    if not all(map(math.isfinite, (*losses, *norms))):
        return f"a loss or gradient norm is not finite: {losses}, {norms}"
    peak = torch.cuda.max_memory_allocated(models.device) / 1e6 if on_gpu else None

    def step() -> None:
        _differentiated(forward, tokens[0])
        models.update()

    return step, Course(losses, norms, peak, first)


def _differentiated(forward: Any, batch: Tensor) -> Tensor:
    """The loss of a batch, once every weight has its gradient."""
    loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    return loss.detach()


def _results(
    work: Workload, mode: str, timings: dict[str, Timing], courses: dict[str, Course],
    device: torch.device, parameters: int,
) -> list[Result]:  # fmt: skip
    peaks = {who: course.peak_mb for who, course in courses.items() if course.peak_mb is not None}
    about = {
        "layers": work.shape.layers, "parameters": parameters,
        "checkpointing": work.checkpointing, "optimizer": OPTIMIZER,
    }  # fmt: skip
    results = []
    for result in record(work.case(), MODES[mode], timings, device, peaks):
        course, seconds = courses[result.who], result.median_ms / 1e3
        results.append(
            dataclasses.replace(
                result,
                case=result.case | about,
                tflops=work.flops(parameters) / seconds / 1e12,
                tokens_per_second=work.num_tokens / seconds,
                first_seconds=course.first_seconds,
                losses=course.losses,
                gradient_norms=course.gradient_norms,
            )
        )
    return results


def _forget(device: torch.device) -> None:
    """Free what is no longer used: compiled code, cycles of objects, the GPU's memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    """Times of all requests together."""
    require_model(folder)
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


def require_model(folder: Path) -> None:
    """Refuse a folder that holds no model."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--serving: {folder} holds no config.json; a model's folder has one")


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
    for number, (got, right) in enumerate(zip(found, wanted, strict=True)):
        if got != right:
            at = next(n for n, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
            raise ValueError(
                f"request {number}: new token {at} is {got[at]}, and {right[at]} without a cache"
            )


def case_of(model: Any, work: Work) -> BenchCase:
    """The work in the numbers of result files; lengths are those of the longest request."""
    longest, total = max(map(len, work.prompts)), sum(map(len, work.prompts))
    name = f"cpu-serving-{len(work.prompts)}x{work.new_tokens}-prompts-{total}"
    return attention_of(model, name, len(work.prompts), longest + work.new_tokens)


def attention_of(model: Any, name: str, batch: int, length: int) -> BenchCase:
    """The attention of one of a model's layers, as a case of that name."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = str(model.dtype).removeprefix("torch.")
    return BenchCase(name, batch, heads, kv_heads, length, length, dim, dim, dtype)

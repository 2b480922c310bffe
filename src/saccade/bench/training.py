"""Training: steps of a Llama-like model under PyTorch's attention and ours, eager and compiled.

Every variant first takes the same steps from the same weights, and its losses and gradient norms
are kept beside those of the others. Then all variants of a length and mode take turns.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.bench import training_model
from saccade.bench.gpu_clock import GpuClock
from saccade.bench.measure import Absence, first_line
from saccade.bench.passes import Runnable
from saccade.bench.peers import ours
from saccade.bench.results import Result, record
from saccade.bench.timing import Plan, Timing, WallClock, rotate
from saccade.bench.training_model import SHAPES, Models, Workload

ATTENTIONS = ("sdpa", "saccade")
MODES = {"eager": "training step", "compiled": "training step, compiled"}  # -> the pass in files
COMPARED_STEPS = 5


class Course(NamedTuple):
    """What the first steps of a variant gave."""

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
    number, thousands = text.removesuffix("k"), text.endswith("k")
    if not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(f"--lengths: got {text!r}, takes lengths such as 2k,8k or 1536")
    return int(number) * (1024 if thousands else 1)


def chosen(option: str, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """What was asked for, or all that is known.

    Raises:
        ValueError: for a name that is unknown.
    """
    for name in asked:
        if name not in known:
            raise ValueError(f"{option}: got {name!r}, takes {', '.join(known)} with --training")
    return [name for name in known if name in asked or not asked]


def measure_training(
    works: Sequence[Workload], attentions: Sequence[str], modes: Sequence[str],
    device: torch.device, plan: Plan, say: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[list[Result], list[Absence]]]:  # fmt: skip
    """For each length and mode, the results of all variants, and who has none and why."""
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
    work: Workload, attentions: Sequence[str], mode: str, device: torch.device, plan: Plan,
    say: Callable[[str], None],
) -> tuple[list[Result], list[Absence]]:  # fmt: skip
    models, case = Models(work, attentions, device), work.case()
    tokens = training_model.batches(work, COMPARED_STEPS, device)
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
    clock = GpuClock(device) if device.type == "cuda" else WallClock()
    candidates = {who: Runnable(run) for who, run in runs.items()}
    timings = rotate(candidates, clock, plan) if candidates else {}
    results = _results(work, mode, timings, courses, device, models.num_parameters)
    del models, runs, candidates
    _forget(device)
    return results, absences


def _first_steps(
    models: Models, attention: str, mode: str, tokens: list[Tensor]
) -> tuple[Callable[[], object], Course] | str:
    """A step, and what the first ones from the same weights gave; or why there are none."""
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
        "checkpointing": work.checkpointing, "optimizer": training_model.OPTIMIZER,
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
    """Give back what nobody holds any more: compiled code, cycles of objects, the GPU's memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

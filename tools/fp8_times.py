"""Check and time fp8 attention on a GPU, beside saccade.attention in bfloat16.

Usage: python tools/fp8_times.py errors|warm|times|schedules [--part N/M] [--seconds S]
       [--json FILE] [--implementation NAME]

errors: what kernels give against float64 and against the CPU's numbers, over forms of scales,
masks, head dims and packed calls. warm: compile what `times` and `schedules` start (parts side by
side fill the cache). times: TFLOP/s of e4m3 rows by the Hopper kernel and by the Triton kernel, of
16-bit rows that are quantised inside, and of bfloat16, in turns. schedules: e4m3 rows by other
schedules of the Hopper kernel.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade import KernelConfig, masks, scores
from saccade.ops.attention_fp8.hopper import configs
from saccade.ops.attention_fp8.hopper.configs import Fp8Schedule
from saccade.ops.attention_fp8.hopper.host import HopperFp8Call
from saccade.ops.attention_fp8.validation import Fp8Options, prepare

E4M3 = torch.float8_e4m3fn
PACKED_FP8: Any = saccade.attention_fp8_varlen
PACKED: Any = saccade.attention_varlen
DENSE: Any = saccade.attention
TOKENS = 16384  # in all sequences of a case
CHANNELS = 2048  # of all heads
LENGTHS = (4096, 1024, 16384)
DIMS = (128, 64, 256)
COPIES = 3  # of the tensors, taken in turns, so that caches hold none of them
ROUNDS = 5
IMPLEMENTATION: str | None = None  # of what `errors` looks at
STRETCH = 12  # milliseconds
SCHEDULES = {
    128: {
        "first": Fp8Schedule(2, 128, 4, 2, 1, 240, 24, "first"),
        "2 stages": Fp8Schedule(2, 128, 2, 2, 1, 240, 24, "first"),
        "largest": Fp8Schedule(2, 128, 4, 2, 1, 240, 24, "all"),
        "64 keys": Fp8Schedule(2, 64, 8, 2, 1, 240, 24, "first", True),
    },
    64: {
        "first": Fp8Schedule(2, 128, 4, 2, 1, 240, 24, "first"),
        "largest": Fp8Schedule(2, 128, 4, 2, 1, 240, 24, "all"),
        "3 consumers": Fp8Schedule(3, 128, 4, 2, 1, 160, 32, "first", True),
    },
    256: {
        "first": Fp8Schedule(2, 128, 2, 1, 2, 240, 24, "first"),
        "64 keys": Fp8Schedule(2, 64, 4, 1, 2, 240, 24, "first", True),
    },
}  # by head dim


# ---- errors --------------------------------------------------------------------------------------


class ErrorCase(NamedTuple):
    """A call whose errors are told."""

    name: str
    head_dim: int = 128
    value_dim: int = 128
    given: str = ""  # the form of scales of e4m3 rows; "": rows are of 16 bits
    options: Callable[[torch.device], dict[str, Any]] = lambda device: {}
    lengths: tuple[int, int] = (600, 700)
    packed: bool = False
    hides_nan: bool = False  # key and value rows from 300 on, which nothing sees


def _of_sinks(device: torch.device) -> dict[str, Any]:
    sinks = torch.linspace(-2, 4, 4, device=device)
    return {"quantize": "head", "causal": True, "sinks": sinks, "score": scores.softcap(8.0)}


def _of_lengths(device: torch.device) -> dict[str, Any]:
    return {"mask": masks.key_lengths(torch.tensor([300, 0], device=device))}


def _of_documents(device: torch.device) -> dict[str, Any]:
    documents = torch.arange(1024, device=device).div(200, rounding_mode="floor")
    return {"mask": masks.documents(documents.to(torch.int32).expand(2, -1)), "causal": True}


ERRORS = (
    ErrorCase("e4m3, no scales", given="none"),
    ErrorCase("e4m3, one number, causal", 64, 64, "number", lambda d: {"causal": True}),
    ErrorCase("e4m3, by heads", 256, 256, "heads", lambda d: {"causal": True}),
    ErrorCase("e4m3, by blocks", 192, 128, "blocks"),
    ErrorCase("e4m3, key lengths", 96, 80, "blocks", _of_lengths),
    ErrorCase("16 bits"),
    ErrorCase(
        "16 bits, window", 64, 64, options=lambda d: {"mask": masks.causal() & masks.window(200)}
    ),
    ErrorCase("16 bits, head, sinks, softcap", options=_of_sinks),
    ErrorCase("16 bits, tensor", 256, 256, options=lambda d: {"quantize": "tensor"}),
    ErrorCase("16 bits, packed", 128, 128, "", lambda d: {"causal": True}, (701, 701), True),
    ErrorCase("16 bits, 8k keys", lengths=(128, 8192)),
    ErrorCase("e4m3, causal, aligned", given="blocks", options=lambda d: {"causal": True},
              lengths=(1024, 1024)),
    ErrorCase("e4m3, documents", given="heads", options=_of_documents, lengths=(1024, 1024)),
    ErrorCase("e4m3, hidden NaN", given="none", options=_of_lengths, hides_nan=True),
    ErrorCase("16 bits, d256, causal", 256, 256, options=lambda d: {"causal": True}),
)  # fmt: skip


def tell_errors(cases: list[ErrorCase]) -> None:
    """A line for each case: RMS against float64 by the GPU and by the CPU, and between them."""
    for case in cases:
        torch.manual_seed(0)
        heads, (query_len, kv_len) = (4, 2), case.lengths
        shapes = [(2, heads[0], query_len, case.head_dim), (2, heads[1], kv_len, case.head_dim),
                  (2, heads[1], kv_len, case.value_dim)]  # fmt: skip
        rows = [torch.randn(shape) for shape in shapes]
        scales: dict[str, Tensor] = {}
        if case.given not in ("", "none"):
            for name, shape in zip(("query", "key", "value"), shapes, strict=True):
                sizes = {
                    "number": (),
                    "heads": shape[:2],
                    "blocks": (*shape[:2], -(-shape[2] // 128)),
                }
                scales[f"{name}_scale"] = torch.rand(sizes[case.given]) + 0.5
        rows = [each.to(E4M3 if case.given else torch.bfloat16) for each in rows]
        if case.hides_nan:
            for each in rows[1:]:
                each[:, :, 300:] = torch.nan
        try:
            print(f"{case.name:32s} {_errors(case, rows, scales)}", flush=True)
        except Exception as error:
            print(f"{case.name:32s} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)


def _errors(case: ErrorCase, rows: list[Tensor], scales: dict[str, Tensor]) -> str:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    found = {}
    for device in (gpu, cpu):
        here = [each.to(device) for each in rows]
        of_scales = {name: scale.to(device) for name, scale in scales.items()}
        options = {**case.options(device), "return_lse": True, "out_dtype": torch.float16}
        if case.packed:
            ends = torch.tensor([0, 1, 130, 130, 701], dtype=torch.int32, device=device)
            here = [each[0].transpose(0, 1).contiguous() for each in here]
            if device == gpu:
                options["implementation"] = IMPLEMENTATION
            found[device.type] = PACKED_FP8(*here, ends, **of_scales, **options)
        else:
            if device == gpu:
                options["implementation"] = IMPLEMENTATION
            found[device.type] = saccade.attention_fp8(*here, **of_scales, **options)
    exact = _exact(case, rows, scales)
    size = float(exact[0].square().mean().sqrt())
    texts = []
    for name in ("cuda", "cpu"):
        off = found[name][0].cpu().double() - exact[0]
        texts.append(f"{name} {float(off.square().mean().sqrt()) / size:.2e}")
    between = found["cuda"][0].cpu().double() - found["cpu"][0].double()
    texts.append(f"between {float(between.square().mean().sqrt()) / size:.2e}")
    texts.append(f"most {float(between.abs().max()) / size:.2e}")
    lse, of_cpu = found["cuda"][1].cpu(), found["cpu"][1]
    same = torch.equal(lse.isinf(), of_cpu.isinf())
    seen = ~of_cpu.isinf()
    texts.append(
        f"lse {float((lse - of_cpu)[seen].abs().max()):.2e}{'' if same else ' INF DIFFERS'}"
    )
    return "  ".join(texts)


def _exact(case: ErrorCase, rows: list[Tensor], scales: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """saccade.attention in float64 over what the rows say."""
    wide = [each.double() for each in rows]
    for number, name in enumerate(("query", "key", "value")):
        scale = scales.get(f"{name}_scale")
        if scale is not None and scale.dim() == 3:
            scale = scale.repeat_interleave(128, 2)[:, :, : wide[number].shape[2], None]
        elif scale is not None and scale.dim() == 2:
            scale = scale[:, :, None, None]
        if scale is not None:
            wide[number] = wide[number] * scale
    options = {**case.options(torch.device("cpu")), "return_lse": True}
    options.pop("quantize", None)
    if case.packed:
        ends = torch.tensor([0, 1, 130, 130, 701], dtype=torch.int32)
        packed = [each[0].transpose(0, 1).contiguous() for each in wide]
        return PACKED(*packed, ends, **options)
    return DENSE(*wide, **options)


# ---- times ---------------------------------------------------------------------------------------


class TimeCase(NamedTuple):
    """A call that is timed."""

    head_dim: int
    length: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of visible pairs."""
        pairs = TOKENS * self.length * (0.5 if self.causal else 1.0)
        return 4.0 * pairs * CHANNELS

    def rows(self, length: int | None = None) -> list[list[Tensor]]:
        """Copies of query, key and value in bfloat16, [batch, heads, length, dim]."""
        batch, length = (TOKENS // self.length, self.length) if length is None else (1, length)
        shape = batch, CHANNELS // self.head_dim, length, self.head_dim
        return [
            [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            for _ in range(COPIES)
        ]


def calls(case: TimeCase) -> dict[str, Callable[[], Any]]:
    """What is timed: functions that go through copies of the rows by turns."""
    half = case.rows()
    numbers = [[each.to(E4M3) for each in rows] for rows in half]
    options: dict[str, Any] = {"causal": case.causal}

    def by(function: Callable[..., Any], copies: list[list[Tensor]], **more: Any) -> Any:
        turns = itertools.cycle(copies)
        return lambda: function(*next(turns), **options, **more)

    found = {
        "bf16": by(saccade.attention, half),
        "e4m3": by(saccade.attention_fp8, numbers, implementation="hopper"),
        "inside": by(saccade.attention_fp8, half, implementation="hopper"),
    }
    if case.head_dim == DIMS[0]:
        found["e4m3, Triton"] = by(saccade.attention_fp8, numbers, implementation="triton")
    return found


def milliseconds(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The time of each, in the middle of several stretches of all of them by turns."""

    def stretch(call: Callable[[], Any], count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    counts: dict[str, int] = {}
    for name, call in list(functions.items()):
        try:
            for _ in range(5):  # the fourth is recorded
                call()
            torch.cuda.synchronize()
            counts[name] = max(3, round(STRETCH / max(stretch(call, 3), 1e-3)))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in counts}
    for number in range(ROUNDS):
        for name in [*counts][:: 1 if number % 2 else -1]:
            times[name].append(stretch(functions[name], counts[name]))
    return {name: median(each) for name, each in times.items()}


def cases() -> Iterator[TimeCase]:
    """All that is timed, what matters most first."""
    for head_dim in DIMS[:1]:
        for length in LENGTHS:
            for causal in (False, True):
                yield TimeCase(head_dim, length, causal)
    for length in LENGTHS:
        for head_dim in DIMS[1:]:
            for causal in (False, True):
                yield TimeCase(head_dim, length, causal)


def tell_times(until: float, file: Path | None) -> None:
    """A line for each case, in TFLOP/s."""
    told = False
    for case in cases():
        if time.monotonic() > until:
            print("no time left")
            return
        found = {name: case.flops / took / 1e9 for name, took in milliseconds(calls(case)).items()}
        if not told:
            print(f"{torch.cuda.get_device_name()}; TFLOP/s: {', '.join(found)}; e4m3 / bf16")
            told = True
        form = "causal" if case.causal else "full"
        ratio = found.get("e4m3", 0.0) / found["bf16"]
        speeds = " ".join(f"{speed:6.0f}" for speed in found.values())
        print(f"d{case.head_dim:<4d}{form:7s}{case.length:6d}  {speeds}  {ratio:.2f}", flush=True)
        if file is not None:
            line = {**case._asdict(), "device": torch.cuda.get_device_name(), "tflops": found}
            with file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def by_schedule(case: TimeCase, schedule: Fp8Schedule) -> Callable[[], Any]:
    """A call of e4m3 rows by a schedule, past the choice of one."""
    copies = [[each.to(E4M3) for each in rows] for rows in case.rows()]
    fp8 = Fp8Options(None, None, None, None, None, None, None)
    packing: Any = (None, None, None, None)
    prepared = [
        prepare(
            rows[0], rows[1], rows[2], *packing, fp8=fp8, score=None, scale=None, sinks=None,
            mask=masks.causal() if case.causal else None, return_lse=False, config=None,
        )
        for rows in copies
    ]  # fmt: skip
    first, config = prepared[0], KernelConfig()
    configs.OVERRIDE = schedule
    try:
        forward = HopperFp8Call(first.inputs, first.variant, config, first.quantisation)
    finally:
        configs.OVERRIDE = None
    turns = itertools.cycle(prepared)

    def call() -> Any:
        one = next(turns)
        return forward(one.inputs, one.variant)

    return call


def tell_schedules(until: float) -> None:
    """A line for each schedule at 4k and 16k: full and causal, in TFLOP/s."""
    found: dict[tuple[int, str], list[str]] = {}
    for length in (4096, 16384, 1024):
        for head_dim in DIMS:
            for causal in (False, True):
                if time.monotonic() > until:
                    continue
                case = TimeCase(head_dim, length, causal)
                functions = {
                    name: by_schedule(case, schedule)
                    for name, schedule in SCHEDULES[head_dim].items()
                }
                for name, took in milliseconds(functions).items():
                    text = f"{case.flops / took / 1e9:6.0f}"
                    found.setdefault((head_dim, name), []).append(text)
    for (head_dim, name), texts in found.items():
        print(f"d{head_dim:<4d}{name:22s} {' '.join(texts)}  (4k full, causal; 16k; 1k)")


def warm(part: int, parts: int, until: float) -> None:
    """Compile a part of what is timed, by short calls."""
    jobs: list[Callable[[], Any]] = []
    for head_dim in DIMS:
        for causal in (False, True):
            case = TimeCase(head_dim, 256, causal)
            jobs += [
                functools.partial(_warm_schedule, case, schedule)
                for schedule in SCHEDULES[head_dim].values()
            ]
            names = ("inside", "bf16", *(["e4m3, Triton"] if head_dim == DIMS[0] else []))
            jobs += [functools.partial(_warm_call, case, name) for name in names]
    for job in jobs[part::parts]:
        if time.monotonic() > until:
            return
        try:
            job()
        except Exception as error:
            print(job, f"{type(error).__name__}: {str(error)[:300]}", flush=True)


def _warm_call(case: TimeCase, name: str) -> None:
    calls(case)[name]()


def _warm_schedule(case: TimeCase, schedule: Fp8Schedule) -> None:
    by_schedule(case, schedule)()


def main() -> None:
    """Do what the command line asks for."""
    global IMPLEMENTATION
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("errors", "warm", "times", "schedules"))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--implementation")
    arguments = parser.parse_args()
    IMPLEMENTATION = arguments.implementation
    part, parts = map(int, arguments.part.split("/"))
    until = time.monotonic() + arguments.seconds
    with torch.no_grad():
        if arguments.what == "errors":
            tell_errors(list(ERRORS[part::parts]))
        elif arguments.what == "warm":
            warm(part, parts, until)
        elif arguments.what == "times":
            tell_times(until, arguments.json)
        else:
            tell_schedules(until)


if __name__ == "__main__":
    main()

"""Check and time fp8 attention on a GPU, beside saccade.attention in bfloat16.

Usage: python tools/fp8_times.py errors|warm|times|tiles [--part N/M] [--seconds S] [--json FILE]

errors: what kernels give against float64 and against the CPU's numbers, over forms of scales,
masks, head dims and packed calls. warm: compile what `times` and `tiles` start (parts side by side
fill the cache). times: TFLOP/s of e4m3 rows, of 16-bit rows that are quantised inside, and of
bfloat16. tiles: e4m3 rows by other tile sizes.
"""

from __future__ import annotations

import argparse
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

E4M3 = torch.float8_e4m3fn
PACKED_FP8: Any = saccade.attention_fp8_varlen
PACKED: Any = saccade.attention_varlen
DENSE: Any = saccade.attention
TOKENS = 16384  # in all sequences of a case
CHANNELS = 2048  # of all heads
LENGTHS = (1024, 4096, 16384)
DIMS = (128, 64)
COPIES = 3  # of the tensors, taken in turns, so that caches hold none of them
TILES = (
    (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3),
    (64, 64, 4, 4),
)  # fmt: skip


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


def _of_sinks(device: torch.device) -> dict[str, Any]:
    sinks = torch.linspace(-2, 4, 4, device=device)
    return {"quantize": "head", "causal": True, "sinks": sinks, "score": scores.softcap(8.0)}


def _of_lengths(device: torch.device) -> dict[str, Any]:
    return {"mask": masks.key_lengths(torch.tensor([300, 0], device=device))}


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
            found[device.type] = PACKED_FP8(*here, ends, **of_scales, **options)
        else:
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


def calls(case: TimeCase, config: KernelConfig | None = None) -> dict[str, Callable[..., Any]]:
    """What is timed: functions of query, key and value in bfloat16, or of e4m3 rows."""
    options: dict[str, Any] = {"causal": case.causal}
    fp8 = {**options, "implementation": "triton", "config": config}

    def given(*rows: Tensor) -> Any:
        return saccade.attention_fp8(*rows, **fp8)

    def inside(*rows: Tensor) -> Any:
        return saccade.attention_fp8(*rows, **fp8)

    def half(*rows: Tensor) -> Any:
        return saccade.attention(*rows, **options)

    return {"bf16": half, "e4m3": given, "quantised inside": inside}


def milliseconds(call: Callable[..., Any], copies: list[list[Tensor]]) -> float:
    """The time of a call, in the middle of five stretches of at least 15 ms each."""
    for rows in copies:
        call(*rows)
    torch.cuda.synchronize()

    def stretch(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for number in range(count):
            call(*copies[number % len(copies)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    count = max(3, round(15 / max(stretch(3), 1e-3)))
    return median(stretch(count) for _ in range(5))


def cases() -> Iterator[TimeCase]:
    """All that is timed."""
    for head_dim in DIMS:
        for causal in (False, True):
            for length in LENGTHS:
                yield TimeCase(head_dim, length, causal)


def tell_times(until: float, file: Path | None) -> None:
    """A line for each case, in TFLOP/s."""
    print(f"{torch.cuda.get_device_name()}; TFLOP/s: bf16, e4m3, quantised inside; e4m3 / bf16")
    for case in cases():
        if time.monotonic() > until:
            print("no time left")
            return
        found = {}
        copies = case.rows()
        numbers = [[each.to(E4M3) for each in rows] for rows in copies]
        for name, call in calls(case).items():
            took = milliseconds(call, numbers if name == "e4m3" else copies)
            found[name] = case.flops / took / 1e9
        form = "causal" if case.causal else "full"
        ratio = found["e4m3"] / found["bf16"]
        speeds = " ".join(f"{speed:6.0f}" for speed in found.values())
        print(f"d{case.head_dim:<4d}{form:7s}{case.length:6d}  {speeds}  {ratio:.2f}", flush=True)
        if file is not None:
            line = {**case._asdict(), "device": torch.cuda.get_device_name(), "tflops": found}
            with file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def tile_cases() -> Iterator[tuple[TimeCase, KernelConfig]]:
    """Configs of the forward kernel at 4k."""
    for numbers in TILES:
        for head_dim in DIMS:
            for causal in (False, True):
                yield TimeCase(head_dim, 4096, causal), KernelConfig(*numbers)


def tell_tiles(until: float) -> None:
    """A line for each config: D128 full and causal, D64 full and causal, in TFLOP/s."""
    rows = {}
    for head_dim in DIMS:
        copies = TimeCase(head_dim, 4096, False).rows()
        rows[head_dim] = [[each.to(E4M3) for each in copy] for copy in copies]
    found: dict[KernelConfig, list[str]] = {}
    for case, config in tile_cases():
        if time.monotonic() > until:
            break
        try:
            took = milliseconds(calls(case, config)["e4m3"], rows[case.head_dim])
            text = f"{case.flops / took / 1e9:6.0f}"
        except Exception as error:
            text = f" {type(error).__name__[:10]}"
        found.setdefault(config, []).append(text)
    for config, texts in found.items():
        print(f"{config.numbers()!s:20s} {' '.join(texts)}  (d128 full, causal; d64)")


def warm(part: int, parts: int, until: float) -> None:
    """Compile a part of what is timed, by short calls."""
    jobs: list[tuple[TimeCase, KernelConfig | None]] = [
        *((case, None) for case in cases() if case.length == LENGTHS[0]), *tile_cases(),
    ]  # fmt: skip
    for case, config in jobs[part::parts]:
        if time.monotonic() > until:
            return
        rows = case.rows(256)[0]
        for name, call in calls(case, config).items():
            if config is None or name == "e4m3":
                try:
                    call(*[each.to(E4M3) for each in rows] if name == "e4m3" else rows)
                except Exception as error:
                    print(case, config, name, f"{type(error).__name__}: {str(error)[:300]}")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("errors", "warm", "times", "tiles"))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
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
            tell_tiles(until)


if __name__ == "__main__":
    main()

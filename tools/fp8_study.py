"""How exact attention in fp8 is: errors by method, length and order of keys, and a needle.

Usage: python tools/fp8_study.py [SECTION ...] [--quick]

Sections: methods, lengths, sinks, needle (all without a name). On a CPU; `saccade.attention_fp8`
and the model of Hopper's sums (`ops/attention_fp8/model.py`) against float64. Prints what
benchmarks/results/cpu/fp8_study.txt has. --quick: shorter rows.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade.ops.attention_fp8.model import EXACT, Sums, Tiles, attention
from saccade.ops.attention_fp8.quantise import quantised
from saccade.runtime.fp8_spec import E4M3, Fp8Inputs, Quantisation

SUMS = {
    "float32": EXACT,
    "13 bits": Sums(13, 0),
    "each 64 tiles": Sums(13, 64),
    "each 4 tiles": Sums(13, 4),
    "each tile": Sums(13, 1),
}
"""What sums are kept in: float32 (float64 here), 13 bits, and 13 bits that go into float32."""

HEAD_DIM = 128
QUERIES = 16  # rows of a head, where the model computes
PUBLISHED = (
    "  FlashAttention-3's paper, table 3, with outliers: per tensor 2.4e-02, with blocks alone\n"
    "  2.4e-02, with the transform alone 9.3e-03, with both 9.1e-03; fp16 1.9e-04"
)


def rms(numbers: Tensor) -> float:
    """The root of the mean square."""
    return float(numbers.double().square().mean().sqrt())


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- methods -------------------------------------------------------------------------------------


def with_outliers(seed: int, *shape: int) -> Tensor:
    """FlashAttention-3's: N(0, 1) + N(0, 100) in one number of a thousand."""
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 100)) < 1e-3
    return draw(seed, *shape) + 10 * draw(seed + 200, *shape) * chosen


def with_a_mean(seed: int, *shape: int) -> Tensor:
    """Normal numbers with a mean of each channel, which keys of models have; its size is 2."""
    return draw(seed, *shape) + 2 * draw(seed + 300, shape[-1])


INPUTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "normal": (draw, draw),
    "outliers": (with_outliers, with_outliers),
    "mean of keys": (draw, with_a_mean),
}
METHODS: dict[str, dict[str, Any]] = {
    "tensor": {"quantize": "tensor", "incoherent": False, "smooth": False},
    "head": {"quantize": "head", "incoherent": False, "smooth": False},
    "block": {"quantize": "block", "incoherent": False, "smooth": False},
    "tensor, transform": {"quantize": "tensor", "smooth": False},
    "block, transform": {"smooth": False},
    "block, smooth": {"incoherent": False},
    "block, transform, smooth": {},
}


def tell_methods(quick: bool) -> Iterator[str]:
    """RMSE of each method, and of bfloat16, against float64."""
    length = 1024 if quick else 4096
    shape = 1, 4, length, HEAD_DIM
    yield f"RMSE against float64 of the same bfloat16 rows; 4 heads, {length} rows, D{HEAD_DIM}"
    yield f"  {'':26s}" + "".join(f"{name:>14s}" for name in INPUTS)
    found: dict[str, list[float]] = {}
    for of_queries, of_keys in INPUTS.values():
        values = of_queries if of_queries is with_outliers else draw
        rows = [of_queries(0, *shape), of_keys(1, *shape), values(2, *shape)]
        rows = [each.bfloat16() for each in rows]
        exact = saccade.attention(*[each.double() for each in rows])
        half = saccade.attention(*rows)
        found.setdefault("(bfloat16)", []).append(rms(half - exact))
        found.setdefault("(size of outputs)", []).append(rms(exact))
        for method, options in METHODS.items():
            output = saccade.attention_fp8(*rows, **options, out_dtype=torch.float16)
            found.setdefault(method, []).append(rms(output - exact))
    for method, errors in found.items():
        yield f"  {method:26s}" + "".join(f"{error:14.2e}" for error in errors)
    best, baseline = found["block, transform, smooth"][1], found["tensor"][1]
    yield f"  with outliers, per tensor / all three: {baseline / best:.2f}"
    yield PUBLISHED


# ---- lengths -------------------------------------------------------------------------------------


def tell_lengths(quick: bool) -> Iterator[str]:
    """RMSE relative to the output against length, by what sums are kept in."""
    lengths = (1024, 8192) if quick else (1024, 4096, 16384, 65536, 131072)
    yield f"RMSE / RMS of the output, by the model; {QUERIES} queries, D64, tiles of 128 keys"
    for name, mean in (("values of mean 0", 0.0), ("values of mean 1", 1.0)):
        yield f"  {name:18s}" + "".join(f"{kind:>15s}" for kind in SUMS)
        for length in lengths:
            query, key = (draw(3, QUERIES, 64), draw(4, length, 64))
            value = (draw(5, length, 64) + mean).to(E4M3)
            rows = query.to(E4M3), key.to(E4M3), value
            exact = _softmax(*rows, 64**-0.5)
            errors = [
                rms(attention(*rows, 64**-0.5, sums)[0] - exact) / rms(exact)
                for sums in SUMS.values()
            ]
            yield f"  {length:>18,}" + "".join(f"{error:15.2e}" for error in errors)


def _softmax(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Exact attention of one head in float64."""
    scores = query.double() @ key.double().mT * scale
    return scores.softmax(1) @ value.double()


# ---- sinks ---------------------------------------------------------------------------------------


def tell_sinks(quick: bool) -> Iterator[str]:
    """RMSE where the first keys have by far the largest scores, by the order of keys."""
    length = 2048 if quick else 8192
    yield (
        f"RMSE / RMS of what is not the sink's, {length} keys, D64: the first 4 keys have scores "
        "higher by so much, and values 0"
    )
    yield f"  {'higher by':>12s}{'from the last':>15s}{'from the first':>16s}{'their weight':>15s}"
    for height in (0.0, 4.0, 8.0, 12.0):
        query, key, value = (
            draw(seed, rows, 64) for seed, rows in ((6, 64), (7, length), (8, length))
        )
        direction = torch.zeros(64)
        direction[0] = 8.0
        query, key = (
            query.index_fill(1, torch.tensor([0]), 8.0),
            key.index_fill(1, torch.tensor([0]), 0),
        )
        key[:4] = direction * height / 8 + 0.01 * key[:4]
        value[:4] = 0
        rows = query.to(E4M3), key.to(E4M3), value.to(E4M3)
        exact = _softmax(*rows, 64**-0.5)
        scores = rows[0].double() @ rows[1].double().mT * 64**-0.5
        weight = float(scores.softmax(1)[:, :4].sum(1).mean())
        errors = [
            rms(attention(*rows, 64**-0.5, EXACT, Tiles(128, last))[0] - exact) / rms(exact)
            for last in (True, False)
        ]
        yield f"  {height:12.0f}{errors[0]:15.2e}{errors[1]:16.2e}{weight:15.4f}"


# ---- a needle ------------------------------------------------------------------------------------


def tell_needle(quick: bool) -> Iterator[str]:
    """What a query finds of one key that it matches, among many that it does not."""
    length = 8192 if quick else 131072
    yield (
        f"A needle of weight 1/3 to 1/2 among {length:,} keys, D{HEAD_DIM}, {QUERIES} queries with "
        "one each: RMSE / RMS of the output (how much of the needle's value is found; 1: all)"
    )
    yield "  " + " " * 32 + "".join(f"{kind:>20s}" for kind in ("bfloat16", *SUMS))
    key, value = draw(9, length, HEAD_DIM), draw(10, length, HEAD_DIM)
    for name, base in (("in the last keys", length - QUERIES * 8), ("in the first keys", 0),
                       ("everywhere", -1)):  # fmt: skip
        places = base + 8 * torch.arange(QUERIES)
        if base < 0:
            places = torch.arange(QUERIES) * (length // QUERIES) + 5
        wanted = torch.log(torch.tensor(length / 2.0)) + 0.5  # score: others add up to e^0.5 each
        needles = key[places]
        query = needles * (wanted / needles.square().sum(1, keepdim=True)) * HEAD_DIM**0.5
        rows = [each.bfloat16() for each in (query, key, value)]
        yield _needle_line(name, rows, places)


def _needle_line(name: str, rows: list[Tensor], places: Tensor) -> str:
    scale = HEAD_DIM**-0.5
    exact = _softmax(rows[0], rows[1], rows[2], scale)
    needles = rows[2][places].double()

    def told(output: Tensor) -> str:
        share = (output.double() * needles).sum(1) / (exact * needles).sum(1)
        return f"{rms(output - exact) / rms(exact):.2e} ({float(share.mean()):.3f})"

    batched = [each[None, None] for each in rows]
    found = [told(saccade.attention(*batched)[0, 0])]
    inputs = Fp8Inputs(*batched)
    made = quantised(inputs, Quantisation("tensor", True, True, torch.bfloat16)).inputs
    query, key, value = (each[0, 0] for each in (made.query, made.key, made.value))
    factor = scale * float(made.query_scale) * float(made.key_scale)  # type: ignore[arg-type]
    for sums in SUMS.values():
        output, _ = attention(query, key, value, factor, sums)
        found.append(told(output * float(made.value_scale)))  # type: ignore[arg-type]
    return f"  {name:32s}" + "".join(f"{text:>20s}" for text in found)


SECTIONS: dict[str, Callable[[bool], Iterator[str]]] = {
    "methods": tell_methods,
    "lengths": tell_lengths,
    "sinks": tell_sinks,
    "needle": tell_needle,
}


def main() -> None:
    """Tell the sections that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}; tools/fp8_study.py")
    for name in arguments.sections or SECTIONS:
        begin = time.process_time()
        print(f"\n{name}")
        with torch.no_grad():
            for line in SECTIONS[name](arguments.quick):
                print(line, flush=True)
        print(f"  ({time.process_time() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()

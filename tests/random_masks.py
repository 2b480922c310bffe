"""Random masks: programs of every operation, run on symbols when a mask is made of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from saccade import masks
from saccade.masks import Mask

BATCH, HEADS, QUERY_LEN, KV_LEN = SHAPE = (2, 2, 13, 18)
Program = tuple[Any, ...]

OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "/": lambda a, b: a / b, "//": lambda a, b: a // b, "%": lambda a, b: a % b,
    "//abs": lambda a, b: a // (abs(b) + 1), "%abs": lambda a, b: a % (abs(b) + 1),
    "neg": lambda a: -a, "abs": lambda a: abs(a), "square": lambda a: a**2,
    "min": torch.minimum, "max": torch.maximum, "clamp": lambda a, b: torch.clamp(a, -3, b),
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "~": lambda a: ~a, "^": lambda a, b: a ^ b,
    "where": torch.where, "int": lambda a: a.int(), "float": lambda a: a.float(),
    "floor": torch.floor, "bool": lambda a: a.bool(), "<<": lambda a, b: a << (b % 5),
    ">>": lambda a, b: a >> (b % 5), "bits": lambda a, b: (a & 6) ^ (b | 1),
    "exp": lambda a: torch.exp(a), "log": lambda a: torch.log(a * 1.0),
    "sqrt": lambda a: torch.sqrt(a * 1.0), "tanh": lambda a: torch.tanh(a * 1.0),
    "sigmoid": lambda a: torch.sigmoid(a * 1.0), "exp2": lambda a: torch.exp2(a * 1.0),
    "log2": lambda a: torch.log2(a * 1.0),
}  # fmt: skip

EXTREMES: dict[torch.dtype, list[float]] = {
    torch.uint8: [0, 255, 128], torch.int8: [-128, 127], torch.int16: [-(2**15), 2**15 - 1],
    torch.int32: [-(2**31), 2**31 - 1], torch.int64: [-(2**63), 2**63 - 1, 2**40, -(2**33)],
    torch.float16: [torch.nan, torch.inf, -torch.inf, 65504.0, 6e-8],
    torch.float32: [torch.nan, torch.inf, -torch.inf, 3e38, 1e-38, -2.5],
}  # fmt: skip
READS = ("take", "inside", "ending")  # the nearest; counted from 0; counted from the end
DTYPES = [torch.bool, *EXTREMES]


@functools.cache
def table_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int, share: int) -> Tensor:
    """Small entries, in order perhaps, and one of `share` an extreme of the dtype (0: none)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 9, shape, generator=generator)
    if seed % 2:
        numbers = numbers.sort(-1).values
    if dtype == torch.bool:
        return numbers > 4
    table = (numbers - 2 * (dtype != torch.uint8)).to(dtype)
    if share:
        extremes = torch.tensor(EXTREMES[dtype], dtype=dtype)
        which = torch.randint(len(extremes), shape, generator=generator)
        chosen = torch.randint(share, shape, generator=generator) == 0
        table = torch.where(chosen, extremes[which], table)
    return table


# ---- programs ---------------------------------------------------------------------------------

rows = st.tuples(st.just("row"), st.sampled_from("bhqkqkqk"))
small_numbers = st.tuples(st.just("number"), st.integers(-6, 14))
wholes = st.one_of(
    small_numbers,
    st.tuples(st.just("number"), st.sampled_from([0, 2**31 - 1, -(2**31), 2**40, -(2**61), 10**9])),
)
reals = st.tuples(
    st.just("number"),
    st.sampled_from([0.0, -0.0, 0.5, -2.5, 3.75, 1e30, 1e-30, torch.inf, -torch.inf, torch.nan]),
)
numbers = st.one_of(small_numbers, small_numbers, wholes, reals)
divisors = st.tuples(st.just("number"), st.sampled_from([1, 2, 3, 5, 7, -1, -3, 2.5, -0.75, 2**33]))
sizes = st.sampled_from([1, 3, 7, 18, 40])


def reads(inner: Any, dtypes: Any) -> Any:
    """Reads along one and two dimensions: nearest, counted, from the end; of rows or of numbers."""
    common = (dtypes, st.integers(0, 99), st.sampled_from([0, 0, 5]))
    index = st.one_of(rows, rows, inner)
    one = st.tuples(st.sampled_from(READS), *common, sizes, index)
    two = st.tuples(st.sampled_from(["take", "inside"]), *common, sizes, index, sizes, index)
    return st.one_of(one, two)


def grown(inner: Any) -> Any:
    """Programs that give numbers, from smaller ones."""
    return st.one_of(
        st.tuples(st.sampled_from("+-*"), inner, st.one_of(inner, numbers)),
        st.tuples(st.sampled_from("+-*"), numbers, inner),
        st.tuples(st.sampled_from(["//", "%", "/"]), inner, divisors),
        st.tuples(st.sampled_from(["//abs", "%abs", "/", "min", "max", "clamp"]), inner, inner),
        st.tuples(st.sampled_from(["neg", "abs", "square", "int", "float", "floor"]), inner),
        st.tuples(st.sampled_from(["<<", ">>", "bits"]), rows, rows),
        st.tuples(
            st.sampled_from(["exp", "log", "sqrt", "tanh", "sigmoid", "exp2", "log2"]), inner
        ),
        st.tuples(st.just("where"), st.tuples(st.sampled_from(["<", "=="]), inner, numbers),
                  inner, st.one_of(inner, numbers)),
        reads(rows, st.sampled_from(DTYPES[1:])),
    )  # fmt: skip


numbered = st.recursive(
    st.one_of(rows, reads(rows, st.sampled_from(DTYPES[1:]))), grown, max_leaves=4
)
compared = st.tuples(
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), numbered, st.one_of(numbered, numbers)
)
truths = st.one_of(
    compared, compared, reads(rows, st.just(torch.bool)), st.tuples(st.just("bool"), numbered)
)
programs = st.recursive(
    truths,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["&", "|", "^", "==", "!="]), inner, inner),
        st.tuples(st.just("~"), inner),
        st.tuples(st.just("where"), inner, inner, inner),
    ),
    max_leaves=3,
)


def made(program: Program, align: str = "top_left") -> Mask:
    """The mask of a program."""
    _make_tables(program)

    def body(b: Any, h: Any, q: Any, k: Any) -> Any:
        return _run(program, {"b": b, "h": h, "q": q, "k": k})

    return masks.function(align=align)(body)()


def _make_tables(program: Program) -> None:
    """A traced function draws no random numbers."""
    if program[0] in READS:
        table_of(program[1], tuple(program[4::2]), *program[2:4])
    for part in program[1:]:
        if isinstance(part, tuple):
            _make_tables(part)


def _run(program: Program, at: dict[str, Any]) -> Any:
    word, *parts = program
    if word == "row":
        return at[parts[0]]
    if word == "number":
        return parts[0]
    if word not in READS:
        return OPERATIONS[word](*(_run(part, at) for part in parts))
    dtype, seed, share, *axes = parts
    lengths, indices = tuple(axes[::2]), [_run(index, at) for index in axes[1::2]]
    table = table_of(dtype, lengths, seed, share)
    if word == "take":
        return masks.take(table, *indices)
    places = [index % size for index, size in zip(indices, lengths, strict=True)]
    if word == "ending":
        places = [place - size for place, size in zip(places, lengths, strict=True)]
    return table[tuple(places)]

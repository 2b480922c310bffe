"""The list of variants is what calls look for, and what is compiled ahead is found by them."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import saccade
from saccade import masks, scores
from saccade.gpu import machine_code, stored_code
from saccade.kernel_check import variants, worker
from saccade_cli import app

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


LINEAR = ("linear_attention backward: bf16 d64* 25? rows",)  # aligned and not


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["kernels", *arguments])


@functools.cache
def row_dots() -> list[variants.Variant]:
    """Those of one kernel and one kind of call."""
    return variants.variants_of("sm_80", "linear_row_dot", LINEAR)


def test_a_variant_is_listed_once_with_a_call_that_reaches_it() -> None:
    linear = ("linear*",)
    found = variants.variants_of("sm_80", "*", linear)
    assert len({variant.address for variant in found}) == len(found) > 10
    assert {variant.kernel for variant in found} >= {"linear_step", "linear_forward_scan"}
    assert all(variant.of.startswith("linear") for variant in found)
    other = variants.variants_of("sm_120", "*", linear)
    assert not {variant.address for variant in found} & {variant.address for variant in other}


def asked_by_users(architecture: str, rounds: int, dim: str = "") -> dict[str, list[list[str]]]:
    """The kernels that a user's calls ask for, by the name of a call, in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, __file__, architecture, str(rounds), dim], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def not_listed(asked: dict[str, list[list[str]]], found: list[variants.Variant]) -> list[str]:
    """Calls by name, with a kernel of theirs that is missing."""
    listed = {variant.address for variant in found}
    return [
        f"{name} ({kernel})"
        for name, kernels in asked.items()
        for kernel, address in kernels
        if address not in listed
    ]


def test_what_calls_of_64_channels_ask_for_is_listed() -> None:
    asked = asked_by_users("sm_90", 2, "64")
    assert not_listed(asked, variants.variants_of("sm_90", "*", ("*d64*",))) == []
    assert sum(map(len, asked.values())) > 50


@pytest.mark.slow  # thousands of calls, which are no others on a machine with more cores
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_what_calls_ask_for_is_listed_or_known_to_be_outside(architecture: str) -> None:
    asked, listed = asked_by_users(architecture, 6), variants.variants_of(architecture)
    assert len(listed) == LISTED[architecture], "docs/triton.md says so, too"
    missing = not_listed(asked, listed)
    assert [name for name in missing if not name.startswith("outside")] == []
    outside = {name for name in asked if name.startswith("outside")}
    assert all(any(one.startswith(name) for one in missing) for name in outside), "it is listed"
    assert sum(map(len, asked.values())) > 300


def test_what_is_listed_is_compiled_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    stored_code.cache.cache_clear()
    try:
        asked = "--arch", "sm_80", "--kernel", "linear_row_dot", "--call", LINEAR[0]
        done = run("--warm", *asked, "--jobs", "1")
        assert done.exit_code == 0, done.output
        assert f"sm_80: {len(row_dots())} variants in" in done.output.replace("\n", " ")
        for variant in row_dots():
            code = stored_code.cached(variant.address)
            assert (
                code is not None and code.name == "linear_row_dot" and code.code[:4] == b"\x7fELF"
            )
    finally:
        stored_code.cache.cache_clear()


@pytest.mark.slow
def test_a_sample_is_spread_over_all() -> None:
    console = Console(quiet=True)
    codes = variants.compile_with_progress("sm_80", "linear_row_dot", 2, console, 1, LINEAR)
    assert list(codes) == [row_dots()[0].address]


def code_of(cubin: bytes) -> dict[str, bytes]:
    """The sections of machine code in an ELF file, by name; and what a launch reads of them."""
    (first,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, first + size * at) for at in range(count)]
    start = headers[names][4]
    found = {
        cubin[start + header[0] : cubin.index(b"\0", start + header[0])].decode(): header
        for header in headers
    }
    return {
        name: cubin[header[4] : header[4] + header[5]]
        for name, header in found.items()
        if name.startswith((".text.", ".nv.constant")) or ("debug" in name and header[5])
    }


@pytest.mark.slow
def test_line_numbers_that_are_left_out_change_no_instruction(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    def compiled(told: dict[str, str], kernel: str, of: tuple[str, ...]) -> list[Any]:
        monkeypatch.setattr(variants, "LEAN", told)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"told {len(told)}"))
        console = Console(quiet=True)
        codes = variants.compile_with_progress("sm_90", kernel, 1, console, 1, of)
        return [code_of(code.code) for code in codes.values()]

    lean = variants.LEAN
    kernel, of = "attention_backward_begin", ("attention backward: bf16 d64 causal 2048 rows",)
    [whole], [short] = compiled({}, kernel, of), compiled(lean, kernel, of)
    assert set(whole) > {".debug_line"} and ".debug_line" not in short
    code = {name for name in whole if "debug" not in name}
    assert f".text.{kernel}" in code and code == {name for name in short if "debug" not in name}
    assert all(whole[name] == short[name] for name in code)


def test_calls_without_bfloat16_have_the_memory_to_be_made() -> None:
    """Chunks of the gated delta rule are short there, and states between them are of float32."""
    assert variants.variants_of("sm_75", "delta_*")


def test_the_number_of_variants_is_printed_last() -> None:
    step = "linear_attention_step*"
    done = run("--list", "--arch", "sm_80", "--kernel", "linear_step", "--call", step)
    assert done.exit_code == 0, done.output
    *lines, last = done.output.splitlines()
    assert last == f"sm_80: {len(lines)} variants"


@pytest.mark.parametrize("option", ["--list", "--warm"])
@pytest.mark.parametrize("other", [["--check"], ["--head-dim", "64"], ["--json", "x"]], ids=str)
def test_options_that_would_be_ignored_are_refused(option: str, other: list[str]) -> None:
    done = run(option, *other)
    assert done.exit_code == 2
    assert "--list and --warm take --arch, --kernel, --call and --jobs alone" in done.output


def test_names_that_no_variant_has_are_refused() -> None:
    for options in (["--list"], ["--warm", "--jobs", "1"]):
        done = run(*options, "--arch", "sm_80", "--kernel", "foward", "--call", "linear*step*")
        said = done.output.replace("\n", " ")
        assert done.exit_code == 2 and "no variant whose kernel fits 'foward'" in said
        assert "whose call 'linear*step*'" in said


def test_calls_by_glob_reach_their_variants_alone() -> None:
    asked = ("attention_paged: bf16 d64 none*p16*", "linear_attention_step: bf16*")
    found = variants.variants_of("sm_80", "*", asked)
    operations = {variant.of.split(":")[0] for variant in found}
    assert operations == {"attention_paged", "linear_attention_step"}
    assert all("bf16 d64" in variant.of for variant in found if variant.kernel == "attention_pages")
    more = variants.variants_of(
        "sm_80", "*", ("attention_paged: bf16 d64*", "linear_attention_step*")
    )
    assert {variant.address for variant in found} < {variant.address for variant in more}
    done = run("--call", "attention_paged*")
    assert done.exit_code == 2 and "--call goes with --list or --warm" in done.output


def test_a_cache_that_is_off_cannot_be_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_CACHE", "")
    stored_code.cache.cache_clear()
    done = run("--warm", "--arch", "sm_80")
    stored_code.cache.cache_clear()
    assert done.exit_code == 2 and "SACCADE_CACHE is empty" in done.output


# ---- calls of users, in a process that pretends to have a GPU ------------------------------------

LISTED = {"sm_80": 2142, "sm_90": 4022}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTHS = (2, 7, 64, 100, 200, 256, 512, 777, 1000, 1024, 2000, 2048, 4096, 5000, 8192, 30000)


def rows(dtype: str, *shape: int, inside: bool = False) -> Tensor:
    """Memory that is never touched; inside: heads lie beside channels."""
    batch, heads, length, dim = shape
    found = torch.empty((batch, length, heads, dim) if inside else shape, dtype=DTYPES[dtype])
    return (found.transpose(1, 2) if inside else found).requires_grad_()


def trained(output: Tensor, *leaves: Tensor) -> None:
    """A backward pass, whose gradient lies as the output, in its own order, or is a sum's."""
    gradients = (
        torch.empty_like(output),
        torch.empty(output.shape, dtype=output.dtype),
        torch.ones((), dtype=output.dtype).expand_as(output),
    )
    torch.autograd.grad(output, leaves, gradients[sum(output.shape) % 3])


def dense(rng: random.Random, dtype: str, dim: int, value_dim: int, **options: Any) -> str:
    heads, kv_heads = rng.choice(variants.HEADS)
    batch, length = rng.choice((1, 2, 5, 16)), rng.choice(LENGTHS)
    inside = options.pop("inside", rng.random() < 0.5)
    given = [
        rows(dtype, batch, heads, length, dim, inside=inside),
        rows(dtype, batch, kv_heads, length, dim, inside=inside),
        rows(dtype, batch, kv_heads, length, value_dim, inside=inside),
    ]
    made = {name: make(batch, heads, length) for name, make in options.items()}
    with torch.no_grad():
        saccade.attention(*given, **made)
    trained(saccade.attention(*given, **made), *given)
    return f"{batch} x {heads} on {kv_heads} heads x {length}{' inside' if inside else ''}"


def varlen(rng: random.Random, dtype: str, dim: int, value_dim: int, **options: Any) -> str:
    heads, kv_heads = rng.choice(variants.HEADS)
    length, sequences = rng.choice(LENGTHS[2:]), rng.choice((1, 3, 17))
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim)
    given = [
        torch.empty(length, *shape, dtype=DTYPES[dtype], requires_grad=True) for shape in shapes
    ]
    offsets = torch.linspace(0, length, sequences + 1).int()
    made = {name: make(sequences, heads, length) for name, make in options.items()}
    query, key, value = given
    of_keys = rng.choice((None, offsets.clone()))
    with torch.no_grad():
        saccade.attention_varlen(query, key, value, offsets, of_keys, **made)
    trained(saccade.attention_varlen(query, key, value, offsets, of_keys, **made), *given)
    return f"{sequences} sequences of {length}, {heads} on {kv_heads} heads"


def paged(dtype: str, dim: int, size: int, heads: tuple[int, int], batch: int, rows: int) -> str:
    key_pages = torch.empty(9 * batch, heads[1], size, dim, dtype=DTYPES[dtype])
    pages = key_pages, torch.empty_like(key_pages)
    table = torch.zeros(batch, 9, dtype=torch.int32)
    query = torch.empty(batch, heads[0], rows, dim, dtype=DTYPES[dtype])
    lengths = torch.ones(batch, dtype=torch.int32)
    saccade.attention_paged(query, *pages, table, lengths, causal=rows > 1)
    key = torch.empty(batch, heads[1], dim, dtype=DTYPES[dtype])
    saccade.write_kv_cache(key, key.clone(), *pages, torch.zeros(batch, dtype=torch.int64))
    return f"{dtype} {dim} p{size} {heads} batch {batch}, {rows} rows"


def linear(dim: int, length: int) -> str:
    given = [rows("bf16", 1, variants.LINEAR_HEADS, length, dim) for _ in range(3)]
    trained(saccade.linear_attention(*given), *given)
    return f"{dim}, {length} rows"


def fp8(rng: random.Random, dim: int, dtype: torch.dtype, packed: bool, causal: bool) -> str:
    heads, length = rng.choice(variants.HEADS), rng.choice(LENGTHS[2:])
    batch, inside = rng.choice((1, 2, 5)), rng.random() < 0.5

    def rows(heads: int) -> Tensor:
        if packed:
            return torch.empty(batch * length, heads, dim).to(dtype)
        if inside:
            return torch.empty(batch, length, heads, dim).to(dtype).transpose(1, 2)
        return torch.empty(batch, heads, length, dim).to(dtype)

    query, key, value = (rows(count) for count in (heads[0], heads[1], heads[1]))
    scales: dict[str, Any] = {}
    if dtype == torch.float8_e4m3fn:
        counts = {"query_scale": heads[0], "key_scale": heads[1], "value_scale": heads[1]}
        scales = {name: torch.ones(batch, count) for name, count in counts.items()}
    if packed:
        ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
        saccade.attention_fp8_varlen(query, key, value, ends, causal=causal, **scales)
    else:
        saccade.attention_fp8(query, key, value, causal=causal, **scales)
    where = "packed" if packed else "inside" if inside else ""
    return f"{dtype} {batch} x {heads} heads x {length} {where} causal={causal}"


def user_calls(
    architecture: str, rng: random.Random, rounds: int
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Calls by name; of those outside the list, the names say so."""
    causal = {"causal": lambda *sizes: True}

    def window(*sizes: int) -> Any:
        return masks.causal() & masks.window(rng.choice((128, 511, 1024, 4095)))

    def ids(batch: int, heads: int, length: int) -> Any:
        return masks.documents(torch.zeros(batch, length, dtype=torch.int64))

    for _ in range(rounds):
        for dtype, dim, value_dim in (
            ("bf16", 64, 64), ("bf16", 96, 96), ("bf16", 128, 128), ("bf16", 192, 128),
            ("bf16", 256, 256), ("fp16", 64, 64), ("fp16", 128, 128),
        ):  # fmt: skip
            of = rng, dtype, dim, value_dim
            for which in (dense, varlen):
                yield f"{which.__name__} {dtype} {dim}", lambda a=of, f=which: f(*a)
                name = f"{which.__name__} causal {dtype} {dim}"
                yield name, lambda a=of, f=which: f(*a, **causal)
                if dtype == "bf16" and dim in (64, 128, 256):
                    name = f"{which.__name__} window {dim}"
                    yield name, lambda a=of, f=which: f(*a, mask=window)
        for dim in (64, 128):
            of = rng, "bf16", dim, dim
            for name, options in {
                "softcap": {"score": lambda *sizes: scores.softcap(50.0)},
                "alibi": {"score": lambda batch, heads, length: scores.alibi(torch.ones(heads))},
                "sinks": {"sinks": lambda batch, heads, length: torch.zeros(heads)},
                "documents": {"mask": ids},
                "dropout": {"dropout_p": lambda *sizes: 0.2},
                "deterministic": {"deterministic": lambda *sizes: True},
            }.items():
                yield (
                    f"{name} {dim}",
                    lambda a=of, o=options: dense(*a, inside=True, **{**causal, **o}),
                )
            for size in (16, 64):
                heads = rng.choice(variants.HEADS)
                batch = rng.choice((1, 2, 3, 16, 33, 100, 200, 300))
                for dtype in variants.HALVES:
                    yield f"decode {dim}", lambda a=(dtype, dim, size, heads, batch, 1): paged(*a)
                chunk = "bf16", dim, size, heads, 1, rng.choice((2, 3, 8, 17, 60, 100, 600, 3000))
                yield f"chunk {dim}", lambda a=chunk: paged(*a)
            if architecture in variants.FP8_ARCHITECTURES:
                for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                    of = rng, dim, dtype, rng.random() < 0.5, rng.random() < 0.5
                    yield f"fp8 {dim}", lambda a=of: fp8(*a)
            for length in (rng.choice(LENGTHS[2:]), rng.randrange(1024, 9000)):
                yield f"linear {dim}", lambda d=dim, n=length: linear(d, n)
    of = rng, "bf16", 128, 128
    yield (
        "outside, a user's mask",
        lambda: dense(*of, mask=lambda *s: lambda b, h, q, k: q >= 2 * k),
    )
    yield "outside, 80 channels", lambda: dense(rng, "bf16", 80, 80, **causal)
    yield "outside, float16 of 256", lambda: dense(rng, "fp16", 256, 256, **causal)
    yield "outside, 12 heads", lambda: paged("bf16", 128, 16, (12, 4), 1, 1)


def main(architecture: str, rounds: str, dim: str) -> None:
    """Print the addresses of kernels that calls ask for, by the name of a call.

    dim: calls whose names end so, of so many channels; "": all of them.
    """
    asked: dict[str, list[list[str]]] = {}
    kernels: list[list[str]] = []

    def look(launch: Any, make: Any) -> None:
        address = machine_code.address_of(launch.kernel, make(), launch.options, architecture)
        kernels.append([launch.kernel.__name__, str(address)])  # None: of a user's function

    worker.pretend_gpu(architecture, look, variants.MULTIPROCESSORS[architecture])
    for name, call in user_calls(architecture, random.Random(26), int(rounds)):
        if not name.endswith(dim):
            continue
        kernels.clear()
        sizes = call()
        asked[f"{name}: {sizes}"] = kernels.copy()
    print(json.dumps(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])

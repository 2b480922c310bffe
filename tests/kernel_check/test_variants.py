"""The list of variants is what calls look for, and what is compiled ahead is found by them."""

from __future__ import annotations

import importlib.util
import struct
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from saccade.gpu import stored_code
from saccade.kernel_check import variants
from saccade_cli import app

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["kernels", *arguments])


def test_a_variant_is_listed_once_with_a_call_that_reaches_it() -> None:
    found = variants.variants_of("sm_80", "linear_*")
    assert len({variant.address for variant in found}) == len(found) > 10
    assert {variant.kernel for variant in found} >= {"linear_step", "linear_forward_scan"}
    assert all(variant.of.startswith("linear") for variant in found)
    other = variants.variants_of("sm_120", "linear_*")
    assert not {variant.address for variant in found} & {variant.address for variant in other}


def test_what_is_listed_is_compiled_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    stored_code.cache.cache_clear()
    try:
        done = run("--warm", "--arch", "sm_80", "--kernel", "linear_row_dot", "--jobs", "1")
        assert done.exit_code == 0, done.output
        listed = variants.variants_of("sm_80", "linear_row_dot")
        assert f"sm_80: {len(listed)} variants in" in done.output.replace("\n", " ")
        for variant in listed:
            code = stored_code.cached(variant.address)
            assert (
                code is not None and code.name == "linear_row_dot" and code.code[:4] == b"\x7fELF"
            )
    finally:
        stored_code.cache.cache_clear()


def test_a_sample_is_spread_over_all() -> None:
    console = Console(quiet=True)
    codes = variants.compile_with_progress("sm_80", "linear_row_dot", 2, console, most=1)
    listed = [variant.address for variant in variants.variants_of("sm_80", "linear_row_dot")]
    assert list(codes) == listed[:1]


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


def test_line_numbers_that_are_left_out_change_no_instruction(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    def compiled(told: dict[str, str], kernel: str) -> list[dict[str, bytes]]:
        monkeypatch.setattr(variants, "LEAN", told)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"told {len(told)}"))
        console = Console(quiet=True)
        codes = variants.compile_with_progress("sm_90", kernel, 1, console, most=1)
        return [code_of(code.code) for code in codes.values()]

    lean = variants.LEAN
    for kernel in ("linear_row_dot", "attention_backward_begin"):
        [whole], [short] = compiled({}, kernel), compiled(lean, kernel)
        assert set(whole) > {".debug_line"} and ".debug_line" not in short
        code = {name for name in whole if "debug" not in name}
        assert f".text.{kernel}" in code and code == {name for name in short if "debug" not in name}
        assert all(whole[name] == short[name] for name in code)


def test_the_number_of_variants_is_printed_last() -> None:
    done = run("--list", "--arch", "sm_80", "--kernel", "linear_step")
    assert done.exit_code == 0, done.output
    *lines, last = done.output.splitlines()
    assert last == f"sm_80: {len(lines)} variants"


@pytest.mark.parametrize("option", ["--list", "--warm"])
@pytest.mark.parametrize("other", [["--check"], ["--head-dim", "64"], ["--json", "x"]], ids=str)
def test_options_that_would_be_ignored_are_refused(option: str, other: list[str]) -> None:
    done = run(option, *other)
    assert done.exit_code == 2
    assert "--list and --warm take --arch, --kernel, --call and --jobs alone" in done.output


def test_a_kernel_of_no_such_name_is_refused() -> None:
    for option in ("--list", "--warm"):
        done = run(option, "--arch", "sm_80", "--kernel", "foward")
        assert done.exit_code == 2 and "no variant whose kernel fits 'foward'" in done.output


def test_calls_by_glob_reach_their_variants_alone() -> None:
    found = variants.variants_of("sm_80", "*", ("paged: bf16 d64 none*p16", "linear step: fp16*"))
    assert {variant.of.split(":")[0] for variant in found} == {"paged", "linear step"}
    assert all("bf16 d64" in variant.of for variant in found if variant.kernel == "attention_pages")
    everything = {variant.address for variant in variants.variants_of("sm_80")}
    assert {variant.address for variant in found} < everything
    done = run("--list", "--arch", "sm_80", "--call", "paged: bf8*")
    assert done.exit_code == 2 and "whose call 'paged: bf8*'" in done.output
    done = run("--call", "paged*")
    assert done.exit_code == 2 and "--call goes with --list or --warm" in done.output


def test_a_cache_that_is_off_cannot_be_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_CACHE", "")
    stored_code.cache.cache_clear()
    done = run("--warm", "--arch", "sm_80")
    stored_code.cache.cache_clear()
    assert done.exit_code == 2 and "SACCADE_CACHE is empty" in done.output

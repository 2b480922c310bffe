"""Build a wheel that holds machine code: python tools/compile_wheel.py [--arch ...] [...]

Every variant that `saccade kernels --list` lists is compiled, without a GPU, for the architectures
that a wheel serves, or those of some calls alone (--call 'attention*: bf16 d128 causal*'); then
hatchling packs the wheel. The machine code is known by a digest of the sources in the same wheel
(`saccade.gpu.stored_code`), so it serves these and no others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import triton
import typer
from rich.console import Console

from saccade.gpu import stored_code
from saccade.kernel_check import variants

ROOT = Path(__file__).resolve().parents[1]
ARCH = typer.Option("--arch", "-a", help="Architectures; several times or with commas.")
SAMPLE = typer.Option("--sample", help=f"Only {variants.SAMPLE} kernels of each: to look at.")
CALL = typer.Option("--call", help="Only kernels of calls that fit a glob; several times.")
JOBS = typer.Option("--jobs", "-j", min=1, help="Compilers at a time; by default one a core.")
TO = typer.Option("--to", help="Where the wheel goes.")


def assembler_version() -> str:
    """The version of the assembler that Triton brings."""
    assembler = Path(triton.__path__[0]) / "backends/nvidia/bin/ptxas"
    said = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"V([\d.]+)", said.stdout)
    return found[1] if found else "unknown"


def main(
    arch: Annotated[list[str] | None, ARCH] = None,
    call: Annotated[list[str] | None, CALL] = None,
    sample: Annotated[bool, SAMPLE] = False,
    jobs: Annotated[int | None, JOBS] = None,
    to: Annotated[Path, TO] = ROOT / "dist",
) -> None:
    """Compile kernels ahead of time and build a wheel that holds them."""
    console = Console()
    asked = [part.strip() for name in arch or variants.SHIPPED for part in name.split(",")]
    made_by = f"Triton {triton.__version__}, ptxas {assembler_version()}"
    shutil.rmtree(stored_code.COMPILED, ignore_errors=True)
    try:
        for architecture in asked:
            begin, most = time.perf_counter(), variants.SAMPLE if sample else 0
            codes = variants.compile_with_progress(
                architecture, "*", jobs, console, most, call or ("*",)
            )
            size = stored_code.write_shipped(stored_code.COMPILED, architecture, codes, made_by)
            seconds = time.perf_counter() - begin
            console.print(
                f"{architecture}: {len(codes)} variants, {size / 1e6:.1f} MB, {seconds:.0f} s"
            )
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(to)],
            cwd=ROOT, check=True,
        )  # fmt: skip
    finally:  # a checkout compiles what it needs: its sources change
        shutil.rmtree(stored_code.COMPILED, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)

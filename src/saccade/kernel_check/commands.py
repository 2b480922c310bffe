"""The commands `saccade kernels` and `saccade tune`.

Triton and the kernels are imported when something is compiled: --help answers without them.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from saccade.ops.attention.triton import configs

if TYPE_CHECKING:
    from saccade.kernel_check.catalogue import Compiled

JOBS = typer.Option("--jobs", "-j", min=1, help="Compilers at a time; by default one a core.")


@contextmanager
def _mistakes_end(command: str) -> Iterator[str]:
    """Triton's version; a mistake of the user's ends the program with one message."""
    try:
        if importlib.util.find_spec("triton") is None:
            raise RuntimeError("Triton is not installed; it comes with PyTorch for Linux")
        import triton

        yield str(triton.__version__)
    except typer.Exit:  # which counts as a RuntimeError
        raise
    except (ValueError, OSError, RuntimeError) as error:
        typer.secho(f"saccade {command}: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def _own_architecture() -> str | None:
    """The architecture of this machine's GPU, or None where there is none."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return "gfx942"
    return configs.architecture_of(torch.cuda.get_device_capability())


def _own_table() -> str:
    """Where the user's own table of configs is, and whether there is one."""
    file = configs.tuned_path()
    if file is None:
        return "Your own configs: turned off, as SACCADE_CONFIGS is empty."
    if not file.exists():
        return f"Your own configs: none; `saccade tune --save` would write {file}"
    entries = ", ".join(
        f"{len(table.entries)} for {table.architecture}"
        for table in configs.read_tuned(file).values()
    )
    return f"Your own configs: {file} ({entries or 'empty'})"


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


# ---- saccade kernels -----------------------------------------------------------------------------

ARCH = typer.Option(
    "--arch", "-a", help="sm_90, gfx942, ...; several times or with commas; or all."
)
KERNEL = typer.Option("--kernel", "-k", help="Kernels by name or glob, such as 'backward_*'.")
OF = typer.Option(
    "--call", help="With --list or --warm: calls by glob, such as 'attention*: bf16 d128 causal*'."
)
HEAD_DIM = typer.Option("--head-dim", "-d", min=1, help="Only calls of this head_dim.")
CHECK = typer.Option(
    "--check",
    help="Show only defaults that spill or take too much memory; exit with 1 if any must not.",
)
MARKDOWN = typer.Option(
    "--markdown",
    exists=True,
    dir_okay=False,
    help="Write tables between the marks of this file; with --check, compare them.",
)
JSON = typer.Option("--json", dir_okay=False, help="Write all that was found to this file.")
LIST = typer.Option(
    "--list",
    help="List the variants that the library's own masks, scores and options reach; their number "
    "last. Nothing is compiled.",
)
WARM = typer.Option(
    "--warm",
    help="Compile them into your cache, so that no call of them compiles anything.",
)
KNOWN = typer.Option(
    "--known",
    dir_okay=False,
    help="Compile only what this file does not know, and a sample; add it to the file, or with "
    "--check compare. Entries of other kernels stay, unless all kernels are asked for.",
)


def kernels(
    arch: Annotated[list[str] | None, ARCH] = None,
    kernel: Annotated[str, KERNEL] = "*",
    head_dim: Annotated[int | None, HEAD_DIM] = None,
    check: Annotated[bool, CHECK] = False,
    markdown: Annotated[Path | None, MARKDOWN] = None,
    json: Annotated[Path | None, JSON] = None,
    known: Annotated[Path | None, KNOWN] = None,
    listed: Annotated[bool, LIST] = False,
    warm: Annotated[bool, WARM] = False,
    call: Annotated[list[str] | None, OF] = None,
    jobs: Annotated[int | None, JOBS] = None,
) -> None:
    """Compile the GPU kernels, with or without a GPU, and show what they take.

    Every kernel is compiled with its default config for each architecture: this machine's
    GPU, or all where there is none. Shown are registers, spills and shared memory.

    [bold]Examples[/bold]

      saccade kernels --arch sm_75          [dim]as it will be on a T4[/dim]
      saccade kernels -a sm_80,sm_90 -k 'backward_*'
      saccade kernels --arch all --check    [dim]exit 1 if a default config spills[/dim]
      saccade kernels --arch all --markdown docs/kernels.md
      saccade kernels --list --arch sm_90   [dim]all variants, and how many there are[/dim]
      saccade kernels --warm -k 'attention_*' [dim]so that no later call compiles[/dim]
      saccade kernels --warm --call '*: bf16 d128 causal*' [dim]only what such calls need[/dim]
    """
    if listed or warm or call:
        others = head_dim, markdown, json, known, check or None
        return _ahead((listed, warm), arch, (kernel, call or "*"), jobs, others)
    with _mistakes_end("kernels") as version:
        from saccade.kernel_check import catalogue, report, worker

        console = Console()
        wanted = catalogue.jobs(_architectures(arch), kernel, head_dim)
        kept = {} if known is None else catalogue.read(known, version, must_exist=check)
        begin = time.perf_counter()
        results = worker.compile_with_progress(wanted, jobs, console, catalogue.trusted(kept))
        seconds = time.perf_counter() - begin
        if not check:
            console.print(*report.usage_tables(results), report.CAPTION, "", sep="\n")
        _print(console, f"Triton {version}: {len(results)} kernels in {seconds:.0f} s.")
        _print(console, _own_table())
        if json is not None:
            json.write_text(report.to_json(results, version), encoding="utf-8")
        if not check:
            if known is not None:
                everything = wanted == catalogue.jobs(configs.ARCHITECTURES)
                catalogue.write(known, results, version, {} if everything else kept)
            if markdown is not None:
                report.write_markdown(markdown, results, version)
            return
        fresh = catalogue.unknown(kept, results)
        if known is not None and fresh:
            hint = f"{fresh} of them were not known; `make kernels-known` writes {known} anew."
            _print(console, hint, "yellow")
        _check(results, catalogue.faults(known, kept, results) if known else [], console)
        if markdown is not None:
            report.compare_markdown(markdown, results, version)


def _ahead(
    asked: tuple[bool, bool],
    arch: Sequence[str] | None,
    wanted: tuple[str, Sequence[str]],
    jobs: int | None,
    others: Sequence[object],
) -> None:
    """List variants, or compile them into the user's cache; wanted: globs of kernels and calls."""
    with _mistakes_end("kernels"):
        listed, warm = asked
        if not listed and not warm:
            raise ValueError("--call goes with --list or --warm")
        if any(option is not None for option in others):
            raise ValueError("--list and --warm take --arch, --kernel, --call and --jobs alone")
        architectures = _architectures(arch)
        if listed:
            _list(architectures, wanted, Console())
        else:
            _warm(architectures, wanted, jobs, Console())


def _list(
    architectures: Sequence[str], wanted: tuple[str, Sequence[str]], console: Console
) -> None:
    """Print every variant with the call that reaches it, then how many there are."""
    from saccade.kernel_check import variants

    for architecture in architectures:
        with console.status(f"looking at calls on {architecture}"):
            found = variants.variants_of(architecture, *wanted)
        for variant in found:
            _print(
                console, f"{architecture} {variant.address[:12]} {variant.kernel} ({variant.of})"
            )
        _print(console, f"{architecture}: {len(found)} variants", "bold")


def _warm(
    architectures: Sequence[str],
    wanted: tuple[str, Sequence[str]],
    jobs: int | None,
    console: Console,
) -> None:
    """Compile variants into the user's cache."""
    from saccade.gpu import stored_code
    from saccade.kernel_check import variants

    if stored_code.cache() is None:
        raise ValueError("--warm: the cache is turned off, as SACCADE_CACHE is empty")
    for architecture in architectures:
        begin = time.perf_counter()
        codes = variants.compile_with_progress(architecture, wanted[0], jobs, console, of=wanted[1])
        for address, code in codes.items():
            stored_code.keep(address, code)
        seconds = time.perf_counter() - begin
        text = f"{architecture}: {len(codes)} variants in {stored_code.cache()}, {seconds:.0f} s"
        _print(console, text)


def _architectures(names: Sequence[str] | None) -> tuple[str, ...]:
    """The architectures that a user named; this machine's, or all, where none was."""
    asked = [part.strip() for name in names or () for part in name.split(",") if part.strip()]
    if not asked:
        own = _own_architecture()
        return configs.ARCHITECTURES if own is None else (own,)
    if "all" in asked:
        return configs.ARCHITECTURES
    for name in asked:
        if name not in configs.ARCHITECTURES:
            known = ", ".join(configs.ARCHITECTURES)
            raise ValueError(f"--arch: got {name!r}, takes {known}, or all")
    return tuple(dict.fromkeys(asked))


def _check(results: Sequence[Compiled], others: Sequence[str], console: Console) -> None:
    """Name kernels that must not be defaults, and other faults; exit with 1 if there are any."""
    from saccade.kernel_check import report

    excused, wrong = report.excused(results), [*report.offenders(results), *others]
    for line in excused:
        _print(console, line, "yellow")
    for line in wrong:
        _print(console, line, "red")
    if wrong:
        raise typer.Exit(1)
    other = "other " if excused else ""
    console.print(f"No {other}default config spills or takes too much memory.", style="green")


# ---- saccade tune --------------------------------------------------------------------------------

HEAD_DIMS = typer.Option("--head-dim", "-d", help="Channels; several times for several tables.")
LENGTH = typer.Option("--length", "-l", min=1, help="Query and key rows of a sequence.")
BATCH = typer.Option("--batch", min=1, help="Sequences.")
HEADS = typer.Option("--heads", min=1, help="Query heads.")
KV_HEADS = typer.Option("--kv-heads", min=1, help="Key and value heads; as many by default.")
DTYPE = typer.Option("--dtype", help="bf16, fp16 or fp32.")
MASK = typer.Option("--mask", help="none, causal, window, documents, blocks, dense; several times.")
WHICH = typer.Option("--which", "-w", help="Kernels: forward, backward_keys, ...; with commas.")
LIMIT = typer.Option("--limit", min=0, help="Seconds after which the last turns of a kernel end.")
SAVE = typer.Option("--save", help="Use the winners from now on: write them to your own table.")

TUNED = ("forward", "backward_keys", "backward_queries", "backward_shared")


def tune(
    head_dim: Annotated[list[int] | None, HEAD_DIMS] = None,
    length: Annotated[int, LENGTH] = 4096,
    batch: Annotated[int, BATCH] = 4,
    heads: Annotated[int, HEADS] = 16,
    kv_heads: Annotated[int | None, KV_HEADS] = None,
    dtype: Annotated[str, DTYPE] = "bf16",
    mask: Annotated[list[str] | None, MASK] = None,
    which: Annotated[list[str] | None, WHICH] = None,
    limit: Annotated[float, LIMIT] = 20.0,
    jobs: Annotated[int | None, JOBS] = None,
    save: Annotated[bool, SAVE] = False,
) -> None:
    """Find the fastest tile sizes for this machine's GPU.

    Candidates are compiled first, looked at once, and the fastest then take
    turns. Only the kernel itself is timed. Without --save nothing changes.

    [bold]Examples[/bold]

      saccade tune                          [dim]width 128, without a mask and causal[/dim]
      saccade tune -d 64 --mask causal --save
      saccade tune -w forward -d 128 --length 16384 --batch 1
      saccade tune -w backward_keys,backward_queries --mask window --limit 60
    """
    with _mistakes_end("tune") as version:
        from saccade.kernel_check import tuning

        names = [part.strip() for name in which or TUNED for part in name.split(",")]
        dims, mask_names = head_dim or [128], mask or ["none", "causal"]
        calls = tuning.calls_of(dims, length, dtype, mask_names, batch, heads, kv_heads)
        architecture, console = _own_architecture(), Console()
        if architecture is None:
            raise RuntimeError(
                "there is no GPU here, so nothing can be timed; "
                "`saccade kernels` compiles without one"
            )
        tasks = [tuning.task(architecture, name, call) for call in calls for name in names]
        gpu = torch.cuda.get_device_name()
        console.print(f"{gpu} ({architecture}), Triton {version}", highlight=False)
        winners = tuning.tune(tasks, limit, jobs, console)
        if save:
            table = configs.ConfigTable(architecture, gpu, version, winners)
            tuning.save_winners(table, console)
        else:
            _print(console, _own_table())

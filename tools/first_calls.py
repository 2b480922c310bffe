"""First calls and calls of new lengths on a GPU, by machine code that was compiled ahead.

Usage: python tools/first_calls.py --compile FOLDER    (needs Triton, and no GPU)
       python tools/first_calls.py FOLDER              (needs a GPU; Triton is hidden)

--help says more.
"""

from __future__ import annotations

import argparse
import builtins
import compileall
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HELP = """\
Call the library as a wheel with machine code would, in fresh processes that can import no Triton
and find no C compiler: each kind of call must give what the reference gives, and compile nothing.
Then time first calls, and calls of lengths that were never seen beside lengths that were; with
--profile, say what first calls are made of instead.
"""
EPILOG = """\
FOLDER holds what a wheel holds in saccade/compiled, for the calls of this script (--compile).

examples:
  python tools/first_calls.py --compile out/first --jobs 16
  python tools/first_calls.py out/first --json out/first_calls.jsonl
  python tools/first_calls.py out/first --profile
  python tools/first_calls.py .../saccade/compiled --core      (of a wheel that is installed)

Times are of the host. A first call is timed until the GPU has done it, in a process in which CUDA
is up, saccade is imported, and PyTorch has made a backward pass of its own: its first one starts
threads and, where a gradient is handed to it, imports sympy. What that took is shown beside.
Saccade's files are compiled to bytecode before, as pip does for a wheel. Lengths: the median of
--lengths calls, the GPU idle before each.

exit status: 0 if every result is right and nothing was compiled, else 1.
"""
SOURCES = Path(__file__).resolve().parents[1] / "src"
DIM, HEADS, KV_HEADS, PAGE = 128, 32, 8, 16
SHORTEST = {"linear": 8193}  # lengths are this, or OTHERS, and every second one that follows
OTHERS = 2049
RESERVED = 2**30  # bytes: a length that is new must not ask CUDA for memory


class Kind(NamedTuple):
    """A kind of call."""

    name: str
    of: tuple[str, ...]  # globs of the listed calls that reach its kernels
    gradients: bool


KINDS = (
    Kind("dense", ("attention*: bf16 d128 causal*rows",), True),
    Kind("varlen", ("attention_varlen*: bf16 d128 causal packed*",), True),
    Kind("decode", ("attention_paged: bf16 d128 none decode p16 batch*",), False),
    Kind("linear", ("linear_attention*: bf16 d128 causal*",), True),
)


# ---- compiling ahead -----------------------------------------------------------------------------


def compile_ahead(folder: Path, architecture: str, jobs: int | None) -> int:
    """Compile what the calls of this script need; the exit status."""
    import triton
    from rich.console import Console

    from saccade.gpu import stored_code
    from saccade.kernel_check import variants

    console, begin = Console(), time.perf_counter()
    globs = [glob for kind in KINDS for glob in kind.of]
    codes = variants.compile_with_progress(architecture, "*", jobs, console, of=globs)
    made_by = f"Triton {triton.__version__}"
    size = stored_code.write_shipped(folder, architecture, codes, made_by)
    seconds = time.perf_counter() - begin
    console.print(f"{folder}: {len(codes)} variants, {size / 1e6:.1f} MB, {seconds:.0f} s")
    return 0


# ---- in a process of its own ---------------------------------------------------------------------


def without_triton(folder: Path) -> None:
    """Have this process use the machine code of a folder, and nothing else."""
    sys.modules["triton"] = None  # type: ignore[assignment]
    from saccade.gpu import stored_code

    stored_code.COMPILED = folder


def beside_triton(folder: Path) -> None:
    """Have this process use the machine code of a folder, and fail where anything is compiled."""
    from saccade.gpu import stored_code, triton_compiler

    def refuse(kernel: Any, *others: Any) -> Any:
        raise RuntimeError(f"{kernel.__name__} is not in {folder}")

    stored_code.COMPILED = folder
    triton_compiler.compiled = refuse


def loaded() -> int:
    """How many kernels were loaded.

    Raises:
        AssertionError: if one of them was not in the folder, or there are none.
    """
    from saccade.gpu import machine_code, stored_code

    origins = [variant.origin for variant in machine_code._variants.values()]
    assert origins, "no kernel was started"
    assert set(origins) == {machine_code.PACKAGE}, f"kernels came from {set(origins)}"
    assert not any(variant.by_triton for variant in machine_code._variants.values())
    cache = stored_code.cache()
    assert cache is not None and not cache.exists(), f"{cache} was written"
    return len(origins)


def check(kind: str) -> int:
    """Compare a kind of call with the reference; how many kernels it started."""
    compare(kind, **CHECKED[kind])
    return loaded()


GROUP = HEADS // KV_HEADS
CHECKED: dict[str, dict[str, Any]] = {
    "dense": {"lengths": ((1041, 1041),), "mask": "causal"},
    "varlen": {"lengths": ((300, 300), (1, 1), (517, 517)), "mask": "causal"},
    "decode": {"lengths": ((1, 700), (1, 1), (1, 2000), (1, 65)), "page_size": PAGE},
    "linear": {"lengths": ((1025, 1025),)},
}
"""A call of each kind: what differs from `compare`'s own."""


def compare(kind: str, dtype: str = "bfloat16", **changes: Any) -> None:
    """Compare one call with the reference, with its gradients.

    Raises:
        AssertionError: naming what differs.
    """
    import torch

    from saccade import linear_attention, testing
    from saccade.testing.linear import _spread as linear_spread
    from saccade.testing.oracle import assert_within, bounds, tolerances

    options: dict[str, Any] = {
        "head_dim": DIM, "value_dim": changes.get("head_dim", DIM), "device": "cuda",
        "kv_heads": KV_HEADS, "group": GROUP, "dtype": getattr(torch, dtype),
    } | changes  # fmt: skip
    case: Any
    if kind == "decode":
        testing.assert_exact(testing.make_paged_case(**options), None)  # type: ignore[arg-type]
        return
    if kind == "linear":
        del options["kv_heads"], options["group"]
        case = testing.make_linear_case(batch=1, heads=(16, 16, 16), **options)
    else:
        case = testing.make_case(batch=1, packed=kind == "varlen", **options)
    for name in case.grads:  # of the output alone, as most calls have them
        if name != "output":
            case.grads[name].zero_()
    leaves = case.leaves()

    def attended() -> Any:
        if kind != "linear":
            return case.call(leaves)[0]
        positional, keywords = case.arguments(leaves)
        return linear_attention(*positional, **keywords)

    got = case.with_gradients(leaves, {"output": attended()})
    with torch.no_grad():  # another kernel, as no residual is written
        alone = attended()
    exact = case.run("reference", torch.float64)
    if kind == "linear":
        allowed = bounds(exact, case.run_plain(), linear_spread(case), options["dtype"])
    else:
        allowed = tolerances(case, exact)
    assert_within(got, {name: exact[name] for name in got}, allowed, str(case.description))
    wanted, most = {"output": exact["output"]}, {"output": allowed["output"]}
    assert_within({"output": alone}, wanted, most, f"{case.description}, no gradient due")


def core() -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls that a wheel serves, a few of each: kinds, and what `compare` is told of them."""
    lengths = {"dense": ((333, 333),), "varlen": ((300, 300), (1, 1), (129, 129))}
    heads = ({"kv_heads": HEADS, "group": 1}, {})
    for kind, those in lengths.items():
        for mask in ("none", "causal"):
            for shape in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
                dims = dict(zip(("head_dim", "value_dim"), shape, strict=True))
                for of_heads in heads:
                    yield kind, {"lengths": those, "mask": mask, **dims, **of_heads}
            for dim in (64, 128):
                dims = {"head_dim": dim, "value_dim": dim}
                yield kind, {"lengths": those, "mask": mask, "dtype": "float16", **dims}
    for dim in (64, 128):
        shared = {"lengths": ((512, 512),), "head_dim": dim, "value_dim": dim}
        for mask in ("none", "causal"):
            yield "dense", {**shared, "mask": mask, "dtype": "float32"}
        inside = {**shared, "layout": "permuted"}
        for score in ("softcap", "alibi"):
            yield "dense", {**inside, "mask": "causal", "score": score}
        yield "dense", {**inside, "score": "bias"}
        yield "dense", {**inside, "mask": "prefix"}
        yield "dense", {**inside, "mask": "causal", "sinks": True}
        yield "dense", {**inside, "mask": "causal", "dropout_p": 0.1}
        yield "linear", {"lengths": ((1024, 1024),), "head_dim": dim, "value_dim": dim}
    decoded = ((1, 700), (1, 1), (1, 2000), (1, 65))
    for dtype in ("bfloat16", "float16"):
        for dim, page in ((64, 16), (64, 64), (128, 16), (128, 64), (256, 16)):
            for of_heads in heads:
                sizes = {"head_dim": dim, "value_dim": dim, "page_size": page, "dtype": dtype}
                yield "decode", {"lengths": decoded, **sizes, **of_heads}


def check_core() -> dict[str, Any]:
    """Compare all calls of the core; how many there were, their kernels, and what failed."""
    failed, calls = [], list(core())
    for kind, changes in calls:
        try:
            compare(kind, **changes)
        except Exception as error:  # of any kind: the others are compared all the same
            failed.append(f"{kind} {changes}: {type(error).__name__}: {error}"[:400])
    return {"calls": len(calls), "kernels": loaded(), "failed": failed}


def caller(kind: str) -> Callable[[int], tuple[Callable[[], Any], list[Any]]]:
    """What makes, for a length, a call of this kind and its leaves."""
    import torch

    import saccade

    def rows(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").bfloat16().requires_grad_(kind != "decode")

    def make(length: int) -> tuple[Callable[[], Any], list[Any]]:
        if kind == "decode":
            pages = -(-length // PAGE)
            table = torch.arange(4 * pages, dtype=torch.int32, device="cuda").view(4, pages)
            lengths = torch.full((4,), length, dtype=torch.int32, device="cuda")
            key_pages, value_pages = (rows(4 * pages, KV_HEADS, PAGE, DIM) for _ in range(2))
            query = rows(4, HEADS, 1, DIM)
            return lambda: saccade.attention_paged(
                query, key_pages, value_pages, table, lengths
            ), []
        if kind == "varlen":
            given = [rows(length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            sequences = 3 + length // 2 % 5
            ends = [number * length // sequences for number in range(sequences + 1)]
            offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
            query, key, value = given
            return lambda: saccade.attention_varlen(query, key, value, offsets, causal=True), given
        if kind == "linear":
            given = [rows(1, 16, length, DIM) for _ in range(3)]
            return lambda: saccade.linear_attention(*given, causal=True), given
        given = [rows(1, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        return lambda: saccade.attention(*given, causal=True), given

    return make


def seconds(run: Callable[[], Any], wait: bool = True) -> tuple[float, Any]:
    """What a call takes, until the GPU has done it or until it returns; and its result."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = run()
    if wait:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def warmed() -> dict[str, float]:
    """Seconds of what PyTorch itself does first: afterwards it is not counted as ours."""
    import torch

    held = torch.zeros(RESERVED, dtype=torch.uint8, device="cuda")
    given = torch.ones(256, 256, device="cuda")
    leaf = torch.mm(given, given).requires_grad_()
    del held

    def backward(*gradients: Any) -> None:
        output = leaf.sin() if gradients else leaf.sin().sum()
        torch.autograd.grad(output, leaf, *gradients)

    found = {"torch backward": seconds(backward)[0]}
    found["torch given gradient"] = seconds(lambda: backward(given))[0]
    found["torch backward again"] = seconds(lambda: backward(given))[0]
    return found


def both(
    call: tuple[Callable[[], Any], list[Any]], wait: bool, at: Callable[[str], Any] = str
) -> tuple[float, float]:
    """Seconds of a forward pass without gradients, then of one with its backward pass.

    at: is told which of them comes.
    """
    import torch

    run, leaves = call
    at("forward")
    with torch.no_grad():
        alone, output = seconds(run, wait)
    if not leaves:
        return alone, 0.0
    given = torch.randn_like(output)
    at("both")
    forward, output = seconds(run, wait)
    backward, _ = seconds(lambda: torch.autograd.grad(output, leaves, given), wait)
    return alone, forward + backward


def times(kind: Kind, lengths: int) -> dict[str, float]:
    """Seconds of first calls, and of calls of new and of known lengths."""
    found, make = warmed(), caller(kind.name)
    shortest = SHORTEST.get(kind.name, OTHERS)
    found["first forward"], found["first both"] = both(make(shortest + 1024), True)
    for length in (shortest - 1, shortest - 2, shortest - 17):  # both classes of alignment
        both(make(length), False)
    calls = {length: make(length) for length in range(shortest, shortest + 2 * lengths, 2)}
    for name in ("new", "known"):
        taken = [both(call, False) for call in calls.values()]
        for which, values in zip(("forward", "both"), zip(*taken, strict=True), strict=True):
            found[f"{name} {which}"] = statistics.median(values)
    one = [both(calls[shortest], False) for _ in range(lengths)]
    for which, values in zip(("forward", "both"), zip(*one, strict=True), strict=True):
        found[f"same {which}"] = statistics.median(values)
    loaded()
    return found


# ---- what a first call is made of ----------------------------------------------------------------

IMPORTS, REST = "importing", "the rest of the host, and PyTorch"


class Clock:
    """Seconds that steps take without the steps within them, by pass and step.

    One thread works at a time: while PyTorch's runs a backward pass, the one that asked waits.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.of, self._inner = "", [0.0]

    def time(self, holder: Any, attribute: str, step: str | Callable[..., str]) -> None:
        """Time a function from now on; step: its name, or what makes it of its arguments."""
        plain = getattr(holder, attribute)

        @functools.wraps(plain)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.step(step if isinstance(step, str) else step(*arguments)):
                return plain(*arguments, **options)

        setattr(holder, attribute, timed)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what is done meanwhile."""
        self._inner.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[self.of][name] += took - self._inner.pop()
            self._inner[-1] += took


def watched() -> Clock:
    """A clock that times the steps from a call to its kernels."""
    from saccade.gpu import driver, launcher, machine_code, stored_code

    clock, started = Clock(), set[int]()

    def start(variant: Any, *others: Any) -> str:
        again = id(variant) in started
        started.add(id(variant))
        return "starting kernels again" if again else f"starting {variant.name} first"

    def load(function: Any, code: bytes, name: str) -> str:
        return f"loading {name}, {len(code):,} bytes"

    clock.time(builtins, "__import__", IMPORTS)
    clock.time(importlib, "import_module", IMPORTS)
    clock.time(stored_code, "source_digest", "digest of the sources")
    clock.time(stored_code, "shipped", "index of the package")
    clock.time(machine_code, "address_of", "addresses")
    clock.time(stored_code.Shipped, "find", "unpacking machine code")
    clock.time(driver.Function, "__init__", load)
    clock.time(driver.Function, "parameter_sizes", "sizes of parameters")
    clock.time(driver.Function, "allow_shared_memory", "shared memory")
    clock.time(machine_code.Variant, "launch", start)
    clock.time(driver, "tensor_map", "TMA descriptors")
    clock.time(launcher.Launch, "_prepare", "arguments and parameters")
    return clock


def profile(kind: Kind) -> dict[str, Any]:
    """What first calls are made of: seconds by pass and step, and of the passes."""
    found: dict[str, Any] = dict(warmed())
    call, clock = caller(kind.name)(SHORTEST.get(kind.name, OTHERS) + 1024), watched()
    for name in ("first", "second"):
        passes = both(call, True, lambda which: setattr(clock, "of", f"{name} {which}"))  # noqa: B023
        clock.of = ""
        for which, took in zip(("forward", "both"), passes, strict=True):
            found[f"{name} {which}"] = took
            steps = clock.seconds[f"{name} {which}"]
            steps[REST] = took - sum(steps.values())
    loaded()
    return {**found, "steps": {of: steps for of, steps in clock.seconds.items() if of}}


def in_child(arguments: argparse.Namespace) -> int:
    """Check or time one kind of call; one line of JSON on standard output."""
    if arguments.beside:
        beside_triton(arguments.folder)
    else:
        without_triton(arguments.folder)
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    import saccade

    found: dict[str, Any] = {"import": time.perf_counter() - begin, "file": saccade.__file__}
    kind = next(kind for kind in KINDS if kind.name == arguments.kind)
    if arguments.core:
        found |= check_core()
    elif arguments.checks:
        found["kernels"] = check(kind.name)
    elif arguments.profile:
        found |= profile(kind)
    else:
        found |= times(kind, arguments.lengths)
    assert arguments.beside or "saccade.gpu.triton_compiler" not in sys.modules
    print(json.dumps(found), flush=True)
    return 0


# ---- the process that starts them ----------------------------------------------------------------


def ask(kind: Kind, folder: Path, *more: str) -> dict[str, Any] | str:
    """What a process of its own finds of a kind of call; text: how it failed."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "CC" and not name.startswith(("TRITON_", "SACCADE_"))
        }
        environment |= {"PATH": empty, "SACCADE_CACHE": f"{empty}/cache", "SACCADE_CONFIGS": ""}
        command = [sys.executable, __file__, str(folder), "--kind", kind.name, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return "\n".join(done.stderr.strip().splitlines()[-12:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def shown_profile(found: dict[str, Any], kind: Kind) -> str:
    """What first calls of a kind are made of, in milliseconds."""
    torch = [1e3 * found[f"torch {name}"] for name in ("backward", "given gradient")]
    lines = [
        f"{kind.name}: importing saccade {1e3 * found['import']:.1f} ms; PyTorch's first backward "
        f"pass {torch[0]:.1f}, its first with a gradient handed over {torch[1]:.1f}"
    ]
    for of, steps in found["steps"].items():
        if not found[of]:
            continue
        lines.append(f"  {of} {1e3 * found[of]:.1f} ms")
        for step, took in sorted(steps.items(), key=lambda step: -step[1]):
            if took > 1e-4:
                lines.append(f"  {1e3 * took:10.1f}  {step}")
    return "\n".join(lines)


def shown(found: dict[str, Any], kind: Kind) -> str:
    """A line of the table."""
    passes = ("forward", "both") if kind.gradients else ("forward",)
    lines = []
    for which in passes:
        first = f"{found[f'first {which}']:11.3f}"
        rest = [f"{1e6 * found[f'{name} {which}']:11.0f}" for name in ("new", "known", "same")]
        name = kind.name if which == "forward" else "  with gradients"
        lines.append(f"{name:18}{first}{''.join(rest)}")
    return "\n".join(lines)


def main(arguments: argparse.Namespace) -> int:
    """Check every kind of call, then time it or say what takes the time; the exit status."""
    failed, begin = 0, time.perf_counter()
    compileall.compile_dir(SOURCES, quiet=1)  # as pip does
    if arguments.core:
        found = ask(KINDS[0], arguments.folder, "--core", *["--beside"] * arguments.beside)
        if isinstance(found, str):
            print(found)
            return 1
        print(*found["failed"], sep="\n")
        print(
            f"{found['calls']} calls as the reference but for {len(found['failed'])}, "
            f"{found['kernels']} kernels, none compiled, {found['file']}"
        )
        return int(len(found["failed"]) > 0)
    for kind in KINDS:
        found = ask(kind, arguments.folder, "--checks")
        if isinstance(found, str):
            failed += 1
            print(f"{kind.name}: FAILED\n{found}", flush=True)
        else:
            said = f"as the reference, {found['kernels']} kernels, none compiled"
            print(f"{kind.name}: {said}", flush=True)
    if not arguments.profile:
        heads = ["first (s)", "new (us)", "known (us)", "same (us)"]
        print(f"\n{'':18}" + "".join(f"{head:>11}" for head in heads))
    how = ["--profile"] if arguments.profile else ["--lengths", str(arguments.lengths)]
    for kind in KINDS:
        found = ask(kind, arguments.folder, *how)
        if isinstance(found, str):
            failed += 1
            print(f"{kind.name}: FAILED\n{found}", flush=True)
            continue
        print((shown_profile if arguments.profile else shown)(found, kind), flush=True)
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind.name, **found}) + "\n")
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "first_calls.py", description=HELP, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("folder", type=Path, help="of machine code")
    made.add_argument("--compile", action="store_true", help="make the folder, by Triton")
    made.add_argument("--arch", default="sm_90", help="what it is compiled for (sm_90)")
    made.add_argument("--jobs", type=int, help="compilers at a time; by default one a core")
    made.add_argument("--lengths", type=int, default=60, help="how many are timed (60)")
    made.add_argument("--profile", action="store_true", help="what first calls are made of")
    made.add_argument("--core", action="store_true", help="compare many calls, and time none")
    made.add_argument(
        "--beside", action="store_true", help="with --core: Triton can be imported, not compile"
    )
    made.add_argument("--json", type=Path, help="append what was found to this file")
    for name in ("--kind", "--checks"):  # of the processes that this one starts
        kind: dict[str, Any] = {"action": "store_true"} if name == "--checks" else {}
        made.add_argument(name, help=argparse.SUPPRESS, **kind)
    return made


if __name__ == "__main__":
    read = parser().parse_args()
    read.folder = read.folder.resolve()
    if read.compile:
        sys.exit(compile_ahead(read.folder, read.arch, read.jobs))
    sys.exit(in_child(read) if read.kind else main(read))

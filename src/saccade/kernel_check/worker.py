"""Worker: a process that compiles for one architecture: python -m saccade.kernel_check.worker

Reads {"architecture": …, "jobs": [[call, pass, kernels, config], …], "known": {key: […], …}}
from its input, and answers with a line of JSON for each kernel; a known one is not compiled. A
process remembers what it prepared for its architecture, and never interprets kernels; hence one for
each architecture.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton

from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.launcher import Launch
from saccade.gpu.machine_code import compiled
from saccade.kernel_check import calls, compiler, linear_calls, machine_code, paged_calls
from saccade.kernel_check.calls import KernelCall
from saccade.kernel_check.compile_cache import key_of
from saccade.kernel_check.linear_calls import LINEAR_PASSES, LinearCall
from saccade.kernel_check.paged_calls import PAGED_PASSES, PagedCall
from saccade.ops.attention.hopper import configs as hopper_configs
from saccade.ops.attention.triton import call_spec
from saccade.runtime.spec import KernelConfig


class Answer(NamedTuple):
    """One kernel that was compiled, or that could not be; see pool.Compiled."""

    job: int
    kernel: str
    config: tuple[int, int, int, int]  # tiles (0: it has none), warps, stages
    seconds: float
    usage: tuple[int, ...] | None  # a pool.Usage
    error: str = ""
    key: str = ""  # of all that the compiler was given, see compile_cache.py


class LaunchRecorder:
    """Stands in for starting kernels: compiles those that are wanted, and tells of them."""

    def __init__(
        self, tell: Callable[[Answer], None], architecture: str, known: Mapping[str, Any]
    ) -> None:
        self.tell, self.architecture, self.known = tell, architecture, known
        self.target = compiler.target(architecture)
        self.job, self.which, self.wanted = 0, "", frozenset[str]()

    def __call__(
        self, started: Launch, programs: int, device: int | None, tensors: Any, arguments: Any
    ) -> None:
        """What `Launch.__call__` is given, once the recorder has taken its place."""
        name = kernel_name(started, self.which)
        if name not in self.wanted:
            return
        begin = time.perf_counter()
        used, error, key = None, "", ""
        try:
            asked = started.arguments(arguments())
            key = key_of(
                triton.__version__,
                self.architecture,
                compiler.given(started, asked, self.architecture),
            )
            used = self.known.get(key) or machine_code.usage(
                compiled(started.kernel, asked, started.options, self.target)
            )
        except Exception as failure:  # whatever the compiler raises is what is to be told
            error = f"{type(failure).__name__}: {failure}"[:400]
        seconds = time.perf_counter() - begin
        config = config_of(started)
        used = None if used is None else tuple(used)
        self.tell(Answer(self.job, name, config, seconds, used, error, key))


def kernel_name(started: Launch, which: str) -> str:
    """The name in `calls.KERNELS` of a kernel that a pass starts."""
    name = started.kernel.__name__.removeprefix("attention_")
    if which == "hopper_ordered":
        return f"hopper_{name}, ordered"
    if which == "hopper_in_order":
        return f"hopper_{name}, in key order"
    if (which, name) == ("paged", "forward"):  # the dense kernel, whose keys lie in pages
        return "pages_forward"
    if name == "linear_nan_safe":  # one kernel for four passes
        return f"hopper_linear_{started.constants['PASS']}_nan_safe"
    if name == "linear_wide":
        return f"hopper_linear_wide_{started.constants['PASS']}"
    if which.startswith("hopper"):
        return f"hopper_{name}"
    if "PASS" in started.constants:  # the sweep of linear attention is one kernel for all of them
        return f"linear_{started.constants['PASS']}"
    if which == "shared":
        name = name.replace("backward_keys", "backward_shared")
    return f"{name}, NaN-safe" if started.constants.get("NAN_SAFE") else name


def config_of(started: Launch) -> tuple[int, int, int, int]:
    """Tiles (0 where a kernel has none), warps and stages of a kernel."""
    constants, options = started.constants, started.options
    if "CONSUMERS" in constants:  # its tile of keys is a side of a descriptor, but for pages
        rows, warps = hopper_configs.ROWS * constants["CONSUMERS"], 4 * constants["CONSUMERS"] + 2
        warps *= 2 if "maxnreg" in options else 1  # of the programs that share a multiprocessor
        return rows, constants.get("KV_TILE", 0), warps, constants["STAGES"]
    if "MAPPER_REGISTERS" in constants:  # linear attention: two consumers, two that map, one loads
        warps = 16 if "PASS" in constants else 17  # the wide kernel's load as well
        return hopper_configs.ROWS, hopper_configs.ROWS, warps, constants["STAGES"]
    if "CONSUMER_REGISTERS" in constants:  # two of them; tiles are sides of descriptors
        return _backward_config(started)
    if "OUTER_TILE" in constants:  # of linear attention: channels and rows
        tile, chunk = constants["OUTER_TILE"], constants["CHUNK"]
        return tile, chunk, options["num_warps"], options["num_stages"]
    query_tile = constants.get("QUERY_TILE", constants.get("TILE", 0))
    kv_tile = constants.get("KV_TILE", constants.get("OTHER", 0))
    return query_tile, kv_tile, options["num_warps"], options["num_stages"]


def _backward_config(started: Launch) -> tuple[int, int, int, int]:
    stages = started.constants["STAGES"]
    if started.kernel.__name__ == "attention_backward_queries":
        chosen = hopper_configs.QuerySchedule()
        return chosen.query_tile, chosen.kv_tile, 10, stages
    apart = started.kernel.__name__ == "attention_backward_keys"
    return 0, hopper_configs.WIDE_KV_TILE if apart else hopper_configs.BACKWARD_KV_TILE, 9, stages


def run_job(recorder: LaunchRecorder, number: int, job: list[Any]) -> None:
    """Compile the wanted kernels that a pass of a call starts."""
    call, which, kernels, numbers = job
    recorder.job, recorder.which, recorder.wanted = number, which, frozenset(kernels)
    config = None if numbers is None else KernelConfig.of_numbers(numbers)
    if which in PAGED_PASSES:
        paged_inputs, variant = paged_calls.make(PagedCall(*call), torch.device("cpu"))
        paged_calls.start(paged_inputs, variant, which, config)
        return
    if which in LINEAR_PASSES:
        linear_inputs, linear_variant = linear_calls.make(LinearCall(*call), torch.device("cpu"))
        linear_calls.start(linear_inputs, linear_variant, which, config)
        return
    inputs, variant = calls.make(KernelCall(*call), torch.device("cpu"))
    with torch.no_grad():
        calls.start(inputs, variant, which, config, calls.results_of(inputs))


def main() -> None:
    """Compile what the input asks for."""
    request = json.load(sys.stdin)
    architecture = request["architecture"]

    def tell(answer: Answer) -> None:
        print(json.dumps(answer), flush=True)

    recorder = LaunchRecorder(tell, architecture, request["known"])
    # The library's own code makes the arguments; only its last step, and the question which GPU
    # the tensors lie on, are answered differently.
    Launch.__call__ = lambda started, *call: recorder(started, *call)  # type: ignore[method-assign]
    call_spec.architecture = lambda tensor: architecture
    tile_scheduler.counter_of = lambda device: torch.zeros((), dtype=torch.int32)
    call_spec.multiprocessors = lambda tensor: 100  # so that work over pages is shared out
    for number, job in enumerate(request["jobs"]):
        run_job(recorder, number, job)


if __name__ == "__main__":
    main()

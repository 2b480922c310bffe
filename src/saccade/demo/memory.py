"""Memory: how much more a process takes at its peak because of one attention call.

The system's own figure (the peak resident size) counts everything, what kernels allocate inside
included, but it only ever grows. So each measurement has a fresh process to itself.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.demo.contenders import CONTENDERS

MEASURABLE = sys.platform != "win32"  # Windows has no getrusage
WARM_UP_LENGTH = 64
TIMEOUT_SECONDS = 120

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Call(NamedTuple):
    """One attention call: who computes it, on what; `window` None is causal."""

    who: str
    length: int
    heads: int
    head_dim: int
    window: int | None


def measure_peak(call: Call) -> int | None:
    """Bytes beyond the inputs that a forward and a backward pass take at their peak.

    None where the system does not tell, or the process ran out of memory.
    """
    if not MEASURABLE:
        return None
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        # One process imports PyTorch and computes nothing; the fresh ones are copies of it.
        context.set_forkserver_preload(["torch", "saccade"])
    receiver, sender = context.Pipe(duplex=False)
    # Daemonic: it ends with this process, also when the user interrupts.
    process = context.Process(
        target=_measure, args=(sender, call, torch.get_num_threads()), daemon=True
    )
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(TIMEOUT_SECONDS) else None
    except EOFError:  # it died, most likely for lack of memory
        return None
    finally:
        process.kill()
        process.join()
        process.close()
        receiver.close()


def _measure(sender: Any, call: Call, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    # A first call loads libraries and starts threads; that memory is nobody's in particular.
    small = call._replace(length=WARM_UP_LENGTH)
    _forward_and_backward(small, make_inputs(small))
    inputs = make_inputs(call)
    before = peak_bytes()
    _forward_and_backward(call, inputs)
    sender.send(peak_bytes() - before)


def _forward_and_backward(call: Call, inputs: Inputs) -> None:
    query, key, value, grad_output = inputs
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = CONTENDERS[call.who](query, key, value, call.window)
    torch.autograd.grad(output, leaves, grad_output)


def make_inputs(call: Call) -> Inputs:
    """Query, key, value and the gradient of the output: random, alike on every run."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, call.heads, call.length, call.head_dim)
    query, key, value, grad_output = (torch.randn(shape, generator=generator) for _ in range(4))
    return query, key, value, grad_output


def peak_bytes() -> int:
    """The largest resident size that this process has had."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def available_bytes() -> int:
    """The memory that is free for new work, or half of all where only that is known."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30  # Windows has no sysconf; most laptops have twice this

"""Another captured number is no other kernel, whatever it is: 1, a multiple of 16, a power of 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import saccade
from saccade import masks, scores
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments
from saccade.kernel_check import worker

LENGTH = 4096
TABLE = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
NUMBERS = (1, 2, 16, 17, 1000, 1024, 2**30)


def dilated(number: int) -> Callable[..., Any]:
    return lambda b, h, q, k: (q >= k) & ((q - k) % number == 0) & (k // number < 7)


def blocks(size: int) -> masks.Mask:
    count = -(-LENGTH // size)
    return masks.blocks(TABLE[:count, :count], size)  # whose steps stay what they are


CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "a window": lambda n: {"mask": lambda b, h, q, k: (q >= k) & (q - k <= n)},
    "the library's window": lambda n: {"mask": masks.causal() & masks.window(n)},
    "a prefix": lambda n: {"mask": lambda b, h, q, k: (q >= k) | (k < n)},
    "a divisor": lambda n: {"mask": dilated(n)},
    "a cap": lambda n: {"score": scores.softcap(n)},
    "a score": lambda n: {"score": lambda s, b, h, q, k: s * n - (q - k) / n + (q // n) * 0.5},
    "blocks": lambda n: {"mask": blocks(16 * (n % 99 + 2))},
    "other blocks": lambda n: {"mask": blocks(2 * (n % 99) + 3)},
}


def test_another_number_is_no_other_kernel() -> None:
    """On Hopper: its own kernels, and those by Triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = json.loads(done.stdout)
    assert asked.keys() == {f"{name}, {dtype}" for name in CALLS for dtype in ("bf16", "fp32")}
    for name, (first, later) in asked.items():
        assert first >= 4, name  # forward, and gradients of keys and of queries
        assert later == 0, f"{name}: another number asks for {later} other kernels"


def main() -> None:
    """Print, by call, how many kernels the first number asks for, and the others besides."""
    found: set[Any] = set()

    def look(launch: Launch, make: Callable[[], Arguments]) -> None:
        found.add((launch.kernel, make().key, *launch.options.items()))

    worker.pretend_gpu("sm_90", look, 132)
    asked = {}
    for name, options in CALLS.items():
        for dtype in (torch.bfloat16, torch.float32):
            shape = 4, 16, LENGTH, 128 if dtype == torch.bfloat16 else 64
            rows = [torch.empty(shape, dtype=dtype).requires_grad_() for _ in range(3)]
            found.clear()
            counts = []
            for number in NUMBERS:
                output = saccade.attention(*rows, **options(number))
                torch.autograd.grad(output, rows, torch.empty_like(output))
                counts.append(len(found))
            kind = "bf16" if dtype == torch.bfloat16 else "fp32"
            asked[f"{name}, {kind}"] = counts[0], counts[-1] - counts[0]
    print(json.dumps(asked))


if __name__ == "__main__":
    main()

"""Memory safety: what offsets, lengths, page tables and slots hold leads no kernel out of tensors.

On a GPU, under NVIDIA's tool, which sees reads as well (about two minutes):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m pytest tests/test_memory_safety.py -m gpu -k alone -p no:cacheprovider

PyTorch's allocator cuts tensors out of larger memory, where the tool would see nothing: hence the
variable, and tensors that lie alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from guarded import Alone, Canaries

BF16 = torch.bfloat16
# What has no kernels for Hopper: packed linear attention, its step, the gated delta rule, writing,
# and pages of eight bits, or of calls that are the same in any batch.
NOT_ON_HOPPER = {
    "linear", "linear_step", "delta", "delta_step", "writing", "decoding_bits",
    "decoding_invariant",
}  # fmt: skip
ON_HOPPER = [name for name in hostile.NAMES if name not in NOT_ON_HOPPER]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_interpreted_kernels_stay_between_closed_pages() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), *sys.path))
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "hostile.py"), *hostile.NAMES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    names = found.stdout.split()
    assert found.returncode == 0, f"{names[-1:]}: {found.returncode}: {found.stderr[-2000:]}"
    assert names == list(hostile.NAMES)


@pytest.fixture
def small_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's own kernels take what they would leave to others."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")
    from saccade.ops.attention.hopper import configs

    classify = configs.pages_unsupported
    monkeypatch.setattr(
        configs, "pages_unsupported",
        lambda problem: classify(problem._replace(query_tiles=10**6, slots=10**6)),
    )  # fmt: skip


GUARDS = pytest.mark.parametrize("guard", [Alone, Canaries], ids=["alone", "canaries"])


@pytest.mark.gpu
@GUARDS
@pytest.mark.parametrize("name", hostile.NAMES)
def test_triton_kernels_stay_in_their_tensors(name: str, guard: Any) -> None:
    hostile.run(name, guard(), "cuda", "triton", BF16)


@pytest.mark.gpu
@GUARDS
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("name", ON_HOPPER)
@pytest.mark.usefixtures("small_calls_too")
def test_hopper_kernels_stay_in_their_tensors(
    name: str, dim: int, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hostile.Calls.__init__

    def with_dim(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.dim = dim

    monkeypatch.setattr(hostile.Calls, "__init__", with_dim)
    hostile.run(name, guard(), "cuda", "hopper", BF16)

"""What CUDA's driver is handed: laid out as cuda.h lays it out. A library that takes notes stands
in for it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("triton")
from saccade.gpu import driver
from saccade.gpu.driver import LaunchAttribute, LaunchConfig, TensorMapKind


def test_structures_lie_as_in_cuda_h() -> None:
    assert ctypes.sizeof(LaunchAttribute) == 72 and LaunchAttribute.value.offset == 8
    assert ctypes.sizeof(LaunchConfig) == 56
    offsets = [getattr(LaunchConfig, field[0]).offset for field in LaunchConfig._fields_]
    assert offsets == [0, 4, 8, 12, 16, 20, 24, 32, 40, 48]


def test_a_launch_may_overlap_the_one_before() -> None:
    config = driver.launch_config(12, 230080, overlapping=True)
    assert (config.block_x, config.shared_memory, config.num_attributes) == (384, 230080, 1)
    assert (config.attributes[0].id, config.attributes[0].value) == (6, 1)
    assert driver.launch_config(4, 0, overlapping=False).num_attributes == 0


class Library:
    """A driver that notes what it is asked to encode, and can fail."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.encoded: list[Any] = []

    def cuTensorMapEncodeTiled(
        self, to: Any, kind: int, rank: Any, address: Any, sizes: Any, steps: Any, sides: Any,
        skips: Any, *rest: int,
    ) -> int:  # fmt: skip
        assert to.value % 64 == 0
        ctypes.memset(to.value, 7, 128)
        count = rank
        self.encoded.append(
            (kind, address.value, *(list(part)[:count] for part in (sizes, steps, sides, skips)))
        )
        assert rest == (0, 3, 2, 0)
        return self.result

    def cuGetErrorName(self, result: int, name: Any) -> int:
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"
        return 0


KIND = TensorMapKind(swizzle=3, element_size=2, element_type=9, sides=(1, 1, 64, 128))


def test_a_descriptor_counts_from_the_innermost_side(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(driver, "library", lambda: library)
    made = driver.tensor_map(KIND, 4096, (2, 8, 1000, 96), (768000, 96, 768, 1))
    assert made == bytes([7]) * 128
    [(kind, address, sizes, steps, sides, skips)] = library.encoded
    assert (kind, address, skips) == (9, 4096, [1, 1, 1, 1])
    assert sizes == [96, 1000, 8, 2] and sides == [128, 64, 1, 1]
    assert steps[:3] == [1536, 192, 1536000]  # bytes; the driver reads no fourth


def test_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", lambda: Library(1))
    with pytest.raises(
        RuntimeError, match=r"shape \(1, 1, 8, 64\).* failed: CUDA_ERROR_INVALID_VALUE"
    ):
        driver.tensor_map(KIND, 4096, (1, 1, 8, 64), (512, 512, 64, 1))

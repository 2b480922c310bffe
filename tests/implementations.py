"""Implementations under test: what each one takes, and which of many cases it is tested in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch
from pairs import covering

import saccade
from saccade.testing import (
    Case,
    DeltaCase,
    LinearCase,
    make_case,
    make_delta_case,
    make_linear_case,
)
from saccade.testing.cases import LAYOUTS

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Implementation:
    """An implementation under test."""

    name: str
    dtypes: tuple[torch.dtype, ...] = (F32, F64, BF16, F16)
    device: str = "cpu"  # "cuda" runs under make test-gpu
    small: saccade.KernelConfig | None = None  # small tiles or chunks, which make edges common
    slow: bool = False  # it compiles or interprets kernels: one dtype and one config a case
    batch_invariant: bool = True
    widest: int = 1024  # channels
    partial: bool = False  # what it does not serve it refuses, and dispatch takes another one
    drops: bool = True  # whether it drops weights
    draws: Mapping[str, Any] = field(default_factory=dict)  # of `descriptions`, what it serves
    instead: Mapping[str, Any] = field(default_factory=dict)  # of what it does not serve

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs it: a thousand times slower than a GPU."""
        return self.slow and self.device == "cpu"

    def case(self, **description: Any) -> Case:
        """A case where and as it runs: on its device, in its first dtype if none is named."""
        if not self.drops:
            description["dropout_p"] = 0.0
        fewer = {"kv_heads": 1} if self.interpreted else {}  # a program for each head
        mine = {"dtype": self.dtypes[0], **fewer, **description, "device": self.device}
        return make_case(**mine)

    def linear_case(self, **description: Any) -> LinearCase:
        """The same of linear attention; what it does not serve gives way to what it does."""
        return make_linear_case(**{**description, **self.instead, "device": self.device})

    def delta_case(self, **description: Any) -> DeltaCase:
        """The same of the gated delta rule."""
        return make_delta_case(**{**description, **self.instead, "device": self.device})

    def dtypes_of(self, case: int) -> Sequence[torch.dtype]:
        """The dtypes that one of many cases is tested in."""
        return [_one_of(self.dtypes, case, 5**0.5)] if self.slow else self.dtypes

    def configs_of(self, case: int) -> Sequence[saccade.KernelConfig | None]:
        """The configs that it is tested with."""
        configs = [None] if self.small is None else [None, self.small]
        return [_one_of(configs, case, 2**0.5)] if self.slow else configs

    def combinations_of(
        self, case: int, choices: Sequence[Choice]
    ) -> list[tuple[torch.dtype, saccade.KernelConfig | None, Choice]]:
        """A dtype, a config and one of two choices, together, that one of many cases is tested in.

        Every two of them meet in any few cases: each has a half of the combinations for that.
        Where kernels are compiled, a case has one dtype and config, and where they are interpreted
        one combination.
        """
        configs = [None] if self.small is None else [None, self.small]
        if not self.slow:
            return covering(self.dtypes, configs, choices)[_one_of((0, 1), case, 3**0.5) :: 2]
        chosen = [_one_of(choices, case, 3**0.5)] if self.interpreted else choices
        cases = [(2 * case + choices.index(choice), choice) for choice in chosen]
        return [
            (_one_of(self.dtypes, one, 5**0.5), _one_of(configs, one, 2**0.5), choice)
            for one, choice in cases
        ]

    def sizes_of(self, case: int) -> dict[str, int]:
        """Two batch entries and two kv heads; where it is interpreted, one of either."""
        fewer = [{"batch": 1}, {"kv_heads": 1}]
        return _one_of(fewer, case, 7**0.5) if self.interpreted else {}


def _one_of(choices: Sequence[Choice], case: int, step: float) -> Choice:
    """A choice for each case. Irrational steps are even, and in step with nothing else."""
    return choices[int(case * step % 1 * len(choices))]


_CPU_TILES = saccade.KernelConfig(query_tile=8, kv_tile=8)
_CPU_CHUNKS = saccade.KernelConfig(kv_tile=5)
_SMALLEST = saccade.KernelConfig(query_tile=16, kv_tile=16)
_KERNEL_TILES = replace(_SMALLEST, backward=_SMALLEST)
_COMPILED = (F32, BF16, F16)
_INTERPRETED = (F32, F16)  # the interpreter multiplies bfloat16 wrongly

IMPLEMENTATIONS = [
    Implementation("reference"),
    Implementation("reference", device="cuda"),
    Implementation("cpu", small=_CPU_TILES),
    Implementation("triton", _COMPILED, "cuda", _KERNEL_TILES, slow=True),
    Implementation(
        "hopper",
        (BF16, F16),
        "cuda",
        slow=True,
        partial=True,
        drops=False,
        draws={"dims": (16, 8, 24, 40), "layouts": LAYOUTS[:2], "dropouts": (0.0,)},
    ),
]
LINEAR_IMPLEMENTATIONS = [
    Implementation("reference"),
    Implementation("reference", device="cuda"),
    Implementation("cpu", small=_CPU_CHUNKS),
    Implementation("triton", _COMPILED, "cuda", slow=True),
    Implementation(
        "hopper",
        (BF16,),
        "cuda",
        slow=True,
        partial=True,
        draws={"dims": (16, 8, 24, 40), "layouts": LAYOUTS[:2], "least": 1},
        instead={"dtype": BF16, "causal": True, "packed": False, "decay": "none"},
    ),
]
DELTA_IMPLEMENTATIONS = [  # the reference is compared with itself in ops/delta_rule/test_reference
    Implementation("cpu", small=saccade.KernelConfig(kv_tile=4)),
    # Interpreted, a sample of the suite runs: tests/ops/delta_rule/triton/test_kernels.py.
    Implementation("triton", _COMPILED, "cuda", saccade.KernelConfig(kv_tile=16), slow=True),
]
PAGED_IMPLEMENTATIONS = [
    Implementation("reference", batch_invariant=False),
    Implementation("reference", device="cuda", batch_invariant=False),
    Implementation("cpu", small=_CPU_TILES),
    # Interpreted, a sample of the suite runs: tests/ops/paged_attention/triton/test_decode.py.
    Implementation("triton", _COMPILED, "cuda", _SMALLEST, slow=True, widest=576),
]
if os.environ.get("TRITON_INTERPRET") == "1":  # conftest.py sees to it wherever there is no GPU
    IMPLEMENTATIONS.append(Implementation("triton", _INTERPRETED, "cpu", _KERNEL_TILES, slow=True))
    LINEAR_IMPLEMENTATIONS.append(Implementation("triton", _INTERPRETED, slow=True))


_REFUSED = pytest.mark.xfail(raises=NotImplementedError, strict=False, reason="refused by dispatch")


def fixture_of(implementations: Sequence[Implementation]) -> Any:
    """The fixture that hands each of them to a test; those on a GPU to `make test-gpu`."""

    @pytest.fixture(
        params=[
            pytest.param(
                implementation,
                id=f"{implementation.name}-{implementation.device}",
                marks=[
                    *([pytest.mark.gpu] if implementation.device == "cuda" else []),
                    *([_REFUSED] if implementation.partial else []),
                ],
            )
            for implementation in implementations
        ]
    )
    def implementation(request: pytest.FixtureRequest) -> Implementation:
        return request.param

    return implementation

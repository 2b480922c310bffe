"""What a kernel is compiled for: types and what it relies on; no length, no address."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from saccade.gpu import launcher
from saccade.gpu.hopper.pipeline import Box, descriptor
from saccade.gpu.language import gl, tl
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments, Length, Signature, Stride
from saccade.kernel_check import worker
from saccade.kernel_check.calls import KernelCall
from saccade.kernel_check.calls.tensors import CPU


class Pair(NamedTuple):
    first: Any
    second: Any


def key_of(*values: Any, constants: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    return Arguments(values, constants).key


ROWS = torch.zeros(64, dtype=torch.bfloat16)


def test_lengths_and_addresses_do_not_count() -> None:
    other = torch.zeros(128, dtype=torch.bfloat16)
    for length in (1, 16, 17, 2**20):
        assert key_of(Pair(ROWS, length), 3) == key_of(Pair(other, 48), 1)
        assert key_of(Length(length)) == key_of(Length(48 if length % 16 == 0 else 3))
        assert key_of(Pair(ROWS, Stride(128))) == key_of(Pair(other, Stride(16 * length)))


UNLIKE = {
    "wide": (2**30 + 1, 5),
    "a stride of neighbours": (Stride(1), Stride(2)),
    "an aligned stride": (Stride(16), Stride(8)),
    "an aligned length": (Length(16), Length(8)),
    "a stride and a number": (Stride(16), 16),
    "dtypes": (ROWS, ROWS.half()),
    "unaligned": (ROWS, ROWS[1:]),
    "absent": (ROWS, None),
    "kinds of number": (1, 1.0),
    "constants": (tl.constexpr(1), tl.constexpr(2)),
    "kinds of constant": (tl.constexpr(1), tl.constexpr(True)),
    "functions": (key_of, Pair),
    "tuples": (Pair(1, 2), (1, 2)),
    "nesting": (Pair(1, (2,)), Pair((1,), 2)),
}


@pytest.mark.parametrize("name", list(UNLIKE))
def test_what_differs_in_machine_code_differs_in_the_key(name: str) -> None:
    one, other = UNLIKE[name]
    assert key_of(one) != key_of(other)
    assert key_of(one) == key_of(one)


@pytest.mark.parametrize("kind", [int, Stride, Length])
@pytest.mark.parametrize(
    "number", [0, 1, -1, 16, 2**30, 2**30 + 1, -(2**30), -(2**30) - 1, -(2**31), 2**40]
)
def test_the_key_and_the_compiler_take_a_number_for_the_same(kind: type[int], number: int) -> None:
    arguments = Arguments([kind(number)], [])
    wide = abs(number) > 2**30
    wanted = "constexpr" if kind is Stride and number == 1 else "i64" if wide else "i32"
    assert Signature.of("a", arguments).types == {"a": wanted}
    assert [name for name, _ in arguments.parameters] == [wanted] * (wanted != "constexpr")


def test_a_constant_is_no_number() -> None:
    assert key_of(constants=(1,)) != key_of(constants=(2,))
    assert key_of(constants=(1,)) != key_of(constants=(True,))
    assert key_of(1) != key_of(constants=(1,))


def test_constants_are_compared_by_value() -> None:
    """What is made anew for each call, a layout say, is no reason to compile again."""
    layouts = [gl.NVMMASharedLayout(128, 16, 4) for _ in range(2)]
    assert layouts[0] is not layouts[1]
    assert key_of(tl.constexpr(layouts[0])) == key_of(tl.constexpr(layouts[1]))
    assert key_of(tl.constexpr(layouts[0])) != key_of(tl.constexpr(gl.NVMMASharedLayout(64, 16, 4)))


def test_no_tensor_is_kept_alive_by_a_key() -> None:
    key = Arguments([Pair(ROWS, 3)], [Pair(tl.constexpr(3), None)]).key
    assert not any(isinstance(value, torch.Tensor) for value in key)


def test_what_triton_is_told() -> None:
    arguments = Arguments((Pair(ROWS, Stride(32)), Stride(1), ROWS[1:], 2**40, None, 0.5), (64,))
    types, constants, attributes = Signature.of("abcdefg", arguments)
    assert types == {
        "a": Pair("*bf16", "i32"), "b": "constexpr", "c": "*bf16", "d": "i64", "e": "constexpr",
        "f": "fp32", "g": "constexpr",
    }  # fmt: skip
    assert constants == {(1,): 1, (4,): None, (6,): 64}
    assert set(attributes) == {(0, 0), (0, 1)}
    assert [kind for kind, _ in arguments.parameters] == ["*bf16", "i32", "*bf16", "i64", "fp32"]


def test_a_descriptor_is_named_as_triton_names_it() -> None:
    rows = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    given = descriptor(rows, Box.of(rows, False, 64, 64))
    (kind, value), *behind = Arguments([given], []).parameters
    assert behind == [
        *(('i32', size) for size in given.shape), *(('i64', step) for step in given.strides)
    ]  # fmt: skip
    assert value is given and kind == "tensordesc"
    assert value.type.startswith("tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout(")


# ---- the library's own calls: in a process whose kernels are not interpreted ------------------

CALLS = {
    "forward": KernelCall(64, mask="causal", score="softcap"),
    "hopper": KernelCall(128, mask="window", packed=True),
    "ordered": KernelCall(64, mask="documents", score="softcap", dropout_p=0.1),
    "hopper_shared": KernelCall(128, mask="causal"),
}


def test_types_are_those_that_triton_reads() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for which in CALLS:
        assert f"{which}: attention_" in done.stdout


def of_triton(started: Launch, arguments: Arguments) -> dict[str, Any]:
    """The types that Triton itself reads off the arguments."""
    kernel = started.kernel.jit
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    values = (*map(launcher.plain, arguments.values), *map(launcher.plain, arguments.constants))
    _, types, _ = bind(*values)
    return dict(zip(kernel.arg_names, [kind for kind, _ in types], strict=True))


def compare(which: str, launch: Launch, make: Callable[[], Arguments]) -> None:
    found, name = make(), launch.kernel.__name__
    mine = Signature.of(launch.kernel.arg_names, found).types
    theirs = of_triton(launch, found)
    assert agree(tuple(mine.values()), tuple(theirs.values())), (which, name, theirs)
    print(f"{which}: {name}")


def agree(mine: Any, theirs: Any) -> bool:
    """Whether types are the same, but for numbers that Triton makes constants of as they are 1."""
    if isinstance(mine, tuple):
        return len(mine) == len(theirs) and all(map(agree, mine, theirs))
    return mine == theirs or (mine, theirs) == ("i32", "constexpr")


def main() -> None:
    for which, call in CALLS.items():
        worker.intercept_launches("sm_90", functools.partial(compare, which))
        call.prepared(CPU)(which, None)


if __name__ == "__main__":
    main()

"""Inverses of blocks of 16 rows, which are PTX: carried out here for the 32 threads of a warp."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from saccade.ops.delta_rule.hopper.blocks import inverse_of_16

LANES = torch.arange(32)
SQUARE = 64


class Warp:
    """Registers of one warp's threads, and the instructions that the text has."""

    def __init__(self, warp: int, inputs: list[Tensor]) -> None:
        self.floats: dict[str, Tensor] = {}
        self.truths: dict[str, Tensor] = {}
        self.bits = {"%tid.x": LANES + 32 * warp, "%laneid": LANES}
        self.bits |= {f"${32 + place}": each for place, each in enumerate(inputs)}

    def run(self, text: str) -> None:
        for line in text.strip("{}\n ").split(";"):
            line, where = line.strip(), torch.ones(32, dtype=torch.bool)
            if not line or line.startswith(".reg"):
                continue
            if line.startswith("@"):
                predicate, line = line.split(" ", 1)
                where = self.truths[predicate[1:]]
            name, rest = line.split(" ", 1)
            into, *operands = [each.strip() for each in re.split(r",\s*(?![^{]*\})", rest)]
            self.carry_out(name, into, operands, where)

    def carry_out(self, name: str, into: str, operands: list[str], where: Tensor) -> None:
        if name.startswith("setp"):
            _, compare, *_ = name.split(".")
            left, right = (self.whole(each) for each in operands[:2])
            found = left == right if compare == "eq" else left > right
            self.truths[into] = found & self.truths[operands[2]] if ".and." in name else found
        elif name.startswith("mma"):
            self.multiply(into, *operands)
        elif name.endswith(".f32") and name.startswith(("add", "sub")):
            left, right = map(self.number, operands)
            self.floats[into] = left + right if name.startswith("add") else left - right
        elif name == "selp.f32":
            kept = self.truths[operands[2]]
            self.floats[into] = torch.where(kept, *map(self.number, operands[:2]))
        elif name == "mov.f32":
            self.floats[into] = torch.where(
                where, self.number(operands[0]), self.floats.get(into, torch.zeros(32))
            )
        elif name == "cvt.rn.bf16x2.f32":
            upper, lower = (self.number(each).bfloat16().view(torch.int16) for each in operands)
            self.bits[into] = (upper.long() & 0xFFFF) << 16 | lower.long() & 0xFFFF
        elif name.startswith("movmatrix"):
            self.bits[into] = packed(unpacked(self.whole(operands[0])).T)
        else:
            found = self.whole_result(name, operands)
            if into in self.floats or re.fullmatch(r"[defg]\d", into):
                self.floats[into] = found.int().view(torch.float32)
            else:
                self.bits[into] = torch.where(where, found, self.bits.get(into, found))

    def whole_result(self, name: str, operands: list[str]) -> Tensor:
        values = [self.whole(each) for each in operands if each not in self.truths]
        if name in ("mov.b32", "mov.u32"):
            return values[0]
        if name == "bfe.u32":
            return values[0] >> values[1] & (1 << values[2]) - 1
        if name == "selp.b32":
            return torch.where(self.truths[operands[2]], *values)
        if name == "and.b32":
            return signed(values[0] & values[1])
        assert name in ("shl.b32", "shr.u32"), name
        return signed(values[0] << values[1]) if name == "shl.b32" else values[0] >> values[1]

    def multiply(self, into: str, left: str, right: str, added: str) -> None:
        rows = [unpacked(self.whole(each)) for each in names(left)]
        square = torch.cat([torch.cat(rows[:2]), torch.cat(rows[2:])], 1)
        columns = torch.cat([unpacked(self.whole(each)) for each in names(right)], 1).T
        found = square.double() @ columns.double()
        for place, (name, sums) in enumerate(zip(names(into), names(added), strict=True)):
            mine = found[LANES // 4 + 8 * (place // 2), 2 * (LANES % 4) + place % 2]
            self.floats[name] = mine.float() + self.number(sums)

    def whole(self, name: str) -> Tensor:
        if re.fullmatch(r"\d+|0x[0-9a-f]+", name):
            return torch.full((32,), int(name, 0))
        if name in self.floats:
            return self.floats[name].view(torch.int32).long()
        return self.bits[name]

    def number(self, name: str) -> Tensor:
        if name.startswith("0f"):
            bits = torch.tensor(int(name[2:], 16), dtype=torch.int32)
            return bits.view(torch.float32).expand(32)
        return self.floats[name]


def names(operands: str) -> list[str]:
    return [each.strip() for each in operands.strip("{}").split(",")]


def signed(bits: Tensor) -> Tensor:
    return (bits & 0xFFFFFFFF).add(2**31).remainder(2**32).sub(2**31)


def unpacked(registers: Tensor) -> Tensor:
    """8 × 8 numbers, of which a thread has two neighbours of row lane / 4."""
    halves = torch.stack([registers & 0xFFFF, registers >> 16 & 0xFFFF], 1)
    return signed(halves << 16).int().view(torch.float32).view(8, 8)


def packed(block: Tensor) -> Tensor:
    halves = block.bfloat16().view(torch.int16).long().reshape(32, 2) & 0xFFFF
    return halves[:, 1] << 16 | halves[:, 0]


def inputs_of(square: Tensor, warp: int) -> list[Tensor]:
    """A thread's registers of [64, 64]: two rows, 8 columns after 8 columns."""
    rows = square[16 * warp : 16 * warp + 16].view(2, 8, 8, 4, 2)
    return [packed(rows[place % 2, :, place // 2].reshape(8, 8)) for place in range(16)]


@pytest.mark.parametrize("kind", ["random", "equal keys", "one pair"])
def test_every_warp_inverts_its_block(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lower = torch.randn(SQUARE, SQUARE, generator=generator) * 0.3
    if kind == "equal keys":  # powers of this one grow to 6,000
        lower = -torch.ones(SQUARE, SQUARE)
    elif kind == "one pair":
        lower = torch.zeros(SQUARE, SQUARE)
        lower[[13, 45, 62], [2, 33, 61]] = 1.0
    lower = lower.tril(-1)
    high = lower.bfloat16()
    low = (lower - high.float()).bfloat16()
    exact, above = torch.zeros(2, SQUARE, SQUARE, dtype=torch.float64)
    found = torch.full((SQUARE, SQUARE), torch.nan)
    for warp in range(4):
        threads = Warp(warp, inputs_of(high.float(), warp) + inputs_of(low.float(), warp))
        threads.run(inverse_of_16())
        for place in range(32):
            row = 16 * warp + LANES // 4 + 8 * (place // 2 % 2)
            column = 8 * (place // 4) + 2 * (LANES % 4) + place % 2
            found[row, column] = threads.floats[f"${place}"]
        block = slice(16 * warp, 16 * warp + 16)
        system = torch.eye(16, dtype=torch.float64) - lower[block, block].double()
        exact[block, block] = torch.linalg.inv(system)
        above[block, block] = torch.linalg.inv(2 * torch.eye(16) - system.abs())
    # Inverses of smaller blocks, none of which has larger numbers than `above`, stand rounded to 8
    # bits on both sides of products, in three steps.
    bound = 3 * 2 * 2**-8 * (above - torch.eye(SQUARE)) + 1e-12  # in float64 too
    assert ((found - exact).abs() <= bound).all()
    if kind != "random":  # all numbers are whole
        torch.testing.assert_close(found.double(), exact, atol=0, rtol=0)

"""Calls of fp8 attention with what they must give: head by head by the model of it, in float64.

The model visits keys in the tiles and in the order of the implementations, so that both round the
same weights to e4m3. Where float32 and float64 differ enough for a weight to be rounded the other
way, one in some hundred thousand, a number may be off by that much: `assert_close` allows it, and
few of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.modifiers.evaluate import index_range, visible
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention_fp8 import model
from saccade.ops.attention_fp8.quantise import scale_of_rows
from saccade.ops.attention_fp8.validation import check_scale
from saccade.runtime.fp8_spec import E4M3, num_slots
from saccade.runtime.validation import with_causal

MOST_FLIPPED = 0.02  # of a result's numbers, whose tile has a weight that was rounded otherwise
FLIP = 2.0**-3  # a weight rounded otherwise is off by at most its last bit
OF_FLOAT32 = 2.0**-14  # products, exponentials and sums of a few hundred terms, against rows of 1


class Case(NamedTuple):
    """e4m3 rows [batch, heads, length, dim], scales in one form, and options of a call."""

    rows: tuple[Tensor, Tensor, Tensor]
    scales: dict[str, Tensor]
    options: dict[str, Any]

    def run(self, implementation: str | None = None, **more: Any) -> tuple[Tensor, Tensor]:
        """Output in float16, which rounds less than bfloat16, and lse."""
        return saccade.attention_fp8(
            *self.rows, **self.scales, **self.options, return_lse=True,
            implementation=implementation, out_dtype=torch.float16, **more,
        )  # fmt: skip


def make_case(
    form: str = "none", lengths: tuple[int, int] = (200, 200), heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (32, 32), batch: int = 2, seed: int = 0, **options: Any,
) -> Case:  # fmt: skip
    """A case; form of its scales: "none", "number", "heads" or "blocks"."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, heads[0], lengths[0], dims[0]),
        (batch, heads[1], lengths[1], dims[0]),
        (batch, heads[1], lengths[1], dims[1]),
    ]
    query, key, value = (torch.randn(shape, generator=generator).to(E4M3) for shape in shapes)
    scales = {}
    for name, shape in zip(("query", "key", "value"), shapes, strict=True):
        sizes = {
            "number": (), "heads": shape[:2], "blocks": (*shape[:2], num_slots(shape[2], None)),
        }  # fmt: skip
        if form != "none":
            scales[f"{name}_scale"] = torch.rand(sizes[form], generator=generator) + 0.5
    return Case((query, key, value), scales, options)


def expected(
    case: Case, kv_tile: int = 128, sums: model.Sums = model.EXACT
) -> tuple[Tensor, Tensor]:
    """Output and lse of a case without score and sinks, by the model."""
    query, key, value = (
        rows.double() * scale_of_rows(check_scale("", scale, rows, None), rows, None).double()
        for rows, scale in zip(case.rows, _listed(case), strict=True)
    )
    group = query.shape[1] // key.shape[1]
    scale = case.options.get("scale") or query.shape[-1] ** -0.5
    seen = visible_pairs(case)
    outputs, lses = [], []
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            of_keys = head // group
            pairs = None if seen is None else seen[batch, head]
            found = model.attention(
                query[batch, head], key[batch, of_keys], value[batch, of_keys], scale,
                sums=sums, tiles=model.Tiles(kv_tile), visible=pairs,
            )  # fmt: skip
            outputs.append(found[0])
            lses.append(found[1])
    shape = query.shape[:2]
    return torch.stack(outputs).unflatten(0, shape), torch.stack(lses).unflatten(0, shape)


def visible_pairs(case: Case) -> Tensor | None:
    """Which pairs a case's mask shows, [batch, heads, rows, keys]; None: all."""
    mask = case.options.get("mask")
    mask = with_causal(mask, case.options.get("causal", False))
    if mask is None:
        return None
    query, key = case.rows[:2]
    sizes = (*query.shape[:3], key.shape[2])
    batch, head, rows, keys = (index_range(0, size, dim) for dim, size in enumerate(sizes))
    at = Coordinates(batch, head, rows, keys, key.shape[2] - query.shape[2])
    return visible(mask.key, mask.captured, at).expand(sizes)  # type: ignore[union-attr]


def _listed(case: Case) -> list[Tensor | None]:
    return [case.scales.get(f"{name}_scale") for name in ("query", "key", "value")]


def assert_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], sizes: float) -> None:
    """Compare output and lse; sizes: the largest value."""
    output, lse = found[0].double(), found[1].double()
    assert torch.equal(lse.isinf(), wanted[1].isinf())
    torch.testing.assert_close(lse, wanted[1], atol=1e-5, rtol=1e-6)
    off = (output - wanted[0]).abs()
    rounded = torch.finfo(found[0].dtype).eps / 2 * wanted[0].abs() + OF_FLOAT32 * sizes
    assert (off > rounded).double().mean() <= MOST_FLIPPED
    assert bool((off <= rounded + FLIP * sizes).all())

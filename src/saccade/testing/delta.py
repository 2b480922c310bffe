"""The gated delta rule: random problems, their answer in float64, and how far from it one may be.

The bound is that of `oracle.py`: 1.1 · (the worst error of plain PyTorch in the same dtype) plus
six standard deviations of rounding.

Here a number depends on all tokens before it through a recurrence, so the second part is found by
trying: the chunked form of the reference, in float64, with an error of one unit roundoff, of random
sign, on everything that products read and give, forwards and backwards (Parker 1997, "Monte Carlo
arithmetic"). The unit is that of the inputs' dtype, in which kernels hand numbers to tensor cores,
and that of a sum in the accumulation dtype. Sums of decay, which are exponents, have the unit of
the accumulation dtype forwards; backwards they are sums of products like any other. A few samples
of a row's channels give its deviation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.ops.delta_rule import reference
from saccade.ops.delta_rule.api import gated_delta_rule, gated_delta_rule_varlen
from saccade.ops.delta_rule.reference import Rounding
from saccade.ops.delta_rule.validation import Prepared, prepare
from saccade.runtime.delta_spec import DeltaInputs, DeltaVariant
from saccade.runtime.spec import accumulate_dtype
from saccade.testing.cases import Differentiable, laid_out, normal_of
from saccade.testing.oracle import assert_within, bounds

SAMPLES = 6
CHUNK = 32


@dataclass(frozen=True)
class DeltaDescription:
    """What a random case of the gated delta rule is made from.

    `heads` are those of keys and of values; `lengths` one for each sequence: a dense case uses the
    first. `strength` is the largest decay. `hard`: all keys are equal and beta is 1.
    """

    batch: int = 2
    heads: tuple[int, int] = (2, 4)
    lengths: tuple[int, ...] = (24,)
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    packed: bool = False
    decay: str = "none"
    strength: float = 1.0
    normalize_qk: bool = False
    scale: float | None = None
    state: bool = False
    hard: bool = False
    layout: str = "contiguous"
    seed: int = 0
    device: str = "cpu"

    @property
    def rows(self) -> int:
        """Tokens of a sequence, or of all of them if packed."""
        return sum(self.lengths) if self.packed else self.lengths[0]


@dataclass
class DeltaCase(Differentiable):
    """A random problem: tensors that can have gradients, and everything else of the call.

    Examples:
        >>> case = saccade.testing.make_delta_case(lengths=(7,))
        >>> case.tensors["value"].shape
        torch.Size([2, 4, 7, 16])
    """

    description: DeltaDescription
    tensors: dict[str, Tensor]  # query, key, value, beta; decay and state where the case has them
    cu_seqlens: Tensor | None
    grads: dict[str, Tensor] = field(default_factory=dict)  # of the output and the last state

    def arguments(self, leaves: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        """Positional and keyword arguments of the public call."""
        d = self.description
        positional = [leaves[name] for name in ("query", "key", "value", "beta")]
        if self.cu_seqlens is not None:
            positional.append(self.cu_seqlens)
        keywords = {
            "decay": leaves.get("decay"), "initial_state": leaves.get("initial_state"),
            "normalize_qk": d.normalize_qk, "scale": d.scale, "return_state": True,
        }  # fmt: skip
        return positional, keywords

    def call(self, leaves: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
        """Output and last state by the public call."""
        positional, keywords = self.arguments(leaves)
        packed = self.cu_seqlens is not None
        function: Any = gated_delta_rule_varlen if packed else gated_delta_rule
        output, state = function(*positional, **keywords, **more)
        return {"output": output, "state": state}

    def run(
        self, implementation: str, dtype: torch.dtype | None = None, **more: Any
    ) -> dict[str, Tensor]:
        """Output, last state and every gradient, by name."""
        leaves = self.leaves(dtype)
        return self.with_gradients(leaves, self.call(leaves, implementation=implementation, **more))

    def prepared(self, leaves: dict[str, Tensor]) -> Prepared:
        """The checked call."""
        positional, keywords = self.arguments(leaves)
        return prepare(*positional, **keywords)

    def run_plain(self) -> dict[str, Tensor]:
        """The results of plain PyTorch with every step in the case's own dtype, to compare with."""
        leaves = self.leaves()
        inputs, variant = self.prepared(leaves)[:2]
        found = reference.attention(inputs, variant, sums=self.description.dtype)
        return self.with_gradients(leaves, found._asdict())


def make_delta_case(description: DeltaDescription | None = None, **changes: Any) -> DeltaCase:
    """A case of the gated delta rule from its description (or from what makes one).

    Examples:
        >>> case = saccade.testing.make_delta_case(lengths=(7,), decay="heads")
        >>> saccade.testing.assert_delta_exact(case, "cpu")
    """
    d = description or DeltaDescription(**changes)
    generator = torch.Generator().manual_seed(d.seed)
    normal = normal_of(generator, d.device, d.dtype)
    wide = accumulate_dtype(d.dtype)
    batches = () if d.packed else (d.batch,)
    sequences = len(d.lengths) if d.packed else d.batch

    def of_length_one(*shape: int) -> Tensor:  # about: more, and no state would stay finite
        drawn = normal(*shape)
        if d.hard:
            drawn = drawn.flatten()[: max(d.head_dim, 1)].expand(shape)
        return (drawn / max(d.head_dim, 1) ** 0.5).contiguous()

    def uniform(*channels: int) -> Tensor:
        shape = (d.rows, d.heads[1]) if d.packed else (*batches, d.heads[1], d.rows)
        return torch.rand(*shape, *channels, generator=generator).to(d.device, wide)

    layout = "contiguous" if d.hard else d.layout
    sizes = {"query": (d.heads[0], d.head_dim), "value": (d.heads[1], d.value_dim)}
    tensors = {
        name: laid_out(normal, (*batches, heads, d.rows, dim), d.layout, d.packed)
        for name, (heads, dim) in sizes.items()
    }
    shape = (*batches, d.heads[0], d.rows, d.head_dim)
    key = laid_out(of_length_one, shape, layout, d.packed)
    beta = torch.ones_like(uniform()) if d.hard else uniform()
    tensors = {"query": tensors["query"], "key": key, "value": tensors["value"], "beta": beta}
    if d.decay != "none":
        tensors["decay"] = -d.strength * uniform(*((d.head_dim,) * (d.decay == "channels")))
    states = (sequences, d.heads[1], d.head_dim, d.value_dim)
    if d.state:
        tensors["initial_state"] = normal(*states, dtype=wide)
    offsets = torch.tensor([0, *d.lengths]).cumsum(0).int().to(d.device) if d.packed else None
    rows = (d.rows, d.heads[1]) if d.packed else (*batches, d.heads[1], d.rows)
    grads = {"output": (*rows, d.value_dim), "state": states}
    drawn = {name: normal(*shape, dtype=wide).double() for name, shape in grads.items()}
    return DeltaCase(d, tensors, offsets, drawn)


def delta_oracle(case: DeltaCase) -> dict[str, Tensor]:
    """Output, last state and gradients of a case by the reference in float64.

    Examples:
        >>> case = saccade.testing.make_delta_case(lengths=(7,))
        >>> "grad_beta" in saccade.testing.delta_oracle(case)
        True
    """
    return case.run("reference", torch.float64)


def assert_delta_exact(case: DeltaCase, implementation: str, **more: Any) -> None:
    """Compare an implementation with the oracle on every result of a case.

    Raises:
        AssertionError: naming the result, the worst error and what was allowed.

    Examples:
        >>> case = saccade.testing.make_delta_case(lengths=(7,))
        >>> saccade.testing.assert_delta_exact(case, "cpu")
    """
    assert_within(case.run(implementation, **more), *expected(case), str(case.description))


def expected(case: DeltaCase) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact results of a case, and the error that is allowed to each of their numbers."""
    exact = delta_oracle(case)
    return exact, bounds(exact, case.run_plain(), _spread(case, exact), case.description.dtype)


# ---- rounding errors -----------------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """Each number off by a unit of itself, with a random sign; its gradient by another one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forwards: float, backwards: float, signs: Any) -> Tensor:
        ctx.unit, ctx.signs = backwards, signs
        return rows + forwards * rows * signs(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] + ctx.unit * grads[0] * ctx.signs(grads[0]), None, None, None


def _rounding(case: DeltaCase) -> Rounding:
    """The rounding errors of an implementation with inputs in the case's dtype."""
    d, generator = case.description, torch.Generator().manual_seed(7)
    one = torch.finfo(accumulate_dtype(d.dtype)).eps / 2
    terms = d.head_dim + d.value_dim + max(d.lengths, default=0)
    unit = torch.finfo(d.dtype).eps / 2 + one * terms**0.5

    def signs(rows: Tensor) -> Tensor:
        drawn = torch.randint(0, 2, rows.shape, generator=generator)
        return (2 * drawn - 1).to(rows.device, rows.dtype)

    return Rounding(
        lambda rows: _Rounded.apply(rows, unit, unit, signs),  # type: ignore[no-any-return]
        lambda rows: _Rounded.apply(rows, one, unit, signs),  # type: ignore[no-any-return]
    )


def _spread(case: DeltaCase, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each result, the standard deviation of its rounding errors."""
    leaves = {name: leaf.detach() for name, leaf in case.leaves(torch.float64).items()}
    inputs, variant = case.prepared(leaves)[:2]
    if case.cu_seqlens is None:
        samples = _samples(case, inputs, variant, case.grads)
    else:
        ends, parts = case.cu_seqlens.tolist(), []
        for b, one in enumerate(reference.sequences(inputs)):
            rows = case.grads["output"][ends[b] : ends[b + 1]].transpose(0, 1)
            grads = {"output": rows.unsqueeze(0), "state": case.grads["state"][b : b + 1]}
            parts.append(_samples(case, one, variant, grads))
        samples = {}
        for name in exact:
            found = [part[name] for part in parts]
            if "state" in name:
                samples[name] = torch.cat(found, 1)
            else:
                samples[name] = torch.cat([each.squeeze(1).transpose(1, 2) for each in found], 1)
    spread = {}
    for name, truth in exact.items():
        squares = (samples[name] - truth).square().mean(0)
        if name not in ("grad_beta", "grad_decay") or case.description.decay == "channels":
            squares = squares.mean(-1, keepdim=True) if name != "grad_beta" else squares
        spread[name] = squares.sqrt().expand(truth.shape)
    return spread


def _samples(
    case: DeltaCase, inputs: DeltaInputs, variant: DeltaVariant, grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Results of a dense call with rounding errors, [samples, *shape] each."""
    leaves = {
        name: each.repeat(SAMPLES, *[1] * (each.dim() - 1)).requires_grad_()
        for name, each in inputs._asdict().items()
        if each is not None and name != "cu_seqlens"
    }
    rows = reference.lay_out(DeltaInputs(**leaves), variant, torch.float64)
    output, state = reference.chunked(rows, CHUNK, _rounding(case))
    results = {"output": output, "state": state}
    heads = {name: result for name, result in results.items() if result.requires_grad}
    arriving = [grads[name].repeat(SAMPLES, 1, 1, 1) for name in heads]
    found = torch.autograd.grad(
        list(heads.values()), list(leaves.values()), arriving, allow_unused=True
    )
    every = {"output": output.detach(), "state": state.detach()}
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        every[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: each.unflatten(0, (SAMPLES, -1)) for name, each in every.items()}

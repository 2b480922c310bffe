"""Operators: attention and its gradient as PyTorch knows them (`torch.library`).

Schemas hold tensors and plain values only; a mask or score travels as its key beside what it
captured. Calls come in through `autograd.py`; one body, the implementation's, does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers.expression import Captured, num_captured
from saccade.runtime.backend_modules import body_of
from saccade.runtime.spec import (
    Gradients,
    Inputs,
    KernelConfig,
    Variant,
    empty_gradients,
    empty_results,
)

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[] tables"
)
PLAIN_VALUES = (
    "SymInt[] ints, float[] floats, str mask, str score, float scale, float dropout_p, "
    "int[] config, bool deterministic, str implementation"
)
NOTHING = Captured()
NO_CHOICE = KernelConfig()  # of tiles: the implementation's own
NUM_INPUTS = len(Inputs._fields)

# The layout of results follows that of inputs, so Inductor must not change the latter.
EXACT_STRIDES = (torch.Tag.needs_exact_strides,)
torch.library.define(
    "saccade::attention",
    f"({TENSORS}, {PLAIN_VALUES}) -> (Tensor, Tensor)",
    tags=EXACT_STRIDES,
)
torch.library.define(
    "saccade::attention_backward",
    "(Tensor? grad_output, Tensor? grad_lse, Tensor output, Tensor lse, int[] wanted_tables, "
    f"{TENSORS}, {PLAIN_VALUES}) -> Tensor[]",
    tags=EXACT_STRIDES,
)
attention_op = torch.ops.saccade.attention.default
attention_backward_op = torch.ops.saccade.attention_backward.default


# ---- plain values there and back --------------------------------------------------------------


def flatten(
    variant: Variant, config: KernelConfig | None, deterministic: bool, implementation: str
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """A variant as an operator's plain arguments: tables, then PLAIN_VALUES."""
    captured = variant.mask_captured.joined(variant.score_captured)
    plain = (
        list(captured.ints),
        list(captured.floats),
        variant.mask,
        variant.score,
        variant.scale,
        variant.dropout_p,
        [] if config is None else config.numbers(),
        deterministic,
        implementation,
    )
    return list(captured.tensors), plain


def variant_of(tables: Sequence[Tensor], plain: Sequence[Any]) -> Variant:
    """The inverse of `flatten`, as far as the variant goes."""
    ints, floats, mask, score, scale, dropout_p = plain[:6]
    if not (tables or ints or floats):
        return Variant(mask, score, NOTHING, NOTHING, scale, dropout_p)
    t, i, f = num_captured(mask)
    return Variant(
        mask,
        score,
        Captured(tables[:t], ints[:i], floats[:f]),
        Captured(tables[t:], ints[i:], floats[f:]),
        scale,
        dropout_p,
    )


def config_of(plain: Sequence[Any]) -> KernelConfig:
    """The inverse of `flatten`, as far as the config goes."""
    return KernelConfig.of_numbers(plain[6]) if plain[6] else NO_CHOICE


def _first_score_table(plain: Sequence[Any]) -> int:
    """How many of the tables belong to the mask."""
    return num_captured(plain[2])[0]


# ---- forward --------------------------------------------------------------------------------


def attention_body(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the named implementation; see `saccade.attention`."""
    inputs, tables, plain = split(arguments)
    body = body_of(plain[8])
    return body.forward(inputs, variant_of(tables, plain), config_of(plain))


torch.library.impl("saccade::attention", "CompositeExplicitAutograd", attention_body)


@torch.library.register_fake("saccade::attention")
def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, _, _ = split(arguments)
    return empty_results(inputs)


def split(arguments: Sequence[Any]) -> tuple[Inputs, Sequence[Tensor], Sequence[Any]]:
    """An operator's arguments as inputs, tables and plain values."""
    return Inputs(*arguments[:NUM_INPUTS]), arguments[NUM_INPUTS], arguments[NUM_INPUTS + 1 :]


# ---- backward -------------------------------------------------------------------------------


def attention_backward_body(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    wanted_tables: list[int],
    *arguments: Any,
) -> list[Tensor]:
    """Gradients of query, key and value, of sinks where there are any, of the wanted tables."""
    inputs, tables, plain = split(arguments)
    results = grad_output, grad_lse, output, lse
    return run_backward(
        variant_of(tables, plain), config_of(plain), wanted_tables, plain, results, inputs
    )


def run_backward(
    variant: Variant,
    config: KernelConfig,
    wanted_tables: Sequence[int],
    plain: Sequence[Any],
    results: Sequence[Any],
    inputs: Inputs,
) -> list[Tensor]:
    """The same by the program that the plain values stand for."""
    grad_output, grad_lse, output, lse = results
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    wanted: Sequence[int] = ()
    if wanted_tables:
        first = _first_score_table(plain)
        wanted = [place - first for place in wanted_tables]
    gradients = body_of(plain[8]).backward(
        inputs, variant, config, output, lse, grad_output, grad_lse, wanted, plain[7]
    )
    return _listed(gradients, wanted)


torch.library.impl(
    "saccade::attention_backward", "CompositeExplicitAutograd", attention_backward_body
)


def _listed(gradients: Gradients, wanted: Sequence[int]) -> list[Tensor]:
    listed = [gradients.query, gradients.key, gradients.value]
    if gradients.sinks is not None:
        listed.append(gradients.sinks)
    return listed + [gradients.tables[place] for place in wanted]


@torch.library.register_fake("saccade::attention_backward")
def _attention_backward_fake(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    wanted_tables: list[int],
    *arguments: Any,
) -> list[Tensor]:
    inputs, tables, _ = split(arguments)
    gradients = empty_gradients(inputs)
    wanted = {place: torch.empty_like(tables[place]) for place in wanted_tables}
    return _listed(gradients._replace(tables=wanted), wanted_tables)


# ---- autograd --------------------------------------------------------------------------------


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass needs: the inputs, the results, no weights."""
    keep_for_backward(ctx, *split(inputs), output)


def keep_for_backward(
    ctx: Any,
    inputs: Sequence[Tensor | None],
    tables: Sequence[Any],
    plain: Sequence[Any],
    output: tuple[Tensor, Tensor],
) -> None:
    """The same, from an operator's arguments taken apart."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output, *tables)
    ctx.plain = plain
    ctx.wanted = _wanted(tables, _first_score_table(plain)) if tables else []


def _wanted(tables: Sequence[Any], first: int) -> list[int]:
    """The places of the score's tables whose gradients may be asked for."""
    return [
        place
        for place, table in enumerate(tables)
        if place >= first and table.is_floating_point() and table.requires_grad
    ]


def gradients_of(
    ctx: Any, call: Callable[..., Sequence[Tensor]], grad_output: Any, grad_lse: Any
) -> list[Any]:
    """Gradients of the inputs (None where there can be none), then those of every table.

    `call` runs the backward operator on (wanted tables, plain values, *tensors).
    """
    everything = ctx.saved_tensors  # read once: checkpointing recomputes them for one reading
    if grad_output is None and grad_lse is None:
        return [None] * (len(everything) - 2)
    saved, tables = everything[:NUM_INPUTS], everything[NUM_INPUTS + 2 :]
    results = everything[NUM_INPUTS : NUM_INPUTS + 2]
    found = call(ctx.wanted, ctx.plain, grad_output, grad_lse, *results, *saved, *tables)
    of_sinks, rest = (None, found[3:]) if saved[3] is None else (found[3], found[4:])
    of_tables: list[Any] = [None] * len(tables)
    for place, gradient in zip(ctx.wanted, rest, strict=True):
        of_tables[place] = gradient
    return [*found[:3], of_sinks, None, None, None, *of_tables]


def call_backward(
    wanted: list[int], plain: tuple[Any, ...], *tensors: Tensor | None
) -> list[Tensor]:
    """The backward operator from flat arguments."""
    end = 4 + NUM_INPUTS
    return attention_backward_op(*tensors[:4], wanted, *tensors[4:end], list(tensors[end:]), *plain)


def _backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    gradients = gradients_of(ctx, call_backward, grad_output, grad_lse)
    # The registered form wants an empty list, not None, for every list argument that was empty.
    of_plain = [[] if value == [] else None for value in ctx.plain]
    return (*gradients[:NUM_INPUTS], gradients[NUM_INPUTS:], *of_plain)


torch.library.register_autograd("saccade::attention", _backward, setup_context=save_for_backward)


def not_implemented(implementation: str, what: str) -> NotImplementedError:
    """The error for a derivative that only the reference has."""
    return NotImplementedError(
        f"saccade: {what} is not implemented by {implementation!r}; pass "
        'implementation="reference", which is plain PyTorch and differentiates to any order'
    )


def _second_order_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.implementation = inputs[-1]


def _second_order(ctx: Any, *grads: Any) -> Any:
    raise not_implemented(ctx.implementation, "double backward")


torch.library.register_autograd(
    "saccade::attention_backward", _second_order, setup_context=_second_order_setup
)

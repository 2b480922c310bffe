"""Explain: which implementation serves a call, why the others do not, and what the call costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers import ops as modifier_ops
from saccade.modifiers.evaluate import visible
from saccade.modifiers.expression import Coordinates
from saccade.modifiers.modifier import written
from saccade.runtime import backends
from saccade.runtime.arguments import values_readable
from saccade.runtime.spec import Inputs, KernelConfig, PagedInputs, Problem, Variant
from saccade.runtime.validation import prepare, prepare_paged, with_causal

# Pairs that `explain` is ready to count one by one; larger problems are counted by sampling rows.
COUNTED_PAIRS = 2**26


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; print it, or read its fields.

    Attributes:
        problem: the call's shape.
        chosen: the implementation that serves the call, or None.
        reasons: for each implementation, in order of preference, why it cannot serve (None: can).
        config: the config that the call gives, if any.
        visible_pairs: pairs that the mask lets through, over all batch entries and heads.
        flops: operations of a forward pass over them.
        bytes: bytes that a forward pass moves at least.
        remark: what else there is to say of the implementation that was chosen, or None.
        yields: for each implementation, why without a name those after it go first (None: they do
            not).
    """

    problem: Problem
    chosen: str | None
    reasons: dict[str, str | None]
    config: KernelConfig | None
    visible_pairs: int
    flops: int
    bytes: int
    remark: str | None = None
    yields: Mapping[str, str | None] | None = None

    def __str__(self) -> str:
        p = self.problem
        shape = f"batch {p.batch}, {p.query_len} x {p.kv_len}"
        if p.packed:
            shape = f"{p.batch} sequences, {p.query_len} x {p.kv_len} tokens"
        if p.page_size:
            dtype = str(p.page_dtype).removeprefix("torch.")
            shape += f" in pages of {p.page_size} ({dtype})"
        lines = [
            f"attention: {shape}, heads {p.query_heads}/{p.kv_heads}, "
            f"dim {p.head_dim}/{p.value_dim}, {str(p.dtype).removeprefix('torch.')} on {p.device}",
            f"  mask {written(p.mask) or 'none'}, score {written(p.score) or 'none'}, "
            f"sinks {'yes' if p.sinks else 'no'}, dropout {'yes' if p.dropout else 'no'}",
            f"  {self.visible_pairs:,} of {p.pairs:,} pairs visible: "
            + costs(self.flops, self.bytes),
        ]
        lines += answers(self.reasons, self.chosen, self.config, self.remark, self.yields)
        return "\n".join(lines)


def costs(flops: int, moved: int) -> str:
    """Operations and bytes of a forward pass, in units that fit them."""
    return (
        f"{_in_units(flops, 1000, FLOPS)} forward, at least {_in_units(moved, 1024, BYTES)} moved"
    )


FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def _in_units(number: int, base: int, units: tuple[str, ...]) -> str:
    """A number in the largest of the units that it has one of."""
    power = 0
    while number >= base ** (power + 1) and power + 1 < len(units):
        power += 1
    return f"{number / base**power:.4g} {units[power]}"


def answers(
    reasons: dict[str, str | None],
    chosen: str | None,
    config: KernelConfig | None,
    remark: str | None = None,
    yields: Mapping[str, str | None] | None = None,
) -> Iterator[str]:
    """A line for each implementation: whether it can serve, or why not, and which one is taken."""
    for name, reason in reasons.items():
        if reason is not None:
            yield f"  {name}: no, {reason}"
            continue
        said = ["yes, not asked for", (yields or {}).get(name)]
        if name == chosen:
            said = ["yes, taken", config and str(config), remark]
        yield f"  {name}: {', '.join(filter(None, said))}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_lens: Tensor | None = None,
    implementation: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Say which implementation would serve a call, without running it.

    Args:
        query, key, value, and all others: as for `saccade.attention`, or, with cu_seqlens_q, for
            `saccade.attention_varlen`, or, with page_table and kv_lens, for
            `saccade.attention_paged` (key and value are then its pages).

    Returns:
        An `Explanation`: printable, with every implementation's reason, FLOPs and bytes.

    Raises:
        TypeError, ValueError: as the call itself would.

    >>> print(saccade.explain(query, key, value, mask=saccade.masks.window(256)))
    """
    if page_table is not None and kv_lens is not None:
        paged = PagedInputs(query, key, value, page_table, kv_lens, cu_seqlens_q)
        inputs, variant, problem, config = _prepare_paged(paged, arguments)
    else:
        given = _complete(arguments, DENSE_OPTIONS)
        inputs, variant, problem, config = prepare(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **given
        )
    reasons = backends.reasons_of(problem)
    try:
        chosen = backends.choose(problem, implementation)
    except NotImplementedError:
        chosen = None
    pairs = _visible_pairs(inputs, variant, problem)
    costs = pairs, problem.flops(pairs), problem.bytes
    remark = chosen and backends.BY_NAME[chosen].remark(problem)
    yields = {name: entry.yields(problem) for name, entry in backends.BY_NAME.items()}
    return Explanation(problem, chosen, reasons, config, *costs, remark, yields)


DENSE_OPTIONS: dict[str, Any] = {
    "mask": None, "score": None, "scale": None, "sinks": None, "dropout_p": 0.0,
    "return_lse": False, "deterministic": False, "config": None,
}  # fmt: skip
PAGED_TENSORS: dict[str, Any] = {"sinks": None, "key_scales": None, "value_scales": None}
PAGED_OPTIONS: dict[str, Any] = {
    "mask": None, "score": None, "scale": None, "batch_invariant": False, "return_lse": False,
    "config": None, **PAGED_TENSORS,
}  # fmt: skip


def _complete(given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The options of a call, those that were not given as they are by default."""
    unknown = sorted(set(given) - set(known) - {"causal"})
    if unknown:
        raise TypeError(f"explain: got {unknown}, takes the arguments of saccade.attention")
    options = {"causal": False, **known, **given}
    options["mask"] = with_causal(options["mask"], options.pop("causal"))
    return options


def _prepare_paged(
    inputs: PagedInputs, arguments: dict[str, Any]
) -> tuple[PagedInputs, Variant, Problem, KernelConfig | None]:
    options = _complete(arguments, PAGED_OPTIONS)
    inputs = inputs._replace(**{name: options.pop(name) for name in PAGED_TENSORS})
    return prepare_paged(inputs, **options)


def _visible_pairs(inputs: Inputs | PagedInputs, variant: Variant, problem: Problem) -> int:
    """Pairs that can be seen: counted, or, where there are very many, from evenly spaced rows."""
    lengths = _lengths(inputs, problem)
    if lengths is None:
        return problem.pairs
    batches = 1 if problem.packed else problem.batch
    return sum(
        _visible_in_sequences((first, first + batches), length, inputs.query, variant)
        for first, length in enumerate(lengths)
    )


def _lengths(inputs: Inputs | PagedInputs, problem: Problem) -> list[tuple[int, int]] | None:
    """Query and key lengths of each sequence (of all, if dense); None if they cannot be read."""
    offsets = inputs.cu_seqlens_q
    if isinstance(inputs, PagedInputs):
        if not values_readable(inputs.kv_lens):
            return None
        dense = [inputs.query.shape[-2]] * inputs.batch
        query_lens = dense if offsets is None else offsets.diff().tolist()
        return list(zip(query_lens, inputs.kv_lens.tolist(), strict=True))
    offsets_k = inputs.cu_seqlens_k
    if offsets is None or offsets_k is None:
        return [(problem.query_len, problem.kv_len)]
    if not (values_readable(offsets) and values_readable(offsets_k)):
        return None
    return list(zip(offsets.diff().tolist(), offsets_k.diff().tolist(), strict=True))


def _visible_in_sequences(
    batch: tuple[int, int], lengths: tuple[int, int], query: Tensor, variant: Variant
) -> int:
    heads, (query_len, kv_len) = query.shape[1], lengths
    pairs = (batch[1] - batch[0]) * heads * query_len * kv_len
    if pairs == 0 or not variant.mask:
        return pairs
    device = query.device
    rows = torch.arange(0, query_len, max(1, pairs // COUNTED_PAIRS), device=device)
    at = Coordinates(
        batch=modifier_ops.index_range(*batch, 0, device),
        head=modifier_ops.index_range(0, heads, 1, device),
        query_row=rows.view(1, 1, -1, 1),
        kv_row=modifier_ops.index_range(0, kv_len, 3, device),
        shift=kv_len - query_len,
    )
    seen = visible(variant.mask, variant.mask_captured, at)
    seen = seen.expand(batch[1] - batch[0], heads, len(rows), kv_len)
    return round(int(seen.sum()) * query_len / len(rows))

"""Explain: which implementation serves a call, why the others do not, and what the call costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.modifiers import evaluate
from saccade.modifiers.evaluate import visible
from saccade.modifiers.expression import Coordinates
from saccade.modifiers.modifier import written
from saccade.modifiers.normal_form import described
from saccade.ops.attention.api import attention, attention_varlen
from saccade.ops.attention_fp8 import custom_op as fp8_op
from saccade.ops.attention_fp8 import validation as fp8_validation
from saccade.ops.attention_fp8.api import attention_fp8, attention_fp8_varlen, split_options
from saccade.ops.delta_rule import api as delta_api
from saccade.ops.delta_rule import validation as delta_validation
from saccade.ops.delta_rule.api import (
    gated_delta_rule,
    gated_delta_rule_step,
    gated_delta_rule_varlen,
)
from saccade.ops.linear_attention import api as linear_api
from saccade.ops.linear_attention import validation as linear_validation
from saccade.ops.linear_attention.api import (
    linear_attention,
    linear_attention_step,
    linear_attention_varlen,
)
from saccade.ops.paged_attention import api as paged_api
from saccade.ops.paged_attention.api import attention_paged
from saccade.runtime.arguments import OFFSETS, options_of, unknown_options, values_readable
from saccade.runtime.backends import Choice, explained
from saccade.runtime.custom_op import REFERENCE_INSTEAD, gradient_asked
from saccade.runtime.delta_spec import DeltaProblem
from saccade.runtime.spec import (
    Inputs,
    KernelConfig,
    LinearProblem,
    PagedInputs,
    Problem,
    Variant,
    accumulate_dtype,
)
from saccade.runtime.validation import prepare, prepare_paged, with_causal

# Pairs that `explain` is ready to count one by one; larger problems are counted by sampling rows.
COUNTED_PAIRS = 2**26


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; print it, or read its fields.

    Attributes:
        problem: the call's shape.
        forward, backward: the choice of a backend for each pass; None for a pass that the operation
            does not have.
        config: the config that the call gives, if any.
        visible_pairs: pairs that the mask lets through, over all batch entries and heads; None for
            linear attention and the gated delta rule, which have no pairs.
        flops: operations of a forward pass over them; of those two, in chunks of 64 rows.
        bytes: bytes that a forward pass moves at least, states included: a step reads and writes
            those that it changes.
    """

    problem: Any  # Problem, LinearProblem or DeltaProblem
    forward: Choice
    backward: Choice | None
    config: KernelConfig | None
    visible_pairs: int | None
    flops: int
    bytes: int

    @property
    def chosen(self) -> str | None:
        """The implementation that serves the forward pass, or None."""
        return self.forward.chosen

    @property
    def reasons(self) -> dict[str, str | None]:
        """For each implementation, in order of preference, why it cannot serve the forward pass
        (None: it can)."""
        return self.forward.reasons

    def __str__(self) -> str:
        cost = costs(self.flops, self.bytes)
        if isinstance(self.problem, Problem):
            lines = _heading(self.problem)
            lines.append(
                f"  {self.visible_pairs:,} of {self.problem.pairs:,} pairs visible: {cost}"
            )
        else:
            delta = isinstance(self.problem, DeltaProblem)
            heading = _delta_heading if delta else _linear_heading
            lines = [*heading(self.problem), f"  {cost}"]
        lines += answers(self.forward, self.config)
        if self.backward is not None and list(answers(self.backward)) != list(
            answers(self.forward)
        ):
            lines += ["  backward pass:", *("  " + line for line in answers(self.backward))]
        return "\n".join(lines)


def _heading(p: Problem) -> list[str]:
    """The shape of a call of softmax attention, in words."""
    shape = f"batch {p.batch}, {p.query_len} x {p.kv_len}"
    if p.packed:
        shape = f"{p.batch} sequences, {p.query_len} x {p.kv_len} tokens"
    if p.page_size:
        dtype = str(p.page_dtype).removeprefix("torch.")
        shape += f" in pages of {p.page_size} ({dtype})"
    fp8 = "fp8 " if p.quantize else ""
    made = {"": "", "given": "e4m3 rows", "tensor": "one scale"}
    quantised = made.get(p.quantize, f"a scale for each {p.quantize}")
    return [
        f"{fp8}attention: {shape}, heads {p.query_heads}/{p.kv_heads}, "
        f"dim {p.head_dim}/{p.value_dim}, {str(p.dtype).removeprefix('torch.')} on {p.device}",
        f"  mask {_mask(p.mask)}, score {written(p.score) or 'none'}, "
        f"sinks {'yes' if p.sinks else 'no'}, "
        + (quantised or f"dropout {'yes' if p.dropout else 'no'}"),
    ]


def _mask(key: str) -> str:
    """A mask's expression, and what it is known as."""
    name = described(key)
    return f"{written(key)} ({name})" if name else written(key) or "none"


def _linear_heading(p: LinearProblem) -> list[str]:
    """The shape of a call of linear attention, in words."""
    batch = f"{p.batch} sequences" if p.packed else f"batch {p.batch}"
    heads = f"{p.query_heads}/{p.key_heads}/{p.value_heads}"
    return [
        f"linear attention: {batch}, {p.query_len} x {p.kv_len} tokens, heads {heads}, "
        f"dim {p.head_dim}/{p.value_dim}, {str(p.dtype).removeprefix('torch.')} on {p.device}",
        f"  {'causal' if p.causal else 'not causal'}, feature map {p.feature_map}, "
        f"normaliser {p.normalize}, decay {'yes' if p.decay else 'no'}, "
        f"initial state {'yes' if p.state else 'no'}",
    ]


def _delta_heading(p: DeltaProblem) -> list[str]:
    """The shape of a call of the gated delta rule, in words."""
    tokens = f"{p.batch} sequences, {p.length} tokens"
    if not p.packed:
        tokens = f"batch {p.batch}, {p.length} tokens"
    decay = {"none": "no", "heads": "of each head", "channels": "of each channel"}[p.decay]
    return [
        f"gated delta rule: {tokens}, heads {p.key_heads}/{p.value_heads}, "
        f"dim {p.head_dim}/{p.value_dim}, {str(p.dtype).removeprefix('torch.')} on {p.device}",
        f"  decay {decay}, queries and keys {'normalized' if p.normalize_qk else 'as they are'}, "
        f"initial state {'yes' if p.state else 'no'}",
    ]


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


def answers(choice: Choice, config: KernelConfig | None = None) -> Iterator[str]:
    """A line for each implementation: whether it can serve, or why not, and which one is taken."""
    for name, reason in choice.reasons.items():
        if reason is not None:
            yield f"  {name}: no, {reason}"
            continue
        answer = ["yes, not asked for", choice.not_preferred[name]]
        if name == choice.chosen:
            answer = ["yes, taken", config and str(config), choice.note]
        yield f"  {name}: {', '.join(filter(None, answer))}"


def explain(function: Callable[..., Any], *arguments: Any, **options: Any) -> Explanation:
    """Say which implementations would serve a call, without running it, and what it costs.

    Args:
        function: `saccade.attention`, `attention_varlen`, `attention_paged`, `attention_fp8`,
            `attention_fp8_varlen`, `linear_attention`, `linear_attention_varlen`,
            `linear_attention_step`, `gated_delta_rule`, `gated_delta_rule_varlen` or
            `gated_delta_rule_step`.
        arguments, options: what the call would be given.

    Returns:
        An `Explanation`: printable, with every implementation's reason for the forward and the
        backward pass, FLOPs and bytes. A feature map that is a function runs, and shows as
        "identity"; one that scales its features (`feature_maps.Favor`) shows as decay.

    Raises:
        TypeError, ValueError: as the call itself would, or for a function that is none of these.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)
        >>> found = saccade.explain(saccade.attention, query, key, value, causal=True)
        >>> found.chosen
        'cpu'
        >>> found.reasons["hopper"]
        'it takes bfloat16 and float16, not float32'
    """
    plain = inspect.unwrap(function)
    validation = next((found for known, found in VALIDATIONS.items() if known is plain), None)
    if validation is None:
        takes = ", ".join(f"saccade.{each.__name__}" for each in VALIDATIONS)
        got = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"function: got {got}, takes one of {takes}, and then a call's arguments")
    bound = inspect.signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    call = dict(bound.arguments)
    if unknown := call.pop("unknown", None):
        raise unknown_options(unknown, options_of(plain))
    with_offsets = attention_varlen, attention_fp8_varlen, linear_attention_varlen
    if plain in with_offsets and call["cu_seqlens_q"] is None:
        raise TypeError(f"cu_seqlens_q: got None, takes {OFFSETS}")
    if plain is gated_delta_rule_varlen and call["cu_seqlens"] is None:
        raise TypeError(f"cu_seqlens: got None, takes {OFFSETS}")
    implementation = call.pop("implementation")
    given = {**call, **call.get("options", {})}
    inputs, variant, problem, config = validation.validate(call)
    choices = [explained(problem, implementation, of) for of in validation.passes]
    forward, backward = (*choices, None)[:2]
    assert forward is not None
    if validation.no_gradient is not None and gradient_asked(inputs, variant):
        forward = _without_gradient(forward, validation.no_gradient)
    if isinstance(problem, (LinearProblem, DeltaProblem)):
        costs = None, problem.flops, problem.bytes + _state_bytes(given, problem)
    else:
        pairs = _visible_pairs(inputs, variant, problem)
        costs = pairs, problem.flops(pairs), problem.bytes
    return Explanation(problem, forward, backward, config, *costs)


def _without_gradient(choice: Choice, lack: NoGradient) -> Choice:
    """The choice for a call of which a gradient may be asked, where backends do not have it."""
    reason = f"{lack.what} may be asked for, which it does not implement; {lack.instead}"
    reasons = {
        name: known if known is not None or name in lack.had_by else reason
        for name, known in choice.reasons.items()
    }
    chosen = choice.chosen if choice.chosen in lack.had_by else None
    return choice._replace(chosen=chosen, reasons=reasons)


def _validated(call: dict[str, Any]) -> tuple[Any, Any, Problem, KernelConfig | None]:
    """A call of `attention` or `attention_varlen`, validated."""
    call["mask"] = with_causal(call["mask"], call.pop("causal"))
    tensors = [call.pop(name) for name in ("query", "key", "value")]
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    packing = [call.pop(name, None) for name in names]
    return prepare(*tensors, *packing, **call)


def _validated_fp8(call: dict[str, Any]) -> tuple[Any, Any, Problem, KernelConfig | None]:
    """A call of `attention_fp8` or `attention_fp8_varlen`, validated."""
    tensors = [call.pop(name) for name in ("query", "key", "value")]
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    packing = [call.pop(name, None) for name in names]
    return_lse = call.pop("return_lse")
    options = call.pop("options", {})
    causal, fp8, rest = split_options({**call, **options})
    rest["mask"] = with_causal(rest["mask"], causal)
    found = fp8_validation.prepare(*tensors, *packing, fp8=fp8, return_lse=return_lse, **rest)
    return found.inputs, found.variant, found.problem, found.config


def _validated_paged(call: dict[str, Any]) -> tuple[Any, Any, Problem, KernelConfig | None]:
    """A call of `attention_paged`, validated."""
    call["mask"] = with_causal(call["mask"], call.pop("causal"))
    inputs = PagedInputs(**{name: call.pop(name) for name in PagedInputs._fields})
    return prepare_paged(inputs, **call)


def _validated_linear(call: dict[str, Any]) -> tuple[Any, Any, LinearProblem, KernelConfig | None]:
    """A call of linear attention or of its step, validated."""
    options = call.pop("options", {})
    linear_api.check_options(options)
    if "state" in call:
        return linear_api.prepare_step(**call)[1][:4]
    return linear_validation.prepare(**call, **options)[:4]


def _validated_delta(call: dict[str, Any]) -> tuple[Any, Any, DeltaProblem, KernelConfig | None]:
    """A call of the gated delta rule or of its step, validated."""
    options = call.pop("options", {})
    delta_api.check_options(options)
    if "state" in call:
        return delta_api.prepare_step(**call)[1]
    return delta_validation.prepare(**call, **options)


def _state_bytes(given: dict[str, Any], problem: LinearProblem | DeltaProblem) -> int:
    """Bytes of the states of a validated call: read where given, written where asked for."""
    if "state" in given:
        sums, index = _sums(given["state"]), given["state_index"]
        entries = sums[0].shape[0] if index is None else index.shape[0]
        return 2 * entries * sum(each.shape[1:].numel() * each.itemsize for each in sums)
    read = sum(each.numel() * each.itemsize for each in _sums(given.get("initial_state")))
    if not given["return_state"]:
        return read
    heads, columns = problem.value_heads, problem.value_dim
    if isinstance(problem, LinearProblem):
        heads, columns = max(problem.key_heads, heads), columns + 1  # and the sum of keys
    written = problem.batch * heads * problem.head_dim * columns
    return read + written * accumulate_dtype(problem.dtype).itemsize


def _sums(state: Any) -> list[Tensor]:
    """The tensors of a state."""
    parts = (state,) if isinstance(state, Tensor) else state or ()
    return [each for each in parts if each is not None]


class NoGradient(NamedTuple):
    """A gradient that a function does not have, what to call instead, and the backends that do."""

    what: str
    instead: str
    had_by: tuple[str, ...] = ()


class Validation(NamedTuple):
    """How the arguments of a public function are validated, and which passes it has.

    no_gradient: of a function that refuses calls of which a gradient may be asked.
    """

    validate: Callable[[dict[str, Any]], tuple[Any, Any, Any, Any]]
    passes: tuple[str, ...] = ("forward", "backward")
    no_gradient: NoGradient | None = None


OF_FP8 = NoGradient(fp8_op.NO_GRADIENT, fp8_op.INSTEAD)
OF_PAGES = NoGradient(paged_api.NO_GRADIENT, REFERENCE_INSTEAD, ("reference",))


VALIDATIONS: dict[Callable[..., Any], Validation] = {
    attention: Validation(_validated),
    attention_varlen: Validation(_validated),
    attention_paged: Validation(_validated_paged, ("forward",), OF_PAGES),
    attention_fp8: Validation(_validated_fp8, ("forward",), OF_FP8),
    attention_fp8_varlen: Validation(_validated_fp8, ("forward",), OF_FP8),
    linear_attention: Validation(_validated_linear),
    linear_attention_varlen: Validation(_validated_linear),
    linear_attention_step: Validation(_validated_linear, ("step",)),
    gated_delta_rule: Validation(_validated_delta),
    gated_delta_rule_varlen: Validation(_validated_delta),
    gated_delta_rule_step: Validation(_validated_delta, ("step",)),
}


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
        batch=evaluate.index_range(*batch, 0, device),
        head=evaluate.index_range(0, heads, 1, device),
        query_row=rows.view(1, 1, -1, 1),
        kv_row=evaluate.index_range(0, kv_len, 3, device),
        shift=kv_len - query_len,
    )
    seen = visible(variant.mask, variant.mask_captured, at)
    seen = seen.expand(batch[1] - batch[0], heads, len(rows), kv_len)
    return round(int(seen.sum()) * query_len / len(rows))

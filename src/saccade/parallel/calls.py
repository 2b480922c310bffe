"""Attention over ranks: each brings its rows of a sequence and gets those of the output.

A call is checked, compared among ranks and then computed by the method of its plan: "gather"
(`gather.py`), "ulysses" (`ulysses.py`) or "ring" (`ring.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from saccade.modifiers.expression import Captured
from saccade.modifiers.graph_constants import in_graph, outside_graph
from saccade.modifiers.modifier import Extents, expanded, misfit
from saccade.parallel import gather, ring, ulysses
from saccade.parallel.agreement import (
    agree,
    begin,
    checked_plan,
    dealt_facts,
    described,
    whole_tensors,
)
from saccade.parallel.agreement_op import agreed_in_graph
from saccade.parallel.dtensors import as_dtensor, local_rows
from saccade.parallel.exchange import summed
from saccade.parallel.local import LocalCall, Options
from saccade.parallel.planner import PLANS, Plan
from saccade.runtime import arguments, backends, shards
from saccade.runtime.arguments import options_of, unknown_options
from saccade.runtime.spec import Inputs, KernelConfig, Variant, accumulate_dtype
from saccade.runtime.validation import cast, new_seed, problem_of
from saccade.scores import AnyScore, Score, as_score

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

METHODS = {"gather": gather.attend, "ulysses": ulysses.attend, "ring": ring.attend}


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
def attention(  # breaks function-length: most of it is the docstring
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    score: AnyScore = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    reduce_gradients: bool = True,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`saccade.attention` of a sequence whose rows are dealt to ranks: a collective.

    Every rank of the plan's group calls it with its own rows (`Plan.shard`), under the plan's mask.
    What one process computes of all rows is what the ranks compute, forward and backward.

    Args:
        query: [batch, query_heads, rows of this rank, head_dim]; or all three DTensors along the
            plan's ranks, whose local parts these are (`Shard(2)`), and then results are such.
        key: [batch, kv_heads, rows of this rank, head_dim].
        value: [batch, kv_heads, rows of this rank, value_dim].
        plan: of `plan`, or of `Plan.for_mask`, with the mask. Masks and scores number the rows of
            the whole sequence, and their tensors are those of the whole call, on every rank.
        score, scale, sinks, implementation, config: as in `saccade.attention`.
        dropout_p: as in `saccade.attention`. The pairs that are dropped are those that one process
            drops by the same seed of PyTorch's generator, which must be the same on every rank.
        return_lse: also return the lse of this rank's rows.
        deterministic: gradients are bit-equal from run to run. Forward passes always are.
        reduce_gradients: whether gradients of what every rank has, sinks and tensors that the score
            captured, are summed over ranks. Where False a rank's are those of its own rows, as
            those of a model's other parameters are until data parallelism sums them.

    Returns:
        output [batch, query_heads, rows of this rank, value_dim]; with `return_lse` also the lse
        [batch, query_heads, rows of this rank].

    Raises:
        TypeError, ValueError, NotImplementedError: as `saccade.attention`, on every rank; where
            ranks differ in mask, length, dtype, method or options, naming the difference.
        RuntimeError: where messages fail or time out, saying where each rank was last.

    Source: Liu et al. 2023, "Ring attention with blockwise transformers"; Jacobs et al. 2023,
    "DeepSpeed Ulysses"; Llama 3 (2024), section 3.3.2, for gathered keys.

    Examples:
        >>> plan = saccade.parallel.plan(
        ...     masks.causal(), 64, 1, query_heads=4, kv_heads=2, head_dim=16
        ... )  # under torchrun: a process group in place of 1
        >>> query, key = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16)
        >>> local = [plan.shard(each, dim=2) for each in (query, key, key)]
        >>> output = saccade.parallel.attention(*local, plan=plan)
        >>> torch.testing.assert_close(
        ...     plan.unshard([output], dim=2), saccade.attention(query, key, key, causal=True)
        ... )
    """
    options = Options(scale, deterministic, implementation, config, dropout_p)
    flags = _Flags(return_lse, reduce_gradients, False)
    return _called("attention", plan, (query, key, value), sinks, score, options, flags, unknown)


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    score: AnyScore = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    reduce_gradients: bool = True,
    implementation: str | None = None,
    config: KernelConfig | Mapping[tuple[int, int], KernelConfig] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`saccade.attention_varlen` of sequences whose rows are dealt to ranks: a collective.

    Args:
        query: [rows of this rank, query_heads, head_dim]; or DTensors as `attention` takes them
            (`Shard(0)`).
        key: [rows of this rank, kv_heads, head_dim].
        value: [rows of this rank, kv_heads, value_dim].
        plan: made from the offsets of the sequences.
        score, scale, sinks, dropout_p, return_lse, deterministic, reduce_gradients, implementation,
        config: as in `attention`; masks and scores number rows within each sequence.

    Returns:
        output [rows of this rank, query_heads, value_dim]; with `return_lse` also the lse
        [query_heads, rows of this rank].

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `attention`.

    Examples:
        >>> offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> plan = saccade.parallel.plan(
        ...     None, offsets, 1, causal=True, query_heads=4, kv_heads=2, head_dim=16
        ... )
        >>> query, key = torch.randn(12, 4, 16), torch.randn(12, 2, 16)
        >>> local = [plan.shard(each, dim=0) for each in (query, key, key)]
        >>> saccade.parallel.attention_varlen(*local, plan=plan).shape
        torch.Size([12, 4, 16])
    """
    options = Options(scale, deterministic, implementation, config, dropout_p)
    flags = _Flags(return_lse, reduce_gradients, True)
    rows = (query, key, value)
    return _called("attention_varlen", plan, rows, sinks, score, options, flags, unknown)


class _Flags(NamedTuple):
    return_lse: bool
    reduce_gradients: bool
    packed: bool


def _called(
    name: str, plan: Plan, rows: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None,
    score: AnyScore, options: Options, flags: _Flags, unknown: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Check a call, compare it among ranks, and compute it."""
    checked_plan(plan)
    if torch.compiler.is_compiling():
        return _into_graph(name, plan, rows, sinks, score, options, flags, unknown)
    return _computed(name, plan, rows, sinks, score, options, flags, unknown)


def _computed(
    name: str, plan: Plan, rows: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None,
    score: AnyScore, options: Options, flags: _Flags, unknown: Mapping[str, Any],
) -> Any:  # fmt: skip
    """A call of tensors, or of what stands for them while a graph is traced."""
    fault, call, facts, mesh = None, None, {}, None
    try:
        if unknown:
            raise _unknown(unknown, flags.packed)
        rows, mesh = local_rows(plan, rows, 0 if flags.packed else 2)
        if shards.any_sharded(sinks):
            raise TypeError("sinks: got a DTensor, takes a plain tensor, whole on every rank")
        call, facts = _checked(plan, rows, sinks, score, options, flags)
    except (TypeError, ValueError, NotImplementedError) as error:
        fault = error  # others learn of it before they wait for this rank
    facts = {"call": name, **facts}
    traced = plan.ranks > 1 and in_graph()
    if plan.ranks > 1 and not traced:
        begin(plan, name)
        where = rows[0].device if isinstance(rows[0], Tensor) else torch.device("cpu")
        seed, whole = (None, {}) if call is None else (call.seed, call.whole)
        agree(plan, facts, fault, where, seed, whole)
    if fault is not None:
        if traced and all(isinstance(each, Tensor) for each in rows):
            return _failing(plan, facts, fault, rows, flags)
        raise fault
    assert call is not None
    if traced:
        call = call._replace(facts=facts)
    output, lse = METHODS[plan.method](call)
    if flags.packed:
        output, lse = output.squeeze(0).transpose(0, 1), lse if lse is None else lse.squeeze(0)
    return _as_given(plan, (output, lse) if flags.return_lse else output, flags, mesh)


def _as_given(plan: Plan, results: Any, flags: _Flags, mesh: DeviceMesh | None) -> Any:
    """Results as DTensors where the rows were such."""
    if mesh is None:
        return results
    output, lse = results if flags.return_lse else (results, None)
    output = as_dtensor(plan, output, mesh, 0 if flags.packed else 2)
    if lse is None:
        return output
    return output, as_dtensor(plan, lse, mesh, 1 if flags.packed else 2)


def _into_graph(
    name: str, plan: Plan, rows: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None,
    score: AnyScore, options: Options, flags: _Flags, unknown: Mapping[str, Any],
) -> Any:  # fmt: skip
    """A call that Dynamo traces: it puts `_traced` into its graph, whose arguments are plain."""
    if unknown:
        raise _unknown(unknown, flags.packed)
    (query, key, value), mesh = local_rows(plan, rows, 0 if flags.packed else 2)
    found = as_score(score)
    where = query.device if isinstance(query, Tensor) else torch.device("cpu")
    config = arguments.resolve_config(options.config, where)
    numbers = [] if config is None else config.numbers()
    plain = (
        options.scale, options.deterministic, options.implementation, numbers, options.dropout_p
    )  # fmt: skip
    captured = found.captured
    results = _traced(
        name, plan.name, query, key, value, sinks, found.key, list(captured.tensors),
        list(captured.ints), list(captured.floats), plain, tuple(flags),
    )  # fmt: skip
    return _as_given(plan, results, flags, mesh)


@torch.compiler.allow_in_graph
def _traced(
    name: str, plan: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
    score: str, tensors: list[Tensor], ints: list[int], floats: list[float],
    plain: tuple[Any, ...], flags: tuple[Any, ...],
) -> Any:  # fmt: skip
    """A call in the graph of Dynamo, which does not look inside: AOTAutograd traces what it does,
    messages and their gradients among them, in the order in which an eager call does it."""
    scale, deterministic, implementation, numbers, dropout_p = plain
    captured = Captured(tuple(tensors), tuple(map(int, ints)), tuple(map(float, floats)))
    config = KernelConfig.of_numbers(numbers) if numbers else None
    options = Options(scale, deterministic, implementation, config, dropout_p)
    rows = query, key, value
    for each in (*rows, sinks):
        for size in each.shape if isinstance(each, Tensor) else ():
            int(size)  # a plan is for one size: none stays a symbol, in errors neither
    found = Score(score, captured)
    return _computed(name, PLANS[plan], rows, sinks, found, options, _Flags(*flags), {})


def _failing(
    plan: Plan, facts: Mapping[str, str], fault: Exception, rows: tuple[Tensor, Tensor, Tensor],
    flags: _Flags,
) -> Any:  # fmt: skip
    """What a graph computes that cannot begin: when it runs it tells other ranks, and fails."""
    query, _, value = rows
    shape = *query.shape[:-1], value.shape[-1]
    output = agreed_in_graph(plan, facts, fault, query.new_zeros(shape))
    lse = output[..., 0].to(accumulate_dtype(query.dtype))
    lse = lse.transpose(0, 1) if flags.packed else lse
    return (output, lse) if flags.return_lse else output


def _unknown(unknown: Mapping[str, Any], packed: bool) -> TypeError:
    for name in ("mask", "causal", "cu_seqlens_q", "cu_seqlens_k"):
        if name in unknown:
            advice = "plan.for_mask(mask)" if name in ("mask", "causal") else "plan(mask, offsets)"
            return TypeError(f"{name}: got one beside a plan, which has its own; use {advice}")
    return unknown_options(unknown, options_of(attention_varlen if packed else attention))


def _checked(
    plan: Plan, rows: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, score: AnyScore,
    options: Options, flags: _Flags,
) -> tuple[LocalCall, dict[str, str]]:  # fmt: skip
    """The call of this rank, and what must be equal on all."""
    shapes = arguments.PACKED_SHAPES if flags.packed else arguments.DENSE_SHAPES
    query, key, value = cast(*rows)
    arguments.check_tensors(query, key, value, shapes)
    for name in ("return_lse", "reduce_gradients"):
        arguments.check_flag(name, getattr(flags, name))
    arguments.check_flag("deterministic", options.deterministic)
    options = options._replace(
        scale=arguments.resolve_scale(options.scale, query.shape[-1]),
        dropout_p=arguments.check_dropout(options.dropout_p),
    )
    arguments.check_sinks(sinks, query)
    if flags.packed != (plan.cu_seqlens is not None):
        takes = "offsets of sequences" if flags.packed else "a length"
        raise ValueError(f"plan: got one of {'a length' if flags.packed else 'offsets'}, takes "
                         f"one of {takes}")  # fmt: skip
    if flags.packed:
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    _check_sizes(plan, query, key, value)
    found = as_score(score)
    _check_score(plan, found)
    _check_implementation(query, key, value, sinks, options)
    if plan.method == "ring" and options.implementation == "reference":
        raise NotImplementedError(
            'implementation: got "reference" with the method "ring", takes one whose backward pass '
            'takes the output of all steps; method="gather" takes the reference'
        )
    tables = [each for each in found.captured.tensors if each.is_floating_point()]
    facts = _facts(plan, query, value, found, sinks, options, flags) | {
        "gradients of": _gradients_of([query, key, value], sinks, tables)
    }
    whole = whole_tensors(sinks, None, found.captured)  # a plan compares its mask once
    if flags.reduce_gradients:
        sinks = None if sinks is None else summed(plan, sinks)
        tensors = tuple(
            summed(plan, each) if each.is_floating_point() else each
            for each in found.captured.tensors
        )
        found = Score(found.key, found.captured._replace(tensors=tensors))
    seed = new_seed(query.device) if options.dropout_p > 0 else None
    call = LocalCall(plan, query, key, value, sinks, found, options, flags.return_lse, seed, whole)
    return call, facts


def _check_sizes(plan: Plan, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse rows that are not those of the plan."""
    sizes, rows = plan.sizes, len(plan.rows)
    wanted = {
        "query": (query, (sizes.batch, sizes.query_heads, rows, sizes.head_dim)),
        "key": (key, (sizes.batch, sizes.kv_heads, rows, sizes.head_dim)),
        "value": (value, (sizes.batch, sizes.kv_heads, rows, sizes.value_dim)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)} (batch, heads, rows, channels) on rank "
                f"{plan.rank}, takes the plan's {shape}"
            )


def _check_score(plan: Plan, score: Score) -> None:
    """Refuse a score whose captured tensors do not fit the call of all ranks."""
    offsets, sizes = plan.cu_seqlens, plan.sizes
    longest = plan.longest
    batch = sizes.batch if offsets is None else len(offsets) - 1
    extents = Extents(batch, sizes.query_heads, longest, longest, packed=offsets is not None)
    complaint = misfit(score.key, expanded(score.key, score.captured), extents)
    if complaint is not None:
        raise ValueError(f"score: {complaint}")


def _check_implementation(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: Options
) -> None:
    """Refuse what no implementation, or not the named one, computes of this rank's rows alone."""
    arguments.resolve_config(options.config, query.device)
    assert options.scale is not None
    nothing = Variant("", "", Captured(), Captured(), options.scale, options.dropout_p)
    inputs = Inputs(query, key, value, sinks)
    backends.choose_all(problem_of(inputs, nothing, None), options.implementation)


def _gradients_of(rows: list[Tensor], sinks: Tensor | None, tables: list[Tensor]) -> str:
    if not torch.is_grad_enabled():
        return "nothing"
    names = ["query", "key", "value", "sinks", *(f"score {i}" for i in range(len(tables)))]
    tensors = [*rows, sinks, *tables]
    wanted = [n for n, t in zip(names, tensors, strict=True) if t is not None and t.requires_grad]
    return ", ".join(wanted) or "nothing"


def _facts(
    plan: Plan, query: Tensor, value: Tensor, score: Score, sinks: Tensor | None,
    options: Options, flags: _Flags,
) -> dict[str, str]:  # fmt: skip
    """What must be equal on all ranks, in words."""
    return _facts_of_plan(plan) | {
        "dtype": str(query.dtype),
        "device": query.device.type,
        "score": described(score.key, score.captured, contents=False),
        "scale": str(options.scale),
        "dropout_p": str(options.dropout_p),
        "sinks": "none" if sinks is None else str(sinks.dtype),
        "options": f"deterministic={options.deterministic}, return_lse={flags.return_lse}, "
        f"reduce_gradients={flags.reduce_gradients}",
        "implementation": str(options.implementation),
    }


@outside_graph
def _facts_of_plan(plan: Plan) -> dict[str, str]:
    known = plan.memory.get("facts")
    if known is None:
        known = plan.memory["facts"] = {
            "mask": described(plan.mask.key, plan.mask.captured, contents=True),
            "method": plan.method,
            "sizes": str(tuple(plan.sizes[:5])),
            **dealt_facts(plan),
        }
    return known


__all__ = ["attention", "attention_varlen"]

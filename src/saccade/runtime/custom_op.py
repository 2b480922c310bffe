"""Custom operators: every operation as PyTorch knows it (`torch.library`), made by one class.

An operator takes the tensors of a call, the tensors that its mask and score captured (`tables`,
where the operation has any), and plain values; a mask or score travels as its key. Three kinds of
callers come in here:

- `torch.compile`, and a caller by name, meet the registered operator with its registered autograd;
- eager calls and `torch.func` come through one `autograd.Function` around it, as registered
  autograd takes longer to enter, and the transforms of torch.func do not reach it;
- an eager call that nothing observes, and that wants no gradient, goes straight to the backend.

A call that was validated before comes the same way as the first one: checkpoints, hooks, modes and
profilers see no difference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.runtime.call_cache import CheckedCall, unobserved, wants_gradients

# The layout of results follows that of inputs, so Inductor must not change the latter.
EXACT_STRIDES = (torch.Tag.needs_exact_strides,)


class Arguments(NamedTuple):
    """The arguments of an operator, taken apart."""

    inputs: Any  # a NamedTuple of tensors
    tables: Sequence[Tensor]  # what mask and score captured
    plain: Sequence[Any]


class Gradient(NamedTuple):
    """The backward pass of an operation: a second operator.

    Attributes:
        schema: the arguments before the inputs: gradients of results, then the kept results.
        results: which results of the forward pass have gradients.
        kept: which results it reads.
        inputs: which inputs may have gradients, in the order in which it gives them; those that a
            call does not have are left out.
        run: gradients from the operator's arguments, (gradients of results, kept results), the
            tables whose gradients are wanted, and the variant.
        empty: memory for the gradients, from the operator's arguments and the wanted tables.
        wanted: the tables whose gradients may be asked for.
        optional: places among the kept results of those that a call need not have: what operators
            give instead has one dimension and no elements, and the backward pass gets None.
        compile_ahead: begins to compile what the backward pass of a call will start, from the
            operator's arguments, the tables whose gradients are wanted, and the variant: before the
            first forward pass of calls like it runs.
    """

    schema: str
    results: tuple[int, ...]
    kept: tuple[int, ...]
    inputs: tuple[int, ...]
    run: Callable[[Arguments, Sequence[Tensor | None], Sequence[int], Any], list[Tensor]]
    empty: Callable[[Arguments, Sequence[int]], list[Tensor]]
    wanted: Callable[[Sequence[Any], Sequence[Any]], list[int]] = lambda tables, plain: []
    optional: tuple[int, ...] = ()
    compile_ahead: Callable[[Arguments, Sequence[int], Any], None] | None = None

    @property
    def num_results(self) -> int:
        """Arguments before the inputs: gradients of results and kept results."""
        return len(self.results) + len(self.kept)


REFERENCE_INSTEAD = (
    'pass implementation="reference", which is plain PyTorch and differentiates to any order'
)


class Operation:
    """An operation as an operator of PyTorch, and the ways into it.

    Attributes:
        name: the operator's, in the namespace saccade.
        inputs: the NamedTuple of its tensors, in the order of `tensors`.
        variant_of: the variant that tables and plain values were made of.
        prepare: the backend's forward pass for calls like this one, of (inputs, variant).
        run: all results, from the operator's arguments.
        empty: memory for all results.
        gradient: its backward pass; None for an operation that has none.
        no_gradient, instead: then what is not implemented, and what to do.
    """

    def __init__(
        self,
        name: str,
        inputs: type,
        tensors: str,
        plain: str,
        num_results: int,
        *,
        variant_of: Callable[[Sequence[Any], Sequence[Any]], Any],
        flatten: Callable[[CheckedCall, bool], tuple[Any, ...]],
        prepare: Callable[[Any, CheckedCall], Callable[[Any, Any], tuple[Any, ...]]],
        run: Callable[[Arguments], tuple[Tensor, ...]],
        empty: Callable[[Arguments], tuple[Tensor, ...]],
        gradient: Gradient | None = None,
        no_gradient: str = "double backward",
        instead: str = REFERENCE_INSTEAD,
    ):
        self.name, self.inputs, self.num_inputs = name, inputs, len(inputs._fields)  # type: ignore[attr-defined]
        self.has_tables = "tables" in tensors
        self.variant_of, self.flatten, self.prepare = variant_of, flatten, prepare
        self.run, self.empty, self.gradient = run, empty, gradient
        results = ", ".join(["Tensor"] * num_results)
        self.op = _define(name, f"({tensors}, {plain}) -> ({results})")
        _register(
            name,
            lambda *arguments: run(self.split(arguments)),
            lambda *arguments: empty(self.split(arguments)),
            self._vmap,
        )
        if gradient is None:
            _refuse_derivatives(name, no_gradient, instead)
            return
        wanted = "int[] wanted_tables, " if self.has_tables else ""
        schema = f"({gradient.schema}, {wanted}{tensors}, {plain}) -> Tensor[]"
        self.backward_op = _define(f"{name}_backward", schema)
        _register(f"{name}_backward", self._run_backward, self._empty_backward, self._backward_vmap)
        _refuse_derivatives(f"{name}_backward", "double backward")
        torch.library.register_autograd(
            f"saccade::{name}", self._registered_backward, setup_context=self._save
        )

    # ---- the ways in --------------------------------------------------------------------------

    def __call__(
        self, inputs: Any, checked: CheckedCall, deterministic: bool = False, *, alone: bool = False
    ) -> tuple[Tensor, ...]:
        """The results of a validated call.

        alone: whether it is known already that nothing observes the call, as of every call that is
        found in the call cache.
        """
        tensors = (*inputs, *checked.tables) if checked.tables else inputs
        tracing = not alone and torch.compiler.is_compiling()
        alone = alone or (not tracing and unobserved(tensors))
        wants = wants_gradients(tensors)
        if alone and not wants:
            return self.straight(inputs, checked, checked.variant)
        if wants:
            checked.check_backward()
            if self.gradient is not None:
                checked = checked.differentiated(inputs[0].dtype)
            # PyTorch's own switch is asked each time: it may be thrown between two like calls.
            deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        plain = checked.plain.get(deterministic)
        if plain is None:
            plain = checked.plain[deterministic] = self.flatten(checked, deterministic)
        if tracing or self.gradient is None:
            return self.op(*self._joined(inputs, checked.tables), *plain)
        if alone and (checked.kind or checked).forward is None and self.gradient.compile_ahead:
            wanted = self.gradient.wanted(checked.tables, plain)
            arguments = Arguments(inputs, checked.tables, plain)
            self.gradient.compile_ahead(arguments, wanted, checked.variant)
        apply = _apply_at_once if alone else OperationFunction.apply
        return apply(OperatorCall(self, checked, plain, alone), *tensors)

    def straight(self, inputs: Any, checked: CheckedCall, variant: Any) -> tuple[Tensor, ...]:
        """The backend itself, by the forward pass that was prepared for such calls."""
        forward = checked.forward
        if forward is None:
            forward = checked.forward = self._prepared(inputs, checked)
        return forward(inputs, variant)

    def _prepared(self, inputs: Any, checked: CheckedCall) -> Callable[[Any, Any], Any]:
        """The forward pass of calls of a kind; of those of one layout, where it has one of its own
        for them."""
        kind = checked.kind
        if kind is None:
            return self.prepare(inputs, checked)
        if kind.forward is None:
            kind.forward = self.prepare(inputs, kind)
        of_layout = getattr(kind.forward, "of_layout", None)
        return kind.forward if of_layout is None else of_layout(inputs, checked.variant)

    def split(self, arguments: Sequence[Any]) -> Arguments:
        """An operator's arguments, taken apart."""
        inputs, end = self.inputs(*arguments[: self.num_inputs]), self.num_inputs
        if self.has_tables:
            return Arguments(inputs, arguments[end], arguments[end + 1 :])
        return Arguments(inputs, (), arguments[end:])

    def _joined(self, inputs: Sequence[Any], tables: Sequence[Any]) -> tuple[Any, ...]:
        """Inputs and tables as the operator takes them."""
        return (*inputs, list(tables)) if self.has_tables else (*inputs,)

    # ---- the backward pass --------------------------------------------------------------------

    def save(self, ctx: Any, tensors: Sequence[Any], plain: Sequence[Any], results: Any) -> None:
        """Keep what the backward pass needs: inputs, some results, tables; no weights."""
        gradient, tables = self.gradient, tensors[self.num_inputs :]
        assert gradient is not None
        ctx.set_materialize_grads(False)
        constant = [r for n, r in enumerate(results) if n not in gradient.results and r is not None]
        if constant:
            ctx.mark_non_differentiable(*constant)
        kept = [results[n] if n < len(results) else None for n in gradient.kept]
        for place in gradient.optional:
            found = kept[place]
            if found is not None and found.dim() == 1:
                kept[place] = None  # an operator's way to say that the call does not have it
        ctx.save_for_backward(*tensors[: self.num_inputs], *kept, *tables)
        ctx.plain = tuple(plain)
        ctx.wanted = gradient.wanted(tables, plain) if tables else []

    def gradients(self, ctx: Any, call: Callable[..., Any], grads: Sequence[Any]) -> list[Any]:
        """Gradients of every input and table, None where there is none.

        `call` runs the backward pass on (wanted tables, plain values, gradients of results and
        kept results, inputs, tables).
        """
        gradient, end = self.gradient, self.num_inputs
        assert gradient is not None
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them for one reading
        found: list[Any] = [None] * (len(saved) - len(gradient.kept))
        arrived = [grads[n] for n in gradient.results]
        if not any([grad is not None for grad in arrived]):
            return found
        first_table = end + len(gradient.kept)
        inputs, tables = saved[:end], saved[first_table:]
        results = (*arrived, *saved[end:first_table])
        gradients = iter(call(ctx.wanted, ctx.plain, results, inputs, tables))
        for position in gradient.inputs:
            if inputs[position] is not None:
                found[position] = next(gradients)
        for position in ctx.wanted:
            found[end + position] = next(gradients)
        return found

    def call_backward(self, wanted: list[int], plain: Sequence[Any], *tensors: Any) -> list[Tensor]:
        """The backward operator from flat arguments."""
        assert self.gradient is not None
        first = self.gradient.num_results
        end = first + self.num_inputs
        choice = [wanted] if self.has_tables else []
        joined = self._joined(tensors[first:end], tensors[end:])
        return self.backward_op(*tensors[:first], *choice, *joined, *plain)

    def backward(
        self, variant: Any, wanted: list[int], plain: tuple[Any, ...], results: Sequence[Any],
        inputs: Sequence[Any], tables: Sequence[Any],
    ) -> Sequence[Tensor]:  # fmt: skip
        """The backward pass: straight to the backend unless it is observed or differentiated."""
        if torch.is_grad_enabled() or not unobserved((*results, *inputs, *tables)):
            return enter(OperationBackward, self, wanted, plain, *results, *inputs, *tables)
        assert self.gradient is not None
        variant = variant or self.variant_of(tables, plain)
        arguments = Arguments(self.inputs(*inputs), tables, plain)
        return self.gradient.run(arguments, results, wanted, variant)

    def _split_backward(self, arguments: Sequence[Any]) -> tuple[Any, list[int], Arguments]:
        assert self.gradient is not None
        first = self.gradient.num_results
        if not self.has_tables:
            return arguments[:first], [], self.split(arguments[first:])
        return arguments[:first], arguments[first], self.split(arguments[first + 1 :])

    def _run_backward(self, *arguments: Any) -> list[Tensor]:
        assert self.gradient is not None
        results, wanted, parts = self._split_backward(arguments)
        return self.gradient.run(parts, results, wanted, self.variant_of(*parts[1:]))

    def _empty_backward(self, *arguments: Any) -> list[Tensor]:
        assert self.gradient is not None
        _, wanted, parts = self._split_backward(arguments)
        return self.gradient.empty(parts, wanted)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        parts = self.split(inputs)
        self.save(ctx, (*parts.inputs, *parts.tables), parts.plain, output)

    def _registered_backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        def call(wanted: list[int], plain: Sequence[Any], *parts: Sequence[Any]) -> list[Tensor]:
            return self.call_backward(wanted, plain, *itertools.chain(*parts))

        gradients = self.gradients(ctx, call, grads)
        # Beside a list of tensors, PyTorch wants an empty list, not None, for each empty list.
        of_plain = [[] if self.has_tables and value == [] else None for value in ctx.plain]
        end = self.num_inputs
        return (*self._joined(gradients[:end], gradients[end:]), *of_plain)

    # ---- vmap ---------------------------------------------------------------------------------

    def _dims(self, in_dims: Sequence[Any], tables: Sequence[Tensor]) -> tuple[Any, ...]:
        """The mapped dimension of each input and each table."""
        dims = tuple(in_dims[: self.num_inputs])
        if not self.has_tables:
            return dims
        of_tables = in_dims[self.num_inputs]
        return dims + (tuple(of_tables) if of_tables is not None else (None,) * len(tables))

    def _vmap(self, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        inputs, tables, plain = self.split(arguments)
        dims, end = self._dims(in_dims, tables), self.num_inputs

        def call(tensors: Sequence[Any]) -> Any:
            return self.op(*self._joined(tensors[:end], tensors[end:]), *plain)

        return mapped(info.batch_size, dims, (*inputs, *tables), call)

    def _backward_vmap(self, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        results, wanted, (inputs, tables, plain) = self._split_backward(arguments)
        behind = len(results) + self.has_tables  # the wanted tables lie between
        dims = (*in_dims[: len(results)], *self._dims(in_dims[behind:], tables))
        stacked, out_dims = mapped(
            info.batch_size,
            dims,
            (*results, *inputs, *tables),
            lambda tensors: self.call_backward(wanted, plain, *tensors),
        )
        return list(stacked), list(out_dims)


class OperatorCall(NamedTuple):
    """A call on its way into an operator."""

    operation: Operation
    checked: CheckedCall
    plain: tuple[Any, ...]
    alone: bool  # whether it is known that nothing observes it


class OperationFunction(torch.autograd.Function):
    """An operator with flat arguments: (the call, *inputs, *tables)."""

    @staticmethod
    def forward(call: OperatorCall, *tensors: Any) -> tuple[Tensor, ...]:
        operation, checked, plain, alone = call
        inputs, tables = tensors[: operation.num_inputs], tensors[operation.num_inputs :]
        if alone or unobserved(tensors):
            variant = operation.variant_of(tables, plain) if tables else checked.variant
            return operation.straight(operation.inputs(*inputs), checked, variant)
        with torch._C._AutoDispatchBelowAutograd():  # gradients are this class's own
            return operation.op(*operation._joined(inputs, tables), *plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call = inputs[0]
        call.operation.save(ctx, inputs[1:], call.plain, output)
        ctx.operation = call.operation
        # A variant that holds tables would keep them from hooks that put saved tensors elsewhere.
        ctx.variant = None if call.checked.tables else call.checked.variant

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operation, variant = ctx.operation, ctx.variant
        call = functools.partial(operation.backward, variant)
        return (None, *operation.gradients(ctx, call, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise not_implemented(ctx.plain[-2], "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        call, *tensors = arguments
        return mapped(
            info.batch_size, in_dims[1:], tensors, lambda t: OperationFunction.apply(call, *t)
        )


class OperationBackward(torch.autograd.Function):
    """A backward operator with flat arguments: (operation, wanted tables, plain, *tensors)."""

    @staticmethod
    def forward(
        operation: Operation, wanted: list[int], plain: tuple[Any, ...], *tensors: Any
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(operation.call_backward(wanted, plain, *tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.implementation = inputs[2][-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise not_implemented(ctx.implementation, "double backward")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise not_implemented(ctx.implementation, "forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        operation, wanted, plain, *tensors = arguments

        def call(parts: Sequence[Any]) -> Any:
            return OperationBackward.apply(operation, wanted, plain, *parts)

        return mapped(info.batch_size, in_dims[3:], tensors, call)


def enter(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`, without its look at the signature where no transform needs it."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return _without_signature(function)(*arguments)


def _without_signature(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` as PyTorch's engine has it."""
    above: Any = super(torch.autograd.Function, function)
    return above.apply


_apply_at_once = _without_signature(OperationFunction)


def mapped(size: int, in_dims: Sequence[Any], tensors: Sequence[Any], call: Any) -> Any:
    """vmap by a loop over the mapped dimension: exact whatever a mask makes of its batch index."""
    results = []
    for index in range(size):
        parts = [
            tensor if dim is None or tensor is None else tensor.select(dim, index)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        ]
        # Of heads, sequences or offsets, kernels read numbers that follow each other.
        results.append(
            call([p.contiguous() if p is not None and p.dim() == 1 else p for p in parts])
        )
    stacked = tuple(
        None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True)
    )
    return stacked, tuple(None if parts is None else 0 for parts in stacked)


# ---- registration -----------------------------------------------------------------------------


def step_operator(
    call: str, schema: str, run: Callable[..., Any], empty: Callable[..., Any]
) -> Any:
    """The operator of a call's steps, which change states where they lie: no gradient, no vmap."""
    name = f"{call}_step"

    def refuse_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        raise NotImplementedError(
            f"{name}: got tensors under vmap, takes plain ones: a step changes states where they "
            f"lie; give all sequences in one batch, or call {call} with initial_state and "
            "return_state"
        )

    operator = _define(name, schema)
    _register(name, run, empty, refuse_vmap)
    return operator


def _define(name: str, schema: str) -> Any:
    torch.library.define(f"saccade::{name}", schema, tags=EXACT_STRIDES)
    return getattr(torch.ops.saccade, name).default


def _register(
    name: str, run: Callable[..., Any], empty: Callable[..., Any], vmap: Callable[..., Any]
) -> None:
    """Tell PyTorch what the operator does, what its results look like, and how it is mapped."""
    torch.library.impl(f"saccade::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"saccade::{name}", empty)
    torch.library.register_vmap(f"saccade::{name}", vmap)


def _refuse_derivatives(name: str, what: str, instead: str = REFERENCE_INSTEAD) -> None:
    """Let a derivative of the operator be an error that says what to do instead."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.implementation = inputs[-1]

    def backward(ctx: Any, *grads: Any) -> Any:
        raise not_implemented(ctx.implementation, what, instead)

    torch.library.register_autograd(f"saccade::{name}", backward, setup_context=setup_context)


def gradient_asked(inputs: Sequence[Tensor | None], variant: Any) -> bool:
    """Whether a gradient may be asked of a call: of its tensors or of those its score captured."""
    captured = variant.score_captured.tensors
    tensors = (*inputs, *captured) if captured else inputs
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def not_implemented(
    implementation: str, what: str, instead: str = REFERENCE_INSTEAD
) -> NotImplementedError:
    """The error for a derivative that only the reference has, or another call."""
    return NotImplementedError(
        f"saccade: {what} is not implemented by {implementation!r}; {instead}"
    )

"""Layers that keep a state of each sequence, for an engine whose steps pack many sequences.

Recurrent layers (Mamba, gated delta rules) and short convolutions keep no keys and values but a
state of what came before: its size does not grow, and each token changes it. A step of an engine
lays the tokens of many sequences side by side in one row, over which such a layer would run from
one sequence into the next. So these layers, and no others, are called once for each kind of rows:
sequences that go on by one token as one batch, and each longer chunk alone, with a cache of
transformers' own class that holds their states.

The model stays as it is. Its layers are called so only while a step is under way, and only in the
thread that takes it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from transformers import Cache, cache_utils

R = TypeVar("R")

# What a layer with a state asks of its cache, and what it calls the cache in its arguments.
ASKED = {"update_conv_state", "update_recurrent_state"}
CACHES = ("cache_params", "past_key_values")

_under_way = threading.local()
# The calls of a model's layers are put back as they were found. Two threads would find what the
# other one has put there, so one at a time takes a step.
_one_at_a_time = threading.RLock()


class StateRows(NamedTuple):
    """Rows of a step that layers with states can compute as one batch.

    Attributes:
        rows: which of the step's rows, one sequence after the other.
        sequences: how many; all have equally many rows.
        fresh: whether they begin with these rows, so that they have no state yet.
        numbers: of their states, on the device; None where nothing is kept of the rows.

    Examples:
        >>> from saccade.integrations.transformers import StateRows
        >>> begins = StateRows(slice(0, 5), sequences=1, fresh=True, numbers=torch.tensor([3]))
        >>> go_on = StateRows(torch.tensor([5, 7]), 2, fresh=False, numbers=torch.tensor([0, 4]))
    """

    rows: slice | Tensor
    sequences: int
    fresh: bool
    numbers: Tensor | None


class SequenceStates(Protocol):
    """The states of the sequences in a step of an engine, which keeps them itself.

    Layers are numbered in the order of the model's modules, those with states alone.

    Examples:
        >>> from saccade.integrations.transformers import SequenceStates, StateRows
        >>> class Alone(SequenceStates):  # of one sequence, which begins
        ...     def __init__(self):
        ...         self.states = {}
        ...     def rows(self):
        ...         return [StateRows(slice(None), 1, fresh=True, numbers=None)]
        ...     def write(self, layer, rows, states):
        ...         self.states[layer] = states
    """

    def rows(self) -> Sequence[StateRows]:
        """All rows of the step."""
        ...

    def read(self, layer: int, rows: StateRows) -> list[Tensor]:
        """A layer's states of some rows, each [sequences, …], as they were written; the layer
        changes them."""
        ...

    def write(self, layer: int, rows: StateRows, states: Sequence[Tensor]) -> None:
        """Keep a layer's states after some rows."""
        ...


class _Kept(NamedTuple):
    """Which states a layer keeps, and whether it goes on from them by more than one token."""

    names: list[tuple[str, int]]  # as transformers' cache has them: an attribute, and a number
    chunks: bool


class StateLayers:
    """The layers of a model that keep states.

    Examples:
        >>> from saccade.integrations.transformers import StateLayers
        >>> StateLayers.of(torch.nn.Linear(2, 2)) is None  # it has no such layers
        True
    """

    def __init__(self, modules: Sequence[Any], states_of_layer: int = 1):
        self._modules, self._states_of_layer = list(modules), states_of_layer
        self._signatures = [inspect.signature(module.forward) for module in self._modules]
        self._kept: dict[int, _Kept] = {}

    @staticmethod
    def of(model: torch.nn.Module) -> StateLayers | None:
        """A model's layers that ask transformers' cache for states; None where there are none."""
        found = [
            module
            for module in model.modules()
            if isinstance(getattr(module, "layer_idx", None), int)
            and _cache_name(inspect.signature(module.forward)) is not None
            and _names_used(type(module)) & ASKED
        ]
        if not found or not hasattr(cache_utils, "LinearAttentionLayer"):
            return None
        config: Any = getattr(model, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        return StateLayers(found, getattr(config, "number_of_conv_states", 1))

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def by_token(self) -> int:
        """How many of them go on from a state by one token at a time only.

        Their scan takes no state to begin with. The first chunk of a sequence has none, and is
        computed at once; later ones take a call for each of their tokens.
        """
        return sum(not kept.chunks for kept in self._kept.values())

    def call(self, states: SequenceStates, run: Callable[[], R]) -> R:
        """Run a pass over packed rows in which these layers get and leave their states.

        Whatever ends the pass, an interrupt between any two lines included, the model is what it
        was.

        Args:
            run: calls the model.
        """
        with _one_at_a_time:
            before = getattr(_under_way, "states", None)
            theirs = [module._compiled_call_impl for module in self._modules]

            def put_back() -> None:
                _under_way.states = before
                for module, call in zip(self._modules, theirs, strict=True):
                    module._compiled_call_impl = call

            try:
                try:
                    for number, module in enumerate(self._modules):
                        module._compiled_call_impl = self._in_steps(number, theirs[number])
                    _under_way.states = states
                    return run()
                finally:
                    put_back()
            except BaseException:  # an interrupt may have ended that, too
                put_back()
                raise

    def _in_steps(self, number: int, compiled: Callable[..., Any] | None) -> Callable[..., Any]:
        """A layer that has its states where this thread takes a step, and else is what it was."""
        theirs = self._modules[number]._call_impl if compiled is None else compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            states = getattr(_under_way, "states", None)
            if states is None:
                return theirs(*args, **kwargs)
            return self._computed(states, number, theirs, args, kwargs)

        return call

    def _computed(
        self, states: SequenceStates, number: int, theirs: Callable[..., Any],
        args: Sequence[Any], kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """A layer over all rows of a step: part by part, with the parts' own states."""
        given = _Given(self._signatures[number], args, kwargs)
        parts, outputs = states.rows(), []
        for part in parts:
            of_part = given.of(part)
            if part.fresh:
                cache = self._cache(number)
                output = of_part.call(theirs, cache)
            else:
                cache = self._cache(number, states.read(number, part))
                output = self._gone_on(number, theirs, of_part, cache)
            if number not in self._kept:
                self._kept[number] = self._learn(number, theirs, of_part, cache)
            states.write(number, part, self._states(number, cache))
            outputs.append(output)
        return given.put_together(outputs, parts)

    def _gone_on(self, number: int, theirs: Callable[..., Any], given: _Given, cache: Cache) -> Any:
        """What a layer gives for rows behind a state."""
        if given.length == 1 or self._kept[number].chunks:
            return given.call(theirs, cache)
        outputs = [given.at(token).call(theirs, cache) for token in range(given.length)]
        return _merged(outputs, lambda each: torch.cat([*each], dim=1))

    def _cache(self, number: int, states: Sequence[Tensor] | None = None) -> Cache:
        """A cache that holds a layer's states, or nothing yet."""
        layer: Any = cache_utils.LinearAttentionLayer(number_of_states=self._states_of_layer)
        if states is not None:
            for (kind, index), state in zip(self._kept[number].names, states, strict=True):
                getattr(layer, kind)[index] = state
                getattr(layer, f"is_{kind}_initialized")[index] = True
                if kind == "conv_states":
                    layer.conv_kernel_size[index] = state.shape[-1]
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
            layer.dtype, layer.device = states[0].dtype, states[0].device
        return Cache(layers=[layer] * (self._modules[number].layer_idx + 1))

    def _states(self, number: int, cache: Cache) -> list[Tensor]:
        layer: Any = cache.layers[-1]
        return [getattr(layer, kind)[index] for kind, index in self._kept[number].names]

    def _learn(self, number: int, theirs: Callable[..., Any], given: _Given, cache: Cache) -> _Kept:
        """Which states a layer keeps, and whether it goes on from all of them by two tokens.

        A scan that takes no state gives the same, bit by bit, whatever the state is.
        """
        layer: Any = cache.layers[-1]
        names = [
            (kind, index)
            for kind in ("conv_states", "recurrent_states")
            for index, state in getattr(layer, kind).items()
            if state is not None
        ]
        self._kept[number] = _Kept(names, chunks=False)
        states = [state.clone() for state in self._states(number, cache)]

        def after(changed: int | None) -> list[Any]:
            before = [
                state + OTHERWISE if place == changed else state.clone()
                for place, state in enumerate(states)
            ]
            return tree_flatten(given.call(theirs, self._cache(number, before)))[0]

        try:
            plain, *changed = [after(place) for place in (None, *range(len(states)))]
        finally:
            del self._kept[number]
        chunks = all(
            any(not torch.equal(one, other) for one, other in zip(plain, each, strict=True))
            for each in changed
        )
        return _Kept(names, chunks and given.length > 1)


OTHERWISE = 100.0  # added to a state: more than what a layer forgets of it within two tokens hides


class _Given:
    """What a layer is called with. Tensors of the rows [sequences, length, …] can be cut.

    Attributes:
        length: rows of each sequence.
    """

    def __init__(self, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]):
        self._signature, self._args, self._kwargs = signature, args, kwargs
        name = _cache_name(signature)
        assert name is not None  # it has one, or it were none of these layers
        self._cache_name, self._cache_place = name, list(signature.parameters).index(name)
        hidden = next(each for each in tree_flatten((args, kwargs))[0] if _has_rows(each))
        self._sequences, self.length = hidden.shape[:2]

    def call(self, layer: Callable[..., Any], cache: Cache) -> Any:
        """Call a layer with a cache in the place of what it was given."""
        if self._cache_place < len(self._args):
            args = list(self._args)
            args[self._cache_place] = cache
            return layer(*args, **self._kwargs)
        return layer(*self._args, **{**self._kwargs, self._cache_name: cache})

    def of(self, part: StateRows) -> _Given:
        """Arguments for a part of the rows, which all lie side by side here."""

        def cut(rows: Tensor) -> Tensor:
            found = rows[0, part.rows]
            return found.reshape(part.sequences, -1, *found.shape[1:])

        return self._changed(cut)

    def at(self, token: int) -> _Given:
        """Arguments for one token of each sequence."""
        return self._changed(lambda rows: rows[:, token : token + 1])

    def put_together(self, outputs: Sequence[Any], parts: Sequence[StateRows]) -> Any:
        """What a layer gave for each part, in the places of the rows."""

        def placed(of_parts: Sequence[Tensor]) -> Tensor:
            flat = [each.flatten(0, 1) for each in of_parts]
            found = flat[0].new_empty(1, self.length, *flat[0].shape[1:])
            for part, each in zip(parts, flat, strict=True):
                found[0, part.rows] = each
            return found

        return _merged(outputs, placed)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> _Given:
        def changed(each: Tensor) -> Tensor:
            is_of_rows = _has_rows(each) and each.shape[:2] == (self._sequences, self.length)
            return change(each) if is_of_rows else each

        args, kwargs = tree_map_only(Tensor, changed, (self._args, self._kwargs))
        return _Given(self._signature, args, kwargs)


def _has_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2


def _merged(outputs: Sequence[Any], merge: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Outputs of one structure as one; what is no tensor is the first one's."""
    flat, spec = zip(*map(tree_flatten, outputs), strict=True)
    merged = [
        merge(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*flat, strict=True)
    ]
    return tree_unflatten(merged, spec[0])


def _cache_name(signature: inspect.Signature) -> str | None:
    """What a layer calls the cache that it takes."""
    return next((name for name in CACHES if name in signature.parameters), None)


def _names_used(kind: type) -> set[str]:
    """The names of attributes that a class's methods use."""
    functions = [
        inspect.unwrap(each)
        for base in kind.__mro__ if base is not torch.nn.Module
        for each in vars(base).values() if isinstance(each, FunctionType)
    ]  # fmt: skip
    return {name for each in functions for name in each.__code__.co_names}

"""Decoder layers compiled once for all layers of a model, by `torch.compile`.

A layer of transformers runs about forty small kernels around its products (norms, rotary
embeddings, activations), each of which reads and writes all rows; Inductor joins them. Attention
stays what the step does: inside a compiled layer it is one operator, which asks the step that is
under way in its thread. The layer's number is an argument of that operator, so layers that differ
in nothing else have one graph. Two graphs are made of it, for one row and for any other number.

The model itself is not changed: its layers are compiled ones only while a step is under way, and
only for the thread that takes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from textwrap import shorten
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend

from saccade import masks, scores
from saccade.serving.compiled_products import with_products_of_all
from saccade.serving.merged_products import MergedProducts
from saccade.serving.model import PackedModel, check_packed_passes, window_of
from saccade.serving.rank_sums import with_sums_by_memory

# As many graphs as a model may have layers that differ (in windows, experts, sizes).
MOST_GRAPHS = 64
# A layer's number is an argument of its graph, not a reason for another one.
SETTINGS = {"allow_unspec_int_on_nn_module": True, "recompile_limit": MOST_GRAPHS}

R = TypeVar("R")

torch.library.define(
    "saccade::attend_in_step",
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, SymInt layer, int? window, "
    "float? softcap, float? scale) -> Tensor",
)
_under_way = threading.local()
# The layers of a model, and the compiler's settings, are put back as they were found. Two threads
# would find what the other one has put there, so one at a time has compiled layers.
_one_at_a_time = threading.RLock()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: int,
    window: int | None, softcap: float | None, scale: float | None,
) -> Tensor:  # fmt: skip
    mask = masks.causal() if window is None else masks.window(window)
    score = None if softcap is None else scores.softcap(softcap)
    output = _under_way.step.attend(
        int(layer), query, key, value, mask=mask, score=score, scale=scale, sinks=sinks
    )
    return output.contiguous()


def _empty(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


torch.library.impl("saccade::attend_in_step", "CompositeExplicitAutograd", _attend)
torch.library.register_fake("saccade::attend_in_step", _empty)


class StepUnderWay:
    """What compiled layers are called with: their attention is the operator's."""

    layers_are_checked = True  # by the same layers, called with another step before

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor,
        *, mask: masks.Mask, score: scores.Score | None, scale: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attend by the step that is under way."""
        window = window_of(mask)
        softcap = None if score is None else score.captured.floats[0]
        return torch.ops.saccade.attend_in_step(
            query, key, value, sinks, layer, window, softcap, scale
        )


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model that attend: elements of lists, an attention layer inside each."""
    found: list[torch.nn.Module] = []
    for modules in model.modules():
        if isinstance(modules, torch.nn.ModuleList):
            found += [
                layer for layer in modules
                if any(hasattr(inside, "layer_idx") for inside in layer.modules())
            ]  # fmt: skip
    return found


class CompiledLayers:
    """The compiled layers of a model.

    Args:
        backend: of `torch.compile`.
        merges: whether products of equal rows are one, over weights that lie side by side.
        sums: whether small sums over ranks go by memory that ranks read of one another.

    Attributes:
        sums: of each graph, how many such sums it has.
        merged: the products that are merged in the model's own layers.
    """

    def __init__(
        self, model: torch.nn.Module, backend: str | Callable[..., Any] = "inductor",
        *, merges: bool = False, sums: bool = False,
    ):  # fmt: skip
        self.sums: list[int] = []
        self.merged: Any = None
        plain = lookup_backend(backend) if isinstance(backend, str) else backend
        if sums:
            backend = plain = with_sums_by_memory(plain, self.sums.append)
        if merges:
            backend = with_products_of_all(plain)
        self._layers: list[tuple[Any, Callable[..., Any]]] = [
            (layer, torch.compile(layer._call_impl, dynamic=True, backend=backend))
            for layer in decoder_layers(model)
        ]
        self._step = StepUnderWay()

    def __len__(self) -> int:
        return len(self._layers)

    def call(self, step: Any, run: Callable[[StepUnderWay], R]) -> R:
        """Run a pass of a step with the compiled layers in the model.

        Whatever ends the pass, an interrupt between any two lines included, the model and the
        compiler's settings are what they were.

        Args:
            step: that attends.
            run: calls the model, with what it is given in the step's place.
        """
        with _one_at_a_time:
            before = getattr(_under_way, "step", None)
            theirs = [layer._compiled_call_impl for layer, _ in self._layers]
            settings = {name: getattr(dynamo_config, name) for name in SETTINGS}

            def put_back() -> None:
                _under_way.step = before
                for (layer, _), call in zip(self._layers, theirs, strict=True):
                    layer._compiled_call_impl = call
                _set(settings)

            try:
                try:
                    _set(SETTINGS)
                    for (layer, compiled), call in zip(self._layers, theirs, strict=True):
                        others = call or layer._call_impl
                        layer._compiled_call_impl = _for_this_thread(compiled, others)
                    _under_way.step = step
                    return run(self._step)
                finally:
                    put_back()
            except BaseException:  # an interrupt may have ended that, too
                put_back()
                raise


def _set(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(dynamo_config, name, value)


def _for_this_thread(
    compiled: Callable[..., Any], theirs: Callable[..., Any]
) -> Callable[..., Any]:
    """A compiled layer where this thread takes a step, and else what the layer was before."""

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = theirs if getattr(_under_way, "step", None) is None else compiled
        return chosen(*args, **kwargs)

    return call


def read_compile(asked: bool | Literal["auto"], *, by_default: bool) -> bool:
    """Whether layers are to be compiled.

    Raises:
        ValueError: for what is neither a bool nor "auto".
    """
    if isinstance(asked, bool):
        return asked
    if asked != "auto":
        raise ValueError(f'compile: got {asked!r}, takes True, False or "auto"')
    return by_default


def compile_layers(
    model: PackedModel, page_size: int, options: Mapping[str, Any], progress: bool,
    *, sums: bool = False,
) -> str:  # fmt: skip
    """Compile a model's layers for all its steps, and try whether they give what it gives.

    A model whose code cannot be compiled, or gives other logits then, goes on as it is. Products
    that are merged in the model's own layers are merged in the compiled ones, if all are.

    Args:
        page_size, options: of the engine.
        progress: whether to say so on the standard error, if that is a terminal.
        sums: whether small sums over ranks go by memory that ranks read of one another.

    Returns:
        How it went, for users to read.
    """
    begin = time.perf_counter()
    if model.latent_layers is not None:
        return "no layers are compiled: latents are taken from them, which a graph does not do"
    if model.state_layers is not None:
        return "no layers are compiled: states are handed to them, which a graph does not do"
    before = model.step_layers
    merges = isinstance(before, MergedProducts) and before.complete
    layers = CompiledLayers(model.module, merges=merges, sums=sums)
    layers.merged = before  # which holds the weights that lie side by side
    if not len(layers):
        return f"no layers are compiled: {model.name} has no list of layers that attend"
    console = Console(stderr=True)
    model.call_with(layers)
    try:
        if progress and console.is_terminal:
            with console.status("Compiling the model's layers"):
                _try(model, page_size, options)
        else:
            _try(model, page_size, options)
    except Exception as error:  # whatever a compiler, or a model's code under it, raises
        model.call_with(before)
        said = " ".join(str(error).split()) or type(error).__name__
        return f"no layers are compiled: {shorten(said, 300)}"
    said = f"{len(layers)} layers are compiled as one ({time.perf_counter() - begin:.1f} s)"
    if sums:
        said += f", {max(layers.sums, default=0)} sums over ranks in each"
    if before is not None and not merges:
        said += ", each product by itself, as some are not merged"
    return said


def _try(model: PackedModel, page_size: int, options: Mapping[str, Any]) -> None:
    check_packed_passes(model, page_size, options)
    model.probe(1)  # one row has a graph of its own

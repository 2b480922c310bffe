"""Model: a Hugging Face causal model, called with packed rows of many sequences.

A model whose attention goes through transformers' interface hands its rows to `BatchStep.attend`,
layer by layer (`saccade.integrations.transformers`). Slots, tables and offsets, which all layers
use, are made once a step. A `Probe` instead of a step records what layers keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import saccade
from saccade import integrations
from saccade.serving.decoding import Sampling, on_device
from saccade.serving.model_watch import ModelWatch, is_random_in_training, random_settings
from saccade.serving.request import Limits, Request
from saccade.serving.rotations import LongRotations
from saccade.serving.scheduler import Scheduler, StepPlan
from saccade.serving.states import StateShape, StepStates, state_rows

if TYPE_CHECKING:
    from saccade.integrations.transformers import StateRows

# One sequence in the batch, as models are called: its rows are those of all sequences.
Rows = Float[Tensor, "1 heads rows dim"]


class PackedStep(Protocol):
    """A step whose rows are those of many sequences; its layers call `attend`."""

    states: Any  # of the sequences, where layers keep some
    last_rows: Int[Tensor, " drawn"]  # those that a token is drawn from

    def begin(self) -> tuple[Int[Tensor, "1 rows"], Int[Tensor, "1 rows"]]:
        """The rows' tokens and positions."""
        ...

    def attend(
        self, layer_index: int | None, query: Rows, key: Rows, value: Rows, **options: Any
    ) -> Float[Tensor, "1 rows heads value_dim"]:
        """Keep a layer's new keys and values, and attend over all of each sequence."""
        ...

    def end(self) -> None:
        """All layers were called."""
        ...


class LayerCall(NamedTuple):
    """One call of an attention layer in a pass: models may use a layer in several places."""

    layer: int | None  # its number, as the layer itself has it
    times: int  # it was called before


class LayerCalls:
    """Which of the cache's layers is attended to next, in each pass of a step.

    Args:
        numbers: of the cache's layers.
    """

    def __init__(self, numbers: Mapping[LayerCall, int]):
        self._numbers = numbers
        self._counts: Counter[int | None] = Counter()

    def begin(self) -> None:
        """A pass begins."""
        self._counts.clear()

    def next(self, index: int | None) -> int:
        """The number in the cache of a layer that is called now."""
        call = LayerCall(index, self._counts[index])
        self._counts[index] += 1
        return self._numbers[call]

    def end(self) -> None:
        """A pass ends.

        Raises:
            RuntimeError: if layers were left out: their keys and values would be missing.
        """
        if self._counts.total() != len(self._numbers):
            raise RuntimeError(
                f"model: called {self._counts.total()} attention layers in a pass, takes all "
                f"{len(self._numbers)} in each"
            )


class PackedRows:
    """How a step attends whose rows are chunks of sequences, one behind the other.

    Args:
        cache: where keys and values go.
        layers: for each call of an attention layer in a pass its number in the cache.
        options: of `saccade.attention_paged`, such as batch_invariant.
    """

    _slots: Sequence[Int[Tensor, " rows"]]  # of each group of layers, as the next
    _tables: Sequence[tuple[Tensor, Tensor]]  # page tables and lengths of the sequences
    _offsets: Int[Tensor, " sequences_and_one"]  # of the sequences' rows

    def __init__(
        self, cache: saccade.PagedCache, layers: Mapping[LayerCall, int],
        options: Mapping[str, Any],
    ):  # fmt: skip
        self._cache, self._calls, self._options = cache, LayerCalls(layers), options

    def end(self) -> None:
        """All layers were called."""
        self._calls.end()

    def attend(
        self, layer_index: int | None, query: Rows, key: Rows, value: Rows, **options: Any
    ) -> Float[Tensor, "1 rows heads value_dim"]:
        """Write a layer's new keys and values, and attend over all of each sequence."""
        layer = self._calls.next(layer_index)
        pages, group, scales = written(self._cache, layer, key, value, self._slots)
        output = saccade.attention_paged(
            query[0].transpose(0, 1), pages.key_pages, pages.value_pages, *self._tables[group],
            cu_seqlens_q=self._offsets, **options, **scales, **self._options,
        )  # fmt: skip
        return output.unsqueeze(0)


class BatchStep(PackedRows):
    """One forward pass over the rows of several sequences, packed into one.

    Args:
        cache, layers, options: as in `PackedRows`.
        plan: whose rows they are, and their slots.
        states: how many tensors each layer with states has.
    """

    def __init__(
        self, cache: saccade.PagedCache, plan: StepPlan, layers: Mapping[LayerCall, int],
        options: Mapping[str, Any], states: Sequence[int] = (),
    ):  # fmt: skip
        super().__init__(cache, layers, options)
        sequences = [chunk.request.sequence for chunk in plan.chunks]
        self._tables = cache.tables([sequence for sequence in sequences if sequence is not None])
        ends = [0]
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for chunk in plan.chunks:
            tokens += chunk.tokens if chunk.known else [0]
            positions += range(chunk.start, chunk.stop)
            ends.append(len(tokens))
            last_rows.append(len(tokens) - 1)
        device = cache.device
        self._slots = [on_device(slots, torch.int64, device) for slots in plan.slots]
        self._offsets = on_device(ends, torch.int32, device)
        self.input_ids = on_device(tokens, torch.int64, device).unsqueeze(0)
        self.position_ids = on_device(positions, torch.int64, device).unsqueeze(0)
        self.last_rows = on_device(last_rows, torch.int64, device)
        self.states = StepStates(cache, states, plan.chunks, len(tokens)) if states else None
        self.long_rows = None
        if any([chunk.request.is_long for chunk in plan.chunks]):
            long = [chunk.request.is_long for chunk in plan.chunks for _ in range(chunk.rows)]
            self.long_rows = on_device(long, torch.bool, device)
        # Places among chunks, and rows, of tokens that a step under way gives.
        self._unknown = [
            (place, last_rows[place]) for place, chunk in enumerate(plan.chunks) if not chunk.known
        ]

    def take_last(self, last_tokens: Int[Tensor, " lanes"], lanes: Sequence[int]) -> None:
        """Read the tokens that the step before gives from the lanes of the chunks' requests."""
        device = last_tokens.device
        rows = on_device([row for _, row in self._unknown], torch.int64, device)
        of = on_device([lanes[place] for place, _ in self._unknown], torch.int64, device)
        self.input_ids[0].index_copy_(0, rows, last_tokens.index_select(0, of))

    def begin(self) -> tuple[Int[Tensor, "1 rows"], Int[Tensor, "1 rows"]]:
        """The rows' tokens and positions."""
        self._calls.begin()
        return self.input_ids, self.position_ids


def written(
    cache: saccade.PagedCache, layer: int, key: Rows, value: Rows,
    slots: Sequence[Int[Tensor, " rows"]],
) -> tuple[Any, int, dict[str, Any]]:  # fmt: skip
    """Write new keys and values of a layer: its pages, its group, and their scales as options.

    slots: of each group of layers.
    """
    pages, group = cache.pages(layer), cache.addresses[layer].group
    scales: dict[str, Any] = {
        "key_scales": pages.key_scales, "value_scales": pages.value_scales
    }  # fmt: skip
    values = None, None
    if not cache.latent:  # else values are a part of keys
        values = value[0].transpose(0, 1), pages.value_pages
    saccade.write_kv_cache(
        key[0].transpose(0, 1), values[0], pages.key_pages, values[1], slots[group], **scales
    )
    return pages, group, scales


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer has to keep for each token, and how far back it looks."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None  # tokens seen before the token itself; None: all
    latent: bool = False  # whether values are the first channels of keys


class ProbedStates:
    """Records what states layers keep, of one sequence that begins."""

    def __init__(self) -> None:
        self.shapes: dict[int, list[StateShape]] = {}

    def rows(self) -> list[StateRows]:
        """All rows, of which nothing is kept."""
        return [state_rows(slice(None), 1, True, None)]

    def read(self, layer: int, rows: StateRows) -> list[Tensor]:
        """There is nothing to read."""
        raise AssertionError("a probe has no states")

    def write(self, layer: int, rows: StateRows, states: Sequence[Tensor]) -> None:
        """Note a layer's sizes."""
        if layer in self.shapes:
            raise ValueError(
                "model: a layer of its that keeps a state is called twice in one pass, takes a "
                "model whose layers each keep their own"
            )
        if not all(state.shape[0] == 1 for state in states):
            raise ValueError("model: got states of another batch than the rows', takes one of each")
        self.shapes[layer] = [StateShape(tuple(each.shape[1:]), each.dtype) for each in states]


class Probe:
    """Records the sizes of a model's attention layers, called once instead of a `BatchStep`.

    So no knowledge is needed of how an architecture names its sizes.
    """

    def __init__(self) -> None:
        self.layers: dict[LayerCall, LayerShape] = {}
        self.states = ProbedStates()

    def attend(
        self, layer_index: int | None, query: Rows, key: Rows, value: Rows,
        *, mask: saccade.masks.Mask | None = None, **_: Any,
    ) -> Float[Tensor, "1 rows heads value_dim"]:  # fmt: skip
        """Note the layer's sizes; the result is nothing but of the right shape."""
        times = sum(call.layer == layer_index for call in self.layers)
        self.layers[LayerCall(layer_index, times)] = LayerShape(
            key.shape[1], key.shape[3], value.shape[3], key.dtype, window_of(mask),
            latent=value.data_ptr() == key.data_ptr(),
        )  # fmt: skip
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def window_of(mask: saccade.masks.Mask | None) -> int | None:
    """How many tokens before itself a token sees at most, if the mask is a plain window."""
    if mask is not None and mask.key == saccade.masks.window(0).key:
        return mask.captured.ints[0]
    return None


def alike(layers: Sequence[LayerShape]) -> tuple[torch.dtype, bool]:
    """The dtype of all layers, and whether their values are the first channels of keys.

    Raises:
        ValueError: if they are not alike in these.
    """
    kinds = {(each.dtype, each.latent) for each in layers}
    if len(kinds) > 1:
        raise ValueError(
            f"model: got attention layers with (dtype, latent) of {sorted(kinds, key=str)}, takes "
            "a model whose layers are alike in these"
        )
    return layers[0].dtype, layers[0].latent


class StepLayers(Protocol):
    """Layers that a model has only while a step is under way."""

    def call(self, step: Any, run: Callable[[Any], Any]) -> Any:
        """Run a pass with them; `run` is given what the model is called with as the step."""
        ...


class PackedModel:
    """A causal model of transformers whose attention is Saccade's.

    Args:
        model: any whose attention goes through transformers' AttentionInterface; it is set to
            "saccade" and otherwise used as it is.
        latents: whether layers that have latents keep these; not where weights are shared out.

    Raises:
        TypeError, ValueError: if it is no such model.
    """

    def __init__(self, model: Any, *, latents: bool = True):
        integrations.transformers.register()
        self.name = type(model).__name__
        self.state_layers = _check_kind(model)
        model.set_attn_implementation("saccade")
        self._model = model.eval()
        self._renewals = 0
        self.step_layers: StepLayers | None = None
        config = model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.longest: int | None = getattr(config, "max_position_embeddings", None)
        self.long_rotations: LongRotations | None = None
        self.device: torch.device = model.device
        self.latent_layers = integrations.transformers.LatentLayers.of(model) if latents else None
        before = self.buffers()
        layers = self._layers_found()
        self._written_by_passes = self.buffers_written_since(before)
        self.watch()
        self.numbers = {index: number for number, index in enumerate(layers)}
        self.layers = list(layers.values())
        self.dtype, self.latent = alike(self.layers) if layers else (model.dtype, False)
        self.windows = [each.window for each in self.layers]
        of_states = [self.probed_states[number] for number in range(len(self.probed_states))]
        self.states = [state for of_layer in of_states for state in of_layer]
        self.states_of_layers = [len(of_layer) for of_layer in of_states]

    @property
    def first_length(self) -> int | None:
        """Tokens past which a sequence is turned by other angles, all of it; None: never."""
        return None if self.long_rotations is None else self.long_rotations.first_length

    def turn_by_rows(self) -> None:
        """From now on angles follow each sequence's own length, where they become others."""
        self.long_rotations = LongRotations.of(self._model)

    def _layers_found(self) -> dict[LayerCall, LayerShape]:
        """What layers keep: a latent where that works, else keys and values for each head."""
        if self.latent_layers is not None:
            try:
                return self.probe(2)
            except ValueError:  # they look like layers that they are not
                self.latent_layers = None
        return self.probe(2)

    def page_sizes(self) -> dict[str, Any]:
        """What layers keep for each token, as `PagedCache` takes it."""
        names = "kv_heads", "head_dim", "value_dim"
        of_layers = {name: [getattr(each, name) for each in self.layers] for name in names}
        sizes = {"windows": self.windows, "latent": self.latent, **of_layers}
        return sizes | ({"states": self.states} if self.states else {})

    @property
    def module(self) -> torch.nn.Module:
        """The model as it came."""
        return self._model

    def call_with(self, layers: StepLayers | None) -> None:
        """From now on steps are called with other layers than the model has; None: with these."""
        self.step_layers = layers

    def check_mode(self) -> None:
        """Refuse a model that was put into training mode since, if that makes it random."""
        for module in self._at_random:
            if module.training and is_random_in_training(module):
                raise ValueError(
                    f"model: got {self.name} in training mode, in which it drops activations or "
                    f"adds noise (in its {type(module).__name__}), takes evaluation mode: "
                    "model.eval()"
                )

    def buffers(self) -> dict[str, tuple[int, int]]:
        """Which tensor each of the model's buffers is, and how often it was written."""
        return {
            name: (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for name, buffer in self._model.named_buffers()
        }

    def buffers_written_since(self, before: Mapping[str, tuple[int, int]]) -> set[str]:
        """Names of buffers that were written, replaced or added since `buffers` gave that."""
        return {name for name, now in self.buffers().items() if now != before.get(name)}

    def weights_version(self) -> int:
        """A number that grows whenever a weight is written in place, or a buffer.

        Tensors of inference mode count no writes, and neither does what is written through `.data`.
        """
        # More than any weight is written, so that no number comes twice.
        return (self._renewals << 48) + sum(weight._version for weight in self._weights)

    def watch(self) -> None:
        """From now on the model is to be what it is."""
        self._renewals += 1
        self._watch = ModelWatch(self._model, self._written_by_passes)
        self._weights = [each for each in self._watch.weights if not each.is_inference()]
        self._at_random = [each for each in self._model.modules() if random_settings(each)]

    def seems_same(self) -> bool:
        """Whether nothing hints at a change of the model since; takes a microsecond or two."""
        return self._watch.seems_same()

    def check_same(self, *, addresses_matter: bool) -> None:
        """Refuse a model that was changed since it was watched, but for its weights' numbers.

        Weights that were replaced by others of their kind count as written.

        Args:
            addresses_matter: whether weights must not be replaced, as graphs read them.

        Raises:
            RuntimeError: saying what was changed.
        """
        change = self._watch.change()
        if change is None:
            return
        if addresses_matter or not change.of_numbers:
            graphs = ", whose memory CUDA graphs read" if change.of_numbers else ""
            raise RuntimeError(
                f"model: {change.said}{graphs}; takes {self.name} as it was when the engine was "
                "made: make another engine"
            )
        self.watch()

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a text, as the model's own settings name them."""
        settings = getattr(self._model, "generation_config", None) or self._model.config
        found = getattr(settings, "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    @property
    def special_tokens(self) -> set[int]:
        """The tokens that the model's settings give a meaning: padding, a place for an image."""
        settings = {
            **self._model.config.to_dict(),
            **self._model.config.get_text_config().to_dict(),
        }
        named = [settings[name] for name in settings if "token_i" in name]
        return {token for token in named if isinstance(token, int)}

    @torch.inference_mode()
    def plain_logits(
        self, prompts: Int[Tensor, "batch rows"], off_by: float = 0.0
    ) -> Float[Tensor, "batch rows vocabulary"]:
        """Logits of every row, as the model gives them with transformers' own attention.

        off_by: how far the tokens' embeddings are moved first, each number up or down at random, in
            parts of its size: that tells how much the model makes of a rounding.
        """

        def moved(module: Any, args: Any, embedded: Tensor) -> Tensor:
            signs = torch.rand_like(embedded, dtype=torch.float32).round_().mul_(2.0).sub_(1.0)
            return (embedded * (1.0 + off_by * signs)).to(embedded.dtype)

        self._model.set_attn_implementation("eager")
        embeddings = self._model.get_input_embeddings()
        hook = embeddings.register_forward_hook(moved) if off_by else None
        try:
            return self._model(input_ids=prompts, use_cache=False).logits
        finally:
            if hook is not None:
                hook.remove()
            self._model.set_attn_implementation("saccade")

    @torch.inference_mode()
    def whole_logits(
        self, prompts: Int[Tensor, "batch rows"], step: Any | None = None
    ) -> Float[Tensor, "batch rows vocabulary"]:
        """Logits of all rows by Saccade's attention, over sequences that are not packed: under the
        masks that the model makes, or by a step's attention, which is told what layers say."""
        options = {} if step is None else self._options(step)
        return self._model(input_ids=prompts, use_cache=False, **options).logits

    @torch.inference_mode()
    def cached_logits(
        self, prompts: Int[Tensor, "batch rows"]
    ) -> Float[Tensor, "batch rows vocabulary"]:
        """The same, token after token over transformers' own cache."""
        self._model.set_attn_implementation("eager")
        options: dict[str, Any] = {}
        found = []
        try:
            for position, tokens in enumerate(prompts.split(1, dim=1)):
                output = self._model(
                    input_ids=tokens, use_cache=True, **options,
                    position_ids=torch.full_like(tokens, position),
                )  # fmt: skip
                found.append(output.logits)
                names = "past_key_values", "cache_params"
                options = {name: output[name] for name in names if name in output}
        finally:
            self._model.set_attn_implementation("saccade")
        return torch.cat(found, dim=1)

    @torch.inference_mode()
    def logits(self, step: PackedStep) -> Float[Tensor, "drawn vocabulary"]:
        """Logits of the rows that a token is drawn from."""
        logits = self._call(step, *step.begin(), step.last_rows)
        step.end()
        return logits

    @torch.inference_mode()
    def probe(self, rows: int, first: int = 0) -> dict[LayerCall, LayerShape]:
        """What each call of an attention layer keeps, from a pass over so many rows.

        Args:
            first: the position of the first of them.

        Raises:
            ValueError: if the model does not take them, or attends otherwise.
        """
        probe = Probe()
        numbers = torch.arange(rows, device=self.device)
        positions = (numbers + first)[None]
        takes = "takes one whose attention goes through transformers' AttentionInterface"
        try:
            logits = self._call(probe, torch.zeros_like(numbers)[None], positions, numbers[-1:])
        except Exception as error:
            raise ValueError(
                f"model: got {self.name}, which fails with packed rows ({error}); {takes}"
            ) from error
        if not probe.layers and not probe.states.shapes:
            raise ValueError(f"model: got {self.name}, no layer of which attends so; {takes}")
        self.num_logits = logits.shape[-1]  # of each row; a padded vocabulary is larger
        self.probed_states = probe.states.shapes
        return probe.layers

    def _options(self, step: Any) -> dict[str, Any]:
        """How layers of the model come to call a step."""
        if self.latent_layers is not None:
            return self.latent_layers.options(step)
        return {"saccade_step": step}

    def _call(
        self, step: PackedStep | Probe, input_ids: Tensor, position_ids: Tensor, rows: Tensor
    ) -> Tensor:
        def run(under_way: Any) -> Any:
            with self._turned(step, position_ids):
                return self._model(
                    input_ids=input_ids, position_ids=position_ids, use_cache=False,
                    logits_to_keep=rows, **self._options(under_way),
                )  # fmt: skip

        if self.state_layers is not None:
            output = self.state_layers.call(step.states, lambda: run(step))
        elif self.step_layers is not None:
            output = self.step_layers.call(step, run)
        else:
            output = run(step)
        logits = output.logits[0]
        # Some models know no logits_to_keep, and give those of all rows.
        return logits if logits.shape[0] == rows.shape[0] else logits[rows]

    def _turned(self, step: Any, position_ids: Tensor) -> AbstractContextManager[None]:
        """While a pass runs, rows are turned by the lengths of their own sequences."""
        if self.long_rotations is None:
            return nullcontext()
        long = getattr(step, "long_rows", None)
        if long is None:  # rows that are the last of their sequences
            long = position_ids[0] >= self.long_rotations.first_length
        return self.long_rotations.by_rows(long)


# What a config's `layer_types` may say of layers that keep keys and values and nothing else, of
# those that keep nothing, and of those that keep a state where they ask transformers' cache for it.
KEPT_IN_PAGES = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}
KEPT_AS_STATES = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}


def _check_kind(model: Any) -> Any:
    """Refuse by name what is no causal language model, or keeps what an engine cannot.

    Returns:
        Its layers that keep states, if there are any.
    """
    got = f"model: got {type(model).__name__}"
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise TypeError(f"{got}, takes a causal language model of transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{got}, which has an encoder beside its decoder, takes a causal language model "
            "(…ForCausalLM); model.generate serves this one"
        )
    if not model.can_generate():
        raise ValueError(
            f"{got}, which predicts no next token (an encoder, or a model without its head), takes "
            "a causal language model (…ForCausalLM)"
        )
    config = model.config.get_text_config()
    states = integrations.transformers.StateLayers.of(model)
    known = KEPT_IN_PAGES | (set() if states is None else KEPT_AS_STATES)
    for name in ("layer_types", "layers_block_type", "block_types"):
        others = sorted({str(kind) for kind in getattr(config, name, None) or ()} - known)
        if others:
            raise ValueError(
                f"{got} with layers of {', '.join(others)} ({name}), which keep or see something "
                f"else than pages of keys and values, or states in transformers' cache; takes "
                "layers of these alone; model.generate serves this one"
            )
    return states


# ---- trial ---------------------------------------------------------------------------------------
# Whether a model gives in packed chunks what it gives alone, tried before it serves.
#
# Layers that keep something else than keys and values, and do not ask transformers' cache for it,
# run over rows of other sequences in a packed pass, and lose at the end of a chunk what they had.
# Nothing fails then: the tokens are others. So an engine compares, once, a few packed steps with a
# plain pass.

PROMPTS, LENGTH = 3, 12
# Of rows: rounding alone may turn near ties between experts over in some of them.
QUANTILE = 0.5
MARGIN = 6.0  # over what another attention's rounding, or one of the embeddings, changes
ROUNDINGS = 4.0  # of the dtype, where that happens to change nothing


class AlonePass:
    """A step over complete sequences, by the reference; it keeps nothing."""

    def attend(
        self, layer_index: int, query: Rows, key: Rows, value: Rows, **options: Any
    ) -> Float[Tensor, "batch rows heads value_dim"]:
        """Attend to all of each sequence."""
        output = saccade.attention(query, key, value, implementation="reference", **options)
        return output.transpose(1, 2).contiguous()


def check_packed_passes(model: PackedModel, page_size: int, options: Mapping[str, Any]) -> None:
    """Compare packed, chunked steps with a plain pass, on random tokens of the model's vocabulary.

    They may differ as far as rounding explains: by some times what one plain pass differs from
    another that attends by Saccade under the same masks, from one whose embeddings are off by a
    rounding, and from one that goes on token by token over transformers' own cache, where layers
    keep states. That takes three passes over 36 tokens (with latents four) and four over 9 to 11
    (with states 8 over 5, and 12 over 3), with pages of its own, and leaves PyTorch's random
    numbers where they were.

    Args:
        page_size, options: of the engine, so that the same kernels run.

    Raises:
        ValueError: naming the model, if they differ by more.
    """
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        prompts = _prompts(model)
        plain = model.plain_logits(prompts)
        again = model.whole_logits(prompts)
        # A latent is attended to by yet another formula. It is told what packed steps are told, so
        # that what it differs by may be more than rounding: a mask that a layer makes by itself.
        absorbed = model.whole_logits(prompts, AlonePass()) if model.latent else again
        # Attention is not all that rounds otherwise: layers that are compiled do, and products of
        # other sizes.
        torch.manual_seed(0)
        moved = model.plain_logits(prompts, torch.finfo(model.dtype).eps)
        packed, telling = _packed(model, prompts, page_size, options)
        # States are worked out by a formula for many tokens at once, or for one after the other.
        cached = _cached(model, prompts) if model.states else plain
    plain, again, absorbed, moved, packed, cached = (
        each.flatten(0, 1).double() for each in (plain, again, absorbed, moved, packed, cached)
    )
    compared = plain.isfinite().all(1) & again.isfinite().all(1) & telling.flatten()
    if not compared.any():
        return
    unit = (plain - plain.mean(1, keepdim=True)).norm(dim=1)
    rounding = ROUNDINGS * torch.finfo(model.dtype).eps
    of_states = min(_typical(cached - plain, unit, compared), torch.finfo(model.dtype).eps ** 0.5)
    of_roundings = max(_typical(each - plain, unit, compared) for each in (again, moved))
    of_latents = _typical(absorbed - plain, unit, compared)
    of_roundings = max(of_roundings, min(of_latents, MARGIN * of_roundings))
    allowed = MARGIN * (of_roundings + of_states) + rounding
    differs = _typical(packed - plain, unit, compared)
    if not differs <= allowed:
        raise ValueError(
            f"model: got {model.name}, whose logits differ by {differs:.2g} of their size between "
            "a plain pass and one over chunks of several sequences side by side, where rounding "
            f"explains {allowed:.2g}; takes a model whose layers keep nothing but keys and values, "
            "which takes positions from position_ids, whose rows see what a causal mask or a "
            "window shows, and none of whose numbers follow other rows of a pass (as scales of "
            "whole tensors do)"
        )


def _cached(model: PackedModel, prompts: Tensor) -> Float[Tensor, "prompts length vocabulary"]:
    """The logits of every row over transformers' own cache, in which models keep states."""
    try:
        return model.cached_logits(prompts)
    except Exception as error:  # whatever a model's code raises
        raise ValueError(
            f"model: got {model.name}, which fails over transformers' own cache ({error}); takes "
            "one that generates with it"
        ) from error


def _prompts(model: PackedModel) -> Int[Tensor, "prompts length"]:
    """Random tokens that have no special meaning."""
    length = min(LENGTH, model.longest or LENGTH)
    random = torch.Generator().manual_seed(0)
    ordinary = sorted(set(range(min(model.vocabulary, 2**16))) - model.special_tokens)
    chosen = torch.randint(len(ordinary), (PROMPTS, length), generator=random)
    return torch.tensor(ordinary)[chosen].to(model.device)


def _packed(
    model: PackedModel, prompts: Tensor, page_size: int, options: Mapping[str, Any]
) -> tuple[Float[Tensor, "prompts length vocabulary"], Bool[Tensor, "prompts length"]]:
    """The logits of every row, from steps such as the engine's; and which rows tell something.

    Those of the first step follow no other sequence. Where layers keep states, it is rows of later
    chunks, which go on from a state, and steps are short, so that these are most.
    """
    length = prompts.shape[1]
    # So that a chunk of one token comes, and every prompt is cut.
    rows = max(length // 2 - 1 if model.states else length - 1, 1)
    cache = saccade.PagedCache(
        PROMPTS * (-(-length // page_size) + 1), page_size, dtype=model.dtype,
        device=model.device, prefix_caching=False, num_states=PROMPTS, **model.page_sizes(),
    )  # fmt: skip
    scheduler = Scheduler(
        cache, max_batch_tokens=rows, max_sequences=PROMPTS, preemption="recompute",
        first_length=model.first_length,
    )  # fmt: skip
    for number, prompt in enumerate(prompts.tolist()):
        scheduler.add(Request(number, prompt, Sampling(), Limits(1)))
    found: list[list[Tensor]] = [[] for _ in range(PROMPTS)]
    telling = torch.ones(PROMPTS, length, dtype=torch.bool, device=model.device)
    telling[0, :rows] = False
    while (plan := scheduler.plan()) is not None:
        step = BatchStep(cache, plan, model.numbers, options, model.states_of_layers)
        step.last_rows = torch.arange(step.input_ids.shape[1], device=model.device)
        chunks = model.logits(step).split([chunk.rows for chunk in plan.chunks])
        scheduler.commit(plan.chunks)
        for chunk, logits in zip(plan.chunks, chunks, strict=True):
            found[chunk.request.number].append(logits)
            if model.states and chunk.start == 0:
                telling[chunk.request.number, : chunk.stop] = False
            if chunk.draws:
                scheduler.remove(chunk.request)
    return torch.stack([torch.cat(each) for each in found]), telling


def _typical(difference: Tensor, unit: Tensor, compared: Tensor) -> float:
    """How far most rows are off, in parts of their logits' size."""
    relative = difference.norm(dim=1) / unit
    return float(relative[compared].nan_to_num(torch.inf).quantile(QUANTILE))

"""Sequences sharded over ranks: a model of transformers trains on rows that no GPU holds alone.

Every rank has the whole model and is given the same batch. It computes its own rows of all layers;
attention alone exchanges rows (`saccade.parallel`). Losses and gradients are those of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from saccade import masks, parallel, scores
from saccade.integrations.arguments import sliding_window_mask
from saccade.integrations.transformers.attention import CAUSAL, NAME, register

Model = TypeVar("Model", bound=torch.nn.Module)

torch.library.define(
    "saccade::positions_of_one_sequence", "(Tensor position_ids, Tensor? attention_mask) -> Tensor"
)

ATTENDING = ("full_attention", "sliding_attention")  # layers, as configs call them
IGNORED = -100  # of labels, in transformers
COUNTED = "num_items_in_batch"  # what transformers' losses are divided by
# What a model's forward pass may be given beside tokens, labels and positions.
NOT_SHARDED = (
    "past_key_values", "inputs_embeds", "cache_position", "shift_labels", "logits_to_keep",
    "saccade_step",
)  # fmt: skip
# The same of what a config may ask for as well: weights are never written out, hidden states would
# be of some rows, and the loss of routers is no sum over rows.
NOT_GIVEN = ("output_attentions", "output_hidden_states", "output_router_logits")
# Offsets of packed sequences, as collators for flash attention name them beside tokens.
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")


class ShardedRows:
    """What layers attend by: this rank's rows of a sequence, beside those of other ranks."""

    takes_dropout = True

    def __init__(self, plan: parallel.Plan, documents: masks.Mask | None, index: Tensor) -> None:
        """plan: of a causal mask. documents: of sequences packed into one row, else None. index:
        the rows of this rank, on the device of tokens."""
        self.plan, self.documents, self.index = plan, documents, index
        self.plans: dict[Any, parallel.Plan] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, mask: masks.Mask,
        score: scores.Score | None, scale: float | None, sinks: Tensor | None,
        dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """A layer's attention; see `AttentionStep`."""
        heads = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        plan = self.plan_of(mask, heads)
        output = parallel.attention(
            query, key, value, plan=plan, score=score, scale=scale, sinks=sinks,
            dropout_p=dropout_p, reduce_gradients=False,
        )  # fmt: skip
        return output.transpose(1, 2)

    def plan_of(self, mask: masks.Mask, heads: tuple[int, int, int, int]) -> parallel.Plan:
        """The plan of layers with a mask and so many query and kv heads of these channels."""
        captured = mask.captured  # of numbers alone, as a step is told windows and nothing else
        kind = mask.key, *captured.ints, *captured.floats, heads
        plan = None if captured.tensors else self.plans.get(kind)
        if plan is None:
            names = ("query_heads", "kv_heads", "head_dim", "value_dim")
            sizes = self.plan.sizes._replace(**dict(zip(names, heads, strict=True)))
            seen = mask if self.documents is None else mask & self.documents
            plan = self.plans[kind] = replace(self.plan, sizes=sizes).for_mask(seen)
        return plan


def shard_sequences(
    model: Model, mesh: Any, *, method: str = "auto", reduce_gradients: bool = True
) -> Model:
    """Let a causal language model train on sequences whose rows are dealt to ranks, by one call.

    Afterwards `model(input_ids=..., labels=...)` is a collective: every rank gives the same batch,
    and computes its own rows of it. The loss is that of the whole batch, on every rank. Logits are
    those of the rank's rows; `model.sequence_plan.unshard(logits, dim=1)` gives all.

    Args:
        model: one that attends by transformers' AttentionInterface, in causal layers, with or
            without sliding windows. It is changed in place. Layers that mix rows in other ways
            (linear attention, convolutions) are refused, and so is the loss of routers
            (`output_router_logits`), which is no sum over rows. Attention drops the weights that
            one process drops by the same seed of PyTorch's generator; what drops rows elsewhere
            draws for this rank's rows alone.
        mesh: a `ProcessGroup` or a `DeviceMesh` of one dimension, as in `saccade.parallel.plan`.
        method: as in `saccade.parallel.plan`.
        reduce_gradients: whether gradients of parameters are summed over ranks as they come, in 32
            bits. Where False a rank's are those of its own rows, and their sum over ranks is that
            of the whole batch: for what sums gradients itself. (DDP and FSDP take the mean: have
            them multiply by the number of ranks.)

    Returns:
        The model. `input_ids` and `labels` are [batch, length]; packed sequences begin where
        `position_ids`, [1, length], do not go on, unless there is an `attention_mask` (as
        transformers has it), and at `cu_seq_lens_q`; padding is refused. `num_items_in_batch`
        divides the loss of all rows, as it does on one process; where it is None, the number of
        labels does.
        The model cannot be copied or pickled any more; its state_dict can.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes, on every rank. A
            batch that differs between ranks is refused on CPUs; on GPUs, where comparing waits for
            the device, the first one, and none in a graph of the whole model.

    Examples:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=2, max_position_embeddings=64,
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> model = saccade.integrations.transformers.shard_sequences(model, 1)
        >>> tokens = torch.arange(40)[None]  # under torchrun: a process group in place of 1
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    _check_layers(model)
    register()
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    sharded = _Sharded(model, mesh, method, reduce_gradients)
    sharded.sum_gradients()
    sharded.rotate_by_all()
    model.forward = sharded.forward
    return model


class _Sharded:
    """The forward pass of a model whose sequences are sharded."""

    def __init__(self, model: Any, mesh: Any, method: str, reduce_gradients: bool) -> None:
        self.model, self.mesh, self.method = model, mesh, method
        self.reduce_gradients = reduce_gradients
        self.summed_up: Any = WeakIdKeyDictionary()  # parameters whose gradients are summed
        self.whole: Callable[..., Any] = model.forward
        self.known = SimpleNamespace()  # rows of batches where nothing is packed, by their shape
        self.in_graphs: set[str] = set()  # the names of those that graphs read
        self.batch_is_known = False
        self.rotates = False  # any module by all positions
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.sizes: dict[str, Any] = {
            "query_heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "dtype": model.dtype,
        }
        self.heads = heads, self.sizes["kv_heads"], *[self.sizes["head_dim"]] * 2
        self.masks = _masks_of_layers(config)
        # What no plan takes is refused before the first step.
        self.group = parallel.plan(None, 0, mesh, method=method, **self.sizes).group

    def forward(
        self, input_ids: Tensor | None = None, *, labels: Tensor | None = None,
        attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        use_cache: bool | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """The forward pass of this rank's rows."""
        counted = options.pop(COUNTED, None)
        _check(input_ids, labels, position_ids, counted, options)
        config = self.model.config
        for name in NOT_GIVEN:
            asked = options.get(name)
            if getattr(config, name, False) if asked is None else asked:
                raise ValueError(f"{name}: got True beside sharded sequences, takes False")
        return_dict = options.pop("return_dict", None)
        return_dict = getattr(config, "return_dict", True) if return_dict is None else return_dict
        assert input_ids is not None
        in_graph = torch.compiler.is_compiling()
        if not in_graph:
            _check_unpadded(attention_mask)
            self.sum_gradients()  # of parameters too that were unfrozen or replaced since
            self._check_batch(input_ids, labels, counted)
        documents, offsets = None, [options.pop(name, None) for name in OFFSETS]
        if not in_graph:  # beside a mask transformers keeps none apart by their positions
            told = position_ids if attention_mask is None else None
            documents = _documents_of(told, _offsets(offsets), input_ids.shape[1])
        elif any(each is not None for each in offsets):
            raise ValueError(f"{OFFSETS[0]}: got some in a graph of the whole model, takes None")
        # Dynamo makes numbers of what a range is as long as, and a graph of one shape by that.
        batch, length = (len(range(size)) for size in input_ids.shape)
        device = input_ids.device
        if documents is None:
            rows = getattr(self.known, self._planned(batch, length, device, in_graph))
        else:
            rows = self._rows((batch, length), documents, device)
        self.model.sequence_plan = rows.plan
        positions = torch.arange(length, device=device)[None]
        if position_ids is not None:
            positions = position_ids
        if in_graph and (position_ids is not None or attention_mask is not None):
            # Each time the graph runs, whose plan is of one sequence.
            positions = torch.ops.saccade.positions_of_one_sequence(positions, attention_mask)
        if labels is not None:
            shifted = pad(labels, (0, 1), value=IGNORED)[:, 1:]
            local = shifted.index_select(1, rows.index)
            counted = (shifted != IGNORED).sum() if counted is None else counted
            options |= {"labels": local, "shift_labels": local, COUNTED: counted}
        if self.rotates:
            self.index, self.positions = rows.index, positions
        output = self.whole(
            input_ids=input_ids.index_select(1, rows.index),
            position_ids=positions.index_select(1, rows.index),
            use_cache=False, saccade_step=rows, return_dict=True, **options,
        )  # fmt: skip
        if labels is not None and self.group is not None:
            output.loss = _Total.apply(self.group, output.loss)
        return output if return_dict else output.to_tuple()

    def rotate_by_all(self) -> None:
        """Have rotations that follow the greatest position follow that of all ranks' rows."""
        for module in self.model.modules():
            if _follows_greatest(getattr(module, "rope_type", None)):
                module.forward = functools.partial(self._rotated, module.forward)
                self.rotates = True

    def _rotated(
        self, rotate: Callable[..., Any], rows: Tensor, position_ids: Tensor, *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """What a module of rotations gives for this rank's rows, found from all positions."""
        whole = rotate(rows, self.positions, *args, **options)
        return tree_map(lambda each: each.index_select(1, self.index), whole)

    @torch.compiler.assume_constant_result
    def _planned(self, batch: int, length: int, device: torch.device, in_graph: bool) -> str:
        """The name of what is known of batches of a shape where nothing is packed.

        Dynamo calls it while it traces, as a graph cannot plan, and has what it gives, a name, in
        the graph: which holds for that shape. So what a graph reads stays known.
        """
        if in_graph:
            self.sum_gradients()
        name = f"rows of {batch}, {length} on {device}"
        if name not in vars(self.known):
            for old in vars(self.known).keys() - self.in_graphs:
                delattr(self.known, old)  # plans of another length go
            setattr(self.known, name, self._rows((batch, length), None, device))
        if in_graph:
            self.in_graphs.add(name)
        return name

    def _rows(
        self, shape: tuple[int, int], documents: masks.Mask | None, device: torch.device
    ) -> ShardedRows:
        """What layers attend by, of batches of a shape."""
        plan = parallel.plan(
            documents, shape[1], self.mesh, causal=True, method=self.method, batch=shape[0],
            **self.sizes,
        )  # fmt: skip
        fewest = min(len(plan.rows_of(rank)) for rank in range(plan.ranks))
        if fewest == 0:  # layers of transformers fail on no rows
            raise ValueError(
                f"input_ids: got {shape[1]} tokens, of which a rank gets none, takes at least one "
                f"for each of {plan.ranks} ranks"
            )
        rows = ShardedRows(plan, documents, plan.rows.to(device))
        for mask in self.masks:  # now, as a graph inside of the model cannot plan
            rows.plan_of(mask, self.heads)
        return rows

    def sum_gradients(self) -> None:
        """Have gradients of parameters summed over ranks, where they are not yet."""
        if not self.reduce_gradients or self.group is None:
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter not in self.summed_up:
                parameter.register_hook(self.summed)
                self.summed_up[parameter] = True

    def __reduce__(self) -> Any:
        raise TypeError(
            f"model: got a copy, or a pickle, of a {type(self.model).__name__} whose sequences are "
            "sharded, which reads its process group; takes one from before shard_sequences, or "
            "model.state_dict()"
        )

    def _check_batch(
        self, input_ids: Tensor, labels: Tensor | None, counted: float | Tensor | None
    ) -> None:
        """Refuse batches that differ between ranks: always on CPUs; on GPUs, where reading waits
        for the device, the first one.

        A sum weighted by places tells of rows that moved; that other tokens have the same one is
        not excluded. Labels of which there are none count as a number that no sum is.
        """
        if self.group is None or (self.batch_is_known and input_ids.is_cuda):
            return
        self.batch_is_known = True
        sums = [float("inf") if each is None else _weighted(each) for each in (input_ids, labels)]
        sums.append(float("inf") if counted is None else float(counted))
        of_rank = torch.tensor(sums, dtype=torch.float64, device=input_ids.device)
        ranks = dist.get_world_size(self.group)
        all_sums = [torch.empty_like(of_rank) for _ in range(ranks)]
        dist.all_gather(all_sums, of_rank, group=self.group)
        for place, name in enumerate(("input_ids", "labels", COUNTED)):
            others = [rank for rank in range(ranks) if all_sums[rank][place] != all_sums[0][place]]
            if others:
                raise ValueError(
                    f"{name}: got other numbers on rank {others[0]} than on rank 0, takes the same "
                    "batch on every rank (no DistributedSampler)"
                )

    def summed(self, gradient: Tensor) -> Tensor:
        """A parameter's gradient, summed over ranks."""
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        dist.all_reduce(total.contiguous(), group=self.group)
        return total.to(gradient.dtype)


class _Total(torch.autograd.Function):
    """The sum of all ranks' losses; each rank's gradient is that of its own."""

    @staticmethod
    def forward(ctx: Any, group: Any, loss: Tensor) -> Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0]


def _check_layers(model: Any) -> None:
    """Refuse what is no model of transformers, and layers that mix rows elsewhere than in
    attention: they would see this rank's alone."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not hasattr(model, "set_attn_implementation"):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"model: got {kind}, takes a causal language model of transformers (PreTrainedModel)"
        )
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - set(ATTENDING)
    if other:
        raise ValueError(
            f"model: got layers of {', '.join(sorted(other))}, takes {' or '.join(ATTENDING)}"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            raise ValueError(f"model: got {name}, a convolution along rows, takes attention alone")


def _masks_of_layers(config: Any) -> list[masks.Mask]:
    """The masks of a model's layers, as they are told to steps."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ATTENDING[window is not None :][:1]
    windowed = sliding_window_mask(window, True) if ATTENDING[1] in kinds else None
    causal = CAUSAL if ATTENDING[0] in kinds else None
    return [mask for mask in (causal, windowed) if mask is not None]


def _follows_greatest(rope_type: Any) -> bool:
    """Whether rotations of a type, or of one for each kind of layers, are other ones in a pass that
    goes past a position."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds if kind is not None)


def _begins_anew(position_ids: Tensor) -> Tensor:
    """Which rows, but for the first, begin another sequence, as transformers tells them."""
    return position_ids.diff(dim=1) != 1


def _positions_of_one(position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Positions, once it is known that they are of one sequence without padding."""
    _check_unpadded(attention_mask)
    if attention_mask is None and bool(_begins_anew(position_ids).any()):
        raise ValueError(
            "position_ids: got sequences packed into one row in a graph of the whole model, takes "
            "one sequence there; compile model.model, outside of which each batch is planned"
        )
    return position_ids.clone()


def _like_positions(position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    return torch.empty_like(position_ids)


torch.library.impl(
    "saccade::positions_of_one_sequence", "CompositeExplicitAutograd", _positions_of_one
)
torch.library.register_fake("saccade::positions_of_one_sequence", _like_positions)


def _documents_of(
    position_ids: Tensor | None, offsets: Tensor | None, length: int
) -> masks.Mask | None:
    """The mask of sequences packed into one row, which begin where positions do not go on, and at
    offsets."""
    begins = None
    if position_ids is not None:
        begins = pad(_begins_anew(position_ids), (1, 0))
    if offsets is not None:
        at_offsets = torch.zeros(1, length + 1, dtype=torch.bool, device=offsets.device)
        at_offsets[:, offsets.long()] = True
        begins = at_offsets[:, :-1] if begins is None else begins | at_offsets[:, :-1]
    if begins is None or not bool(begins[:, 1:].any()):
        return None
    return masks.documents(begins.long().cumsum(1))


def _offsets(given: list[Tensor | None]) -> Tensor | None:
    """Offsets of the sequences of queries and keys, which are the same rows here."""
    of_queries, of_keys = given
    if of_keys is not None and (of_queries is None or not torch.equal(of_queries, of_keys)):
        got = "none" if of_queries is None else "others"
        raise ValueError(f"{OFFSETS[1]}: got some where {OFFSETS[0]} has {got}, takes the same")
    return of_queries


def _check(
    input_ids: Any, labels: Any, position_ids: Any, counted: Any, options: dict[str, Any]
) -> None:  # fmt: skip
    """Refuse what would be computed of some rows as if they were all."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise TypeError(f"input_ids: got {_kind(input_ids)}, takes a tensor [batch, length]")
    for name in NOT_SHARDED:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{name}: got some beside sharded sequences, takes None")
    shape = tuple(input_ids.shape)
    if labels is not None and tuple(labels.shape) != shape:
        raise ValueError(f"labels: got {_kind(labels)}, takes the shape of input_ids, {shape}")
    if position_ids is not None and tuple(position_ids.shape) != (1, shape[1]):
        raise ValueError(f"position_ids: got {_kind(position_ids)}, takes [1, {shape[1]}]")
    for name, each in options.items():
        if isinstance(each, Tensor) and each.shape[:2] == shape:
            raise ValueError(
                f"{name}: got {_kind(each)} beside sharded sequences, takes nothing with rows: "
                "input_ids, labels and position_ids alone are dealt to ranks"
            )
    number = isinstance(counted, int | float) and not isinstance(counted, bool)
    if not (counted is None or number or (isinstance(counted, Tensor) and counted.numel() == 1)):
        raise TypeError(f"{COUNTED}: got {_kind(counted)}, takes a number")


def _check_unpadded(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise ValueError(
            "attention_mask: got padding, takes None; pack sequences into one row and say by "
            "position_ids where they begin"
        )


def _weighted(numbers: Tensor) -> float:
    """A sum of whole numbers by their places."""
    flat = numbers.reshape(-1).long()
    weights = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 % 1000003
    return float((flat * weights).sum())


def _kind(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

"""Products of equal rows in compiled layers: one operator, over weights that lie side by side.

A compiled layer has its linear layers' weights as inputs, so that all layers share one graph. Where
several of them multiply the same rows, they become one operator here, before the compiler sees the
graph. It looks where the weights lie when it is called (`merged_products` has moved them), and
multiplies by each alone where they do not follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from saccade.serving.merged_products import as_one

torch.library.define(
    "saccade::product_of_all", "(Tensor rows, Tensor[] weights, Tensor[] biases) -> Tensor"
)


def _product(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    weight, bias = as_one(weights), as_one(biases) if biases else None
    if weight is not None and (bias is not None or not biases):
        return F.linear(rows, weight, bias)
    each_bias = biases or [None] * len(weights)
    products = [F.linear(rows, *pair) for pair in zip(weights, each_bias, strict=True)]
    return torch.cat(products, -1)


def _empty(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], sum([weight.shape[0] for weight in weights]))


torch.library.impl("saccade::product_of_all", "CompositeExplicitAutograd", _product)
torch.library.register_fake("saccade::product_of_all", _empty)


def with_products_of_all(backend: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` whose graphs multiply equal rows at once."""

    def compiled(module: GraphModule, inputs: Any, **options: Any) -> Any:
        join_products(module.graph)
        module.recompile()
        return backend(module, inputs, **options)

    return compiled


def join_products(graph: Graph) -> int:
    """Have linear layers that follow one another with the same rows multiply them at once.

    Returns:
        How many groups there are.
    """
    groups: list[list[Node]] = []
    for node in [node for node in graph.nodes if _is_linear(node)]:
        before = groups[-1][-1] if groups else None
        if before is None or _rows(before) is not _rows(node) or _bias(before) != _bias(node):
            groups.append([])
        groups[-1].append(node)
    groups = [group for group in groups if len(group) > 1]
    for group in groups:
        _join(graph, group)
    return len(groups)


def _join(graph: Graph, group: Sequence[Node]) -> None:
    weights: list[Any] = [node.args[1] for node in group]
    biases: list[Any] = [node.args[2] for node in group] if _bias(group[0]) else []
    for each in (*weights, *biases):
        if each.op != "placeholder":  # a rank's part of an input, and of nothing else
            group[0].prepend(each)
    with graph.inserting_before(group[0]):
        whole = graph.call_function(
            torch.ops.saccade.product_of_all.default, (_rows(group[0]), weights, biases)
        )
        start = 0
        for node in group:
            size = _value(node.args[1]).shape[0]
            node.replace_all_uses_with(graph.call_function(torch.narrow, (whole, -1, start, size)))
            start += size
    for node in group:
        graph.erase_node(node)


def _is_linear(node: Node) -> bool:
    """Whether a node multiplies rows by weights that are inputs of the graph, or a rank's parts of
    such, and plain tensors."""
    others = [each for each in node.args[1:] if each is not None]
    return (
        node.op == "call_function"
        and node.target is F.linear
        and not node.kwargs
        and isinstance(_rows(node), Node)
        and all([isinstance(each, Node) and _is_input(each) for each in others])
        and all([_is_plain(_value(each), _value(_rows(node)).dtype) for each in others])
    )


def _is_input(node: Node) -> bool:
    """Whether a node is an input of the graph, or this rank's part of one."""
    if node.op == "placeholder":
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name not in ("to_local", "prim_to_local") or len(node.args) != 1 or node.kwargs:
        return False
    source = node.args[0]
    return isinstance(source, Node) and source.op == "placeholder"


def _is_plain(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is none of other libraries', for numbers of eight bits say."""
    return value.dtype == dtype and not is_traceable_wrapper_subclass(value)


def _value(node: Any) -> Tensor:
    """What a node gives, without numbers."""
    return node.meta["example_value"]


def _rows(node: Node) -> Any:
    return node.args[0]


def _bias(node: Node) -> bool:
    return len(node.args) > 2 and node.args[2] is not None

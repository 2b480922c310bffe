"""Tree attention: the names of `xformers.ops.tree_attention`, by which drafted tokens attend.

Drafted tokens are a tree: each sees the keys of the context, and of the draft itself and its
ancestors. The two parts are computed apart and merged.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.integrations.xformers.attention import (
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    merge_attentions,
)
from saccade.integrations.xformers.attn_bias import AttentionBias
from saccade.integrations.xformers.operators import triton_splitk

__all__ = [
    "SplitKAutotune",
    "TreeAttnMetadata",
    "construct_full_tree_choices",
    "construct_tree_choices",
    "get_full_tree_size",
    "select_prefix_op",
    "tree_attention",
    "use_triton_splitk_for_prefix",
]

Node = tuple[int, ...]
"""A drafted token: of each of its ancestors and itself, which child of its parent it is."""


def tree_attention(
    q: Tensor,
    spec_k: Tensor,
    spec_v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    spec_attn_bias: Tensor,
    prefix_attn_bias: AttentionBias,
    prefix_op: Any = None,
    suffix_op: Any = None,
    autotune: bool = False,
    quantized_kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of drafted tokens to the keys of a context and to a tree of drafts.

    Args:
        q: [B, drafted, H, K], or [B, drafted, G, H, K].
        spec_k, spec_v: of the drafted tokens, of q's form; there may be more than q has.
        cache_k, cache_v: of the context, [B, longest, ...], or [1, rows, ...] of pages.
        spec_attn_bias: [drafted, keys of drafted], added to the scores; of a tree it is
            `TreeAttnMetadata.attention_bias`.
        prefix_attn_bias: keys that B · drafted queries see: a `BlockDiagonalPaddedKeysMask`, say.
        prefix_op, suffix_op, autotune: name kernels of xformers', and are not needed.
        quantized_kv_scales: None; keys of eight bits are not served.

    Returns:
        q's form, with the width of the values.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias, tree_attention
        >>> tree = tree_attention.TreeAttnMetadata.from_tree_choices([(0,), (1,), (0, 0)])
        >>> q, spec_k, spec_v = torch.randn(3, 2, 4, 8, 32)  # the root, and three more
        >>> cache_k, cache_v = torch.randn(2, 2, 16, 8, 32)
        >>> prefix = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([4, 4], 16, [10, 16])
        >>> output = tree_attention.tree_attention(
        ...     q, spec_k, spec_v, cache_k, cache_v, tree.attention_bias, prefix
        ... )
        >>> assert output.shape == q.shape
    """
    if quantized_kv_scales is not None or cache_k.dtype == torch.uint8:
        raise NotImplementedError(
            f"cache_k: got {cache_k.dtype} with quantized_kv_scales, takes keys and values in q's "
            "dtype, and None"
        )
    batch, drafted = q.shape[:2]
    if list(spec_attn_bias.shape) != [drafted, spec_k.shape[1]]:
        raise ValueError(
            f"spec_attn_bias: got {list(spec_attn_bias.shape)}, takes {[drafted, spec_k.shape[1]]}"
        )
    one_behind_another = [rows.flatten(0, 1).unsqueeze(0) for rows in (q, cache_k, cache_v)]
    of_prefix, lse_prefix = memory_efficient_attention_partial(
        *one_behind_another, attn_bias=prefix_attn_bias
    )
    of_tree, lse_tree = memory_efficient_attention_forward_requires_grad(
        q, spec_k, spec_v, spec_attn_bias.to(q.dtype)
    )
    by_entry = of_prefix[0].unflatten(0, (batch, drafted))
    lse_by_entry = lse_prefix[0].unflatten(-1, (batch, drafted)).movedim(-2, 0)
    outputs, lses = [by_entry, of_tree.to(by_entry.dtype)], [lse_by_entry, lse_tree]
    return merge_attentions(outputs, lses, False, q.dtype)[0]


# ---- trees ---------------------------------------------------------------------------------------


@dataclass
class TreeAttnMetadata:
    """A tree of drafted tokens, below a root that is the last token of the context.

    Nodes are numbered by depth, then by their places among siblings; the root is node 0.

    Attributes:
        tree_choices: the nodes without the root, in order.
        attention_bias: [nodes, nodes]: 0 where a node sees another (itself, an ancestor), else
            -inf.
        tree_indices: [nodes]: where each node's token stands in the drafts, of which each level
            has as many as its largest choice.
        retrieval_indices: [leaves, depth + 1]: the nodes from the root to each leaf, then -1.
        path_lengths: how many nodes each of these paths has.
        tree_seq_position_ids: [nodes]: the depth of each.
        parent_node_indices: [nodes - 1]: the parent of each node but the root.
        child_node_indices: [nodes, most children]: the children of each as places in
            tree_choices, the last one repeated; 0 of a leaf.
        num_children_per_node: [nodes].
        candidate_idx: [nodes - 1]: how many siblings come before each node.
        num_nodes_per_level, num_nodes_per_level_cpu: [depth + 1].
        num_children_per_node_at_level, num_children_per_node_at_level_cpu: of each level, the
            children of its nodes.
        subtree_sizes: how many nodes there are up to each level.

    Examples:
        >>> from saccade.integrations.xformers import tree_attention
        >>> tree = tree_attention.TreeAttnMetadata.from_tree_choices([(0,), (1,), (0, 0)])
        >>> (tree.attention_bias == 0).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """

    tree_choices: Sequence[Node]
    attention_bias: Tensor
    tree_indices: Tensor
    retrieval_indices: Tensor
    path_lengths: list[int]
    tree_seq_position_ids: Tensor
    parent_node_indices: Tensor
    child_node_indices: Tensor
    num_children_per_node: Tensor
    candidate_idx: Tensor
    num_nodes_per_level: Tensor
    num_nodes_per_level_cpu: Tensor
    num_children_per_node_at_level: list[Tensor]
    num_children_per_node_at_level_cpu: list[Tensor]
    subtree_sizes: list[int]

    @classmethod
    @functools.lru_cache
    def from_tree_choices_cached(
        cls,
        tree_choices: tuple[Node, ...],
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> TreeAttnMetadata:
        """`from_tree_choices` of a tuple, made once."""
        return cls.from_tree_choices(tree_choices, dtype, device)

    @classmethod
    def from_tree_choices(
        cls, tree_choices: Sequence[Node], dtype: torch.dtype | None = None, device: Any = None
    ) -> TreeAttnMetadata:
        """The tree of these nodes, of which each comes with all its ancestors.

        Raises:
            ValueError: for a node whose parent is not among them.
        """
        nodes = sorted(tree_choices, key=lambda node: (len(node), node))
        numbers = {(): 0} | {node: number + 1 for number, node in enumerate(nodes)}
        for node in nodes:
            if node[:-1] not in numbers:
                raise ValueError(
                    f"tree_choices: got {node} without {node[:-1]}, takes nodes with all their "
                    "ancestors"
                )
        children = {node: [one for one in nodes if one[:-1] == node] for node in numbers}
        paths = [[numbers[node[:end]] for end in range(len(node) + 1)] for node in numbers]
        of_leaves = [path for node, path in zip(numbers, paths, strict=True) if not children[node]]
        longest = max(map(len, paths))
        levels = [len(list(level)) for _, level in itertools.groupby(numbers, len)]
        most = max(1, *map(len, children.values()))

        def whole(numbers: Sequence[Any], dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        num_children = whole([len(below) for below in children.values()])
        by_level = list(num_children.split(levels))
        return cls(
            tree_choices=nodes,
            attention_bias=_prepare_tree_attn_bias(nodes, levels[1:], dtype, device),
            tree_indices=whole(_places_in_drafts(nodes)),
            retrieval_indices=whole([path + [-1] * (longest - len(path)) for path in of_leaves]),
            path_lengths=[len(path) for path in of_leaves],
            tree_seq_position_ids=whole([len(node) for node in numbers], torch.int32),
            parent_node_indices=whole([numbers[node[:-1]] for node in nodes]),
            child_node_indices=whole(
                [_padded([numbers[one] - 1 for one in below], most) for below in children.values()]
            ),
            num_children_per_node=num_children,
            candidate_idx=whole([children[node[:-1]].index(node) for node in nodes]),
            num_nodes_per_level=whole(levels),
            num_nodes_per_level_cpu=torch.tensor(levels),
            num_children_per_node_at_level=by_level,
            num_children_per_node_at_level_cpu=[level.cpu() for level in by_level],
            subtree_sizes=list(itertools.accumulate(levels)),
        )


def _padded(children: list[int], most: int) -> list[int]:
    """Children up to so many, the last one repeated; 0 where there is none."""
    last = children[-1] if children else 0
    return children + [last] * (most - len(children))


def _places_in_drafts(nodes: Sequence[Node]) -> list[int]:
    """Where tokens of nodes stand in the drafts, which lie level by level; the root's is 0."""
    places = [0]
    for _, level in itertools.groupby(nodes, len):
        before = max(places)
        places += [before + 1 + node[-1] for node in level]
    return places


def _get_depth_counts(sorted_tree_choices: Sequence[Node]) -> list[int]:
    """How many nodes each level has below the root; vLLM imports it by this name."""
    return [len(list(level)) for _, level in itertools.groupby(sorted_tree_choices, len)]


def _prepare_tree_attn_bias(
    sorted_tree_choices: Sequence[Node],
    depth_counts: Sequence[int],
    dtype: torch.dtype | None,
    device: Any,
) -> Tensor:
    """0 where a node sees another, else -inf; vLLM imports it by this name."""
    numbers = {(): 0} | {node: number + 1 for number, node in enumerate(sorted_tree_choices)}
    rows = [number for node, number in numbers.items() for _ in range(len(node) + 1)]
    columns = [numbers[node[:end]] for node in numbers for end in range(len(node) + 1)]
    bias = torch.full((len(numbers), len(numbers)), -torch.inf, dtype=dtype)
    bias[rows, columns] = 0
    return bias.to(device)


def construct_full_tree_choices(tree_depth: int, branching: int) -> list[Node]:
    """The nodes of a tree in which each but the leaves has so many children.

    Examples:
        >>> from saccade.integrations.xformers import tree_attention
        >>> tree_attention.construct_full_tree_choices(2, 2)
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return construct_tree_choices([branching] * tree_depth)


def construct_tree_choices(branching: Sequence[int]) -> list[Node]:
    """The nodes of a tree in which nodes have as many children as their level says.

    Examples:
        >>> from saccade.integrations.xformers import tree_attention
        >>> tree_attention.construct_tree_choices([1, 2])
        [(0,), (0, 0), (0, 1)]
    """
    levels = (branching[: depth + 1] for depth in range(len(branching)))
    return [node for level in levels for node in itertools.product(*map(range, level))]


def get_full_tree_size(tree_depth: int, branching: int) -> int:
    """How many nodes a full tree of so many levels has, the root's included.

    Examples:
        >>> from saccade.integrations.xformers import tree_attention
        >>> tree_attention.get_full_tree_size(3, 2)
        7
    """
    return sum(branching**level for level in range(tree_depth))


# ---- names of kernels ----------------------------------------------------------------------------


class SplitKAutotune(triton_splitk.FwOp):
    """The name of a kernel of xformers', which calls take and do not need.

    Examples:
        >>> from saccade.integrations.xformers import tree_attention
        >>> tree_attention.SplitKAutotune.NAME
        'triton_splitkF'
    """

    AUTOTUNE = True


def use_triton_splitk_for_prefix(B: int, G: int, tree_size: int) -> bool:
    """Whether xformers' own split of keys is to be named: saccade splits where that is faster.

    Examples:
        >>> from saccade.integrations.xformers import tree_attention
        >>> tree_attention.use_triton_splitk_for_prefix(1, 1, 4)
        False
    """
    return False


def select_prefix_op(
    B: int,
    G: int,
    tree_size: int,
    autotune: bool,
    attn_bias: AttentionBias,
    kv_cache_dtype: torch.dtype,
) -> None:
    """Which kernel of xformers' is to be named for the context: none.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias, tree_attention
        >>> bias = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([4], 16, [10])
        >>> tree_attention.select_prefix_op(1, 1, 4, False, bias, torch.bfloat16)
    """

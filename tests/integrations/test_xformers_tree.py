"""Attention of drafted trees, and the modules of xformers that programs ask about kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.integrations import xformers as stand_in
from saccade.integrations.xformers import attn_bias, tree_attention
from saccade.integrations.xformers.tree_attention import TreeAttnMetadata

CHOICES = [(1, 0), (0,), (1,), (0, 2), (1, 0, 0)]  # of a root with two children
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64, a few dozen terms


# All of the tree, or its last nodes.
@pytest.mark.parametrize(("heads", "drafted"), [((2,), 6), ((2, 3), 2)])
def test_a_tree_sees_its_context_and_itself(heads: tuple[int, ...], drafted: int) -> None:
    """As one softmax over the context and the drafts, with gradients; also over pages."""
    torch.manual_seed(0)
    longest, lengths, wide = 8, [5, 8], {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(2, drafted, *heads, 16, **wide)
    drafts = torch.randn(2, 2, 6, *heads, 16, **wide)
    context = torch.randn(2, 2, longest, *heads, 16, **wide)
    tree = TreeAttnMetadata.from_tree_choices(CHOICES, dtype=torch.float64)
    bias = tree.attention_bias[-drafted:]
    prefix = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([drafted] * 2, longest, lengths)
    found = tree_attention.tree_attention(
        q, drafts[0], drafts[1], context[0], context[1], bias, prefix
    )

    keys, values = (torch.cat(parts, 1) for parts in zip(context, drafts, strict=True))
    scores = torch.einsum("bi...d,bj...d->b...ij", q, keys) / 4
    seen = torch.arange(longest) < torch.tensor(lengths)[:, None]
    of_context = seen.view(2, *[1] * (len(heads) + 1), longest).expand(*scores.shape[:-1], -1)
    of_drafts = (bias == 0).expand(*scores.shape[:-1], -1)
    scores = scores.masked_fill(~torch.cat([of_context, of_drafts], -1), -torch.inf)
    wanted = torch.einsum("b...ij,bj...d->bi...d", scores.softmax(-1), values)
    torch.testing.assert_close(found, wanted, **CLOSE)
    leaves, grad = (q, drafts, context), torch.randn_like(wanted)
    for one, other in zip(
        *(torch.autograd.grad(each, leaves, grad) for each in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other, **CLOSE)

    pages = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)  # of 4 rows
    paged = prefix.make_paged(pages, 4, attn_bias.PagedBlockDiagonalPaddedKeysMask)
    rows = context.detach().unflatten(2, (2, 4)).flatten(1, 2)[:, pages.flatten().argsort()]
    with torch.no_grad():
        over_pages = tree_attention.tree_attention(
            q, drafts[0], drafts[1], rows[0].flatten(0, 1)[None], rows[1].flatten(0, 1)[None], bias,
            paged,
        )  # fmt: skip
    torch.testing.assert_close(over_pages, found, **CLOSE)


def test_what_a_tree_is_made_of() -> None:
    tree = TreeAttnMetadata.from_tree_choices_cached(tuple(CHOICES))
    assert tree.tree_choices == [(0,), (1,), (0, 2), (1, 0), (1, 0, 0)]
    lists = {name: x.tolist() for name, x in vars(tree).items() if isinstance(x, torch.Tensor)}
    del lists["attention_bias"]  # of which the test above shows what it does
    assert lists == {
        # (0, 2) is the third draft below (0,); the next level begins behind the largest choice
        "tree_indices": [0, 1, 2, 5, 3, 6],
        "retrieval_indices": [[0, 1, 3, -1], [0, 2, 4, 5]],
        "tree_seq_position_ids": [0, 1, 1, 2, 2, 3],
        "parent_node_indices": [0, 0, 1, 2, 4],
        "child_node_indices": [[0, 1], [2, 2], [3, 3], [0, 0], [4, 4], [0, 0]],
        "num_children_per_node": [2, 1, 1, 0, 1, 0],
        "candidate_idx": [0, 1, 0, 0, 0],
        "num_nodes_per_level": [1, 2, 2, 1],
        "num_nodes_per_level_cpu": [1, 2, 2, 1],
    }
    assert tree.path_lengths == [3, 4] and tree.subtree_sizes == [1, 3, 5, 6]
    assert [each.tolist() for each in tree.num_children_per_node_at_level] == [
        [2],
        [1, 1],
        [0, 1],
        [0],
    ]
    full = tree_attention.construct_full_tree_choices(2, 3)
    assert len(full) + 1 == tree_attention.get_full_tree_size(3, 3)
    with pytest.raises(ValueError, match=r"tree_choices: got \(1, 0\) without \(1,\)"):
        TreeAttnMetadata.from_tree_choices([(0,), (1, 0)])


def test_what_trees_do_not_have() -> None:
    rows = torch.randn(1, 2, 1, 8)
    prefix = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([2], 2, [2])
    given = rows, rows, rows, rows, rows
    with pytest.raises(ValueError, match=r"spec_attn_bias: got \[3, 3\], takes \[2, 2\]"):
        tree_attention.tree_attention(*given, torch.zeros(3, 3), prefix)
    with pytest.raises(NotImplementedError, match="quantized_kv_scales"):
        tree_attention.tree_attention(
            *given, torch.zeros(2, 2), prefix, quantized_kv_scales=(rows, rows)
        )


def test_what_programs_ask_about_kernels(capsys: Any) -> None:
    with stand_in.installed():
        import xformers.info as info
        import xformers.ops as xops
        from xformers.attn_bias_utils import ref_attention, ref_attention_bmhk
        from xformers.ops.fmha import common, dispatch
        from xformers.ops.tree_attention import SplitKAutotune

        torch.manual_seed(0)
        rows = torch.randn(3, 1, 6, 2, 8)
        asked = common.Inputs(*rows)
        forward = dispatch._dispatch_fw(asked, needs_gradient=True)
        assert (forward.NAME, dispatch._dispatch_bw(asked, True).NAME) == ("saccadeF", "saccadeB")
        dispatch._set_use_fa3(False)  # as programs do on GPUs that it is not for
        assert not dispatch._get_use_fa3() and not dispatch.fa3_available()
        dispatch._set_use_fa3(True)
        assert [x.shape for x in asked.get_qkv_in_bmghk()] == [(1, 6, 1, 2, 8)] * 3
        assert asked.scale_float == 8**-0.5 and asked.get_output_dtype() == torch.float32
        assert common.bmk2bmhk(rows[0, 0].transpose(0, 1), 2).equal(rows[0])
        mask = xops.LowerTriangularMask()
        assert isinstance(mask, xops.AttentionMask) and isinstance(mask, common.AttentionBias)
        found = xops.memory_efficient_attention(*rows, mask, op=(SplitKAutotune, None))
        torch.testing.assert_close(found, ref_attention_bmhk(*rows, mask))
        one_head = ref_attention(*(x[..., 0, :] for x in rows), mask.materialize((6, 6)))
        torch.testing.assert_close(found[..., 0, :], one_head)
        info.print_info()
    said = capsys.readouterr().out
    assert "memory_efficient_attention.flashF: " in said and torch.__version__ in said

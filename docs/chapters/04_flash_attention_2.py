# %% [markdown]
# # 04 · FlashAttention-2: what moved
#
# FlashAttention-2 (Dao 2023) computes the same function with the same tiles. It changes who does
# what, and when. Three things moved:
#
# 1. **Queries are the outer loop.** A tile of queries stays on the chip while all keys pass by. Its
#    maximum, sum and output never travel, and each tile of queries can be a program of its own.
# 2. **The division comes last.** The sum stays undivided (`weighted_sum`), and is divided once.
# 3. **One number a row is kept** for the backward pass: the log-sum-exp in place of maximum and
#    sum.
#
# The second matters more than it seems. A GPU's tensor cores do 10 to 20 times as many operations
# in a second as its other units, so an operation that is no product is as dear as 10 to 20 that
# are. This chapter counts them.

# %%
import torch
from lesson import Lesson
from torch.utils._python_dispatch import TorchDispatchMode

import saccade

lesson = Lesson(__file__)
LENGTH, HEAD_DIM, TILE = (128, 32, 32) if lesson.quick else (512, 64, 64)
query, key, value, grad_output = torch.randn(4, LENGTH, HEAD_DIM, dtype=torch.float64).unbind()
scale = HEAD_DIM**-0.5


# %%
FREE = ("slice", "t", "unsqueeze", "copy_", "zeros_like", "new_zeros", "new_full")


class Count(TorchDispatchMode):
    """Counts what PyTorch is asked to compute: products, all else, numbers moved."""

    def __init__(self):
        super().__init__()
        self.products = self.others = self.moved = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        """Runs the operator, and adds up its work."""
        result = operator(*arguments, **(options or {}))
        name = operator.overloadpacket.__name__
        if name in ("mm", "addmm"):
            left, right = arguments[-2:]
            self.products += left.shape[0] * left.shape[1] * right.shape[1]
        elif name in ("amax", "sum", "mul", "sub", "add", "div", "exp", "log", "maximum"):
            self.others += max(
                each.numel() for each in (*arguments, result) if hasattr(each, "numel")
            )
        elif name == "clone":  # a load or a store, as `moving` marks them
            self.moved += result.numel()
        else:
            assert name in FREE, f"{name} is not counted"
        return result


def moving(rows):
    """Rows on their way between memory and chip."""
    return rows.clone()


def tiles(length):
    """Where tiles lie."""
    return [slice(start, start + TILE) for start in range(0, length, TILE)]


# %% [markdown]
# ## Forward, both ways
#
# The loops of chapter 03 and those of FlashAttention-2, in plain PyTorch, so that they can be laid
# side by side and counted. `moving` marks what goes to or from memory.


# %%
def forward_1(query, key, value):
    """Keys outside, queries inside; output divided at every visit."""
    output = torch.zeros_like(query)
    row_max, row_sum = query.new_full((LENGTH,), -torch.inf), query.new_zeros(LENGTH)
    for kv in tiles(LENGTH):
        key_tile, value_tile = moving(key[kv]), moving(value[kv])
        for rows in tiles(LENGTH):
            scores = moving(query[rows]) @ key_tile.t() * scale
            old, old_max, old_sum = (moving(each[rows]) for each in (output, row_max, row_sum))
            tile_max = scores.amax(-1)
            weights = (scores - tile_max[:, None]).exp()
            new_max = torch.maximum(old_max, tile_max)
            kept, taken = (old_max - new_max).exp(), (tile_max - new_max).exp()
            new_sum = kept * old_sum + taken * weights.sum(-1)
            new = (old_sum * kept)[:, None] * old + taken[:, None] * (weights @ value_tile)
            output[rows], row_max[rows], row_sum[rows] = (
                moving(each) for each in (new / new_sum[:, None], new_max, new_sum)
            )
    return output


def forward_2(query, key, value):
    """Queries outside, keys inside; divided once, and one number a row kept."""
    output, logsumexp = torch.zeros_like(query), query.new_zeros(LENGTH)
    for rows in tiles(LENGTH):  # each turn could be a program
        query_tile = moving(query[rows])
        row_max = query.new_full((len(query_tile),), -torch.inf)
        row_sum, weighted_sum = torch.zeros_like(row_max), torch.zeros_like(query_tile)
        for kv in tiles(LENGTH):
            scores = query_tile @ moving(key[kv]).t() * scale
            new_max = torch.maximum(row_max, scores.amax(-1))
            rescale = (row_max - new_max).exp()
            weights = (scores - new_max[:, None]).exp()
            row_sum = row_sum * rescale + weights.sum(-1)
            weighted_sum = torch.addmm(weighted_sum * rescale[:, None], weights, moving(value[kv]))
            row_max = new_max
        output[rows] = moving(weighted_sum / row_sum[:, None])
        logsumexp[rows] = moving(row_max + row_sum.log())
    return output, logsumexp


# %% [markdown]
# ## Backward
#
# Nothing of the size length² was kept, so the weights are computed anew from the lse: `weights =
# exp(scores − lse)`, already divided. The softmax's own derivative needs a sum over each row, Σ
# weights · grad_weights. It equals `row_dot = Σ grad_output · output` (the papers' D), which is
# known before any tile is visited. With it a tile stands alone:
#
#     grad_weights = grad_output · valueᵀ
#     grad_scores  = weights ∘ (grad_weights − row_dot)
#     grad_value  += weightsᵀ · grad_output
#     grad_key    += scale · grad_scoresᵀ · query
#     grad_query  += scale · grad_scores · key
#
# With `scores` that makes five products a tile. Gradients of keys want a loop over queries inside,
# and gradients of queries one over keys. One pass cannot have both, so there are two forms:
#
# - **atomic**: a program stands at a tile of keys, and *adds* its part of `grad_query` to memory,
#   where programs meet in any order. Five products.
# - **ordered**: a second pass stands at tiles of queries, and computes the weights once more. Seven
#   products, and every sum has one order.


# %%
def pair_tile(rows, kv, saved):
    """Weights and gradient of the scores of one tile: two products."""
    query, key, value, grad_output, logsumexp, row_dot = saved
    weights = (query[rows] @ key[kv].t() * scale - logsumexp[rows, None]).exp()
    grad_weights = grad_output[rows] @ value[kv].t()
    return weights, weights * (grad_weights - row_dot[rows, None])


def atomic_backward(saved, order):
    """Programs at tiles of keys, which reach memory in the given order."""
    query, key, value, grad_output = saved[:4]
    grad_query, grad_key, grad_value = (torch.zeros_like(each) for each in (query, key, value))
    for kv in order:
        for rows in tiles(LENGTH):
            weights, grad_scores = pair_tile(rows, kv, saved)
            grad_value[kv] = torch.addmm(grad_value[kv], weights.t(), grad_output[rows])
            grad_key[kv] = torch.addmm(grad_key[kv], grad_scores.t(), query[rows], alpha=scale)
            grad_query[rows] = torch.addmm(grad_query[rows], grad_scores, key[kv], alpha=scale)
    return grad_query, grad_key, grad_value


def ordered_backward(saved, order):
    """The same without additions of others: a pass for keys, and one for queries."""
    query, key, value, grad_output = saved[:4]
    grad_query, grad_key, grad_value = (torch.zeros_like(each) for each in (query, key, value))
    for kv in order:
        for rows in tiles(LENGTH):
            weights, grad_scores = pair_tile(rows, kv, saved)
            grad_value[kv] = torch.addmm(grad_value[kv], weights.t(), grad_output[rows])
            grad_key[kv] = torch.addmm(grad_key[kv], grad_scores.t(), query[rows], alpha=scale)
    for rows in order:
        for kv in tiles(LENGTH):
            _, grad_scores = pair_tile(rows, kv, saved)
            grad_query[rows] = torch.addmm(grad_query[rows], grad_scores, key[kv], alpha=scale)
    return grad_query, grad_key, grad_value


# %% [markdown]
# All of it against PyTorch's own gradients of the formula, in float64:

# %%
leaves = [rows.clone().requires_grad_() for rows in (query, key, value)]
exact = (leaves[0] @ leaves[1].T * scale).softmax(-1) @ leaves[2]
exact_gradients = torch.autograd.grad(exact, leaves, grad_output)
exact = exact.detach()

counts = {name: Count() for name in ("FlashAttention-1", "FlashAttention-2", "atomic", "ordered")}
with counts["FlashAttention-1"]:
    output_1 = forward_1(query, key, value)
with counts["FlashAttention-2"]:
    output, logsumexp = forward_2(query, key, value)
torch.testing.assert_close(output_1, exact)
torch.testing.assert_close(output, exact)

saved = (query, key, value, grad_output, logsumexp, (grad_output * output).sum(-1))
for name, backward in (("atomic", atomic_backward), ("ordered", ordered_backward)):
    with counts[name]:
        gradients = backward(saved, tiles(LENGTH))
    for ours, theirs in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(ours, theirs)

# %% [markdown]
# ## The count
#
# Per pair of a query and a key, so that the length drops out. A product of head_dim channels is
# head_dim multiplications a pair.

# %%
pairs = LENGTH * LENGTH
per_pair = {
    name: (count.products / pairs / HEAD_DIM, count.others / pairs, count.moved / pairs)
    for name, count in counts.items()
}
lesson.table(
    f"for each pair; {HEAD_DIM} channels, tiles of {TILE}",
    ("form", "products", "other operations", "numbers moved"),
    [
        (f"{'forward' if 'Flash' in name else 'backward'}, {name}", products, others, moved or "–")
        for name, (products, others, moved) in per_pair.items()
    ],
)
first, second = per_pair["FlashAttention-1"], per_pair["FlashAttention-2"]
assert first[0] == second[0] == 2
assert (per_pair["atomic"][0], per_pair["ordered"][0]) == (5, 7)
assert first[1] - second[1] > 2.5 * HEAD_DIM / TILE  # 3 of 4 passes over the output are gone
assert second[2] < first[2]
visits = LENGTH // TILE  # chapter 03 said on paper what its kernel moves; here it is counted
on_paper = 2 * LENGTH * HEAD_DIM + visits * (3 * LENGTH * HEAD_DIM + 4 * LENGTH)
assert counts["FlashAttention-1"].moved == on_paper

with lesson.picture(
    "Operations that are no products, and numbers moved: fewer in FlashAttention-2",
    panels=2, size=(7.5, 3.0),
) as axes:  # fmt: skip
    names = ("FlashAttention-1", "FlashAttention-2")
    for panel, index, title in (
        (axes[0], 1, "Operations beside products, a pair"),
        (axes[1], 2, "Numbers moved, a pair"),
    ):
        heights = [per_pair[name][index] for name in names]
        bars = panel.bar(names, heights, color=("#0072b2", "#d55e00"), width=0.6)
        panel.bar_label(bars, fmt="%.2f", color="#808080", fontsize=9, padding=2)
        panel.set_title(title)
        panel.grid(visible=False, axis="x")
        panel.margins(y=0.15)

# %% [markdown]
# Numbers move less by a third or so here: keys and values are now fetched for each tile of queries,
# which the first form spared. But those fetches are shared: programs that run side by side ask for
# the same keys, and the chip's cache answers. Nobody can share the output.
#
# ## Deterministic or not
#
# Floating-point addition depends on its order. On a GPU nobody decides in which order programs
# reach `grad_query`; here a shuffle plays that part. In float32 the atomic form gives other bits
# for other orders. The ordered form gives the same ones always. Both are equally right.

# %%
narrow = tuple(each.float() for each in saved)
shuffled = [tiles(LENGTH)[place] for place in torch.randperm(LENGTH // TILE).tolist()]
orders = (tiles(LENGTH), tiles(LENGTH)[::-1], shuffled)
atomic = [atomic_backward(narrow, order)[0] for order in orders]
ordered = [ordered_backward(narrow, order)[0] for order in orders]
assert not all(torch.equal(atomic[0], other) for other in atomic[1:])
assert all(torch.equal(ordered[0], other) for other in ordered[1:])
worst = max(float((each - exact_gradients[0]).abs().max()) for each in (*atomic, *ordered))
assert worst < 1e-4
spread = max(float((atomic[0] - other).abs().max()) for other in atomic[1:])
print(f"largest difference between two orders: {spread:.1e}; largest error of any: {worst:.1e}")

# %% [markdown]
# ## In the library
#
# The library's kernels are of this kind; [forward.md](../forward.md) walks through the forward one,
# line by line. `deterministic=True` takes the ordered form where the other would be faster.

# %%
inputs = [
    rows.float()[None, None].to(lesson.device).requires_grad_() for rows in (query, key, value)
]
found = []
for _ in range(2):
    output = saccade.attention(*inputs, deterministic=True)
    found.append(torch.autograd.grad(output, inputs, grad_output.to(output)[None, None]))
for once, again, theirs in zip(*found, exact_gradients, strict=True):
    assert torch.equal(once, again)
    torch.testing.assert_close(once[0, 0].double().cpu(), theirs, rtol=0, atol=1e-4)

# %% [markdown]
# ## Change this and see
#
# 1. Double `TILE`. Which of the numbers in the table change, which by half, and which not at all?
# 2. Fold the scale into the exponent: `exp2(scores · factor − shift)`. How many operations a pair
#    does the count say are gone? (It counts a multiplication and a subtraction as two; a GPU has
#    one instruction for both.)
# 3. Compute `row_dot` inside `pair_tile`, as a sum over `weights · grad_weights`. Why is it wrong
#    for one tile alone, and what would FlashAttention have to keep if D = Σ grad_output · output
#    did not hold?

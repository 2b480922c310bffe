# %% [markdown]
# # 05 · Masks as functions, and tiles that are skipped
#
# A mask says which pairs of a query row and a key row see each other. Written out it has length²
# entries, which is what four chapters have been avoiding. And half of a causal mask is hidden:
# whole tiles of it, which need not be computed at all.
#
# So a mask should be a *function* of two row numbers. This chapter asks it two questions: which
# pairs of this tile are visible? And, without looking at any pair: is any, are all?

# %%
import torch
from lesson import Lesson

import saccade
from saccade import masks

lesson = Lesson(__file__)
LENGTH, TILE = (256, 32) if lesson.quick else (2048, 128)


def causal(query_row, kv_row):
    """A row sees itself and what came before."""
    return kv_row <= query_row


def local(query_row, kv_row):
    """And no further back than a sixth of the text."""
    return (kv_row <= query_row) & (query_row - kv_row <= LENGTH // 6)


def with_start(query_row, kv_row):
    """Or the first rows, which everybody sees."""
    return local(query_row, kv_row) | (kv_row <= LENGTH // 20)


# %% [markdown]
# ## On pairs
#
# Called with a column and a row of numbers, the function gives all pairs: PyTorch's operators do
# it.

# %%
rows = torch.arange(LENGTH)
pairs = {mask.__name__: mask(rows[:, None], rows) for mask in (causal, local, with_start)}
assert int(pairs["causal"].sum()) == LENGTH * (LENGTH + 1) // 2

# %% [markdown]
# ## On intervals
#
# A tile is an interval of query rows and an interval of key rows. What is `kv_row <= query_row` for
# intervals? *Possible* if the smallest key row is at most the largest query row; *certain* if the
# largest key row is at most the smallest query row. So a comparison of intervals has two answers,
# and they combine as truth values do. The functions above need not know: Python lets a class say
# what its operators mean.


# %%
class Interval:
    """Whole numbers from low to high."""

    def __init__(self, low, high):
        self.low, self.high = low, high

    def __sub__(self, other):
        """All differences."""
        return Interval(self.low - other.high, self.high - other.low)

    def __le__(self, other):
        """Whether it may be, and whether it must be."""
        other = other if isinstance(other, Interval) else Interval(other, other)
        return Verdict(self.low <= other.high, self.high <= other.low)


class Verdict:
    """What is said of a whole tile: some pair may be visible; every pair is."""

    def __init__(self, possible, certain):
        self.possible, self.certain = possible, certain

    def __and__(self, other):
        """Both."""
        return Verdict(self.possible and other.possible, self.certain and other.certain)

    def __or__(self, other):
        """One of them."""
        return Verdict(self.possible or other.possible, self.certain or other.certain)


HIDDEN, EDGE, CLEAN = 0, 1, 2


def judged(mask):
    """For each tile: hidden, an edge (look at its pairs), or clean."""
    starts = range(0, LENGTH, TILE)
    verdicts = torch.empty(len(starts), len(starts), dtype=torch.long)
    for i, query_start in enumerate(starts):
        for j, kv_start in enumerate(starts):
            verdict = mask(
                Interval(query_start, query_start + TILE - 1),
                Interval(kv_start, kv_start + TILE - 1),
            )
            verdicts[i, j] = CLEAN if verdict.certain else EDGE if verdict.possible else HIDDEN
    return verdicts


# %% [markdown]
# Two promises must hold, whatever the mask. A tile that is called hidden has no visible pair, or we
# would lose something; a tile that is called clean has no hidden one. A doubtful tile may always be
# called an edge: that costs time, never exactness.

# %%
verdicts = {mask.__name__: judged(mask) for mask in (causal, local, with_start)}
for name, verdict in verdicts.items():
    inside = pairs[name].unfold(0, TILE, TILE).unfold(1, TILE, TILE).flatten(2)
    assert not inside[verdict == HIDDEN].any()
    assert inside[verdict == CLEAN].all()
    assert (verdict == HIDDEN).any() and (verdict == EDGE).any()

# %% [markdown]
# ## Attention that skips
#
# The loop of chapter 02, with one question before each tile. Hidden tiles are left out, clean ones
# are computed without a look at the mask, and only edges ask for their pairs.


# %%
def attention_that_skips(query, key, value, mask, verdicts):
    """Exact attention; also how many tiles were visited, and how many asked for pairs."""
    output, visited, asked = torch.zeros_like(query), 0, 0
    for i, query_start in enumerate(range(0, LENGTH, TILE)):
        queries = slice(query_start, query_start + TILE)
        row_max = query.new_full((TILE,), -torch.inf)
        row_sum, weighted_sum = torch.zeros_like(row_max), torch.zeros_like(query[queries])
        for j in verdicts[i].nonzero().flatten().tolist():
            kv = slice(j * TILE, (j + 1) * TILE)
            scores = query[queries] @ key[kv].T * query.shape[1] ** -0.5
            visited += 1
            if verdicts[i, j] == EDGE:
                asked += 1
                scores = scores.masked_fill(~mask(rows[queries, None], rows[kv]), -torch.inf)
            new_max = torch.maximum(row_max, scores.amax(-1))
            shift = new_max.masked_fill(new_max == -torch.inf, 0)  # a row that saw nothing so far
            rescale = (row_max - shift).exp()
            weights = (scores - shift[:, None]).exp()
            row_sum = row_sum * rescale + weights.sum(-1)
            weighted_sum = weighted_sum * rescale[:, None] + weights @ value[kv]
            row_max = new_max
        output[queries] = weighted_sum / row_sum[:, None]
    return output, visited, asked


query, key, value = torch.randn(3, LENGTH, 32, dtype=torch.float64).unbind()
scores = query @ key.T * 32**-0.5
visits = {}
for mask in (causal, local, with_start):
    name = mask.__name__
    exact = scores.masked_fill(~pairs[name], -torch.inf).softmax(-1) @ value
    output, *visits[name] = attention_that_skips(query, key, value, mask, verdicts[name])
    torch.testing.assert_close(output, exact)

# %% [markdown]
# ## In the library
#
# `saccade.masks` has the usual masks, and any Python function such as these may be given to an
# attention call as it is. Saccade runs it once, on symbols in the place of rows, and keeps what it
# computes: an expression, with the numbers and tensors that it reached. That is evaluated on pairs
# and on intervals, as here (there are intervals for `%`, `//`, `where`, captured tensors and more),
# and written as code for the GPU kernels. `masks.function` makes a mask whose numbers and tensors
# are given to it. Masks combine with `&`, `|` and `~`, and printing one shows its expression.
#
# A **block-sparse** mask is one whose function reads a table: is the block of this pair on? It is
# the one kind for which somebody outside must say what is visible, as no formula does.


# %%
@masks.function
def strided(batch, head, query_row, kv_row, stride):
    """A row sees every stride-th row, counted from itself."""
    return (query_row - kv_row) % stride == 0


blocks = LENGTH // TILE
layout = torch.rand(1, 1, blocks, blocks) < 0.2
layout |= torch.eye(blocks, dtype=torch.bool)  # nobody is left without a key
start_length = torch.tensor([LENGTH // 20 + 1], device=lesson.device)
library = {
    "everything": None,
    "causal": masks.causal(),
    "local": masks.window(LENGTH // 6),
    "with_start": masks.window(LENGTH // 6) | masks.key_lengths(start_length),
    "strided": masks.causal() & strided(8),
    "block-sparse": masks.blocks(layout.to(lesson.device), TILE),
}
pairs["everything"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
pairs["strided"] = pairs["causal"] & ((rows[:, None] - rows) % 8 == 0)
pairs["block-sparse"] = layout[0, 0].repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)

wide = [each[None, None].float().to(lesson.device) for each in (query, key, value)]
for name, mask in library.items():
    exact = scores.masked_fill(~pairs[name], -torch.inf).softmax(-1) @ value
    output = saccade.attention(*wide, mask=mask)
    torch.testing.assert_close(output[0, 0].double().cpu(), exact, rtol=0, atol=1e-5)
    explained = saccade.explain(saccade.attention, *wide, mask=mask)
    assert explained.visible_pairs == int(pairs[name].sum())

# Times on four heads, beside PyTorch's own attention, which takes a mask only written out.
timed = torch.randn(3, 1, 4, LENGTH, 64, device=lesson.device).unbind()
race = {
    name: lambda mask=mask: saccade.attention(*timed, mask=mask) for name, mask in library.items()
}
for name, pair in pairs.items():
    written = pair.to(lesson.device)
    race[f"{name}, written out"] = lambda written=written: (
        torch.nn.functional.scaled_dot_product_attention(*timed, attn_mask=written)
    )
times = lesson.race(race, rounds=3)
seen = {
    name: pair.unfold(0, TILE, TILE).unfold(1, TILE, TILE).flatten(2)
    for name, pair in pairs.items()
}
lesson.table(
    f"length {LENGTH}, tiles of {TILE}, {lesson.device.type}",
    ("mask", "visible %", "tiles visited %", "of these clean %", "saccade ms", "SDPA ms"),
    [
        (name, 100 * float(pairs[name].float().mean()), 100 * float(tile.any(-1).float().mean()),
         100 * float(tile.all(-1).sum() / tile.any(-1).sum()), times[name],
         times[f"{name}, written out"])
        for name, tile in ((name, seen[name]) for name in library)
    ],
)  # fmt: skip
for name, (visited, asked) in visits.items():  # our loop visited what it had to, and no more
    assert visited == int(seen[name].any(-1).sum())
    assert visited - asked <= int(seen[name].all(-1).sum())

# %% [markdown]
# The last line says "at most" (`<=`): intervals may doubt where there is nothing to doubt. In
# `with_start` a tile can be visible for one reason on its left and for the other on its right;
# neither function is certain of it alone, so it is called an edge.

# %%
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

says = "Tiles of four masks: hidden ones are skipped, clean ones need no mask, edges do"
with lesson.picture(says, panels=4, size=(8.4, 2.7)) as axes:
    shades = ListedColormap(["#8080801a", "#e69f00", "#0072b2"])
    for panel, name in zip(axes, ("causal", "local", "with_start", "block-sparse"), strict=True):
        tile = seen[name].any(-1).long() + seen[name].all(-1).long()
        panel.imshow(tile, cmap=shades, vmin=0, vmax=2)
        panel.set_title(name)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.grid(visible=False)
        panel.set_xlabel("keys")
    axes[0].set_ylabel("queries")
    legend = [Patch(color=shades(index), label=label)
              for index, label in enumerate(("hidden", "edge", "clean"))]  # fmt: skip
    axes[0].figure.legend(handles=legend, loc="outside lower center", ncols=3)

# %% [markdown]
# A row that sees nothing has no keys to average. The formula gives 0 / 0; here it gives 0, and an
# lse of −inf, so that whatever merges it later finds that it counts for nothing ([chapter
# 07](07_split_keys.py)).

# %%
nobody = masks.key_lengths(torch.tensor([0], device=lesson.device))
output, lse = saccade.attention(*wide, mask=nobody, return_lse=True)
assert (output == 0).all() and (lse == -torch.inf).all()

# %% [markdown]
# ## Change this and see
#
# 1. Halve `TILE`. Which share falls, the one of tiles visited or the one of clean ones among them?
#    Why do kernels not take the smallest tile there is?
# 2. Write `checkerboard`, which shows pairs whose row numbers have an even sum. What verdict can
#    intervals give on `(query_row + kv_row) % 2 == 0`, and what does that mean for its speed?
# 3. Give `Verdict` a method `__invert__` and try `~local`. What happens to *possible* and
#    *certain*?

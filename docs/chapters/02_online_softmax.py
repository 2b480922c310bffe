# %% [markdown]
# # 02 · Online softmax, tiles, merging
#
# The softmax of a row divides by the sum of all its exponentials. That seems to want the whole row.
# It does not: the sum can be corrected as one goes. This chapter builds exact attention that looks
# at a few keys at a time and holds no row of scores.

# %%
import torch
from lesson import Lesson

import saccade

lesson = Lesson(__file__)
LENGTH, HEAD_DIM = (96, 16) if lesson.quick else (512, 64)
query, key, value = torch.randn(3, LENGTH, HEAD_DIM, dtype=torch.float64).unbind()
scale = HEAD_DIM**-0.5
exact = (query @ key.T * scale).softmax(-1) @ value

# %% [markdown]
# ## The exponential overflows
#
# In float32 `exp(89)` is infinite, and inf / inf is NaN. So every softmax subtracts the largest
# score of the row first. That changes nothing: numerator and denominator shrink by the same factor.

# %%
scores = torch.tensor([100.0, 99.0, 98.0])
naive = scores.exp() / scores.exp().sum()
shifted = (scores - scores.max()).exp()
assert naive.isnan().all()
torch.testing.assert_close(shifted / shifted.sum(), scores.softmax(0))

# %% [markdown]
# ## The largest score so far
#
# The largest score of the row is unknown before all keys were seen. So take the largest one *so
# far*, `row_max`, and when a larger one comes, repair what was summed. All terms were `exp(score −
# row_max)`; they should have been `exp(score − new_max)`. The factor between the two is the same
# for all: `rescale = exp(row_max − new_max)`.
#
# Three quantities a row are enough: `row_max` (the papers' m), `row_sum` (ℓ), and `weighted_sum`
# (the values times their weights, not yet divided). The following function is all of online
# softmax; every kernel of every later chapter contains it.


# %%
def fold(state, scores, values):
    """Take one tile of scores and values into (row_max, row_sum, weighted_sum)."""
    row_max, row_sum, weighted_sum = state
    new_max = torch.maximum(row_max, scores.amax(-1))
    rescale = (row_max - new_max).exp()
    weights = (scores - new_max[:, None]).exp()
    return (
        new_max,
        row_sum * rescale + weights.sum(-1),
        weighted_sum * rescale[:, None] + weights @ values,
    )


def empty_state(rows, channels, like):
    """Before the first key: the maximum of nothing is −inf, sums are 0."""
    return (
        like.new_full((rows,), -torch.inf),
        like.new_zeros(rows),
        like.new_zeros(rows, channels),
    )


def tiled_attention(query, key, value, query_tile, kv_tile):
    """Exact attention that never holds more than query_tile × kv_tile scores."""
    output = torch.empty_like(query)
    for query_start in range(0, len(query), query_tile):
        rows = query[query_start : query_start + query_tile]
        state = empty_state(len(rows), value.shape[1], rows)
        for kv_start in range(0, len(key), kv_tile):
            keys = key[kv_start : kv_start + kv_tile]
            state = fold(state, rows @ keys.T * scale, value[kv_start : kv_start + kv_tile])
        _, row_sum, weighted_sum = state
        output[query_start : query_start + query_tile] = weighted_sum / row_sum[:, None]
    return output


# %% [markdown]
# It is *exact*: not an approximation that gets better with smaller tiles, but the same sum in
# another order. In float64 nothing is left but rounding, for any tile, also one that does not
# divide the length. In float32 it rounds no worse than PyTorch's own softmax does.

# %%
narrow = [rows.float() for rows in (query, key, value)]
plain_error = ((narrow[0] @ narrow[1].T * scale).softmax(-1) @ narrow[2] - exact).abs().max()
rows = [("all at once", LENGTH * LENGTH, "–", float(plain_error))]
for tiles in ((LENGTH, 32), (32, 32), (16, 64), (13, 37)):
    error = (tiled_attention(query, key, value, *tiles) - exact).abs().max()
    narrow_error = (tiled_attention(*narrow, *tiles) - exact).abs().max()
    assert error < 1e-13
    assert narrow_error < 4 * plain_error
    rows.append(
        (f"{tiles[0]} × {tiles[1]}", tiles[0] * tiles[1], float(error), float(narrow_error))
    )
lesson.table(
    f"length {LENGTH}: largest error against float64",
    ("tile", "scores held", "error in float64", "error in float32"),
    rows,
)

# %% [markdown]
# A wrong factor would show. Without the repair the error is no rounding any more:


# %%
def forgetful(state, scores, values):
    """`fold` without its rescaling."""
    row_max, row_sum, weighted_sum = fold(state, scores, values)
    forgotten = 1 - (state[0] - row_max).exp()
    return (
        row_max,
        row_sum + state[1] * forgotten,
        weighted_sum + state[2] * forgotten[:, None],
    )


state = empty_state(LENGTH, HEAD_DIM, query)
for kv_start in range(0, LENGTH, 16):
    keys = slice(kv_start, kv_start + 16)
    state = forgetful(state, query @ key[keys].T * scale, value[keys])
assert (state[2] / state[1][:, None] - exact).abs().max() > 1e-2

# %% [markdown]
# ## What one row goes through
#
# `row_max` climbs in steps. At each step everything that was summed shrinks by `rescale`; after a
# few tiles new maxima become rare, since the largest of k numbers is a new one with probability
# 1/k.

# %%
state = empty_state(1, HEAD_DIM, query)
scores = query[:1] @ key.T * scale
tile = LENGTH // 32
maxima, sums, rescales = [], [], []
for kv_start in range(0, LENGTH, tile):
    before = state[0]
    keys = slice(kv_start, kv_start + tile)
    state = fold(state, scores[:, keys], value[keys])
    maxima.append(float(state[0]))
    sums.append(float(state[1]))
    rescales.append(float((before - state[0]).exp()))
assert maxima == sorted(maxima) and maxima[-1] == float(scores.max())
torch.testing.assert_close(state[0] + state[1].log(), scores.logsumexp(-1))

says = "One row: its maximum climbs in steps, and its sum is rescaled at each"
with lesson.picture(says, panels=2, size=(8.0, 3.2)) as (left, right):
    steps = range(1, len(maxima) + 1)
    tile_maxima = [float(part.max()) for part in scores[0].split(tile)]
    left.plot(steps, tile_maxima[: len(maxima)], "o", color="#808080", ms=3, label="of the tile")
    left.step(steps, maxima, where="post", label="so far: row_max")
    left.set_title("The largest score")
    left.set_xlabel("tiles seen")
    left.legend(loc="upper left")
    left.set_ylim(top=maxima[-1] * 1.4)
    right.step(steps, sums, where="post", color="#0072b2")
    jumps = [step for step in steps if rescales[step - 1] < 1 and step > 1]
    right.plot(jumps, [sums[step - 1] for step in jumps], "v", color="#d55e00", label="rescaled")
    right.set_title("row_sum: grows, and shrinks at a new maximum")
    right.set_xlabel("tiles seen")
    right.set_ylim(bottom=0)
    right.legend(loc="upper right")

# %% [markdown]
# ## Merging
#
# Nothing says that tiles come one after the other. Two halves of the keys can be computed by two
# programs and combined afterwards, with the same factor. One number a row is enough for it: the
# *log-sum-exp*, `lse = row_max + log(row_sum)` (the papers' L), the logarithm of the denominator.
# The share of a part is `exp(lse_part − lse)`.

# %%
halves = []
for keys in (slice(0, LENGTH // 3), slice(LENGTH // 3, LENGTH)):
    scores = query @ key[keys].T * scale
    halves.append((scores.softmax(-1) @ value[keys], scores.logsumexp(-1)))
lse = torch.logaddexp(halves[0][1], halves[1][1])
merged = sum(output * (part - lse).exp()[:, None] for output, part in halves)
torch.testing.assert_close(merged, exact)

# %% [markdown]
# ## In the library
#
# `saccade.attention(..., return_lse=True)` gives the lse, and `saccade.merge_states` combines
# parts, NaN-safe for those that saw nothing ([chapter 07](07_split_keys.py)).

# %%
whole = [rows[None, None] for rows in (query, key, value)]
output, lse = saccade.attention(*whole, return_lse=True)
torch.testing.assert_close(output[0, 0], exact)
third = LENGTH // 3
first = saccade.attention(whole[0], whole[1][:, :, :third], whole[2][:, :, :third], return_lse=True)
rest = saccade.attention(whole[0], whole[1][:, :, third:], whole[2][:, :, third:], return_lse=True)
merged, merged_lse = saccade.merge_states((first[0], rest[0]), (first[1], rest[1]))
torch.testing.assert_close(merged, output)
torch.testing.assert_close(merged_lse, lse)

# %% [markdown]
# ## Change this and see
#
# 1. Visit the tiles of keys from the last to the first. Which of the three quantities differ at the
#    end, and which not?
# 2. Start with `row_max = 0` instead of −inf. For which rows is the result still exact? Multiply
#    the queries by 100, or by −100, in float32, to find those for which it is not.
# 3. Put a tile of scores that are all −inf (keys that a mask hides) *first*. What does `fold` make
#    of it, and which line must change? (The library's answer is called `GUARDED` in [the forward
#    kernel](../forward.md).)

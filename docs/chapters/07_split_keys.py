# %% [markdown]
# # 07 · Split keys, and merging that is safe
#
# A model that writes text has *one* query row a head, and thousands of keys. FlashAttention-2 makes
# a program of each tile of queries: there is one, and most of the GPU stands idle. So the keys are
# *split*: each program takes a share of them, and what they found is merged ([chapter
# 02](02_online_softmax.py) has the formula). This chapter is about the merge, and about what
# happens when a share is empty.

# %%
import itertools

import torch
from lesson import COLORS, Lesson

import saccade
from saccade import masks

lesson = Lesson(__file__)
HEADS, HEAD_DIM = 4, 16
kv_len, parts = (64, 4) if lesson.quick else (8192, 8)
query = torch.randn(1, HEADS, 1, HEAD_DIM, dtype=torch.float64)
key, value = torch.randn(2, 1, HEADS, kv_len, HEAD_DIM, dtype=torch.float64).unbind()


# %% [markdown]
# ## Merging as one would write it
#
# Each part gives its output, divided by its own sum, and the logarithm of that sum, its lse. The
# sum of all is the sum of the parts' sums. Subtracting the largest lse first keeps exponentials
# small.


# %%
def naive_merge(outputs, lses):
    """The formula, and nothing else."""
    weights = (lses - lses.amax(0)).exp()
    return ((weights / weights.sum(0))[..., None] * outputs).sum(0)


def split(query, key, value, shares, visible=None):
    """(outputs, lses) of attention over shares of the keys, stacked."""
    found = []
    for keys in shares:
        scores = query @ key[:, :, keys].mT * HEAD_DIM**-0.5
        if visible is not None:
            scores = scores.masked_fill(~visible[keys], -torch.inf)
        found.append((scores.softmax(-1) @ value[:, :, keys], scores.logsumexp(-1)))
    return tuple(torch.stack(each) for each in zip(*found, strict=True))


step = kv_len // parts
shares = [slice(start, start + step) for start in range(0, kv_len, step)]
exact = (query @ key.mT * HEAD_DIM**-0.5).softmax(-1) @ value
torch.testing.assert_close(naive_merge(*split(query, key, value, shares)), exact)

# %% [markdown]
# ## A share that sees nothing
#
# Now let a mask hide all keys of one share. This is common: a window that ended, a short text in a
# batch of long ones, a shard of a long sequence that lies in the future. Its lse is −inf, which is
# right: the logarithm of nothing. But its output is 0 / 0.

# %%
visible = torch.ones(kv_len, dtype=torch.bool)
visible[shares[1]] = False
outputs, lses = split(query, key, value, shares, visible)
assert (lses[1] == -torch.inf).all() and outputs[1].isnan().all()
assert naive_merge(outputs, lses).isnan().all()

# %% [markdown]
# The share's weight is exp(−inf) = 0, and still all is NaN, because 0 · NaN is NaN. And if *all*
# shares are empty, the largest lse is −inf, and −inf − −inf is NaN before anything is multiplied.
# Three rules make the merge safe:
#
# 1. The output of a part with lse −inf is **not read**: it is selected away, not multiplied by 0.
# 2. Where the largest lse is −inf, 0 is subtracted in its place.
# 3. Where the sum is 0, the result is 0 and its lse −inf: again a part that counts for nothing, so
#    that merges of merges work.


# %%
def safe_merge(outputs, lses):
    """The formula with its three rules."""
    largest = lses.amax(0)
    weights = (lses - largest.masked_fill(largest == -torch.inf, 0)).exp()
    total = weights.sum(0)
    read = outputs.masked_fill((lses == -torch.inf)[..., None], 0)
    output = (weights[..., None] * read).sum(0) / total.masked_fill(total == 0, 1)[..., None]
    return output, largest + total.log()


# %% [markdown]
# ## Every pattern of emptiness
#
# With four parts there are 16 patterns: none is empty, one, many, all. Each is compared with
# attention over the visible keys at once; and the library's `saccade.merge_states` with both. Where
# the naive form gave the right numbers is counted, too.

# %%
quarter = kv_len // 4
quarters = [slice(start, start + quarter) for start in range(0, kv_len, quarter)]
counted = {empty: [0, 0, 0, 0.0] for empty in range(5)}  # patterns, right: naive, safe; error
patterns = list(itertools.product([True, False], repeat=4))
for pattern in patterns:
    visible = torch.tensor(pattern).repeat_interleave(quarter)
    outputs, lses = split(query, key, value, quarters, visible)
    ours, our_lse = safe_merge(outputs, lses)
    output, lse = saccade.merge_states(outputs, lses)
    if any(pattern):
        scores = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(~visible, -torch.inf)
        wanted, wanted_lse = scores.softmax(-1) @ value, scores.logsumexp(-1)
    else:
        wanted, wanted_lse = torch.zeros_like(exact), torch.full((1, HEADS, 1), -torch.inf).double()
    for found, of in ((ours, wanted), (output, wanted), (our_lse, wanted_lse), (lse, wanted_lse)):
        torch.testing.assert_close(found, of)
    row = counted[4 - sum(pattern)]
    row[0] += 1
    row[1] += naive_merge(outputs, lses).allclose(wanted)
    row[2] += ours.allclose(wanted) and output.allclose(wanted)
    row[3] = max(row[3], float((output - wanted).abs().max()))
assert [row[1] for row in counted.values()] == [1, 0, 0, 0, 0]  # right when nobody is empty
lesson.table(
    "merging four parts, in float64",
    ("empty parts", "patterns", "right, naive", "right, safe", "its largest error"),
    [(str(empty), *row) for empty, row in counted.items()],
)

# %% [markdown]
# Merging is associative, so a tree of merges, or a ring of machines that pass partial results on,
# gives the same:

# %%
outputs, lses = split(query, key, value, shares)
at_once = saccade.merge_states(outputs, lses)
running = (outputs[0], lses[0])
for output, lse in zip(outputs[1:], lses[1:], strict=True):
    running = saccade.merge_states((running[0], output), (running[1], lse))
for one, other in zip(at_once, running, strict=True):
    torch.testing.assert_close(one, other)

# %% [markdown]
# ## How many parts
#
# More parts keep more programs busy, and make more to merge. What a split changes in the result is
# rounding, which depends on where the cuts are. That is why the same text can get other last bits
# in another batch, unless cuts stand at fixed places (`batch_invariant=True` over pages, next
# chapter).

# %%
narrow = [rows.float().to(lesson.device) for rows in (query, key, value)]


def by_parts(count):
    """Decoding with the keys in so many parts, by the library's calls."""
    step = -(-kv_len // count)
    found = [
        saccade.attention(
            narrow[0], *(rows[:, :, start : start + step] for rows in narrow[1:]), return_lse=True
        )
        for start in range(0, kv_len, step)
    ]
    return saccade.merge_states([output for output, _ in found], [lse for _, lse in found])[0]


counts = (1, 2, 4, 8, 16)
times = lesson.race({str(count): lambda count=count: by_parts(count) for count in counts})
errors = [float((by_parts(count).double().cpu() - exact).abs().max()) for count in counts]
assert max(errors) < 1e-6
whole = saccade.attention(*narrow)
lesson.table(
    f"one query row, {kv_len} keys, float32, {lesson.device.type}, one part after the other",
    ("parts", "ms", "error", "same bits as one part"),
    [
        (str(count), times[str(count)], error, "yes" if by_parts(count).equal(whole) else "no")
        for count, error in zip(counts, errors, strict=True)
    ],
)

# %% [markdown]
# Here parts come one after the other, so more of them only cost; over pages the library's kernels
# do them at once. What a part has to say is its share of the denominator, exp(lse of the part −
# lse):

# %%
shares_of = (lses - at_once[1]).exp()[:, 0, :, 0]  # [parts, heads]
torch.testing.assert_close(shares_of.sum(0), torch.ones(HEADS, dtype=torch.float64))
with lesson.picture(
    "What each part of the keys contributes to each head's output", size=(7.0, 2.8)
) as axes:
    left = torch.zeros(HEADS, dtype=torch.float64)
    for part, share in enumerate(shares_of):
        color = COLORS[part % 2]
        axes.barh(range(HEADS), share, left=left, color=color, height=0.7)
        for head in range(HEADS):
            if share[head] > 0.05:
                middle = float(left[head] + share[head] / 2)
                axes.text(
                    middle, head, str(part), ha="center", va="center", color="white", fontsize=9
                )
        left = left + share
    axes.set_yticks(range(HEADS), [f"head {head}" for head in range(HEADS)])
    axes.set_xlabel("share of the softmax's denominator, by part of the keys")
    axes.set_xlim(0, 1)
    axes.grid(visible=False)

# %% [markdown]
# The library's own attention follows the same rules inside: a row that sees nothing gives 0 and
# −inf, so that its results can be merged with anybody's.

# %%
seen = masks.key_lengths(torch.tensor([step], device=lesson.device))
first = saccade.attention(*narrow, mask=seen, return_lse=True)
rest = saccade.attention(*narrow, mask=~seen, return_lse=True)
none = saccade.attention(*narrow, mask=seen & ~seen, return_lse=True)
merged = saccade.merge_states([first[0], none[0], rest[0]], [first[1], none[1], rest[1]])[0]
torch.testing.assert_close(merged.double().cpu(), exact, rtol=0, atol=1e-6)

# %% [markdown]
# ## Change this and see
#
# 1. Take rule 1 out of `safe_merge` and let empty parts give 0 and not NaN. Which patterns are
#    right now? Why does the library not rely on it?
# 2. Multiply the keys of one share by 30. What do the shares of the denominator look like, and does
#    the error grow?
# 3. A *sink* is a logit that joins the denominator and has no value (`sinks=`). Give it to every
#    part, then to one part only. Which is right, and what does the other compute?

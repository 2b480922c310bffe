# %% [markdown]
# # 01 · Attention, and why memory is the problem
#
# A token that is being read asks a question (its *query*). Every token offers a *key* that says
# what it answers to, and a *value* that says what it answers. Attention compares the query with all
# keys, and returns the mean of the values, weighted by how well their keys match.
#
# For one head, with tokens as rows:
#
#     scores  = scale · query · keyᵀ        [query_len, kv_len]
#     weights = softmax(scores)             each row is positive and adds up to 1
#     output  = weights · value             [query_len, head_dim]
#
# with `scale = 1 / √head_dim`, so that scores do not grow with the number of channels. The
# [glossary](../glossary.md) has the papers' letters for all names of this course.

# %%
import torch
from lesson import Lesson

import saccade

lesson = Lesson(__file__)


def plain_attention(query, key, value):
    """Attention as the formula says it: all scores in memory at once."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


# %% [markdown]
# ## Is that what the words say?
#
# A formula in three lines hides its loops. Here is one row of it by hand, with Python's own
# numbers, in float64. If the two agree, we have understood the formula.

# %%
query, key, value = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64).unbind()
row, head_dim = 2, 4
matches = [
    sum(float(query[0, 0, row, channel] * key[0, 0, other, channel]) for channel in range(head_dim))
    for other in range(6)
]
exponentials = [2.718281828459045 ** (match / head_dim**0.5) for match in matches]
by_hand = [
    sum(exponentials[other] * float(value[0, 0, other, channel]) for other in range(6))
    / sum(exponentials)
    for channel in range(head_dim)
]
output = plain_attention(query, key, value)
torch.testing.assert_close(output[0, 0, row], torch.tensor(by_hand, dtype=torch.float64))

# %% [markdown]
# ## What it holds in memory
#
# Inputs and output have `length · head_dim` numbers a head. But `scores` and `weights` have
# `length²`, and they lie in memory together when the softmax reads the one and writes the other. We
# do not guess: the allocator says how much a call holds at its worst moment.
#
# `saccade.attention` is the same function, computed in tiles. How, the next chapters tell. Here it
# is a claim to be checked: the same numbers, and memory that grows with the length and not with its
# square.

# %%
HEADS, HEAD_DIM = 4, 64
lengths = (128, 256, 512) if lesson.quick else (512, 1024, 2048)
plain_memory, tiled_memory, rows = [], [], []
for length in lengths:
    query, key, value = torch.randn(3, 1, HEADS, length, HEAD_DIM, device=lesson.device).unbind()
    candidates = {
        "plain": lambda: plain_attention(query, key, value),
        "tiled": lambda: saccade.attention(query, key, value),
    }
    exact = plain_attention(query.double(), key.double(), value.double())
    for run in candidates.values():
        torch.testing.assert_close(run().double(), exact, rtol=0, atol=1e-5)
    plain_memory.append(lesson.peak_bytes(candidates["plain"]))
    tiled_memory.append(lesson.peak_bytes(candidates["tiled"]))
    times = lesson.race(candidates)
    rows.append(
        (str(length), HEADS * length**2 * 4 / 2**20, plain_memory[-1] / 2**20,
         tiled_memory[-1] / 2**20, times["plain"], times["tiled"])
    )  # fmt: skip
lesson.table(
    f"{HEADS} heads of {HEAD_DIM} channels, float32, {lesson.device.type}",
    ("length", "scores MiB", "plain MiB", "saccade MiB", "plain ms", "saccade ms"),
    rows,
)

# %% [markdown]
# The check: twice the length must be four times the memory for the formula, within a tenth, and
# about twice for the tiles. The formula holds two matrices of the scores' size, not one.

# %%
longer = lengths[-1] / lengths[-2]
assert plain_memory[-1] >= 2 * HEADS * lengths[-1] ** 2 * 4
assert 0.9 * longer**2 < plain_memory[-1] / plain_memory[-2] < 1.1 * longer**2
assert tiled_memory[-1] / tiled_memory[-2] < 1.3 * longer
assert tiled_memory[-1] < plain_memory[-1] / 4

says = "Memory by length: the formula's grows with the square, the tiles' with the length"
with lesson.picture(says) as axes:
    axes.plot(lengths, [size / 2**20 for size in tiled_memory], "o-", label="saccade.attention")
    axes.plot(lengths, [size / 2**20 for size in plain_memory], "s-", label="the formula")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("length")
    axes.set_ylabel("MiB beyond the inputs")
    axes.set_title("Memory at the worst moment")
    axes.legend()

# %% [markdown]
# ## Why it is also a problem of time
#
# Memory that is written must be moved. A GPU such as the H100 multiplies some 300 numbers of 16
# bits in the time in which its memory delivers one. So what counts is how many operations there are
# for each byte that moves: its *arithmetic intensity*.

# %%
length, bytes_each = 4096, 2
operations = 4 * length**2 * HEAD_DIM  # two products, a multiplication and an addition each
least = 4 * length * HEAD_DIM * bytes_each  # three inputs, one output, once each
formula = least + 4 * length**2 * bytes_each  # scores and weights, each written and read
lesson.table(
    f"one head, length {length}, 16 bits a number",
    ("what moves", "MiB", "operations a byte"),
    [
        ("the formula", formula / 2**20, operations / formula),
        ("inputs and output, once", least / 2**20, operations / least),
    ],
)
assert operations / formula < 64 < operations / least

# %% [markdown]
# The formula offers fewer operations a byte than `head_dim`, however long the sequence is: the
# processor waits for memory. Inputs and output alone offer more of them the longer it is. So the
# whole course follows one wish: **never write the scores to memory**. What stands in the way is the
# softmax, since its divisor wants all scores of a row at once. The [next
# chapter](02_online_softmax.py) removes that.
#
# ## Change this and see
#
# 1. Take the `scale` out of `plain_attention` and draw one row of `weights` for `HEAD_DIM` of 16
#    and of 1024. What becomes of the mean, and why is the scale what it is?
# 2. Ask for gradients (`requires_grad=True`, then `.sum().backward()` inside the candidates). How
#    many matrices of the scores' size does the formula hold now? What must PyTorch keep for the
#    backward pass?
# 3. Give `plain_attention` half precision. Does it need half of the memory? Does the check with
#    float64 still hold, and if not, which `atol` does it need?

# %% [markdown]
# # 10 · Linear attention: three forms of one function
#
# All that came before computes the same function better and better, and it stays quadratic: twice
# the length, four times the pairs. Linear attention (Katharopoulos et al. 2020) computes *another*
# function, which is linear in the length. The exponential of a product becomes a product of
# *features*:
#
#     softmax attention:  weight(i, j) = exp(scale · query_i · key_j)
#     linear attention:   weight(i, j) = φ(query_i) · φ(key_j)
#
# φ maps each row alone; with elu(x) + 1 all features are positive, so weights are, too, and their
# sum can divide. That is the whole change, and everything follows from it: products can be taken in
# another order.

# %%
import torch
from lesson import Lesson

import saccade

lesson = Lesson(__file__)
LENGTH, DIM, CHUNK = (96, 8, 16) if lesson.quick else (1024, 32, 64)
query, key, value = torch.randn(3, LENGTH, DIM, dtype=torch.float64).unbind()
EPS = 1e-6


def features(rows):
    """φ(x) = elu(x) + 1: x + 1 above zero, exp(x) below; always positive."""
    return torch.nn.functional.elu(rows) + 1


# %% [markdown]
# ## Form 1: by pairs
#
# As the definition has it, causal: row i sees keys up to its own. All pairs in memory.


# %%
def by_pairs(query, key, value):
    """Quadratic in the length."""
    scores = (features(query) @ features(key).T).tril()
    return scores @ value / (scores.sum(-1, keepdim=True) + EPS)


# %% [markdown]
# ## Form 2: row by row
#
# Written out for row i, φ(query_i) does not depend on j and can be taken out of the sum:
#
#     Σ_j (φ(query_i) · φ(key_j)) value_j  =  φ(query_i) · Σ_j φ(key_j) value_jᵀ
#
# The sum on the right is a matrix of DIM × DIM numbers, the **state**. The next row's state is this
# one and one product more. So the past is a matrix of fixed size, however long it was: linear
# attention is a recurrent network. (With exp there is no such φ of finite size; this is where
# softmax differs.)


# %%
def by_rows(query, key, value):
    """Linear in the length, one row after the other."""
    state, key_sum = query.new_zeros(DIM, DIM), query.new_zeros(DIM)
    rows = []
    for query_row, key_row, value_row in zip(features(query), features(key), value, strict=True):
        state = state + key_row[:, None] * value_row
        key_sum = key_sum + key_row
        rows.append(query_row @ state / (query_row @ key_sum + EPS))
    return torch.stack(rows)


# %% [markdown]
# ## Form 3: in chunks
#
# Row by row means many small steps, each waiting for the last, and processors like large products.
# So: pairs within a chunk of rows, the state for all before it. Chunks of one row are form 2; one
# chunk of all rows is form 1.


# %%
def by_chunks(query, key, value, chunk):
    """Linear in the length, in products of chunk × chunk."""
    state, key_sum = query.new_zeros(DIM, DIM), query.new_zeros(DIM)
    parts = []
    for start in range(0, len(query), chunk):
        rows = slice(start, start + chunk)
        queries, keys = features(query[rows]), features(key[rows])
        scores = (queries @ keys.T).tril()
        weighted = scores @ value[rows] + queries @ state
        divisor = scores.sum(-1) + queries @ key_sum + EPS
        parts.append(weighted / divisor[:, None])
        state = state + keys.T @ value[rows]
        key_sum = key_sum + keys.sum(0)
    return torch.cat(parts)


# %% [markdown]
# Three programs, one function: in float64 nothing but rounding is between them, for any chunk, also
# one that does not divide the length. And softmax attention is *not* the same function, which is
# worth a check of its own, as the word "attention" stands for both.

# %%
exact = by_pairs(query, key, value)
found = {"row by row": by_rows(query, key, value)}
for chunk in (1, 7, CHUNK, LENGTH):
    found[f"chunks of {chunk}"] = by_chunks(query, key, value, chunk)
ours = saccade.linear_attention(*(rows[None, None] for rows in (query, key, value)), eps=EPS)
found["saccade"] = ours[0, 0]
for output in found.values():
    torch.testing.assert_close(output, exact, rtol=0, atol=1e-12)

scores = (query @ key.T * DIM**-0.5).masked_fill(
    torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf
)
assert (scores.softmax(-1) @ value - exact).abs().max() > 0.1

# %% [markdown]
# ## What they cost
#
# Multiplications for each row and head, of the products alone, and what must be held at once. The
# chunk that costs least is small; the one that is fastest is as large as the processor's products
# want.


# %%
def multiplications(length, chunk):
    """A row's share: pairs within its chunk, the state's reading and writing."""
    within = 2 * DIM * min(chunk, length)
    return within + (0 if chunk >= length else 2 * DIM * DIM)


lengths = (64, 128, 256) if lesson.quick else (512, 1024, 2048, 4096)
forms = ("by pairs", "row by row", "in chunks", "saccade", "softmax, saccade")
seconds = {form: [] for form in forms}
for length in lengths:
    narrow = torch.randn(3, length, DIM, device=lesson.device).unbind()
    batched = [rows[None, None] for rows in narrow]
    mask = saccade.masks.causal()
    times = lesson.race(
        {
            "by pairs": lambda: by_pairs(*narrow),
            "row by row": lambda: by_rows(*narrow),
            "in chunks": lambda: by_chunks(*narrow, CHUNK),
            "saccade": lambda: saccade.linear_attention(*batched),
            "softmax, saccade": lambda: saccade.attention(*batched, mask=mask),
        },
        rounds=3,
    )
    for form in forms:
        seconds[form].append(times[form])
longest = lengths[-1]
lesson.table(
    f"length {longest}, {DIM} channels, float32, {lesson.device.type}",
    ("form", "multiplications a row", "numbers held", "ms"),
    [
        ("by pairs", multiplications(longest, longest), longest**2, seconds["by pairs"][-1]),
        ("row by row", multiplications(longest, 1), DIM * DIM + DIM, seconds["row by row"][-1]),
        (f"in chunks of {CHUNK}", multiplications(longest, CHUNK), CHUNK**2 + DIM * DIM + DIM,
         seconds["in chunks"][-1]),
        ("saccade.linear_attention", "–", "–", seconds["saccade"][-1]),
        ("saccade.attention (softmax)", "–", "–", seconds["softmax, saccade"][-1]),
    ],
)  # fmt: skip
assert (
    multiplications(longest, 1)
    < multiplications(longest, CHUNK)
    < multiplications(longest, longest)
)
assert multiplications(10 * longest, CHUNK) == multiplications(longest, CHUNK)

with lesson.picture("Time by length of the three forms, of the library's, and of softmax") as axes:
    for form, marker in zip(
        ("saccade", "by pairs", "in chunks", "row by row"), "osD^", strict=True
    ):
        axes.plot(lengths, seconds[form], marker + "-", label=form)
    axes.plot(lengths, seconds["softmax, saccade"], "--", color="#808080", label="softmax")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("length")
    axes.set_ylabel("ms")
    axes.set_title(f"One head of {DIM} channels, causal")
    axes.legend(ncols=2)

# %% [markdown]
# ## A text that is written
#
# The state is the cache: no pages, no table, nothing grows. A prompt is read in chunks; then each
# token is one step. `linear_attention_step` changes the state where it lies.

# %%
cut = LENGTH - 5
prompt = [rows[None, None, :cut] for rows in (query, key, value)]
_, state = saccade.linear_attention(*prompt, return_state=True, eps=EPS)
assert state.kv.shape == (1, 1, DIM, DIM)
for token in range(cut, LENGTH):
    now = [rows[None, None, token : token + 1] for rows in (query, key, value)]
    output = saccade.linear_attention_step(state, *now, eps=EPS)
    torch.testing.assert_close(output[0, 0, 0], exact[token])
cache_of_softmax, cache_here = 2 * LENGTH * DIM, state.kv.numel() + state.key_sum.numel()
print(
    f"kept of {LENGTH} tokens: {cache_here:,} numbers; softmax attention keeps {cache_of_softmax:,}"
)

# %% [markdown]
# ## What is given up
#
# A state of DIM × DIM numbers cannot keep arbitrarily many keys apart. Ask for one value among n by
# its own key: softmax attention with sharp scores finds it, and linear attention gives a blur that
# grows.

# %%
recalled = {}
for count in (4, LENGTH):
    keys = torch.nn.functional.normalize(torch.randn(count, DIM, dtype=torch.float64), dim=-1) * 6
    values = torch.nn.functional.one_hot(torch.arange(count)).double()
    sharp = (keys @ keys.T).softmax(-1) @ values
    scores = features(keys) @ features(keys).T
    blurred = scores @ values / scores.sum(-1, keepdim=True)
    recalled[count] = [float(each.diagonal().mean()) for each in (sharp, blurred)]
lesson.table(
    "weight on the one value that was asked for",
    ("keys", "softmax", "linear"),
    [(str(count), *weights) for count, weights in recalled.items()],
)
assert recalled[LENGTH][0] > 0.9 and recalled[LENGTH][1] < 0.1

# %% [markdown]
# [linear.md](../linear.md) goes on from here: chunks in the library's source, gradients, decay, and
# kernels. A state that takes back what is wrong is the subject of
# [chapter 11](11_delta_rule.py).
#
# ## Change this and see
#
# 1. Let φ be the identity. Which of the checks still holds, and which line gives nonsense?
#    (`normalize=` of `saccade.linear_attention` says what can be done.)
# 2. Multiply the state by 0.9 before each row in `by_rows`. What must the pairs in `by_pairs` be
#    multiplied by? Compare with `decay=` of `saccade.linear_attention`, which takes logarithms.
# 3. Try chunks of 16, 64, 256 and 1024 at the longest length. Which is fastest here, and which does
#    `multiplications` call cheapest?

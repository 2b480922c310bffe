# %% [markdown]
# # 11 · The delta rule: a state that corrects itself
#
# Chapter 10 ended with what linear attention gives up: its state adds up all that was ever written,
# so what is asked for comes with everything else. The delta rule (Schlag et al. 2021) changes one
# line. Before a token writes, it asks the state what that says of its key, and writes the *error*:
#
#     linear attention:   state ← state + key_t value_tᵀ
#     delta rule:         state ← state + beta_t key_t (value_t − stateᵀ key_t)ᵀ
#
# With beta 1 and a key of length 1, the state afterwards says exactly value_t of key_t. It is one
# step of gradient descent on ½ ‖value_t − stateᵀ key_t‖², and beta is its step size. With a decay
# it is the linear layer of many language models (Gated DeltaNet, Kimi Delta Attention).

# %%
import torch
from lesson import Lesson

import saccade

lesson = Lesson(__file__)
LENGTH, DIM, CHUNK = (96, 16, 16) if lesson.quick else (1024, 32, 32)
query, value = torch.randn(2, LENGTH, DIM, dtype=torch.float64).unbind()
key = torch.nn.functional.normalize(torch.randn(LENGTH, DIM, dtype=torch.float64), dim=-1)
beta = torch.rand(LENGTH, dtype=torch.float64)
decay = -0.1 * torch.rand(LENGTH, dtype=torch.float64)  # logarithms of what is left of the state


# %% [markdown]
# ## Form 1: row by row
#
# The definition. First the whole state fades a little, so that what is old makes room by itself.


# %%
def by_rows(query, key, value, beta, decay, state):
    """The output, and the last state: linear in the length, one row after the other."""
    rows = []
    for t in range(len(key)):
        state = state * decay[t].exp()
        error = value[t] - key[t] @ state
        state = state + beta[t] * key[t][:, None] * error
        rows.append(query[t] @ state)
    return torch.stack(rows), state


empty = torch.zeros(DIM, DIM, dtype=torch.float64)
exact, last = by_rows(query, key, value, beta, decay, empty)

# %% [markdown]
# A key that comes twice shows the difference: linear attention answers with the sum of both values,
# the delta rule with the last one.

# %%
one, first, second = key[0], value[0], value[1]
added = one[:, None] * first + one[:, None] * second
twice = (torch.stack(pair) for pair in ((one, one), (one, one), (first, second)))
_, corrected = by_rows(*twice, torch.ones(2), torch.zeros(2), empty)
torch.testing.assert_close(one @ added, first + second)
torch.testing.assert_close(one @ corrected, second)

# %% [markdown]
# ## Form 2: in chunks
#
# In a chunk, what a token finds in the state is what was there before the chunk, and what earlier
# tokens of the chunk wrote. Call what a token writes its *update*, beta · error, and G the sums of
# decay from the chunk's start. Then
#
#     update_i + beta_i Σ_{j<i} (key_i · key_j) e^{G_i − G_j} update_j
#         = beta_i (value_i − stateᵀ (e^{G_i} key_i))
#
# This is a system of linear equations, and it is triangular, as no token sees a later one. One
# product makes it, solving it gives all updates at once, and the rest is chapter 10.


# %%
def by_chunks(query, key, value, beta, decay, state, chunk):
    """The same, in products of chunk × chunk."""
    parts = []
    for start in range(0, len(key), chunk):
        queries, keys, values, betas, decays = (
            rows[start : start + chunk] for rows in (query, key, value, beta, decay)
        )
        sums = decays.cumsum(0)
        left = (sums[:, None] - sums).tril().exp().tril()  # e^{G_i − G_j}: always at most 1
        system = torch.eye(len(keys), dtype=key.dtype) + betas[:, None] * (
            (keys @ keys.T) * left
        ).tril(-1)
        faded = sums.exp()[:, None]
        wanted = betas[:, None] * (values - faded * keys @ state)
        updates = torch.linalg.solve_triangular(system, wanted, upper=False)
        parts.append(faded * queries @ state + ((queries @ keys.T) * left) @ updates)
        until_end = (sums[-1] - sums).exp()[:, None]
        state = sums[-1].exp() * state + (until_end * keys).T @ updates
    return torch.cat(parts), state


for chunk in (1, 7, CHUNK, LENGTH):
    output, state = by_chunks(query, key, value, beta, decay, empty, chunk)
    torch.testing.assert_close(output, exact, rtol=0, atol=1e-11)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-11)
ours = saccade.gated_delta_rule(
    *(rows[None, None] for rows in (query, key, value, beta)), decay=decay[None, None], scale=1.0
)
torch.testing.assert_close(ours[0, 0], exact, rtol=0, atol=1e-11)

# %% [markdown]
# ## How to solve it
#
# Substitution, row after row, is slow on a processor that likes products. The system is I + A, and
# A has nothing on its diagonal, so a high power of it is 0 and
#
#     (I + A)⁻¹ = (I − A) (I + A²) (I + A⁴) …
#
# is exact, and made of products alone. On paper. With equal keys and beta 1, all entries of A below
# the diagonal are 1, those of its powers are binomial numbers, and the inverse's are at most 1:
# what is left of huge numbers is noise. Solving by *blocks* multiplies nothing that is larger than
# the result: with the inverses of both blocks on the diagonal, the block below them is
# −T₂₂ A₂₁ T₁₁. Six steps of that, from blocks of 2 rows on, solve 64 rows.


# %%
def by_powers(lower):
    """The inverse as a product of powers."""
    one = torch.eye(len(lower))
    found, power = one - lower, lower
    while power.any():
        power = power @ power
        found = found @ (one + power)
    return found


def by_blocks(lower):
    """The inverse by blocks, each twice as large as the ones before."""
    found, size = torch.eye(len(lower)), 1
    while size < len(lower):
        for start in range(0, len(lower), 2 * size):
            upper, under = slice(start, start + size), slice(start + size, start + 2 * size)
            found[under, upper] = -found[under, under] @ lower[under, upper] @ found[upper, upper]
        size *= 2
    return found


errors = []
for name, matrix in (
    ("keys at random", 0.5 * torch.randn(64, 64).div(8).tril(-1)),
    ("equal keys, beta 1", torch.ones(64, 64).tril(-1)),
):
    true = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + matrix.double())
    far = [float((solve(matrix) - true).abs().max()) for solve in (by_powers, by_blocks)]
    errors.append((name, *far))
lesson.table("largest error of an inverse of 64 rows, float32", ("", "powers", "blocks"), errors)
assert errors[1][1] > 1 and errors[1][2] < 1e-5 and errors[0][2] < 1e-5

# %% [markdown]
# ## One long sequence
#
# Chunks take turns, which leaves a large processor idle when there is one sequence. But whatever a
# stretch of tokens does to the state before it is linear in that state: S ← M S + N. So stretches
# can find their N (what they make of an empty state) and M (what they make of the identity, if
# nothing is wanted of their keys) side by side, and one small product for each gives the states
# between.

# %%
half = LENGTH // 2
before, after = slice(0, half), slice(half, LENGTH)
rows = query, key, value, beta, decay
_, between = by_chunks(*(each[before] for each in rows), empty, CHUNK)
_, alone = by_chunks(*(each[after] for each in rows), empty, CHUNK)
identity = torch.eye(DIM, dtype=torch.float64)
nothing = torch.zeros_like(value)
_, moves = by_chunks(*(each[after] for each in (query, key, nothing, beta, decay)), identity, CHUNK)
torch.testing.assert_close(moves @ between + alone, last, rtol=0, atol=1e-11)

# %% [markdown]
# ## What it costs, and what it gives

# %%
length = 128 if lesson.quick else 4096
narrow = [torch.randn(length, DIM, device=lesson.device) for _ in range(3)]
narrow[1] = torch.nn.functional.normalize(narrow[1], dim=-1)
narrow += [torch.rand(length, device=lesson.device), -torch.rand(length, device=lesson.device)]
batched = [rows[None, None] for rows in narrow]
forms = {
    "saccade.gated_delta_rule": lambda: saccade.gated_delta_rule(*batched[:4], decay=batched[4]),
    "saccade.linear_attention": lambda: saccade.linear_attention(*batched[:3]),
}
if lesson.device.type == "cpu":  # on a GPU, their small steps would only show how long starts take
    zeros = torch.zeros(DIM, DIM)
    forms["row by row"] = lambda: by_rows(*narrow, zeros)
    forms["in chunks"] = lambda: by_chunks(*narrow, zeros, CHUNK)
times = lesson.race(forms, rounds=3)
lesson.table(
    f"length {length}, {DIM} channels, float32, {lesson.device.type}",
    ("form", "ms"),
    list(times.items()),
)

# %% [markdown]
# Ask for one value among n by its own key, after all were written. As long as keys are fewer than
# channels, writing each of them a few times more brings the error down to nothing; added up, they
# stay as blurred as they were. Past that, no state of this size can tell them apart.


# %%
def recalled(count, passes):
    """The relative error of values that are asked for by their keys: added up, and corrected."""
    keys = torch.nn.functional.normalize(torch.randn(count, DIM, dtype=torch.float64), dim=-1)
    values = torch.randn(count, DIM, dtype=torch.float64)
    ones, zero = torch.ones(count * passes), torch.zeros(count * passes)
    again = keys.repeat(passes, 1), keys.repeat(passes, 1), values.repeat(passes, 1)
    _, state = by_chunks(*again, ones.double(), zero.double(), empty, CHUNK)
    return [float((keys @ s - values).norm() / values.norm()) for s in (keys.T @ values, state)]


counts = [DIM // 8, DIM // 4, DIM // 2, DIM, 2 * DIM]
found = [recalled(count, passes=20) for count in counts]
assert found[0][0] > 0.1 and found[0][1] < 1e-6 and found[-1][1] > 0.5
with lesson.picture("Error of recalled values by how many keys were written") as axes:
    for number, name in enumerate(("added up", "corrected")):
        axes.plot(counts, [each[number] for each in found], "os"[number] + "-", label=name)
    axes.axvline(DIM, color="#808080", linestyle="--", label="channels")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("keys")
    axes.set_ylabel("relative error of values")
    axes.set_title(f"A state of {DIM} × {DIM} numbers, 20 passes")
    axes.legend()

# %% [markdown]
# [delta.md](../delta.md) goes on from here: decay of each channel, gradients, and kernels.
#
# ## Change this and see
#
# 1. Set beta to 2 in `by_rows`, with a key of length 1. What does the state then say of that key,
#    and which matrix is the state multiplied by? (Its eigenvalue along the key is 1 − beta.)
# 2. Leave the error's second term out of `by_rows`. Which call of `saccade.linear_attention` is
#    that?
# 3. Cut the sequence into four stretches instead of two. What must be multiplied with what, and in
#    which order?

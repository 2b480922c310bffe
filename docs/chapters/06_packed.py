# %% [markdown]
# # 06 · Packed sequences
#
# Texts have unlike lengths. A tensor wants one length, so short texts are filled up: *padding*, of
# which every layer computes products that nobody wants. The other way is to lay all tokens end to
# end in one long row and to remember where each text starts.

# %%
import torch
from lesson import Lesson

import saccade
from saccade import masks

lesson = Lesson(__file__)
HEADS, HEAD_DIM = 4, 32
if lesson.quick:
    lengths = torch.tensor([5, 64, 17, 0, 33, 120])
else:
    lengths = torch.tensor([40, 1024, 130, 0, 260, 700, 90, 65])  # one text is empty: it happens

# %% [markdown]
# ## Offsets
#
# `cu_seqlens` (cumulative sequence lengths; everybody calls it so) has one entry more than there
# are texts: text b lies in rows `cu_seqlens[b]` to before `cu_seqlens[b + 1]`. Nothing else is
# needed, and an empty text is no special case.

# %%
offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
cu_seqlens = offsets.to(lesson.device)
tokens = int(offsets[-1])
query, key, value = torch.randn(3, tokens, HEADS, HEAD_DIM, dtype=torch.float64).unbind()
spans = list(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))


def causal_attention(query, key, value):
    """One text, [length, heads, dim], by the formula."""
    scores = torch.einsum("ihd,jhd->hij", query, key) * HEAD_DIM**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


exact = torch.cat(
    [causal_attention(query[first:end], key[first:end], value[first:end]) for first, end in spans]
)

# %% [markdown]
# ## Three ways to the same numbers
#
# - **Packed**: the kernel finds the text of each tile of rows by the offsets.
# - **Padded**: one row of the batch for each text, as long as the longest, and a mask
#   (`masks.key_lengths`) that hides the filling.
# - **Documents**: one long text, and a mask that hides other texts' keys. It is what a training
#   program does that packs its texts and changes nothing else.

# %%
narrow = [rows.float().to(lesson.device) for rows in (query, key, value)]
longest, texts = int(lengths.max()), len(lengths)
place = torch.cat(
    [text * longest + torch.arange(int(length)) for text, length in enumerate(lengths)]
)


def padded(rows):
    """[texts, heads, longest, dim], filled with NaN: whoever reads the filling will show it."""
    room = torch.full((texts * longest, HEADS, HEAD_DIM), torch.nan, device=lesson.device)
    room[place.to(lesson.device)] = rows
    return room.unflatten(0, (texts, longest)).transpose(1, 2)


filled = [padded(rows) for rows in narrow]
real_keys = masks.key_lengths(lengths.to(lesson.device))
ids = torch.repeat_interleave(torch.arange(texts), lengths)[None].to(lesson.device)
whole = [rows.transpose(0, 1)[None] for rows in narrow]
# Rows start at 0 in each text, and keys do: padding at the end leaves both at the top left.
ways = {
    "packed": lambda: saccade.attention_varlen(*narrow, cu_seqlens, mask=masks.causal()),
    "padded": lambda: saccade.attention(*filled, mask=masks.causal() & real_keys),
    "documents": lambda: saccade.attention(*whole, mask=masks.causal() & masks.documents(ids)),
}

# %% [markdown]
# The check, in which the filling is NaN. A product with 0 does not hide NaN (0 · NaN is NaN), so
# what a mask hides must be *selected away*. In the padded form the rows of filling themselves are
# NaN, of course; they are dropped.

# %%
results = {name: run() for name, run in ways.items()}
results["padded"] = results["padded"].transpose(1, 2).flatten(0, 1)[place.to(lesson.device)]
results["documents"] = results["documents"][0].transpose(0, 1)
for output in results.values():
    torch.testing.assert_close(output.double().cpu(), exact, rtol=0, atol=1e-5)

# %% [markdown]
# Packed sequences must not feel their neighbours: a text alone gives the same numbers as in
# company, and NaN in one text stays there. The danger is real: a tile that reaches over the end of
# a text holds the next one's keys.

# %%
nonfinite = [rows.clone() for rows in narrow]
first, end = spans[1]
for rows in nonfinite:
    rows[first:end] = torch.nan
output = saccade.attention_varlen(*nonfinite, cu_seqlens, mask=masks.causal())
assert output[first:end].isnan().all()
others = torch.ones(tokens, dtype=torch.bool)
others[first:end] = False
torch.testing.assert_close(output[others].double().cpu(), exact[others], rtol=0, atol=1e-5)

# %% [markdown]
# ## What padding costs
#
# Rows are what linear layers pay for, pairs are what attention pays for. Time depends on the mask
# too: tiles of filling and of other texts are skipped (chapter 05), if whole tiles of them there
# are.

# %%
times = lesson.race(ways)
real_pairs = sum(length * (length + 1) // 2 for length in lengths.tolist())
computed = {"packed": tokens, "padded": texts * longest, "documents": tokens}
asked = {
    "packed": real_pairs,
    "padded": texts * longest * (longest + 1) // 2,
    "documents": tokens * (tokens + 1) // 2,
}
on_host = [rows.float() for rows in (query, key, value)]  # where lengths can be read
explained = saccade.explain(
    saccade.attention_varlen, *on_host, offsets, offsets, mask=masks.causal()
)
assert explained.visible_pairs == HEADS * real_pairs
lesson.table(
    f"{texts} texts of {', '.join(map(str, lengths.tolist()))} tokens",
    ("form", "rows", "causal pairs", "of them wanted %", "saccade ms"),
    [
        (name, computed[name], asked[name], 100 * real_pairs / asked[name], times[name])
        for name in ways
    ],
)
assert computed["padded"] > 1.5 * computed["packed"]

with lesson.picture("Rows: padded to the longest, and packed end to end", size=(7.5, 2.6)) as axes:
    from lesson import COLORS, GREY

    for text, length in enumerate(lengths.tolist()):
        color = COLORS[text % len(COLORS)]
        axes.barh(text + 2, longest, color=GREY, alpha=0.15, height=0.75)
        axes.barh(text + 2, length, color=color, height=0.75)
        axes.barh(0, length, left=spans[text][0], color=color, height=0.9)
    axes.set_yticks([0, 2 + (texts - 1) / 2], ["packed", "padded,\na row a text"])
    axes.set_xlabel("rows (grey: filling that is computed)")
    axes.grid(visible=False, axis="y")

# %% [markdown]
# Gradients flow through the packed form too, each text's on its own:

# %%
leaves = [rows.clone().requires_grad_() for rows in narrow]
saccade.attention_varlen(*leaves, cu_seqlens, mask=masks.causal()).square().sum().backward()
exact_leaves = [rows.clone().requires_grad_() for rows in (query, key, value)]
for first, end in spans:
    causal_attention(*(rows[first:end] for rows in exact_leaves)).square().sum().backward()
for ours, theirs in zip(leaves, exact_leaves, strict=True):
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.double().cpu(), theirs.grad, rtol=0, atol=1e-4)

# %% [markdown]
# ## Change this and see
#
# 1. Make all lengths equal. Which form is fastest now, and what is left of the difference?
# 2. Sort the texts by length and pad groups of two. How much filling is left? This is *bucketing*,
#    what one did before kernels knew offsets. What does it do to the order of training?
# 3. Give the queries other offsets than the keys (`cu_seqlens_k`), so that each text has fewer
#    queries than keys. Which keys does a causal row see then? (`masks.causal("top_left")` is the
#    other answer.)

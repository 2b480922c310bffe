# %% [markdown]
# # 08 · Pages
#
# While a model writes, the keys and values of everything so far are kept: the *cache*. Nobody knows
# how long a text will become. A slab of memory for each, as long as the longest allowed, stands
# empty for the most part. So all texts share one pool of **pages**, and a **page table** says which
# pages a text has, in order:
#
#     row j of sequence b  →  page page_table[b, j // page_size], slot j % page_size
#
# It is what an operating system does with memory, for the same reason.

# %%
import torch
from lesson import COLORS, Lesson

import saccade

lesson = Lesson(__file__)
HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 8
lengths = [13, 40, 3, 25] if lesson.quick else [130, 1900, 33, 700, 12, 1024, 260, 415]
kv_lens = torch.tensor(lengths, dtype=torch.int32)
texts = [torch.randn(2, length, KV_HEADS, HEAD_DIM).unbind() for length in lengths]
query = torch.randn(len(lengths), HEADS, 1, HEAD_DIM)  # one new row of each text


def exact_attention(query, key, value):
    """One row of queries [heads, 1, dim] over [length, kv_heads, dim], in float64."""
    key, value = (
        rows.double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
        for rows in (key, value)
    )
    return (query.double() @ key.mT * HEAD_DIM**-0.5).softmax(-1) @ value


exact = torch.stack([exact_attention(rows, *text) for rows, text in zip(query, texts, strict=True)])

# %% [markdown]
# ## A pool, a table
#
# The pool has some pages more than are needed; all begin as NaN, so that whoever reads what was
# never written will show it. Texts get their pages from a shuffled list: neighbours in a text are
# nobody's neighbours in memory.

# %%
needed = [-(-length // PAGE) for length in lengths]
num_pages = sum(needed) + 5
free = torch.randperm(num_pages).tolist()
key_pages, value_pages = (
    torch.full((num_pages, KV_HEADS, PAGE, HEAD_DIM), torch.nan) for _ in "kv"
)
page_table = torch.full(
    (len(lengths), max(needed)), -1, dtype=torch.int32
)  # -1: no page, never read
for text, (key, value) in enumerate(texts):
    for number in range(needed[text]):
        page = page_table[text, number] = free.pop()
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for pages, source in ((key_pages, key), (value_pages, value)):
            filled = source[rows].transpose(0, 1)
            pages[page, :, : filled.shape[1]] = filled

# %% [markdown]
# ## Reading through the table
#
# The simple way gathers each text's pages side by side and attends to them. That is a copy of the
# whole cache at each step, for one row of queries. The library's call reads keys where they lie.
# Both must give what the text alone gives.


# %%
def gathered(text):
    """One text by way of a copy."""
    used = page_table[text, : needed[text]].long()
    key, value = (
        pages[used].transpose(1, 2).flatten(0, 1)[: lengths[text]]
        for pages in (key_pages, value_pages)
    )
    return exact_attention(query[text], key, value)


for text in range(len(lengths)):
    torch.testing.assert_close(gathered(text), exact[text])

pool = [each.to(lesson.device) for each in (query, key_pages, value_pages, page_table, kv_lens)]
output = saccade.attention_paged(*pool)
torch.testing.assert_close(output.double().cpu(), exact, rtol=0, atol=1e-5)

# %% [markdown]
# Where pages lie must not matter, not even to the last bit. That takes sums that are cut at fixed
# places of the text and not where pages happen to end in memory:

# %%
order = torch.randperm(num_pages)
moved = [pool[0], *(pages[order.to(lesson.device)] for pages in pool[1:3])]
new_number = torch.empty_like(order)
new_number[order] = torch.arange(num_pages)
moved_table = (
    torch.where(page_table >= 0, new_number[page_table.long()], -1).int().to(lesson.device)
)
fixed = {"batch_invariant": True}
there = saccade.attention_paged(*moved, moved_table, pool[4], **fixed)
assert saccade.attention_paged(*pool, **fixed).equal(there)

# %% [markdown]
# ## What is wasted
#
# A slab wastes everything behind a text's end. Pages waste the rest of the last page of each text:
# half a page on average, whatever the length. Smaller pages waste less and make longer tables.

# %%
longest = 64 if lesson.quick else 2048
tokens = sum(lengths)
rows = [("slab", len(lengths) * longest, 100 * tokens / (len(lengths) * longest), 0)]
for size in (1, 8, 16, 64, 256):
    pages = sum(-(-length // size) for length in lengths)
    rows.append((f"pages of {size}", pages * size, 100 * tokens / (pages * size), pages))
lesson.table(
    f"{len(lengths)} texts, {tokens} tokens, at most {longest} each",
    ("cache", "slots taken", "of them used %", "entries of the table"),
    rows,
)
assert rows[1][1] == tokens and all(row[1] - tokens < len(lengths) * 256 for row in rows[1:])

# %% [markdown]
# ## Sharing
#
# Two texts with the same beginning have the same keys there. With a table they can have the same
# *pages*. `saccade.PagedCache` keeps the books: who holds a page, which beginning it stands for,
# who must get a copy before writing. Here one question is asked of one long prompt three times, and
# one of the answers branches.

# %%
cache = saccade.PagedCache(
    64, page_size=PAGE, num_layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, device=lesson.device
)
prompt = list(range(37))
known = {}  # what was written, by sequence


def read(sequence, tokens):
    """The layer computes keys and values of new tokens (here: a function of token and place)."""
    begin = cache.length(sequence)
    slots = cache.append({sequence: tokens})
    seeds = [1000 * token + place for place, token in enumerate(tokens, begin)]
    new = torch.stack([
        torch.randn(2, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ])  # fmt: skip
    known[sequence] = torch.cat([known[sequence][:begin], new]) if sequence in known else new
    key, value = new.to(lesson.device).unbind(1)
    cache.write(0, key, value, slots)


first = cache.allocate(prompt)
read(first, prompt)
cache.commit(first)  # its full pages may be found from now on
others = []
for _ in range(2):
    other = cache.allocate([*prompt, 99])
    assert cache.length(other) == len(prompt) // PAGE * PAGE  # full pages of the prompt: found
    known[other] = known[first]
    read(other, [*prompt[cache.length(other) :], 99])
    others.append(other)
branch = cache.fork(first)
known[branch] = known[first]
read(branch, [7, 7, 7])
read(first, [8])
sequences = [first, *others, branch]
cache.check()

# %% [markdown]
# The check that matters: each text reads what it would read alone, though most pages are not its
# own. And the books: without sharing the four would take many more pages.

# %%
query = torch.randn(4, HEADS, 1, HEAD_DIM)
output = cache.attend(0, query.to(lesson.device), sequences)
for rows, found, sequence in zip(query, output, sequences, strict=True):
    alone = exact_attention(rows, *known[sequence].unbind(1))
    torch.testing.assert_close(found.double().cpu(), alone, rtol=0, atol=1e-5)
used = cache.statistics().used
alone = sum(-(-cache.length(sequence) // PAGE) for sequence in sequences)
assert cache.statistics().copied == 1 and used < alone / 2
print(f"{used} pages hold what would take {alone}; one page was copied before it was written")

table, lens = (each.tolist() for each in cache.tables(sequences))
says = "Which pages each text holds: the beginning is shared, the ends are its own"
with lesson.picture(says, size=(7.0, 2.6)) as axes:
    holders = {}
    for text, (row, length) in enumerate(zip(table, lens, strict=True)):
        for page in row[: -(-length // PAGE)]:
            holders.setdefault(page, []).append(text)
    for text, (row, length) in enumerate(zip(table, lens, strict=True)):
        for number, page in enumerate(row[: -(-length // PAGE)]):
            shared = len(holders[page]) > 1
            color = "#808080" if shared else COLORS[text]
            fill = min(PAGE, length - number * PAGE) / PAGE
            axes.barh(text, 0.94, left=number, color=color, alpha=0.2, height=0.7)
            axes.barh(text, 0.94 * fill, left=number, color=color, height=0.7)
            axes.text(number + 0.47, text, str(page), ha="center", va="center", color="white")
    axes.set_yticks(range(4), ["first", "same prompt", "same prompt", "fork"])
    axes.invert_yaxis()
    axes.set_xlabel(
        "pages in the text's order, with their numbers in the pool; grey ones are shared"
    )
    axes.set_xticks([])
    axes.grid(visible=False)

# %% [markdown]
# [paged.md](../paged.md) shows the rest: chunks of a prompt and decoding in one call, drafts that
# branch, swapping, eight bits.
#
# ## Change this and see
#
# 1. Make `PAGE` 1, then 64. How many tokens of the prompt do the others find now, and how many
#    pages are copied at the fork?
# 2. Write -1 in place of a real page in `page_table`, at a place that is read. What comes out? What
#    does the library promise about entries behind the end, and about others?
# 3. Fork `first` once more *before* `read(first, [8])`. Who pays for the copy, and who does not?

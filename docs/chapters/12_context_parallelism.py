# %% [markdown]
# # 12 · Context parallelism: one sequence on several GPUs
#
# However well one GPU computes attention, a sequence can be too long for it: a million tokens of
# activations fit into no card. So the rows are dealt to several, each of which is a *rank*. All
# layers of a model work row by row and notice nothing, except attention, where a row wants the keys
# and values of other rows. This chapter deals rows, brings keys to where they are needed, and runs
# four processes on this machine that compute what one does.

# %%
import itertools
import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from lesson import COLORS, Lesson

import saccade
from saccade import masks

lesson = Lesson(__file__)
torch.set_num_threads(1)  # four processes share the cores
RANKS, HEADS, DIM = 4, 4, 16
LENGTH = 64 if lesson.quick else 1024
query, key, value = torch.randn(3, 1, HEADS, LENGTH, DIM, dtype=torch.float64).unbind()
exact = saccade.attention(query, key, value, causal=True)

# %% [markdown]
# ## Who gets which rows
#
# The obvious deal gives each rank a stretch of rows. Under a causal mask, row r sees r + 1 keys, so
# the last rank has most of the work and the others wait for it: of four ranks it computes 7/16 of
# all pairs. Cut the rows into twice as many chunks and give each rank one from the front and the
# one at the same distance from the end, and all have the same.


# %%
def pairs_of(rows):
    """Visible pairs of some rows under a causal mask."""
    return int((rows + 1).sum())


stretches = torch.arange(LENGTH).chunk(RANKS)
chunks = torch.arange(LENGTH).chunk(2 * RANKS)
folded = [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(RANKS)]
shares = {
    name: [pairs_of(rows) / pairs_of(torch.arange(LENGTH)) for rows in dealt]
    for name, dealt in (("stretches", stretches), ("front and end", folded))
}
lesson.table(
    "share of all pairs",
    ("deal", *(f"rank {rank}" for rank in range(RANKS))),
    [(name, *each) for name, each in shares.items()],
)
assert max(shares["stretches"]) > 0.42 and max(shares["front and end"]) < 0.26

# %% [markdown]
# ## Keys come to rows
#
# A rank has its own keys and values, no others. The plainest way: collect the keys that its rows
# see from all ranks, and attend as always. Rows keep the numbers that they have in the whole, so
# the mask compares those. Nothing else changes, and the output of a row is what it was.


# %%
def attend(rank, kv_rows):
    """Output and lse of a rank's rows against some keys of the whole."""
    rows = folded[rank]
    scores = query[:, :, rows] @ key[:, :, kv_rows].mT * DIM**-0.5
    scores = scores.masked_fill(kv_rows > rows[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return weights @ value[:, :, kv_rows], lse


order = torch.cat(folded).argsort()  # from the order of ranks to that of rows
gathered = [attend(rank, torch.arange(int(folded[rank].max()) + 1))[0] for rank in range(RANKS)]
torch.testing.assert_close(torch.cat(gathered, 2)[:, :, order], exact, rtol=0, atol=1e-12)

# %% [markdown]
# It holds all keys at once, which a very long sequence may not allow. In a **ring** the keys of one
# rank after another pass by: each step attends to one rank's keys, and chapters 2 and 7 know how to
# merge what comes of it. While a step computes, the next keys are on their way.


# %%
def by_ring(rank):
    """Output of a rank's rows, from the keys of one rank after another."""
    parts = [attend(rank, folded[(rank - step) % RANKS]) for step in range(RANKS)]
    return saccade.merge_states(*zip(*parts, strict=True))[0]


merged = torch.cat([by_ring(rank) for rank in range(RANKS)], 2)
torch.testing.assert_close(merged[:, :, order], exact, rtol=0, atol=1e-12)

# %% [markdown]
# The third way turns the deal round for the moment of attention. **Ulysses** exchanges rows for
# heads: each rank gets all rows of some heads, attends as if it were alone, and gives the outputs
# back. Kernels see a whole sequence; but there must be heads for all ranks.
#
# ## A plan from the mask
#
# Front and end suit a causal mask and nothing else. Documents laid end to end, windows and prefixes
# have other work per row, and other keys that rows need. The library asks the mask itself:
# intervals ([chapter 5](05_masks.py)) say of whole tiles what is visible, so the work of every row
# is known before there is a tensor, and so is who needs whose keys.

# %%
generator = torch.Generator().manual_seed(1)
cuts = torch.randperm(LENGTH - 1, generator=generator)[:5].sort().values + 1
ids = torch.searchsorted(cuts, torch.arange(LENGTH), right=True)
kinds = {
    "causal": masks.causal(),
    "window": masks.window(LENGTH // 8),
    "documents": masks.causal() & masks.documents(ids[None]),
}
plans = {name: saccade.parallel.plan(mask, LENGTH, RANKS) for name, mask in kinds.items()}
rows_of_table = []
for name, plan in plans.items():
    of_others = plan.sent.sum(1) - plan.sent.diagonal()
    alone = [plan.whole_call.mask.to_dense(1, 1, LENGTH, LENGTH)[0, 0][rows].sum()
             for rows in stretches]  # fmt: skip
    most = float(torch.stack(alone).max() / torch.stack(alone).double().mean() - 1)
    rows_of_table.append((name, most, plan.imbalance, float(of_others.max() / LENGTH)))
    seen = plan.whole_call.mask.to_dense(1, 1, LENGTH, LENGTH)[0, 0]
    for rank in range(RANKS):  # every key that a row sees is one that its rank has or gets
        have = torch.cat([plan.needed_rows(rank, owner) for owner in range(RANKS)])
        wanted = seen[plan.rows_of(rank)].any(0).nonzero().flatten()
        assert set(wanted.tolist()) <= set(have.tolist())
lesson.table(
    "the busiest rank beside the mean, and the keys of others that it gets, of all",
    ("mask", "stretches", "plan", "keys of others"),
    rows_of_table,
)
assert plans["causal"].imbalance < 0.05 < rows_of_table[0][1]

# %% [markdown]
# Which rank computes which pairs, for a causal mask in stretches and as planned, and for documents:

# %%
colors = torch.tensor([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in COLORS])
deals = {
    "stretches": (list(stretches), plans["causal"]),
    "planned": ([plans["causal"].rows_of(rank) for rank in range(RANKS)], plans["causal"]),
    "documents, planned": (
        [plans["documents"].rows_of(rank) for rank in range(RANKS)], plans["documents"],
    ),
}  # fmt: skip
with lesson.picture(
    "Pairs of query and key rows, coloured by the rank that computes them", 3, (9.0, 3.3)
) as panels:
    for axes, (name, (dealt, plan)) in zip(panels, deals.items(), strict=True):
        seen = plan.whole_call.mask.to_dense(1, 1, LENGTH, LENGTH)[0, 0]
        owner = torch.zeros(LENGTH, dtype=torch.int64)
        for rank, rows in enumerate(dealt):
            owner[rows] = rank
        shown = torch.where(seen[..., None], colors[owner][:, None], 1.0)
        axes.imshow(shown.numpy(), interpolation="nearest")
        axes.set_title(name)
        axes.set_xlabel("key row")
        axes.grid(visible=False)
    panels[0].set_ylabel("query row")

# %% [markdown]
# ## Four processes
#
# Now in earnest. Each process is a rank with its own memory, and `torch.distributed` carries the
# messages: gloo here, NCCL between GPUs. Every rank makes the same plan, takes its rows, and calls
# `saccade.parallel.attention`. In the backward pass gradients of keys go back to where the keys
# came from, and are added there. On several GPUs `torchrun` starts the processes; here they are
# forked.


# %%
def run_rank(rank, folder):
    """Be one rank: outputs and gradients of its rows by each method, put together at the end."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    sizes = {"query_heads": HEADS, "kv_heads": HEADS, "head_dim": DIM}
    found = {}
    for (name, mask), method in itertools.product(kinds.items(), ("gather", "ulysses", "ring")):
        plan = saccade.parallel.plan(mask, LENGTH, dist.group.WORLD, method=method, **sizes)
        local = [plan.shard(each, dim=2).requires_grad_() for each in (query, key, value)]
        output = saccade.parallel.attention(*local, plan=plan)
        output.square().sum().backward()
        results = output.detach(), *(each.grad for each in local)
        found[name, method] = [plan.unshard(each, dim=2) for each in results]
    if rank == 0:
        torch.save(found, folder / "found")
    dist.destroy_process_group()


found = {}
if "fork" in multiprocessing.get_all_start_methods() and dist.is_gloo_available():
    with tempfile.TemporaryDirectory() as name:
        context, folder = multiprocessing.get_context("fork"), Path(name)
        ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert all(each.exitcode == 0 for each in ranks)
        found = torch.load(folder / "found")
worst = {}
for (name, method), results in found.items():
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    output = saccade.attention(*leaves, mask=kinds[name])
    output.square().sum().backward()
    wanted = output.detach(), *(each.grad for each in leaves)
    errors = [float((a - b).abs().max()) for a, b in zip(results, wanted, strict=True)]
    worst[name, method] = max(errors)
    assert worst[name, method] < 1e-11
lesson.table(
    "largest difference from one process, of outputs and gradients in float64",
    ("mask", "gather", "ulysses", "ring"),
    [(name, *(worst.get((name, method), "–") for method in ("gather", "ulysses", "ring")))
     for name in kinds],
)  # fmt: skip

# %% [markdown]
# ## What it costs
#
# The three ways send different things. Gathered keys are short where few heads hold them and
# windows are narrow; Ulysses sends queries and outputs as well, a share of each to each rank; a
# ring sends what gathering does, and merges. A model of costs, printed by `print(plan)`, chooses
# where nothing is named. Here is what it expects of eight GPUs, causal, 64k rows, in milliseconds;
# two GPUs were [measured](../parallel.md#measured).

# %%
plan = saccade.parallel.plan(masks.causal(), 65536, 8)
lesson.table(
    "expected, not measured: 32 query and 8 kv heads of 128 channels, 8 GPUs",
    ("method", "MB received", "keys held", "forward ms", "backward ms"),
    [(cost.method, cost.received / 1e6, cost.held, cost.forward * 1e3, cost.backward * 1e3)
     for cost in plan.costs.values()],
)  # fmt: skip
assert plan.method == min(plan.costs.values(), key=lambda cost: cost.total).method

# %% [markdown]
# Linear attention and the delta rule ([chapter 11](11_delta_rule.py)) send less: a state is
# all that rows need of those before them. [parallel.md](../parallel.md) has these, a cache whose
# tokens are dealt to ranks, and what happens when ranks disagree. [Chapter 13](13_fp8.py) makes
# numbers smaller instead.
#
# ## Change this and see
#
# 1. Let `folded` be dealt in turns, rank r getting rows r, r + 4, r + 8 and so on. Is the work
#    even? Why are single rows a bad deal all the same? (Count the keys that a rank needs under the
#    window.)
# 2. In `by_ring`, give `saccade.merge_states` the outputs in bfloat16 and 64 ranks instead of 4.
#    How does the error grow with the number of steps?
# 3. Give rank 1 another mask in `run_rank`. Which process tells what, and how long does it take?

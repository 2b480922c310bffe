# %% [markdown]
# # 09 · FlashAttention-3 on Hopper: compiled and read
#
# An H100 multiplies three times as fast as an A100, and FlashAttention-2 reached only a third of
# that. FlashAttention-3 (Shah et al. 2024) computes the very same sums. What is new is *when*:
# products run in the background, and something else is done meanwhile. This chapter needs no GPU:
# it counts on paper, checks the new order of the sums in float64, and then reads what compilers
# make.

# %%
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lesson import COLORS, GREY, Lesson

from saccade.kernel_check.calls import KernelCall

lesson = Lesson(__file__, interpret=False)  # kernels are compiled here, not run
ROOT = Path(__file__).parents[2]

# %% [markdown]
# ## What is slow
#
# A multiprocessor of an H100 does 4096 operations of 16-bit products in a clock, and 16
# exponentials. Attention takes one exponential a pair, and 4 · head_dim operations of products. Per
# tile of 128 × 128 pairs:

# %%
PRODUCT_RATE, EXPONENT_RATE = 4096, 16  # a clock and multiprocessor
PAIRS = 128 * 128
clocks = {
    head_dim: (2 * PAIRS * head_dim // PRODUCT_RATE, PAIRS // EXPONENT_RATE)
    for head_dim in (64, 128, 256)
}
lesson.table(
    "clocks of a tile of 128 × 128; what the products' share is if nothing overlaps",
    ("head_dim", "one product", "both products", "exponentials", "share %"),
    [
        (str(dim), product, 2 * product, exponents, 200 * product / (2 * product + exponents))
        for dim, (product, exponents) in clocks.items()
    ],
)
assert clocks[128] == (1024, 1024)

# %% [markdown]
# One after the other, the tensor cores of a kernel with 128 channels idle a third of the time,
# however well it is written, and half of the time with 64. The exponentials must run *under* the
# products. But the product of weights and values needs the weights, and these need the
# exponentials, and these the scores. Within one tile nothing can overlap. Two ways out:
#
# - **One tile late.** Start the scores of tile j, then the sum of tile j − 1, whose weights are
#   ready. While the sum runs, take the exponentials of tile j.
# - **Two groups of warps**, each with rows of its own. While one takes exponentials, the other's
#   products run. Nobody must say so: the tensor cores serve who is ready.
#
# ## A model of it
#
# Two units, tensor cores and exponentials; each does one thing at a time, in the order in which it
# was asked. A task starts when its unit is free and what it needs is there.


# %%
def serial(tile, group):
    """FlashAttention-2's order: scores, exponentials, sum, each after the other."""
    before = [("sum", tile - 1, group)] if tile else []
    return [
        (("scores", tile, group), before),
        (("exponents", tile, group), [("scores", tile, group)]),
        (("sum", tile, group), [("exponents", tile, group)]),
    ]


def one_tile_late(tile, group):
    """The sum of the tile before runs under this tile's exponentials."""
    late = [(("sum", tile - 1, group), [("exponents", tile - 1, group)])] if tile else []
    return [
        (("scores", tile, group), [("exponents", tile - 1, group)] if tile else []),
        *late,
        (("exponents", tile, group), [("scores", tile, group)]),
    ]


def timeline(order, tiles, groups, head_dim):
    """When each task runs: {task: (start, end)}; groups share the units, each has its own rows."""
    product, exponents = (number // groups for number in clocks[head_dim])
    waiting = [
        [task for tile in range(tiles) for task in order(tile, group)] for group in range(groups)
    ]
    if order is one_tile_late:
        for group, tasks in enumerate(waiting):
            tasks.append((("sum", tiles - 1, group), [("exponents", tiles - 1, group)]))
    free, done = {"tensor": 0, "exponents": 0}, {}
    while any(waiting):
        ready = []
        for group, tasks in enumerate(waiting):
            for unit in free:
                first = next((task for task in tasks if unit_of(task[0]) == unit), None)
                if first and all(need in done for need in first[1]):
                    start = max([free[unit], *(done[need][1] for need in first[1])])
                    ready.append((start, -len(tasks), group, first))  # whoever has more to do
        start, _, group, task = min(ready, key=lambda each: each[:3])
        end = start + (exponents if task[0][0] == "exponents" else product)
        done[task[0]] = (start, end)
        free[unit_of(task[0])] = end
        waiting[group].remove(task)
    return done


def unit_of(task):
    """Who does it."""
    return "exponents" if task[0] == "exponents" else "tensor"


# %% [markdown]
# The model's own checks: a unit does one thing at a time, nothing starts before what it needs, and
# no order can beat the busiest unit.

# %%
TILES = 6 if lesson.quick else 16
SCHEDULES = {
    "one after the other": (serial, 1),
    "one tile late": (one_tile_late, 1),
    "two groups": (serial, 2),
    "two groups, one tile late": (one_tile_late, 2),
}
rows = []
for name, (order, groups) in SCHEDULES.items():
    shares = []
    for head_dim in (64, 128, 256):
        done = timeline(order, TILES, groups, head_dim)
        assert len(done) == 3 * TILES * groups
        for unit in ("tensor", "exponents"):
            spans = sorted(span for task, span in done.items() if unit_of(task) == unit)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for (kind, tile, group), (start, _) in done.items():
            if kind != "scores":
                need = "scores" if kind == "exponents" else "exponents"
                assert start >= done[need, tile, group][1]
        total = max(end for _, end in done.values())
        busy = 2 * TILES * clocks[head_dim][0]
        assert total >= max(busy, TILES * clocks[head_dim][1])
        shares.append(100 * busy / total)
    rows.append((name, *shares))
lesson.table(
    f"the tensor cores' busy time in %, {TILES} tiles",
    ("order", "head_dim 64", "128", "256"),
    rows,
)
assert rows[0][2] < 67 < 85 < min(row[2] for row in rows[1:])

# %%
says = "Four orders of the same work: what the tensor cores and the exponentials do when"
with lesson.picture(says, panels=1, size=(8.4, 4.2)) as axes:
    from matplotlib.patches import Patch

    shades = {"scores": COLORS[1], "sum": COLORS[2], "exponents": COLORS[0]}
    ticks = []
    for place, (name, (order, groups)) in enumerate(SCHEDULES.items()):
        done = timeline(order, 5, groups, 128)
        for (kind, tile, group), (start, end) in done.items():
            line = 3 * place + (kind == "exponents")
            axes.barh(line, end - start - 16, left=start + 8, color=shades[kind], height=0.85,
                      alpha=1 - 0.35 * group)  # fmt: skip
            if (end - start) > 700:
                axes.text(
                    (start + end) / 2,
                    line,
                    str(tile),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                )
        finish = max(end for _, end in done.values())
        axes.plot([finish, finish], [3 * place - 0.6, 3 * place + 1.6], color=GREY, linewidth=1)
        ticks.append((3 * place + 0.5, f"{name}\n{finish:,} clocks"))
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks])
    axes.invert_yaxis()
    axes.set_xlabel(
        "clocks (5 tiles, head_dim 128; upper line: tensor cores; paler: the second group)"
    )
    axes.grid(visible=False, axis="y")
    axes.figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in shades.items()],
        loc="outside upper center", ncols=3,
    )  # fmt: skip

# %% [markdown]
# ## The same sums
#
# One tile late, the sum of tile j − 1 is added after the maximum of tile j − 1 is known and before
# that of tile j is: the rescaling lags by one tile. Does it still come out exact? In float64,
# beside the formula:

# %%
query, key, value = torch.randn(3, 96, 16, dtype=torch.float64).unbind()
exact = (query @ key.T / 4).softmax(-1) @ value
weighted_sum, row_sum = torch.zeros_like(query), query.new_zeros(96)
row_max, weights, rescale = query.new_full((96,), -torch.inf), None, query.new_zeros(96)
for start in range(0, 96, 16):
    scores = query @ key[start : start + 16].T / 4
    if weights is not None:  # on a GPU this product runs on while the next lines are computed
        weighted_sum = weighted_sum * rescale[:, None] + weights @ value[start - 16 : start]
    new_max = torch.maximum(row_max, scores.amax(-1))
    rescale = (row_max - new_max).exp()
    weights = (scores - new_max[:, None]).exp()
    row_sum, row_max = row_sum * rescale + weights.sum(-1), new_max
weighted_sum = weighted_sum * rescale[:, None] + weights @ value[-16:]
torch.testing.assert_close(weighted_sum / row_sum[:, None], exact)

# %% [markdown]
# ## Compiled and read
#
# What does a compiler make of the two products? Here is attention's inner loop in Triton, without
# masks or edges. Its source is compiled for an A100 (sm_80) and for an H100 (sm_90); no GPU is
# needed to compile.

# %%
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def inner_loop(query_ptr, key_ptr, value_ptr, output_ptr, kv_len, TILE: tl.constexpr):
    """Scores, weights, sum: no maximum, no mask, only what occupies the two units."""
    rows, channels = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    place = rows * TILE + channels
    query_tile = tl.load(query_ptr + place)
    weighted_sum = tl.zeros([TILE, TILE], tl.float32)
    for kv_start in range(0, kv_len, TILE):
        key_tile = tl.load(key_ptr + kv_start * TILE + place)
        value_tile = tl.load(value_ptr + kv_start * TILE + place)
        weights = tl.exp2(tl.dot(query_tile, tl.trans(key_tile)))
        weighted_sum = tl.dot(weights.to(value_tile.dtype), value_tile, weighted_sum)
    tl.store(output_ptr + place, weighted_sum)


def compiled(capability):
    """The kernel in PTX, the assembly of NVIDIA's GPUs."""
    signature = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), "*bf16")
    signature |= {"output_ptr": "*fp32", "kv_len": "i32", "TILE": "constexpr"}
    source = ASTSource(inner_loop, signature, constexprs={"TILE": 64})
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, GPUTarget("cuda", capability, 32), options).asm["ptx"]


INSTRUCTIONS = {
    "mma.sync": "a product; the warp waits for it",
    "wgmma.mma_async": "a product of four warps, started",
    "wgmma.wait_group": "wait for started products",
    "ex2.approx": "an exponential, base 2",
}
texts = {capability: compiled(capability) for capability in (80, 90)}
found = {name: {at: text.count(name) for at, text in texts.items()} for name in INSTRUCTIONS}
lesson.table(
    "instructions in the compiled loop",
    ("instruction: what it is", "sm_80", "sm_90"),
    [(f"{name}: {INSTRUCTIONS[name]}", *counts.values()) for name, counts in found.items()],
)
assert found["mma.sync"][80] > 0 and found["wgmma.mma_async"][80] == 0
assert found["wgmma.mma_async"][90] > 0 and found["mma.sync"][90] == 0

# %% [markdown]
# On sm_90 products are *started* (`mma_async`), and waited for. Asynchronous they are, but do the
# exponentials run in between? In the compiled text of this loop, the question is what stands
# between the start of a product and the wait for it:

# %%
body = re.findall(r"wgmma\.mma_async|wgmma\.wait_group\S* *\d|ex2\.approx", texts[90])
between = 0
running = 0
for word in body:
    running = running + 1 if "mma_async" in word else 0 if "wait_group" in word else running
    between += word == "ex2.approx" and running > 0
print(f"{between} of {found['ex2.approx'][90]} exponentials stand under a running product")
assert between == 0  # Triton's own schedule leaves them alone; see below

# %% [markdown]
# None. Triton's language has no word for "start this, and do that meanwhile". The library's Hopper
# kernel is written in Gluon, which has: `warpgroup_mma(..., is_async=True)` and
# `warpgroup_mma_wait(1)`, *wait until at most one is running*. [hopper.md](../hopper.md) shows its
# step and its roles: one warp only loads, by TMA; groups of four warps compute, one tile late, and
# there are two or three of them.
#
# `saccade kernels -a sm_90 -k 'hopper_*'` compiles it, and counts in the machine code how many
# exponentials stand between the two waits. In full this chapter does so; in quick mode it reads
# what was committed in [kernels.md](../kernels.md): registers of a thread, and KB of shared memory.

# %%
committed = {}
for line in (ROOT / "docs/kernels.md").read_text(encoding="utf-8").splitlines():
    cells = [cell.strip(" *") for cell in line.split("|")]
    if len(cells) > 7 and cells[1] == "hopper_forward" and "/" in cells[7]:
        committed[cells[2].removeprefix("half ")] = tuple(map(int, cells[7].split("/")))
lesson.table(
    "the library's Hopper kernel, as committed",
    ("head_dim and mask", "registers", "shared KB", "of 227 %"),
    [
        (name, registers, shared, 100 * shared / 227)
        for name, (registers, shared) in committed.items()
        if re.fullmatch(r"d(64|128|256) (none|causal)( \d+ rows)?", name)
    ],
)
assert all(shared <= 227 and registers <= 168 for registers, shared in committed.values())


def compiled_now():
    """What the library's compiler finds for bfloat16 and 64 channels: {name: usage}."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernels.json")
        options = ["-a", "sm_90", "-k", "hopper_forward", "-d", "64", "--json", str(file)]
        command = [sys.executable, "-m", "saccade", "kernels", *options]
        environment = {**os.environ, "SACCADE_CONFIGS": ""}  # none but the default configs
        subprocess.run(command, check=True, capture_output=True, env=environment)
        kernels = json.loads(file.read_text(encoding="utf-8"))["kernels"]
    usages = {}
    for kernel in kernels:
        name = KernelCall(**kernel["call"]).name.removeprefix("bf16 ")
        usages[name] = kernel["usage"]
    return usages


if not lesson.quick:
    usages = compiled_now()
    fields = ("registers", "products", "covered", "looped")
    lesson.table(
        "compiled now",
        ("kernel", "registers", "WGMMA", "exponentials under a product", "spills in its loops"),
        [(name, *(usage[field] for field in fields)) for name, usage in usages.items()],
    )
    for name, usage in usages.items():
        # Where two programs share a multiprocessor (80 registers at first), a few weights stay in
        # memory.
        assert usage["products"] > 0 and (usage["looped"] == 0 or usage["registers"] == 80)
        # A thread's share of 64 × 128 pairs among 128 threads. Three groups or two programs, which
        # have fewer registers each, cover one another's exponentials instead.
        assert usage["covered"] >= 64 or usage["registers"] in (80, 128)
        assert (usage["registers"], round(usage["shared"] / 1024)) == committed[name]

# %% [markdown]
# ## Measured
#
# On an H200, forward, bfloat16, from the committed result file: TFLOP/s of this kernel, of the
# Triton's, and of cuDNN's, in turn.

# %%
results = [
    json.loads(line)
    for line in (ROOT / "benchmarks/results/h200/hopper.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
by_case = {}
for result in results:
    if result["pass"] == "forward":
        by_case.setdefault(result["case"]["name"], {})[result["who"]] = result["tflops"]
names = ("saccade/hopper", "saccade/triton", "sdpa/cudnn")
lesson.table(
    "TFLOP/s on one H200",
    ("case", *names),
    [
        (case.removeprefix("gpu-"), *(rates[name] for name in names))
        for case, rates in by_case.items()
        if re.search(r"(full|causal)-bf16-d128-(1k|4k|16k)", case)
    ],
)
longest = by_case["gpu-full-bf16-d128-16k"]
assert longest["saccade/hopper"] > longest["saccade/triton"]

# %% [markdown]
# On a GPU of capability 9.0 such a call takes it unasked; by its name it is this one or an error:

# %%
if lesson.device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0):
    import saccade

    rows = torch.randn(3, 1, 4, 1000, 128, device=lesson.device).bfloat16().unbind()
    output = saccade.attention(*rows, implementation="hopper")
    exact = saccade.attention(*(each.double() for each in rows), implementation="reference")
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-2)

# %% [markdown]
# ## Change this and see
#
# 1. Set `EXPONENT_RATE` to 32. For which head_dim does the order hardly matter any more? (Blackwell
#    went the other way: products doubled, exponentials did not. What becomes of the table with
#    `PRODUCT_RATE` at 8192?)
# 2. Let `timeline` run three groups. Is that better than two in the model, and what would a third
#    group cost in registers, of which a multiprocessor has 65,536?
# 3. Compile `inner_loop` with `"num_warps": 8` and `TILE` of 128. How many products does the loop
#    start for each exponential now?

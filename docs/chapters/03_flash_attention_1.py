# %% [markdown]
# # 03 · FlashAttention-1, as it was published
#
# Chapter 02 has the arithmetic: fold one tile after the other, and no row of scores is ever needed.
# FlashAttention (Dao et al. 2022) made one GPU kernel of it, so that scores are born and die on the
# chip. Here is its algorithm 1, line for line, in Triton. It is history: the library has no such
# kernel, and the next chapter says why. But it is the shortest way to see what a kernel does.
#
# Without a GPU Triton's interpreter runs it, one program after the other, with numpy. Its numbers
# are those of a GPU; its times say nothing.

# %%
import torch
from lesson import Lesson

import saccade

lesson = Lesson(__file__)  # before Triton is imported: it chooses the interpreter

# %%
import triton
import triton.language as tl

# %% [markdown]
# ## The kernel
#
# A *program* is one instance of a kernel; many run at once. Here one program computes a whole head.
#
# The **outer loop goes over tiles of keys and values**, the inner one over tiles of queries. So
# each key is loaded once. The price: when the inner loop comes to a tile of queries again, its
# `output`, `row_max` and `row_sum` must be fetched from memory, corrected, and written back. The
# output is kept divided at all times, so each visit multiplies the old sum in and divides by the
# new one.


# %%
@triton.jit
def flash_attention_1(
    query_ptr, key_ptr, value_ptr, output_ptr, row_max_ptr, row_sum_ptr, length, scale,
    HEAD_DIM: tl.constexpr, QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """One program: all of one head. Algorithm 1 of the paper; its lines in the margin."""
    head = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, HEAD_DIM)
    for kv_start in range(0, length, KV_TILE):  # line 5
        kv_rows = kv_start + tl.arange(0, KV_TILE)
        kv_there = kv_rows[:, None] < length
        kv_place = (head * length + kv_rows[:, None]) * HEAD_DIM + channels[None, :]
        key_tile = tl.load(key_ptr + kv_place, mask=kv_there, other=0.0)  # line 6
        value_tile = tl.load(value_ptr + kv_place, mask=kv_there, other=0.0)
        for query_start in range(0, length, QUERY_TILE):  # line 7
            rows = query_start + tl.arange(0, QUERY_TILE)
            there = rows < length
            place = (head * length + rows[:, None]) * HEAD_DIM + channels[None, :]
            query_tile = tl.load(query_ptr + place, mask=there[:, None], other=0.0)  # line 8
            output_tile = tl.load(output_ptr + place, mask=there[:, None], other=0.0)
            row_max = tl.load(row_max_ptr + head * length + rows, mask=there, other=0.0)
            row_sum = tl.load(row_sum_ptr + head * length + rows, mask=there, other=1.0)

            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scale  # 9
            scores = tl.where(kv_rows[None, :] < length, scores, float("-inf"))
            tile_max = tl.max(scores, 1)  # line 10
            weights = tl.exp(scores - tile_max[:, None])
            tile_sum = tl.sum(weights, 1)
            new_max = tl.maximum(row_max, tile_max)  # line 11
            rescale = tl.exp(row_max - new_max)
            tile_rescale = tl.exp(tile_max - new_max)
            new_sum = rescale * row_sum + tile_rescale * tile_sum

            product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
            old = (row_sum * rescale)[:, None] * output_tile  # line 12
            output_tile = (old + tile_rescale[:, None] * product) / new_sum[:, None]
            tl.store(output_ptr + place, output_tile, mask=there[:, None])
            tl.store(row_max_ptr + head * length + rows, new_max, mask=there)  # line 13
            tl.store(row_sum_ptr + head * length + rows, new_sum, mask=there)
        tl.debug_barrier()  # what one thread has stored, another may load in the next round


def attend(query, key, value, tile=64):
    """Attention [batch, heads, length, head_dim] by the kernel above."""
    batch, heads, length, head_dim = query.shape
    output = torch.zeros(query.shape, device=query.device)  # line 2; float32, as it is re-read
    row_max = torch.full(query.shape[:3], -torch.inf, device=query.device)
    row_sum = torch.zeros(query.shape[:3], device=query.device)
    flash_attention_1[(batch * heads,)](
        query, key, value, output, row_max, row_sum, length, head_dim**-0.5, head_dim, tile, tile
    )
    return output.to(query.dtype)


def hand_written(query, key, value):
    """What everybody writes first."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


# %% [markdown]
# ## Is it right?
#
# The first size is the one on which small FlashAttention kernels are usually shown: batch 16, 12
# heads, length 64, 64 channels. The last length of each list is no multiple of the tile. The bound
# is absolute; beside it stands the real error against float64. On a GPU the inputs have 16 bits.

# %%
dtype = torch.float16 if lesson.device.type == "cuda" else torch.float32
if lesson.quick:
    shapes, tile = [(2, 3, 64, 64), (1, 1, 200, 64), (1, 2, 77, 16)], 64
elif lesson.device.type == "cuda":
    shapes, tile = [(16, 12, 64, 64), (4, 12, 1024, 64), (4, 12, 4096, 64), (1, 2, 1000, 64)], 64
else:
    shapes, tile = [(16, 12, 64, 64), (1, 1, 1024, 64), (1, 1, 4096, 64), (1, 2, 777, 64)], 256

rows = []
for shape in shapes:
    query, key, value = torch.randn(3, *shape, device=lesson.device).to(dtype).unbind()
    exact = hand_written(query.double(), key.double(), value.double())
    output = attend(query, key, value, tile if shape[2] > 64 else 64)
    assert torch.allclose(output, hand_written(query, key, value), rtol=0, atol=1e-2)
    error = float((output.double() - exact).abs().max())
    plain_error = float((hand_written(query, key, value).double() - exact).abs().max())
    assert error < 4 * plain_error + 1e-7
    library = saccade.attention(query, key, value).double()
    assert float((library - exact).abs().max()) < 4 * plain_error + 1e-7
    times = lesson.race(
        {
            "hand": lambda: hand_written(query, key, value),
            "library": lambda: saccade.attention(query, key, value),
        }
        | ({"kernel": lambda: attend(query, key, value)} if dtype == torch.float16 else {}),
        rounds=3,
    )
    rows.append(
        (str(shape), error, plain_error, times["hand"], times.get("kernel", "interpreted"),
         times["library"])
    )  # fmt: skip
lesson.table(
    f"FlashAttention-1, {str(dtype).removeprefix('torch.')}, {lesson.device.type}",
    ("shape", "its error", "by hand", "by hand ms", "kernel ms", "saccade ms"),
    rows,
)

# %% [markdown]
# ## The profile
#
# What attention by hand spends its time on. The two products are the only lines that a tensor core
# can help with. The others read `length²` numbers, do next to nothing, and write them again.

# %%
length = 256 if lesson.quick else 1024
query, key, value = torch.randn(3, 1, 4, length, 64, device=lesson.device).to(dtype).unbind()
hand_written(query, key, value)
with torch.profiler.profile() as profile:
    hand_written(query, key, value)
wanted = ("aten::bmm", "aten::mul", "aten::_softmax")
events = {event.key: event for event in profile.key_averages() if event.key in wanted}
assert set(events) == set(wanted), "PyTorch names its operators otherwise now"


def milliseconds(event):
    """What one operator took, on the device that did the work."""
    on_gpu = lesson.device.type == "cuda"
    return (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3


lesson.table(
    f"attention by hand, 4 heads, length {length}",
    ("operator", "calls", "ms"),
    [(name, event.count, milliseconds(event)) for name, event in events.items()],
)
assert events["aten::bmm"].count == 2

# %% [markdown]
# ## What moves
#
# With tiles of B rows, a head has length / B tiles of keys, and for each of them the inner loop
# reads all queries, and reads and writes the whole output. That is still quadratic in the length,
# but the factor is `head_dim / B` and not 1. The paper proves that for a chip's memory of M numbers
# it is length² · head_dim² / M, and that nothing exact can do better for all M.


# %%
def moved_by_hand(length, head_dim):
    """Numbers of one head that go to and from memory: scores and weights are the most."""
    return 4 * length * head_dim + 6 * length**2  # three matrices, each written and read again


def moved_by_flash_1(length, head_dim, tile):
    """Numbers of one head: keys and values once; queries, output, m and ℓ for every key tile."""
    visits = -(-length // tile)
    return 2 * length * head_dim + visits * (3 * length * head_dim + 4 * length)


lengths = [2**power for power in range(9, 15)]
by_hand = [moved_by_hand(length, 64) for length in lengths]
flash = [moved_by_flash_1(length, 64, 128) for length in lengths]
once = [4 * length * 64 for length in lengths]
assert all(more > 3 * less for more, less in zip(by_hand[2:], flash[2:], strict=True))
lesson.table(
    "millions of numbers moved for one head of 64 channels, tiles of 128",
    ("length", "by hand", "FlashAttention-1", "each once"),
    [
        (str(length), hand / 1e6, tiled / 1e6, least / 1e6)
        for length, hand, tiled, least in zip(lengths, by_hand, flash, once, strict=True)
    ],
)
with lesson.picture("Numbers moved by length, by hand, by FlashAttention-1, and at least") as axes:
    axes.plot(lengths, flash, "o-", label="FlashAttention-1, tiles of 128")
    axes.plot(lengths, by_hand, "s-", label="by hand")
    axes.plot(lengths, once, "--", color="#808080", label="inputs and output, once")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("length")
    axes.set_ylabel("numbers to and from memory")
    axes.set_title("What one head moves")
    axes.legend()

# %% [markdown]
# The output travels `length / tile` times, which is most of what still moves. And the published
# kernel has another fault: one program a head. A batch of one with 12 heads keeps 12 of an H100's
# 132 multiprocessors busy, however long it is. [Chapter 04](04_flash_attention_2.py) turns the
# loops around, and both are gone.
#
# ## Change this and see
#
# 1. Take the `tl.debug_barrier()` out. The interpreter's result stays the same. Why is that no
#    proof?
# 2. Give `output` the dtype of `query` where it is allocated, and let inputs be float16. How does
#    the error at the longest length change, and with the tile?
# 3. Let the kernel keep `weighted_sum` undivided and divide once in a loop at the end. What is
#    saved for each tile, and what is not?

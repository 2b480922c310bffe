"""Configs: the schedule of a Hopper kernel, as a pure function of the problem.

Shared memory of a program holds the queries of its consumers, `stages` tiles of keys and as many of
values, and output on its way out.
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.hopper.pipeline import width_of
from saccade.gpu.kernel_args import Extent, Geometry, mask_functions
from saccade.modifiers.normal_form import contiguity_of, is_causal
from saccade.runtime.spec import Inputs, Variant

ROWS = 64  # query rows of a consumer, as in forward.py
SHARED_MEMORY = 227 << 10  # bytes of one program
REGISTERS = 65536  # of a multiprocessor
L2_BYTES = 32 << 20  # keys and values of heads that are worked on together: most of the L2
HEADS_AT_ONCE = 64
LONGEST_TILE = 128  # of keys
ADDED_BYTES = 1 << 10  # for barriers and work tiles
LONG, SHORT, FEW_KEYS = 12288, 1024, 256  # of keys


class HopperProblem(NamedTuple):
    """What a schedule depends on."""

    head_width: int  # as the kernel widens them
    value_width: int
    masked: bool  # then tiles of query rows are not equally dear
    scored: bool = False  # whether the caller changes scores
    causal: bool = False  # whether the mask is causal and nothing else
    kv_len: int = LONG  # of all sequences together, if they are packed
    packed: bool = False
    aligned: bool = False  # whether queries and keys end together, or whole tiles apart
    read_along: bool = False  # whether the mask reads a tensor along queries or along keys
    max_logit: bool = False  # whether the largest score of each row is asked for


class KernelSchedule(NamedTuple):
    """How a kernel runs."""

    consumers: int
    kv_tile: int
    stages: int  # a power of two
    query_stages: int  # a power of two: of tiles of queries
    output_parts: int  # 1, or 2: halves of its channels go out one after the other
    consumer_registers: int
    producer_registers: int
    grid: str  # "dynamic": programs take numbers from a counter; "static": every so many-th
    programs: int = 1  # of one multiprocessor
    # Tiles of which the largest score is looked for before scores are weighed: "all"; "unseen":
    # partial tiles and the first full one, after which every row has seen a key; "first": the
    # first one, where all others are full and every row sees a key of it. "exact": all, and what
    # scores are compared with is always the largest, so that in the end it is known.
    max_of: str = "unseen"
    # whether a consumer's partial tiles are those of its rows, and not of the tile's
    skip_masked_tile: bool = False

    @property
    def overlap_softmax(self) -> bool:
        """Whether exponents are computed while values are summed; where more than two consumers
        share a multiprocessor, others compute meanwhile, and registers are short."""
        return self.consumers * self.programs == 2

    @property
    def launch_registers(self) -> int:
        """Registers of each thread that a program begins with, those of idle warps included."""
        threads = 128 * (self.consumers + 1)
        return REGISTERS // (self.programs * threads) // 8 * 8

    @property
    def query_tile(self) -> int:
        """Query rows of a program."""
        return self.consumers * ROWS

    def shared_memory(self, head_width: int, value_width: int) -> int:
        """Bytes of shared memory, for elements of 2 bytes."""
        queries = self.query_tile * self.query_stages * head_width
        outputs = self.query_tile * value_width // self.output_parts
        keys_and_values = self.stages * self.kv_tile * (head_width + value_width)
        return 2 * (queries + keys_and_values + outputs) + ADDED_BYTES


OVERRIDE: KernelSchedule | None = None
"""Taken instead of what `choose` would take, to measure what it should."""


def choose(problem: HopperProblem) -> KernelSchedule:
    """The schedule of a problem; what was timed is dense, and its scores are as they are."""
    if OVERRIDE is not None:
        return OVERRIDE
    width = max(problem.head_width, problem.value_width)
    if problem.max_logit and width <= 128:
        return KernelSchedule(2, 128, 2, 2, 1, 240, 24, "dynamic", max_of="exact")
    if problem.max_logit:
        return KernelSchedule(2, 64, 2, 1, 2, 240, 24, "dynamic", max_of="exact")
    plain = not problem.masked and not problem.scored
    causal = problem.causal and not problem.scored
    aligned = causal and problem.aligned
    timed = not problem.packed and not problem.scored
    few = timed and problem.kv_len <= (2 * SHORT if aligned else SHORT)
    # One straight path for all tiles but the first, where that one alone hides anything. Else,
    # where a causal mask leaves few tiles, each is looked through, as most are anyway.
    other = "all" if few and causal and width <= 128 else "unseen"
    max_of = "first" if plain or aligned else other
    if width <= 64 and few and (causal or plain):
        # Beginnings and ends of one program are hidden under the other one's loop. It costs more a
        # step, so that others are as fast from 3k on (1.5k without a mask or the straight path).
        return KernelSchedule(
            2, 64, 2, 2, 1, 104, 24, "dynamic", 2, max_of=max_of, skip_masked_tile=causal
        )
    if width <= 64 and plain:
        # A tenth faster than two, and no registers are left for a score, or for a mask in the loop.
        # The straight path takes 3 % more here, and 2 % more at width 256.
        return KernelSchedule(3, 128, 2, 2, 1, 160, 32, "dynamic")
    if width <= 64 and timed and aligned and problem.kv_len >= LONG // 2:
        return KernelSchedule(
            3, 128, 2, 2, 1, 160, 32, "dynamic", max_of="first", skip_masked_tile=True
        )
    if width <= 128 and problem.read_along:
        # Of 128 keys a thread would hold 32 entries beside its scores, and spill: documents took
        # 1.3 to 1.5 of the time (benchmarks/results/h200/flex_ways.txt).
        return KernelSchedule(2, 64, 4, 2, 1, 240, 24, "dynamic", max_of=max_of)
    if width <= 128:
        return KernelSchedule(2, 128, 2, 2, 1, 240, 24, "dynamic", max_of=max_of)
    return KernelSchedule(
        2, 64, 2, 1, 2, 240, 24, "dynamic", max_of="first" if aligned else "unseen",
        skip_masked_tile=aligned or (timed and causal),
    )  # fmt: skip


def heads_at_once(
    masked: bool, heads: int, slots: int, multiprocessors: int, group: int, size: int
) -> int:
    """How many query heads are worked on together, their longest rows first.

    Without a mask all rows are equally long: one head after the other meets its keys in the L2.
    Else as many as fit it, 64 at most: more are slower at 512, by 3 % at width 128. All rounds
    are of equally many heads: the last one of 9, 9, …, 9 and 1 heads began long rows when all
    others were done, which took an eighth of the time of 64 heads of 4k.

    heads: query heads of all sequences. slots: tiles of query rows of a head. group: query heads of
    a kv head. size: bytes of the keys and values of a kv head.
    """
    if not masked:
        return 1
    enough = max(HEADS_AT_ONCE, -(-2 * multiprocessors // max(slots, 1)))
    at_most = max(1, min(enough, L2_BYTES // max(size, 1) * group))
    groups = -(-heads // at_most)
    return -(-heads // max(groups, 1))


class HopperPagedProblem(NamedTuple):
    """What decides whether a pass over pages is one for the Hopper kernel."""

    head_width: int
    value_width: int
    page_size: int
    query_tiles: int  # whole ones of 128 rows of one head, at most, of all heads and sequences
    slots: int  # that programs look at for them
    multiprocessors: int
    planned: bool  # whether the mask reads captured tensors along rows


SMALLEST_PAGE = 16  # slots; fewer would take too many boxes for a tile
BUSY = 3 / 4  # of all multiprocessors


def choose_paged(problem: HopperPagedProblem) -> KernelSchedule:
    """The schedule of a pass over pages: that of a masked problem, whose consumers are two."""
    return choose(HopperProblem(problem.head_width, problem.value_width, True))


def pages_unsupported(problem: HopperPagedProblem) -> str | None:
    """Why a pass over pages goes to the Triton kernels, or None."""
    kv_tile, size = choose_paged(problem).kv_tile, problem.page_size
    if size < SMALLEST_PAGE or (size % kv_tile and kv_tile % size):
        return f"pages have {SMALLEST_PAGE}, 32, 64 slots, or a multiple of {kv_tile}"
    if problem.planned:
        return "the mask reads tensors along rows, which is planned ahead"
    if problem.query_tiles < BUSY * problem.multiprocessors:
        return "there are few query rows: keys are cut into shares, to keep the GPU busy"
    if problem.slots > 2 * problem.query_tiles:
        return "most sequences have few query rows"
    return None


class BackwardSchedule(NamedTuple):
    """How the kernel of the backward pass runs: two consumers, which share a tile of keys."""

    query_tile: int  # 64, or 128 where registers allow
    stages: int  # a power of two
    consumer_registers: int
    producer_registers: int
    grid: str  # as in KernelSchedule
    at_once_mb: int
    kv_tile: int

    def shared_memory(self, width: int) -> int:
        """Bytes of shared memory, for elements of 2 bytes: keys, values and the way out of their
        gradients; queries, gradients of outputs and of scores, and at most four numbers of each
        query; partial sums in float32."""
        keys = 2 * width * (2 * self.kv_tile + self.kv_tile)
        of_stage = 2 * self.query_tile * (2 * width + self.kv_tile) + 16 * self.query_tile
        return keys + self.stages * of_stage + 4 * self.query_tile * width + ADDED_BYTES

    def shared_memory_apart(self, head_width: int, value_width: int) -> int:
        """Bytes where gradients of queries are a pass of their own: no partial sums, slopes
        in place of gradients of scores, and the gradients of keys and values leave through the
        memory of values and keys, if that is as wide."""
        widths = head_width + value_width
        keys = 2 * self.kv_tile * widths * (1 if head_width == value_width else 2)
        of_stage = 2 * self.query_tile * (widths + self.kv_tile) + 16 * self.query_tile
        return keys + self.stages * of_stage + ADDED_BYTES


BACKWARD_KV_TILE, WIDE_KV_TILE = 128, 64  # up to 128 channels, and above
BACKWARD_OVERRIDE: BackwardSchedule | None = None
"""Taken instead of what `choose_backward` would take, to measure what it should."""


def choose_backward(problem: BackwardProblem) -> BackwardSchedule:
    """The schedule of a backward pass.

    Few heads are worked on together where one keeps most multiprocessors busy, and under a mask
    from a quarter of that on: at 16k it gave 3 to 4 %, at 2k it took as much.
    """
    if BACKWARD_OVERRIDE is not None:
        return BACKWARD_OVERRIDE
    if apart(problem):
        # At 1k and 4k it gives a twentieth under a causal mask, and nothing without one.
        at_once_mb = 32 if problem.masked else 0
        return BackwardSchedule(64, 2, 240, 24, "dynamic", at_once_mb, WIDE_KV_TILE)
    # With 128 queries and no partial sums ptxas has too few registers, and waits for each product.
    query_tile = 128 if problem.head_width == 64 and not ordered(problem) else 64
    long = problem.kv_len >= (LONG // 4 if problem.masked else LONG)
    at_once_mb = 32 if long and not in_key_order(problem) else 0
    return BackwardSchedule(query_tile, 2, 240, 24, "dynamic", at_once_mb, BACKWARD_KV_TILE)


class BackwardProblem(NamedTuple):
    """What decides whether and how the kernel of the backward pass serves a call."""

    head_width: int  # as kernels widen them
    value_width: int
    query_len: int  # of a sequence; of packed ones, on average
    kv_len: int
    masked: bool
    deterministic: bool
    contiguity: str | None = (
        None  # of keys that a row sees, see modifiers/normal_form.py; None: not known
    )
    causal: bool = False  # whether the mask is causal and nothing else
    packed: bool = False
    scored: bool = False  # whether the caller changes scores


def apart(problem: BackwardProblem) -> bool:
    """Whether gradients of queries are a pass of their own for want of registers: above 128
    channels, a consumer has none for partial sums beside the gradients of keys or values."""
    return max(problem.head_width, problem.value_width) > 128


class QuerySchedule(NamedTuple):
    """How the pass for gradients of queries runs: two consumers of 64 rows each."""

    query_tile: int = 2 * ROWS
    kv_tile: int = WIDE_KV_TILE
    stages: int = 2  # of keys; a power of two
    consumer_registers: int = 240
    producer_registers: int = 24

    def shared_memory(self, head_width: int, value_width: int) -> int:
        """Bytes of shared memory, for elements of 2 bytes: queries and gradients of outputs, a tile
        of values, and `stages` of keys. Gradients of queries leave through the queries' memory."""
        rows = self.query_tile * (head_width + value_width)
        tiles = self.kv_tile * (self.stages * head_width + value_width)
        return 2 * (rows + tiles) + ADDED_BYTES


def ordered(problem: BackwardProblem) -> bool:
    """Whether gradients of queries are a pass of their own, in the order of keys.

    It is for equal bits where partial sums have no key order, and above 128
    channels: two of the products are done again.
    """
    return apart(problem) or (problem.deterministic and problem.contiguity is None)


def in_key_order(problem: BackwardProblem) -> bool:
    """Whether partial sums of the gradients of queries are added in the order of keys.

    Which tile comes before which must be known beforehand: a row sees one range of keys. It is for
    equal bits; it is also faster where keys are few, as the first one is written and no zeros
    need be there before: by a tenth to a fifth up to two tiles of keys (256), under a causal mask
    at width 128 by a tenth at 512 and a twentieth at 1k. At 4k it takes a tenth more.
    """
    longest = SHORT if problem.causal and problem.head_width == 128 else FEW_KEYS
    faster = problem.kv_len <= longest
    if apart(problem) or problem.contiguity is None:
        return False
    return problem.deterministic or faster


FEW_PROGRAMS = 3  # of a multiprocessor
SPLIT_COST = 2.2  # of a tile of parts that is written and read, in query rows at a tile of keys
UNEVEN = 1 / 4  # of the longest program, by which programs of unequal length end apart


def backward_splits(
    problem: BackwardProblem, keys: Extent, group: int, multiprocessors: int
) -> int:
    """Over how many programs the query heads of a kv head are split at each tile of keys.

    One program visits all of them, and writes gradients at once. Where few kv heads make few
    programs, multiprocessors wait for the longest: 8 kv heads of 2k make 128 programs, under a
    causal mask the first of them twice as long as a multiprocessor's part of all. Split, gradients
    are written in float32 and added up, which takes time, too. The least time is taken; it is
    counted in what one query head takes at a tile of keys that all of its rows see.
    """
    tiles = keys.programs(BACKWARD_KV_TILE)
    if apart(problem) or group == 1 or not tiles or not problem.query_len:
        return 1
    visible = 1.0
    if problem.causal:
        visible = max(1 - problem.query_len / (2 * max(problem.kv_len, 1)), 1 / 2)

    def time(splits: int) -> float:
        longest = group // splits
        if visible == 1.0:
            span = float(-(-tiles * splits // multiprocessors) * longest)
        else:
            each = tiles * group * visible / multiprocessors
            span = max(longest, each + UNEVEN * longest)
        return span + (SPLIT_COST * tiles * splits / problem.query_len if splits > 1 else 0)

    return min((splits for splits in range(1, group + 1) if group % splits == 0), key=time)


def backward_heads_at_once(
    problem: BackwardProblem, at_once: int, keys: Extent, kv_tile: int, multiprocessors: int
) -> int:
    """How many heads of keys are worked on together, their longest tiles first.

    All of them where programs are few, or the last ones to begin are long: 1.1 to 1.3 times as
    fast at width 128. Where a multiprocessor has 8 of them, gradients of queries no longer stay in
    the L2, and it takes 1.3 times as long. At width 64 it took more in one case of two, above 128
    channels 2 % more. at_once: heads whose queries and gradients fit the L2.
    """
    if in_key_order(problem):
        return heads_in_key_order(keys.slots(kv_tile), multiprocessors)
    few = keys.programs(kv_tile) <= FEW_PROGRAMS * multiprocessors
    timed = problem.masked and problem.head_width > 64 and not apart(problem)
    return keys.heads * keys.sequences if timed and few else at_once


def heads_in_key_order(slots: int, multiprocessors: int) -> int:
    """How many kv heads are worked on together in key order: as many as busy all multiprocessors.

    Programs that begin at the same time stand at tiles of keys of different heads then, and none
    of them waits for another one. slots: tiles of keys of a head.
    """
    return -(-multiprocessors // max(slots, 1))


# ---- problems ------------------------------------------------------------------------------------
# What of a call decides which kernels serve it, and how they are scheduled.


def kernel_problem(inputs: Inputs, variant: Variant) -> HopperProblem:
    """What the schedule of a call depends on."""
    head_width, value_width = (width_of(rows.shape[-1]) for rows in (inputs.query, inputs.value))
    return HopperProblem(
        head_width, value_width, variant.mask != "", variant.score != "",
        is_causal(variant.mask), inputs.key.shape[-2], inputs.cu_seqlens_q is not None,
        ends_align(inputs),
        variant.mask != "" and mask_functions(variant.mask).spans_read == 1,
        variant.max_logit,
    )  # fmt: skip


def ends_align(inputs: Inputs) -> bool:
    """Whether queries and keys end together, or whole tiles of keys apart, in every sequence, as
    far as the host knows. Under a causal mask rows then see keys up to the end of a tile."""
    offsets, of_keys = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if offsets is None or of_keys is None:
        return (inputs.key.shape[-2] - inputs.query.shape[-2]) % LONGEST_TILE == 0
    return offsets is of_keys or offsets.data_ptr() == of_keys.data_ptr()


def backward_problem(inputs: Inputs, variant: Variant, deterministic: bool) -> BackwardProblem:
    """What decides whether and how these kernels serve a backward pass."""
    head_width, value_width = (width_of(rows.shape[-1]) for rows in (inputs.query, inputs.value))
    lengths = Geometry.of(inputs).lengths()
    return BackwardProblem(
        head_width, value_width, *lengths, variant.mask != "", deterministic,
        contiguity=contiguity_of(variant.mask), causal=is_causal(variant.mask),
        packed=inputs.cu_seqlens_q is not None, scored=variant.score != "",
    )  # fmt: skip

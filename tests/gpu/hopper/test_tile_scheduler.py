"""Schedules fit the machine, and programs take every tile once, dearest first."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from saccade import masks
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.kernel_args import Extent
from saccade.kernel_check.calls import KernelCall
from saccade.modifiers.normal_form import PREFIX
from saccade.ops.attention.hopper import configs
from saccade.ops.attention.hopper.configs import BackwardProblem, HopperProblem
from saccade.runtime.spec import Inputs

MEMORY = 228 << 10  # bytes of a multiprocessor, of which each program takes one KB more
WIDTHS = (64, 128, 256)
PROBLEMS = [
    HopperProblem(head_width, value_width, masked)
    for head_width, value_width in itertools.product(WIDTHS, WIDTHS)
    for masked in (False, True)
]
PROBLEMS += [problem._replace(causal=problem.masked, kv_len=configs.SHORT) for problem in PROBLEMS]
PROBLEMS += [
    HopperProblem(width, width, True, causal=True, aligned=True, kv_len=kv_len)
    for width, kv_len in itertools.product(WIDTHS, (configs.SHORT, 4 * configs.SHORT, configs.LONG))
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_schedule_fits_a_multiprocessor(problem):
    schedule = configs.choose(problem)
    used = schedule.shared_memory(problem.head_width, problem.value_width)
    assert used <= configs.SHARED_MEMORY
    assert schedule.programs * (used + 1024) <= MEMORY
    assert schedule.stages & (schedule.stages - 1) == 0
    warpgroups = [schedule.consumer_registers] * schedule.consumers + [schedule.producer_registers]
    assert all(registers % 8 == 0 and registers <= 256 for registers in warpgroups)
    # Programs begin with equally many for all warps; consumers take those of the others.
    begun_with = len(warpgroups) * schedule.launch_registers
    assert sum(warpgroups) <= begun_with <= configs.REGISTERS // 128 // schedule.programs
    assert 1 + 4 * schedule.programs * 132 <= tile_scheduler.NUMBERS
    # A consumer passes over one tile at most, so its 64 rows must lie within two.
    assert not schedule.skip_masked_tile or (
        problem.causal and schedule.query_tile <= 2 * schedule.kv_tile
    )
    if (
        problem.masked and not problem.causal
    ):  # the kernels that plan have tiles with sides of a power of two
        assert schedule.query_tile & (schedule.query_tile - 1) == 0


def test_a_schedule_can_be_given_to_measure_it(monkeypatch):
    given = configs.choose(PROBLEMS[0])._replace(stages=4)
    monkeypatch.setattr(configs, "OVERRIDE", given)
    assert configs.choose(PROBLEMS[-1]) == given


def test_few_keys_have_schedules_of_their_own():
    def schedule(width, kv_len, **changes):
        return configs.choose(HopperProblem(width, width, **changes, kv_len=kv_len))

    causal = {"masked": True, "causal": True}
    narrow = schedule(64, configs.SHORT, **causal)
    assert (narrow.programs, narrow.max_of, narrow.skip_masked_tile) == (2, "all", True)
    plain = schedule(64, configs.SHORT, masked=False)
    assert (plain.programs, plain.max_of, plain.skip_masked_tile) == (2, "first", False)
    assert schedule(128, configs.SHORT, **causal).max_of == "all"
    assert schedule(128, configs.SHORT, masked=False).max_of == "first"
    for other in ({"masked": True}, {"masked": False, "scored": True}, causal | {"packed": True}):
        assert schedule(64, configs.SHORT, **other) == schedule(64, configs.LONG, masked=True)
    assert schedule(256, configs.LONG, **causal).skip_masked_tile
    assert not schedule(256, configs.LONG, masked=True).skip_masked_tile
    for width, changes in ((64, causal), (64, {"masked": False}), (128, causal)):
        long = schedule(width, configs.SHORT + 1, **changes)
        assert (long.programs, long.max_of, long.skip_masked_tile) == (1, "unseen", False)


def test_rows_that_end_with_tiles_have_one_straight_path():
    """The first tile that a consumer visits may be the only one to hide anything: tiles of keys are
    as long as those of queries then, or consumers pass over those that hide all from their rows."""
    for width, kv_len, packed in itertools.product(
        (64, 96, 128, 256), (512, 1024, 2048, 2049, 6144, 16384), (False, True)
    ):
        call = {"head_width": width, "value_width": width, "kv_len": kv_len, "packed": packed}
        causal = HopperProblem(**call, masked=True, causal=True)
        found = configs.choose(causal._replace(aligned=True))
        assert found.max_of == "first"
        assert found.skip_masked_tile or found.query_tile == found.kv_tile
        for other in (causal, causal._replace(aligned=True, scored=True)):
            assert configs.choose(other).max_of != "first"
        assert configs.choose(HopperProblem(**call, masked=True, aligned=True)).max_of != "first"
        if packed:  # launches of one preparation differ in nothing that boxes are made of
            shapes = (configs.choose(p) for p in (causal, causal._replace(aligned=True)))
            assert len({(s.consumers, s.kv_tile, s.query_stages, s.programs) for s in shapes}) == 1
    assert configs.choose(HopperProblem(64, 64, True, causal=True, aligned=True)).consumers == 3


def test_queries_and_keys_end_together():
    """Packed sequences do where both sides have the same offsets, and nothing else is known."""
    rows, offsets = torch.zeros(300, 2, 64), torch.tensor([0, 100, 300], dtype=torch.int32)

    def packed(of_keys):
        inputs = Inputs(rows, rows, rows, None, None, offsets, of_keys)
        return configs.ends_align(inputs)

    assert packed(offsets) and packed(offsets.view(3)) and not packed(offsets.clone())
    for query_len, kv_len in ((100, 100), (1, 1), (100, 228), (400, 16)):
        dense = (torch.zeros(1, 2, length, 64) for length in (query_len, kv_len, kv_len))
        assert configs.ends_align(Inputs(*dense))
    dense = (torch.zeros(1, 2, length, 64) for length in (100, 164, 164))
    assert not configs.ends_align(Inputs(*dense))


# Query heads, kv heads, batch, length, whether causal, width → programs that share a kv head: those
# that were fastest on an H100 (benchmarks/results/h100/hopper_grouped.txt), or within 5 % of it.
SPLITS = [
    (40, 8, 1, 3001, True, 128, {5}),
    (40, 8, 1, 3001, False, 128, {5}),
    (32, 8, 1, 2048, True, 128, {2}),
    (32, 8, 1, 4096, True, 128, {2}),
    (32, 8, 2, 2048, True, 128, {1, 2}),
    (32, 8, 4, 4096, True, 128, {1, 2}),
    (28, 4, 1, 4096, True, 128, {7}),
    (28, 4, 1, 8192, True, 128, {7}),
    (16, 8, 1, 2048, True, 128, {2}),
    (32, 8, 8, 2048, True, 128, {1}),
    (32, 8, 1, 1024, False, 128, {2}),
    (64, 8, 1, 4096, True, 64, {2, 4}),
    (14, 2, 1, 2048, True, 64, {7}),
    (32, 32, 1, 2048, True, 128, {1}),  # a query head cannot be split
    (8, 1, 1, 4096, True, 256, {1}),
]


@pytest.mark.parametrize("heads, kv_heads, batch, length, causal, width, best", SPLITS)
def test_few_kv_heads_split_their_query_heads(
    heads, kv_heads, batch, length, causal, width, best
):  # fmt: skip
    problem = configs.BackwardProblem(width, width, length, length, causal, False, causal=causal)
    keys = Extent(batch, length, kv_heads, False)
    found = configs.backward_splits(problem, keys, heads // kv_heads, 132)
    assert found in best and heads // kv_heads % found == 0


def test_heads_take_turns_while_their_keys_fit_the_l2():
    def heads(number, slots, megabytes, masked=True, group=1):
        return configs.heads_at_once(masked, number, slots, 132, group, megabytes << 20)

    assert heads(128, 16, 1, masked=False) == 1
    assert heads(128, 16, 1) == 32
    assert heads(16, 128, 8) == 4
    assert heads(16, 128, 8, group=2) == 8  # whose query heads share them
    assert heads(16, 128, 64) == 1
    assert heads(512, 4, 0) == 64
    assert heads(512, 2, 0) == 128  # of 132 that would give two tiles a multiprocessor


def test_no_turn_is_of_fewer_heads_than_others_by_much():
    for number in range(1, 200):
        at_once = configs.heads_at_once(True, number, 32, 132, 1, 2 << 20)
        turns = -(-number // at_once)
        assert at_once <= 16
        assert number - (turns - 1) * at_once > at_once - turns


BACKWARD = BackwardProblem(64, 64, 9, 9, masked=False, deterministic=False)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_a_backward_schedule_fits_a_multiprocessor(width, masked):
    schedule = configs.choose_backward(BACKWARD._replace(head_width=width, masked=masked))
    assert schedule.shared_memory(width) <= configs.SHARED_MEMORY
    assert schedule.stages & (schedule.stages - 1) == 0
    # Half of a tile's share is 64 rows: all of its channels, or half of them.
    assert schedule.query_tile * width == 2 * configs.ROWS * 64
    registers = 2 * schedule.consumer_registers + schedule.producer_registers
    assert 128 * registers <= configs.REGISTERS


@pytest.mark.parametrize("widths", [(256, 256), (256, 128), (128, 256), (64, 256)])
def test_two_passes_fit_a_multiprocessor(widths):
    problem = BACKWARD._replace(head_width=widths[0], value_width=widths[1])
    of_keys, of_queries = configs.choose_backward(problem), configs.QuerySchedule()
    assert of_keys.shared_memory_apart(*widths) <= configs.SHARED_MEMORY
    assert of_queries.shared_memory(*widths) <= configs.SHARED_MEMORY
    for schedule in (of_keys, of_queries):
        assert schedule.stages & (schedule.stages - 1) == 0
        registers = 2 * schedule.consumer_registers + schedule.producer_registers
        assert 128 * registers <= configs.REGISTERS


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_above_128_channels_queries_have_a_pass_of_their_own(width, deterministic):
    problem = BACKWARD._replace(
        head_width=width, value_width=width, deterministic=deterministic,
        query_len=1000, kv_len=1000, contiguity=PREFIX,
    )  # fmt: skip
    assert configs.apart(problem) == (width > 128)
    assert configs.in_key_order(problem) == (deterministic and width <= 128)
    assert configs.ordered(problem) == (width > 128)


@pytest.mark.parametrize(
    ("mask", "in_key_order"),
    [
        (None, True),
        (masks.causal(), True),
        (masks.causal("top_left"), True),
        (masks.causal() & masks.window(256), True),
        (masks.documents(torch.zeros(1, 4096, dtype=torch.int32)), False),
    ],
)
def test_equal_bits_by_turns_where_it_is_known_who_comes_before_whom(mask, in_key_order):
    inputs, variant = KernelCall(64, length=4096).make(torch.device("cpu"))
    if mask is not None:
        variant = variant._replace(mask=mask.key, mask_captured=mask.captured)
    problem = configs.backward_problem(inputs, variant, True)
    assert configs.in_key_order(problem) == in_key_order
    assert configs.ordered(problem) != in_key_order
    assert not configs.in_key_order(problem._replace(deterministic=False))


@pytest.mark.parametrize(
    ("changes", "in_key_order"),
    [
        ({}, True),
        ({"kv_len": 1025}, False),
        ({"head_width": 64, "value_width": 64}, False),
        ({"causal": False}, False),
        ({"contiguity": None}, False),
        ({"kv_len": 256, "causal": False}, True),
        ({"kv_len": 257, "causal": False}, False),
        ({"kv_len": 256, "head_width": 64, "value_width": 64}, True),
        ({"kv_len": 256, "head_width": 256, "value_width": 256}, False),
        ({"kv_len": 256, "contiguity": None}, False),
    ],
)
def test_passes_of_few_keys_are_faster_in_turns(changes, in_key_order):
    problem = BACKWARD._replace(
        head_width=128, value_width=128, query_len=1024, kv_len=1024, masked=True,
        contiguity=PREFIX, causal=True,
    )  # fmt: skip
    assert configs.in_key_order(problem._replace(**changes)) == in_key_order


def test_programs_that_begin_together_stand_at_different_heads():
    assert configs.heads_in_key_order(8, 132) == 17
    assert configs.heads_in_key_order(128, 132) == 2
    assert configs.heads_in_key_order(500, 132) == 1

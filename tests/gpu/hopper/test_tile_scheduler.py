"""Schedules fit the machine, and programs take every tile once, dearest first."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from saccade import masks
from saccade.gpu.hopper import tile_scheduler
from saccade.kernel_check.calls import KernelCall
from saccade.modifiers.normal_form import PREFIX
from saccade.ops.attention.hopper import configs
from saccade.ops.attention.hopper.configs import BackwardProblem, HopperProblem

MEMORY = 228 << 10  # bytes of a multiprocessor, of which each program takes one KB more
WIDTHS = (64, 128, 256)
PROBLEMS = [
    HopperProblem(head_width, value_width, masked)
    for head_width, value_width in itertools.product(WIDTHS, WIDTHS)
    for masked in (False, True)
]
PROBLEMS += [problem._replace(causal=problem.masked, kv_len=configs.SHORT) for problem in PROBLEMS]


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
    assert not schedule.skip_masked_tile or (
        problem.causal and schedule.query_tile == 2 * schedule.kv_tile
    )
    if problem.masked:  # the kernels that plan have tiles with sides of a power of two
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
    assert (narrow.programs, narrow.exact_max, narrow.skip_masked_tile) == (2, True, True)
    plain = schedule(64, configs.SHORT, masked=False)
    assert (plain.programs, plain.exact_max, plain.skip_masked_tile) == (2, False, False)
    assert schedule(128, configs.SHORT, **causal).exact_max
    assert not schedule(128, configs.SHORT, masked=False).exact_max
    for other in ({"masked": True}, {"masked": False, "scored": True}, causal | {"packed": True}):
        assert schedule(64, configs.SHORT, **other) == schedule(64, configs.LONG, masked=True)
    assert schedule(256, configs.LONG, **causal).skip_masked_tile
    assert not schedule(256, configs.LONG, masked=True).skip_masked_tile
    for width, changes in ((64, causal), (64, {"masked": False}), (128, causal)):
        long = schedule(width, configs.SHORT + 1, **changes)
        assert (long.programs, long.exact_max, long.skip_masked_tile) == (1, False, False)


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
        contiguity=PREFIX,
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
    ],
)
def test_short_causal_passes_of_width_128_are_faster_in_turns(changes, in_key_order):
    problem = BACKWARD._replace(
        head_width=128, value_width=128, query_len=1024, kv_len=1024, masked=True,
        contiguity=PREFIX, causal=True,
    )  # fmt: skip
    assert configs.in_key_order(problem._replace(**changes)) == in_key_order


def test_programs_that_begin_together_stand_at_different_heads():
    assert configs.heads_in_key_order(8, 132) == 17
    assert configs.heads_in_key_order(128, 132) == 2
    assert configs.heads_in_key_order(500, 132) == 1

"""Faults are found, excused only where configs.py says so, and shown."""

import io
import json

from rich.console import Console

from saccade.kernel_check import machine_code, report
from saccade.kernel_check.calls import KernelCall, PagedCall
from saccade.kernel_check.catalogue import Compiled, Job
from saccade.kernel_check.machine_code import Usage
from saccade.ops.attention.triton import configs

FORWARD = Job("sm_80", KernelCall(128), "forward", ("forward",))


def compiled(*usage, job=FORWARD, kernel="forward", error=""):
    used = Usage(*usage)._replace(looped=usage[1]) if usage else None
    return Compiled(job, kernel, (64, 64, 4, 3), 1.25, used, error, "")


def test_a_kernel_without_faults():
    good = compiled(255, 0, configs.SHARED_MEMORY["sm_80"])
    assert report.fault(good) == ""
    assert report.offenders([good]) == report.excused([good]) == []


def test_faults_name_what_was_taken_and_what_there_is():
    spilling, large = compiled(255, 4, 1024), compiled(100, 0, 240_000)
    failed = compiled(error="RuntimeError: no\nmore")
    crowded = compiled(100, 0, 0, 513)
    assert report.offenders([spilling]) == [
        "sm_80: forward (bf16 d128 none, 64×64 w4 s3): spills (4)"
    ]
    assert report.fault(large) == "240000 bytes of shared memory, more than 166912"
    assert report.fault(failed) == "RuntimeError: no"
    assert "513 columns of tensor memory" in report.fault(crowded)


def test_spills_are_excused_where_the_table_says_so_but_nothing_else_is():
    timed = Job("sm_90", KernelCall(128), "ordered", ("backward_keys",))
    spilling = compiled(255, 17, 1024, job=timed, kernel="backward_keys")
    assert report.offenders([spilling]) == []
    assert "allowed: chosen by its time" in report.excused([spilling])[0]
    assert report.offenders([compiled(255, 17, 240_000, job=timed, kernel="backward_keys")])
    assert report.offenders([compiled(255, 17, 0, job=timed, kernel="find_tile_ranges")])
    turing = Job("sm_75", KernelCall(256, "fp16"), "ordered", ("backward_keys, NaN-safe",))
    assert report.excused([compiled(255, 9, 0, job=turing, kernel="backward_keys, NaN-safe")])
    chunk = Job("sm_90", PagedCall(256, mask="causal", query_len=20), "paged", ("pages",))
    assert "a few numbers" in report.excused([compiled(255, 13, 0, job=chunk, kernel="pages")])[0]
    assert report.offenders([compiled(255, 33, 0, job=chunk, kernel="pages")])


def test_tables_show_every_kernel():
    hopper = FORWARD._replace(architecture="sm_90")
    console = Console(width=120, record=True, file=io.StringIO())
    tables = report.usage_tables([compiled(255, 0, 2048), compiled(64, 9, 0, job=hopper)])
    console.print(*tables)
    text = console.export_text()
    for part in ("sm_90", "sm_80", "64×64 w4 s3", "255", "2 KB", "bf16 d128 none"):
        assert part in text
    rows = json.loads(report.to_json([compiled(255, 3, 2048)], "3.6.0"))["kernels"]
    assert rows[0]["usage"] == {
        "registers": 255,
        "spills": 3,
        "shared": 2048,
        "columns": 0,
        "looped": 3,
        "products": 0,
        "covered": 0,
        "guarded": 0,
        "unfenced": 0,
    }
    assert rows[0]["call"]["head_dim"] == 128
    assert rows[0]["fault"] == "spills (3)"


def test_spills_outside_of_loops_cost_nothing_that_counts():
    once = compiled(255, 4, 1024)
    assert once.usage is not None
    once = once._replace(usage=once.usage._replace(looped=0))
    assert report.offenders([once]) == []
    assert "once a program" in report.excused([once])[0]


def test_spills_are_found_inside_of_loops():
    listing = """
        STL [R1], R2 ;
    .L_x_1:
        LDL R2, [R1] ;
        @P0 BRA `(.L_x_3) ;
    .L_x_2:
        @P1 BRA `(.L_x_1) ;
        LDL R3, [R1] ;
        EXIT ;
    .L_x_3:
        STL [R1], R4 ;
        BRA `(.L_x_2) ;
    """.splitlines()
    assert [listing[n].split()[0] for n in machine_code.spilling(listing)] == [
        "STL",
        "LDL",
        "LDL",
        "STL",
    ]
    assert [listing[n].split()[1] for n in machine_code.in_loops(listing)] == ["R2,", "[R1],"]


def test_a_loop_over_edges_may_spill_where_pairs_read_a_tensor():
    blocks = Job("sm_80", KernelCall(128, mask="blocks"), "forward", ("forward",))
    spilling = compiled(255, 17, 1024, job=blocks)
    assert report.offenders([spilling]) == []
    assert "its loop over edges" in report.excused([spilling])[0]


def test_markdown_replaces_what_stands_between_its_marks(tmp_path):
    file = tmp_path / "kernels.md"
    file.write_text(f"before\n\n{report.BEGIN}stale\n{report.END}\n\nafter\n")
    report.write_markdown(file, [compiled(255, 3, 2048)], "3.6.0")
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "stale" not in text
    assert "| forward | half d128 none | **255 / 2** |" in text
    assert "| kernel | width | sm_75 |" in text
    report.write_markdown(file, [compiled(255, 3, 2048)], "3.6.0")
    assert file.read_text() == text


def test_markdown_refuses_a_file_without_marks(tmp_path):
    file = tmp_path / "kernels.md"
    file.write_text("nothing\n")
    try:
        report.write_markdown(file, [], "3.6.0")
    except ValueError as error:
        assert "kernels: begin" in str(error)
    else:
        raise AssertionError("took a file without marks")
    assert file.read_text() == "nothing\n"


def test_kernels_with_roles_must_multiply_and_must_cover_their_exponents():
    job = Job("sm_90", KernelCall(128), "hopper", ("hopper_forward",))
    good = compiled(168, 0, 200_000, 0, 0, 64, 66, job=job, kernel="hopper_forward")
    assert good.usage is not None
    assert report.fault(good._replace(usage=good.usage._replace(looped=0))) == ""
    slow = good._replace(usage=good.usage._replace(covered=0))
    assert report.fault(slow) == "its exponents wait for the product of values"
    assert report.offenders([good._replace(usage=good.usage._replace(products=0, covered=0))])


def test_reductions_behind_a_condition_are_no_default():
    """ptxas reads another register than the condition's; see `machine_code.guarded_reductions`."""
    listing = """
        @!P0 LDG.E R2, desc[UR24][R4.64] ;
        REDUX.MIN.S32 UR5, R2 ;
        @P0 REDUX.MAX.S32 UR11, R6 ;
        @!UP1 REDUX.SUM.S32 UR4, R0 ;
    """.splitlines()
    assert machine_code.guarded_reductions(listing) == 2
    assert machine_code.guarded_reductions(listing[:3]) == 0
    found = compiled(168, 0, 1000)
    assert found.usage is not None
    assert report.fault(found) == ""
    guarded = found._replace(usage=found.usage._replace(guarded=2))
    assert report.fault(guarded) == "2 reductions behind a condition, which ptxas gets wrong"


def test_barriers_are_made_before_a_fence_and_roles_after_it():
    """TMA's first tile may else come before them; see `machine_code.unfenced_barriers`."""
    ptx = """
        @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
        bar.sync 0, 128;
        @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
        fence.proxy.async.shared::cta;
        barrier.sync 1;
    """
    assert machine_code.unfenced_barriers(ptx) == 0
    assert machine_code.unfenced_barriers(ptx.replace("fence.proxy.async.shared::cta;", "")) == 2
    later = ptx.replace(
        "barrier.sync", "@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;\nbarrier.sync"
    )
    assert machine_code.unfenced_barriers(later) == 1
    found = compiled(168, 0, 1000)
    assert found.usage is not None
    unfenced = found._replace(usage=found.usage._replace(unfenced=3))
    assert report.fault(unfenced) == "3 barriers without a fence before roles start"


def test_only_innermost_loops_that_multiply_count_for_kernels_with_roles():
    listing = """
    .L_x_1:
        LDL R2, [R1] ;
    .L_x_2:
        HGMMA.64x128x16 R24 ;
        WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        MUFU.EX2 R3, R3 ;
        MUFU.EX2 R4, R4 ;
        WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        @P1 BRA `(.L_x_2) ;
        STL [R1], R2 ;
        @P0 BRA `(.L_x_1) ;
    """.splitlines()
    ((start, end),) = machine_code.multiplying(listing)
    assert machine_code.spilling(listing[start:end]) == []
    assert len(machine_code.spilling(listing)) == 2
    assert machine_code.covered(listing) == 2

"""Pages on the CPU: short sequences together, what is read where it lies, and hidden rows."""

import pytest
import torch

import saccade
from saccade.ops.paged_attention.cpu import groups as paged_groups
from saccade.ops.paged_attention.cpu.pages import COPIED_ROWS, PageReader, Piece, Scratch
from saccade.runtime.spec import PagedInputs
from saccade.runtime.validation import prepare_paged
from saccade.testing import assert_exact, make_paged_case
from saccade.testing.paged import MEMORIES

RAGGED = ((1, 40), (1, 3), (1, 17), (3, 9), (1, 64))


def groups_of(**description):
    case = make_paged_case(**{"lengths": RAGGED, "packed": True, **description})
    inputs, variant = case.prepared()
    lens = [rows for rows, _ in case.description.lengths]
    return paged_groups.short_groups(inputs, variant, lens)


def test_single_rows_of_short_sequences_are_a_group_in_their_order():
    assert groups_of() == [paged_groups.Group([0, 1, 2, 4], 64)]


def test_groups_hold_no_more_than_is_copied_at_once(monkeypatch):
    of_row = 2 * 2 * 16
    monkeypatch.setattr(paged_groups, "COPIED", 2 * 40 * of_row)
    found = groups_of(kv_heads=2, head_dim=16, value_dim=16)
    assert found == [
        paged_groups.Group([1, 2], 17),
        paged_groups.Group([0], 40),
        paged_groups.Group([4], 64),
    ]


@pytest.mark.parametrize(
    "description",
    [{"score": "softcap"}, {"lengths": ((1, 5), (2, 5))}, {"dtype": torch.float16}],
    ids=str,
)
def test_others_go_their_own_way(description):
    assert groups_of(**description) == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "mask",
    [None, saccade.masks.causal(), saccade.masks.window(5)],
    ids=["full", "causal", "window"],
)
def test_result_is_the_references_and_nothing_hidden_shows(packed, sinks, mask):
    generator = torch.Generator().manual_seed(0)
    lens = [21, 4, 0, 9]
    key_pages, value_pages = torch.randn(2, 12, 2, 4, 8, generator=generator, dtype=torch.float64)
    table = torch.tensor([[3, 7, 1, 0, 9, 11], [2] * 6, [-5] * 6, [4, 8, 10, -1, -1, -1]])
    for sequence, length in enumerate(lens):  # what no row may see
        seen = length if mask is None or "window" not in mask.key else 6
        for row in range(-(-length // 4) * 4):
            if row >= length or row < length - seen:
                page = int(table[sequence, row // 4])
                key_pages[page, :, row % 4] = value_pages[page, :, row % 4] = torch.nan
    query = torch.randn(4, 4, 1, 8, generator=generator, dtype=torch.float64)
    options = {"mask": mask, "return_lse": True}
    if sinks:
        options["sinks"] = torch.randn(4, generator=generator, dtype=torch.float64)
    if packed:
        query, options["cu_seqlens_q"] = query.squeeze(2), torch.arange(5, dtype=torch.int32)
    given = (query, key_pages, value_pages, table.int(), torch.tensor(lens, dtype=torch.int32))
    found = saccade.attention_paged(*given, implementation="cpu", **options)
    wanted = saccade.attention_paged(*given, implementation="reference", **options)
    torch.testing.assert_close(found, wanted)
    assert found[0].isfinite().all()


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("heads", [(0, 2), (0, 0)], ids=["query", "all"])
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_no_heads(rows, heads, implementation):
    query_heads, kv_heads = heads
    pages = torch.zeros(5, kv_heads, 4, 8), torch.zeros(5, kv_heads, 4, 6)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    lens = torch.tensor([3, 4], dtype=torch.int32)
    options = {"sinks": torch.zeros(query_heads), "implementation": implementation}
    if rows is None:
        query, sizes = torch.zeros(2, query_heads, 1, 8), (2, query_heads, 1, 6)
    else:
        query, sizes = torch.zeros(2 * rows, query_heads, 8), (2 * rows, query_heads, 6)
        options["cu_seqlens_q"] = torch.arange(3, dtype=torch.int32) * rows
    found = saccade.attention_paged(query, *pages, table, lens, causal=True, **options)
    assert found.shape == sizes


def planned(case):
    inputs, variant = case.prepared()
    return paged_groups.planned_groups(inputs, variant, None)


def test_masks_that_differ_between_heads_are_left_to_the_others():
    @saccade.masks.function
    def of_head(batch, head, query_row, kv_row):
        return kv_row % 2 == head % 2

    case = make_paged_case(lengths=((1, 8), (1, 12)))
    inputs, _ = case.prepared()
    given = [getattr(inputs, name) for name in PagedInputs._fields[:5]]
    options = {"mask": of_head(), "scale": None, "batch_invariant": False, "return_lse": False}
    inputs, variant, *_ = prepare_paged(inputs, score=None, config=None, **options)
    assert paged_groups.planned_groups(inputs, variant, None) == []
    found = saccade.attention_paged(*given, mask=of_head(), implementation="cpu")
    wanted = saccade.attention_paged(*given, mask=of_head(), implementation="reference")
    torch.testing.assert_close(found, wanted)


def test_layers_share_a_plan_until_lengths_or_pages_change():
    case = make_paged_case(lengths=((1, 40), (1, 17)))
    inputs, variant = case.prepared()
    (group,) = planned(case)
    again = inputs._replace(kv_lens=inputs.kv_lens.clone(), query=inputs.query + 1)
    assert paged_groups.planned_groups(again, variant, None)[0] is group
    again.kv_lens[0] -= 1  # a plan goes by what is in the tensors, not by the tensors
    (shorter,) = paged_groups.planned_groups(again, variant, None)
    assert isinstance(shorter, paged_groups.PlannedGroup)
    assert shorter.kv_len == 39
    swapped = inputs._replace(page_table=inputs.page_table.clone())
    swapped.page_table[0, :2] = inputs.page_table[0, :2].flip(0)
    (other,) = paged_groups.planned_groups(swapped, variant, None)
    assert isinstance(group, paged_groups.PlannedGroup)
    assert isinstance(other, paged_groups.PlannedGroup)
    assert not torch.equal(other.key_parts.numbers, group.key_parts.numbers)


def test_calls_that_are_validated_each_time_share_a_plan_too(monkeypatch):
    planned_anew = []
    plan = paged_groups._plan
    monkeypatch.setattr(
        paged_groups, "_plan", lambda *given: (planned_anew.append(1), plan(*given))[1]
    )
    case = make_paged_case(lengths=((1, 40), (1, 17)))
    inputs, _ = case.prepared()
    given = [getattr(inputs, name) for name in PagedInputs._fields[:5]]
    ends = torch.tensor([31, 9])
    for _ in range(2):  # layers of a step
        for layer in range(3):
            given[0] = inputs.query + layer
            options = {"mask": saccade.masks.key_lengths(ends)}
            found = saccade.attention_paged(*given, implementation="cpu", **options)
            wanted = saccade.attention_paged(*given, implementation="reference", **options)
            torch.testing.assert_close(found, wanted)
        ends -= 2  # in place
    assert len(planned_anew) == 2


def test_plans_refuse_what_is_not_in_the_pages():
    case = make_paged_case(lengths=((1, 40), (1, 17)))
    case.run("cpu")
    case.table["page_table"][1, 0] = 1000
    for batch_invariant in (False, True):
        with pytest.raises(ValueError, match="page_table: got page 1000"):
            case.run("cpu", batch_invariant=batch_invariant)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_longer_sequences_are_read_where_they_lie(monkeypatch, page_size, mask, packed):
    monkeypatch.setattr(paged_groups, "SHORT", 20 * 2 * 2 * 16)
    case = make_paged_case(
        lengths=((1, 40), (1, 17), (1, 33), (1, 9), (2, 30)), packed=packed, mask=mask,
        page_size=page_size, kv_heads=2, head_dim=16, value_dim=16, scattered=False,
        memory="heads_first", sinks=True,
    ) if packed else make_paged_case(
        lengths=((1, 40), (1, 17), (1, 33), (1, 9)), mask=mask, page_size=page_size, kv_heads=2,
        head_dim=16, value_dim=16, scattered=False, memory="heads_first",
    )  # fmt: skip
    inputs, variant = case.prepared()
    ends = None if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.tolist()
    kinds = [
        (type(group).__name__, group.sequences)
        for group in paged_groups.planned_groups(inputs, variant, ends)
    ]
    assert kinds == [("PlannedGroup", [1, 3]), ("ViewedGroup", [0, 2])]
    assert_exact(case, "cpu")


def pages_of(dtype=torch.float32, fixed=False, **description):
    case = make_paged_case(**{"lengths": ((1, 3000),), "page_size": 16, **description})
    inputs, _ = case.prepared()
    kv_len = case.description.lengths[0][1]
    return PageReader.of(inputs, 0, kv_len, dtype, fixed, Scratch())


def test_adjacent_pages_whose_rows_follow_are_one_view():
    pages = pages_of(scattered=False, memory="heads_first")
    assert list(pages.pieces(0, 3000)) == [Piece(0, 3000, True)]
    key, value = pages.rows(Piece(0, 3000, True))
    assert key.untyped_storage().data_ptr() == pages.inputs.key_pages.untyped_storage().data_ptr()
    assert value.untyped_storage().data_ptr() != key.untyped_storage().data_ptr()


def test_scattered_pages_are_copied_a_piece_at_a_time():
    pages = pages_of(memory="heads_first")
    pieces = list(pages.pieces(0, 3000))
    assert pieces == [Piece(0, 1024, False), Piece(1024, 2048, False), Piece(2048, 3000, False)]


def test_a_run_that_ends_within_a_piece_is_no_view():
    pages = pages_of(scattered=False, memory="heads_first")._replace(run_ends=[1600, 3008])
    assert list(pages.pieces(0, 3000)) == [
        Piece(0, 1600, True),
        Piece(1600, 3000, True),
    ]
    assert list(pages._replace(run_ends=[500, 3008]).pieces(0, 3000)) == [
        Piece(0, 1024, False),
        Piece(1024, 3000, True),
    ]


def test_fixed_pieces_do_not_depend_on_where_pages_lie():
    splits = [
        list(pages_of(fixed=True, scattered=scattered, memory=memory).pieces(128, 3000))
        for scattered in (False, True)
        for memory in MEMORIES
    ]
    wanted = [Piece(128, 1024, False), Piece(1024, 2048, False), Piece(2048, 3000, False)]
    assert splits == [wanted] * len(splits)


def test_other_dtypes_are_copied():
    pages = pages_of(scattered=False, memory="heads_first", dtype=torch.float16)
    assert not any(piece.view for piece in pages.pieces(0, 3000))
    key, _ = pages.rows(Piece(0, 1024, False))
    assert key.dtype == torch.float16


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("fixed", [False, True])
def test_pieces_hold_the_rows(memory, scattered, page_size, fixed):
    pages = pages_of(
        memory=memory, scattered=scattered, page_size=page_size, fixed=fixed, lengths=((1, 1500),)
    )
    given, found = pages.inputs, []
    for piece in pages.pieces(0, 1500):
        key, _ = pages.rows(piece)
        found.append(key.clone())  # the next copy overwrites this one
        assert key.shape == (1, 2, piece.stop - piece.start, 16)
        assert not fixed or key.is_contiguous()
    row = torch.arange(1500)
    page = given.page_table[0].long()[row // page_size]
    wanted = given.key_pages[page, :, row % page_size].transpose(0, 1)
    assert torch.equal(torch.cat(found, dim=2)[0], wanted)
    assert COPIED_ROWS == 1024


CHUNKS = ((5, 21), (4, 4), (1, 9), (7, 19), (3, 30), (1, 1), (0, 6), (6, 22))


def chunks_case(**description):
    return make_paged_case(**{"lengths": CHUNKS, "packed": True, **description})


def test_chunks_of_alike_sizes_are_groups_and_lone_ones_are_not():
    inputs, _ = chunks_case().prepared()
    rows = [rows for rows, _ in CHUNKS]
    assert paged_groups.chunk_groups(inputs, rows) == [
        [0, 1, 3, 7]
    ]  # 30 keys would double the pairs
    assert paged_groups.chunk_groups(inputs, [1] * 8) == []
    assert paged_groups.chunk_groups(inputs, [300, 4, 1, 7, 1, 1, 0, 1]) == [[1, 3]]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_chunks_side_by_side_are_exact(memory, mask, sinks):
    case = chunks_case(mask=mask, sinks=sinks, memory=memory)
    inputs, variant = case.prepared()
    ends = [0, 5, 9, 10, 17, 20, 21, 21, 27]
    kinds = [type(group).__name__ for group in paged_groups.planned_groups(inputs, variant, ends)]
    assert kinds == ["PlannedGroup", "ChunkGroup"]
    assert_exact(case, "cpu")


def test_what_a_chunk_hides_does_not_show():
    lens, counts = [11, 14, 9], [5, 6, 4]
    generator = torch.Generator().manual_seed(0)
    key_pages, value_pages = torch.randn(2, 12, 2, 4, 8, generator=generator, dtype=torch.float64)
    table = torch.tensor([[3, 7, 1, 0], [2, 5, 9, 11], [4, 8, 10, -1]], dtype=torch.int32)
    key_pages[1, :, 3:] = value_pages[1, :, 3:] = torch.nan  # behind the first one's end
    key_pages[10, :, 0] = value_pages[10, :, 0] = torch.inf  # the last one's last row alone sees it
    query = torch.randn(sum(counts), 4, 8, generator=generator, dtype=torch.float64)
    given = (query, key_pages, value_pages, table, torch.tensor(lens, dtype=torch.int32))
    ends = torch.tensor([0, 5, 11, 15], dtype=torch.int32)
    options = {"cu_seqlens_q": ends, "causal": True, "return_lse": True}
    found = saccade.attention_paged(*given, implementation="cpu", **options)
    wanted = saccade.attention_paged(*given, implementation="reference", **options)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found[0][:14].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_plans_are_of_one_memory_layout(packed):
    lengths = ((1, 40), (1, 17)) if not packed else ((1, 40), (1, 17), (3, 9), (4, 8))
    case = make_paged_case(lengths=lengths, packed=packed)
    inputs, _ = case.prepared()
    given = [getattr(inputs, name) for name in PagedInputs._fields[:5]]
    options = {"cu_seqlens_q": inputs.cu_seqlens_q, "causal": True}
    wanted = saccade.attention_paged(*given, implementation="reference", **options)
    orders = (0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3), (1, 2, 3, 0)
    for order in orders:  # how the dimensions lie in memory
        back = [order.index(dim) for dim in range(4)]
        for number in (1, 2):
            given[number] = given[number].permute(order).contiguous().permute(back)
        torch.testing.assert_close(
            saccade.attention_paged(*given, implementation="cpu", **options), wanted
        )

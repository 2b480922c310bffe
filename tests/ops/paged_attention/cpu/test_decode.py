"""Short sequences that are computed together: which ones, and that nothing hidden shows."""

import pytest
import torch

import saccade
from saccade.ops.paged_attention.cpu import decode as paged_decode
from saccade.runtime.spec import PagedInputs
from saccade.testing import make_paged_case

RAGGED = ((1, 40), (1, 3), (1, 17), (3, 9), (1, 64))


def groups_of(**description):
    case = make_paged_case(**{"lengths": RAGGED, "packed": True, **description})
    inputs, variant = case.prepared()
    lens = [rows for rows, _ in case.description.lengths]
    return paged_decode.groups(inputs, variant, lens)


def test_single_rows_of_short_sequences_are_taken_the_shortest_first():
    assert groups_of() == [paged_decode.Group([1, 2, 0, 4], 64)]


def test_groups_hold_no_more_than_is_copied_at_once(monkeypatch):
    of_row = 2 * 2 * 16
    monkeypatch.setattr(paged_decode, "COPIED", 2 * 40 * of_row)
    found = groups_of(kv_heads=2, head_dim=16, value_dim=16)
    assert found == [
        paged_decode.Group([1, 2], 17),
        paged_decode.Group([0], 40),
        paged_decode.Group([4], 64),
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


def test_masks_that_differ_between_heads_are_left_to_the_others(monkeypatch):
    @saccade.masks.function
    def of_head(batch, head, query_row, kv_row):
        return kv_row % 2 == head % 2

    seen = []
    monkeypatch.setattr(paged_decode, "attend", lambda *a: seen.append(real(*a)) or seen[-1])
    case = make_paged_case(lengths=((1, 8), (1, 12)))
    inputs, _ = case.prepared()
    given = [getattr(inputs, name) for name in PagedInputs._fields[:5]]
    found = saccade.attention_paged(*given, mask=of_head(), implementation="cpu")
    wanted = saccade.attention_paged(*given, mask=of_head(), implementation="reference")
    assert seen == [None]
    torch.testing.assert_close(found, wanted)


real = paged_decode.attend

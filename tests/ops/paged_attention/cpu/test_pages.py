"""Pieces of a sequence: what is read where it lies, what is copied, and that both hold its rows."""

import pytest
import torch

from saccade.ops.paged_attention.cpu.pages import COPIED_ROWS, PageReader, Piece, Scratch
from saccade.testing import make_paged_case
from saccade.testing.paged import MEMORIES


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

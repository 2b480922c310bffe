"""Moving pages against the reference: permutations, overlaps, other pools."""

import pytest
import torch

import saccade
from saccade.testing import paged


def pools() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(6, 2, 4, 8, generator=generator)
    heads_first = torch.randn(2, 6, 4, 8, generator=generator).transpose(0, 1)
    eight_bits = torch.randn(6, 2, 4, 3, generator=generator).to(torch.float8_e4m3fn)
    return [pages, heads_first, eight_bits, torch.rand(6, 2, 4, generator=generator)]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.float(), theirs.float())


@pytest.mark.parametrize(
    ("source", "target"),
    [([0, 1, 2], [1, 2, 0]), ([5, 5], [0, 1]), ([3], [3]), ([], []), ([4, 2, 0], [2, 0, 4])],
)
def test_reads_before_it_writes(source, target):
    source, target = (torch.tensor(pages, dtype=torch.int64) for pages in (source, target))
    found, wanted = pools(), pools()
    saccade.move_pages(found, source, target)
    paged.move(wanted, source, target)
    assert_equal(found, wanted)


def test_into_other_pools_and_back():
    device, host = pools(), [torch.zeros_like(pool[:3]) for pool in pools()]
    source, target = torch.tensor([5, 0]), torch.tensor([1, 2])
    saccade.move_pages(device, source, target, into=host)
    for old, new in zip(device, host, strict=True):
        assert torch.equal(new[[1, 2]].float(), old[[5, 0]].float())
        assert not bool(new[0].float().any())
    before = pools()
    for pool in device:
        pool[5] = pool[0] = 0
    saccade.move_pages(host, target, source, into=device)
    assert_equal(device, before)


def test_operator():
    given = ([pools()[0], pools()[3]], torch.tensor([0, 1]), torch.tensor([1, 5]))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.saccade.move_pages.default, given, test_utils=tests)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pools": pools()[0]}, TypeError, "pools: got Tensor, takes a sequence"),
        ({"pools": [3]}, TypeError, "pools: got int, takes a sequence"),
        ({"pools": [torch.zeros(6, 2), torch.zeros(5, 2)]}, ValueError, "pools: got pools of diff"),
        ({"source": [1]}, TypeError, "source: got list"),
        ({"source": torch.ones(1)}, TypeError, "source: got torch.float32"),
        ({"source": torch.ones(1, 1).long()}, ValueError, r"source: got shape \(1, 1\)"),
        ({"source": torch.tensor([6])}, ValueError, "source: got page 6, takes 0 to 5"),
        ({"target": torch.tensor([-1])}, ValueError, "target: got page -1, takes 0 to 5"),
        ({"target": torch.tensor([1, 2])}, ValueError, "target: got 2 pages, takes 1"),
        ({"into": [torch.zeros(3, 9)]}, ValueError, "into: got pools of other shapes"),
    ],
)
def test_complaint(changes, error, message):
    given = {"pools": pools()[:1], "source": torch.tensor([0]), "target": torch.tensor([1])}
    with pytest.raises(error, match=message):
        saccade.move_pages(**{**given, **changes})


def test_a_page_is_written_once():
    with pytest.raises(ValueError, match="target: got a page twice"):
        saccade.move_pages(pools(), torch.tensor([0, 1]), torch.tensor([2, 2]))

"""The reference over pages against attention on the rows that the pages hold, and its gradient."""

import math

import pytest
import torch

import saccade
from saccade.testing import make_paged_case

F64 = torch.float64


def rows_of(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """One sequence's rows, read slot by slot."""
    size = pages.shape[2]
    rows = [pages[int(table[row // size]), :, row % size] for row in range(length)]
    return torch.stack(rows, dim=1) if rows else pages.new_zeros(pages.shape[1], 0, pages.shape[3])


@pytest.mark.parametrize("mask", [None, saccade.masks.causal(), saccade.masks.window(5, 1)])
def test_attention_to_the_rows_in_the_pages(mask):
    case = make_paged_case(lengths=((3, 20), (3, 0), (3, 9)), dtype=F64)
    given = {**case.arguments(), "mask": mask}
    output, lse = saccade.attention_paged(**given, implementation="reference", return_lse=True)
    for sequence, (_, length) in enumerate(case.description.lengths):
        table = given["page_table"][sequence]
        key, value = (rows_of(given[f"{name}_pages"], table, length) for name in ("key", "value"))
        wanted, wanted_lse = saccade.attention(
            given["query"][[sequence]], key[None], value[None], mask=mask,
            implementation="reference", return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(output[[sequence]], wanted)
        torch.testing.assert_close(lse[[sequence]], wanted_lse)


def test_by_hand():
    key, value = torch.zeros(2, 1, 2, 1, dtype=F64), torch.zeros(2, 1, 2, 1, dtype=F64)
    key[1, 0, 0], key[1, 0, 1], key[0, 0, 0] = 0.0, math.log(2), math.log(5)
    value[1, 0, 0], value[1, 0, 1], value[0, 0, 0] = 8.0, 16.0, 24.0
    key[0, 0, 1] = value[0, 0, 1] = torch.nan  # behind the end
    output, lse = saccade.attention_paged(
        torch.ones(1, 1, 1, 1, dtype=F64), key, value,
        torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32),
        implementation="reference", return_lse=True,
    )  # fmt: skip
    assert output.item() == pytest.approx((8 + 2 * 16 + 5 * 24) / 8)
    assert lse.item() == pytest.approx(math.log(8))


def test_gradients_by_finite_differences():
    case = make_paged_case(lengths=((2, 7), (2, 3)), page_size=4, head_dim=3, dtype=F64)
    given = case.arguments()
    names = ("query", "key_pages", "value_pages")
    for name in names:  # finite everywhere: gradcheck moves unused slots too
        given[name] = given[name].nan_to_num(0.5).requires_grad_()

    def call(*tensors):
        options = {**given, **dict(zip(names, tensors, strict=True))}
        return saccade.attention_paged(**options, implementation="reference", return_lse=True)

    assert torch.autograd.gradcheck(call, [given[name] for name in names])


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_of_eight_bits_are_multiplied_by_their_scales(page_dtype):
    case = make_paged_case(page_dtype=page_dtype, dtype=F64)
    given = case.arguments(F64)
    plain = dict(given)
    for name in ("key", "value"):
        scales = plain.pop(f"{name}_scales").double()
        plain[f"{name}_pages"] = given[f"{name}_pages"].double() * scales.unsqueeze(-1)
    output = saccade.attention_paged(**given, implementation="reference")
    wanted = saccade.attention_paged(**plain, implementation="reference")
    torch.testing.assert_close(output, wanted)

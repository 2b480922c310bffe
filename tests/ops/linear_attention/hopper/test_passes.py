"""Linear attention by Hopper kernels: what they refuse, how they split, and all forms on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import saccade
from saccade.ops.linear_attention.hopper.host import split_of
from saccade.ops.linear_attention.hopper.program import HeadSplit
from saccade.ops.linear_attention.triton.passes import LinearCallSpec
from saccade.ops.linear_attention.validation import prepare
from saccade.runtime import backends
from saccade.testing import assert_linear_exact, make_linear_case, poisoned

BF16 = torch.bfloat16


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def reason(query: Tensor, key: Tensor | None = None, **more: Any) -> str:
    key = query if key is None else key
    problem = prepare(query, key, key, **more).problem
    return backends.explained(problem).reasons["hopper"] or ""


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("not float16", lambda: reason(rows(1, 2, 8, 64, dtype=torch.float16))),
        ("causal", lambda: reason(rows(1, 2, 8, 64), causal=False)),
        ("decay", lambda: reason(rows(1, 2, 8, 64), decay=-torch.ones(2))),
        ("packed", lambda: reason(rows(8, 2, 64), cu_seqlens_q=torch.tensor([0, 8]).int())),
        ("multiples of 8", lambda: reason(rows(1, 2, 8, 60))),
        ("up to 256", lambda: reason(rows(1, 2, 8, 264))),
        ("nothing to load", lambda: reason(rows(1, 2, 8, 64), rows(1, 2, 0, 64))),
        ("strides", lambda: reason(rows(1, 2, 8, 65)[..., :64])),
        (
            "takes no config",
            lambda: reason(rows(1, 2, 8, 64), config=saccade.KernelConfig(kv_tile=64)),
        ),
    ],
)
def test_reasons(what: str, found: Any) -> None:
    assert what in found()


def test_it_comes_before_triton_kernels_and_wants_a_hopper() -> None:
    assert list(backends.candidates("linear_attention"))[1].name == "hopper"
    with pytest.raises(NotImplementedError, match="hopper: "):
        saccade.linear_attention(*[rows(1, 2, 8, 64)] * 3, implementation="hopper")


def spec_of(
    *shape: int, lengths: tuple[int, int] | None = None, value_dim: int = 0, key_heads: int = 0
) -> LinearCallSpec:
    batch, heads, length, dim = shape
    query_len, kv_len = lengths or (length, length)
    query, key = rows(1, 1, 1, 1), rows(1, 1, 1, 1)
    inputs, variant = prepare(
        query.expand(batch, heads, query_len, dim),
        key.expand(batch, key_heads or heads, kv_len, dim),
        key.expand(batch, key_heads or heads, kv_len, value_dim or dim),
    )[:2]
    spec = LinearCallSpec.of(inputs, variant, saccade.KernelConfig(kv_tile=64))
    return spec._replace(multiprocessors=132)


def split(*shape: int, **more: Any) -> HeadSplit:
    return HeadSplit.of(spec_of(*shape, **more))


def test_splits() -> None:
    assert split(8, 16, 8192, 128) == (2, 1, 1)
    assert split(8, 32, 8192, 64) == (1, 1, 1)
    assert split(1, 8, 131072, 128) == (2, 1, 16)
    assert split(1, 8, 131072, 64) == (1, 1, 33)  # two heads to a program
    assert split(1, 3, 1024, 128) == (2, 1, 2)  # segments are not shorter than 512
    assert split(1, 2, 4096, 64, value_dim=256) == (2, 2, 8)
    assert split(1, 2, 4096, 40, value_dim=96) == (2, 1, 8)
    assert split(8, 32, 2048, 256) == (4, 2, 1)  # blocks of wide kernels, and two programs a head
    assert split(1, 2, 4096, 136, value_dim=64) == (4, 1, 8)


def test_few_heads_are_whole_where_chunks_would_not_be_those_of_triton_kernels() -> None:
    assert split(1, 2, 0, 64, lengths=(4096, 4096 + 64)).segments > 1
    assert split(1, 2, 0, 64, lengths=(4096, 4096 + 63)).segments == 1
    assert split(1, 2, 0, 64, lengths=(4096 + 63, 4096)).segments > 1


def test_which_gradients_are_left_to_triton_kernels() -> None:
    taken, left = (2, 1, 1), None
    for keys in (False, True):
        assert split_of(spec_of(8, 16, 8192, 128), keys) == taken
        assert split_of(spec_of(8, 16, 8192, 64, value_dim=136), keys) == (2, 2, 1)
        assert split_of(spec_of(8, 32, 2048, 256), keys) == (4, 2, 1)
    shared = spec_of(8, 16, 8192, 128, key_heads=4)
    assert split_of(shared, keys=False) == taken
    assert split_of(shared, keys=True) is left  # their gradients are sums
    # Segments begin where those of Triton kernels do, or there are none.
    assert split_of(spec_of(1, 2, 0, 64, lengths=(4096, 4096 + 63)), keys=False) is left
    assert split_of(spec_of(1, 2, 0, 64, lengths=(4096, 4096 + 63)), keys=True) == (1, 1, 8)
    assert split_of(spec_of(1, 2, 0, 64, lengths=(4096 + 63, 4096)), keys=False) == (1, 1, 8)
    assert split_of(spec_of(1, 2, 0, 64, lengths=(4096 + 63, 4096)), keys=True) is left


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 2, 1024, 128), None),
        ((1, 2, 1023, 128), "from 1024 on"),
        ((1, 2, 4096, 136), None),
        ((1, 2, 4096, 256), None),
    ],
)
def test_what_was_not_measured_goes_to_triton_kernels_unless_it_is_named(shape, said, monkeypatch):
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)
    asked = prepare(*[rows(*shape)] * 3).problem._replace(device="cuda")
    chosen = backends.choose(asked)
    assert chosen == ("hopper" if said is None else "triton")
    assert backends.choose(asked, "hopper") == "hopper"
    why = backends.explained(asked).not_preferred["hopper"]
    assert (why is None) if said is None else (said in why)
    values_alone = asked._replace(head_dim=128, value_dim=256)
    assert backends.choose(values_alone) == "triton"


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")


FORMS = [
    {"lengths": ((1, 1),)},
    {"lengths": ((63, 129),)},
    {"lengths": ((129, 63),)},
    {"lengths": ((64, 228),), "align": "top_left"},
    {"lengths": ((300, 100),), "align": "top_left", "state": True},
    {"lengths": ((300, 100),), "state": True},
    {"lengths": ((300, 300),), "padded": True},
    {"lengths": ((300, 300),), "padded": True, "state": True, "heads": (4, 1, 2)},
    {"lengths": ((130, 200),), "heads": (2, 2, 4), "normalize": "none", "scale": 0.3},
    {"lengths": ((130, 200),), "feature_map": "relu", "normalize": "abs"},
    {"lengths": ((130, 200),), "feature_map": "exp", "normalize": "clamp", "scale": 0.3},
    {"lengths": ((130, 200),), "feature_map": "identity", "normalize": "abs", "eps": 1.0},
    {"lengths": ((2000, 2000),), "batch": 1, "heads": (3, 3, 3)},
    {"lengths": ((2100, 2100),), "batch": 1, "heads": (1, 1, 1), "state": True, "padded": True},
    {"lengths": ((200, 130),), "state": True, "eps": 30.0, "scale": 0.3},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 96), (64, 256)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(hopper: None, form: dict[str, Any], dims: tuple[int, int]) -> None:
    case = make_linear_case(
        dtype=BF16, head_dim=dims[0], value_dim=dims[1], device="cuda", **form
    )  # fmt: skip
    with poisoned():
        assert_linear_exact(case, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "form"),
    [
        *(((256, 256), FORMS[position]) for position in (0, 1, 2, 4, 7, 8, 10, 11, 13)),
        *((dims, FORMS[6]) for dims in ((136, 200), (192, 64))),
    ],
    ids=str,
)
def test_wide_heads(hopper: None, form: dict[str, Any], dims: tuple[int, int]) -> None:
    case = make_linear_case(
        dtype=BF16, head_dim=dims[0], value_dim=dims[1], device="cuda", **form
    )  # fmt: skip
    with poisoned():
        assert_linear_exact(case, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", ["query", "key", "value"])
@pytest.mark.parametrize("heads", [1, 64], ids=["segments", "whole"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_before_a_nonfinite_row_stay_clean(
    hopper: None, dim: int, heads: int, nonfinite: str
) -> None:
    tensors = [torch.randn(1, heads, 1500, dim, device="cuda").to(BF16) for _ in range(3)]
    clean = saccade.linear_attention(*tensors, implementation="hopper")
    position, which = 1100, ("query", "key", "value").index(nonfinite)
    tensors[which][:, :, position] = torch.nan
    output = saccade.linear_attention(*tensors, implementation="hopper")
    torch.testing.assert_close(
        output[:, :, :position], clean[:, :, :position], atol=0.02, rtol=0.02
    )
    assert bool(output[:, :, position].isnan().all())
    assert bool(output[:, :, position + 1 :].isfinite().all()) == (nonfinite == "query")


@pytest.mark.gpu
def test_projections_are_read_as_they_lie_and_runs_are_bit_equal(hopper: None) -> None:
    joint = torch.randn(2, 700, 12, 128, device="cuda").to(BF16)
    query, key, value = (part.transpose(1, 2) for part in joint.split([8, 2, 2], 2))
    found = saccade.linear_attention(query, key, value, implementation="hopper")
    recompute = saccade.linear_attention(
        *(t.contiguous() for t in (query, key, value)), implementation="hopper"
    )
    assert torch.equal(found, recompute)


def gradients(tensors: list[Tensor], grad: Tensor, implementation: str) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = saccade.linear_attention(*leaves, implementation=implementation)
    return torch.autograd.grad(output, leaves, grad)


ROWS, NONFINITE = 1500, 1100
ALONE, FROM, UP_TO = (NONFINITE, NONFINITE + 1), (NONFINITE, ROWS), (0, NONFINITE + 1)
ALL, NONE = (0, ROWS), (0, 0)
REACHED = {  # by NaN in one row: which gradients of queries, keys and values
    "query": (ALONE, UP_TO, UP_TO),
    "key": (FROM, ALL, ALL),  # divisors of all rows that see it
    "value": (FROM, ALL, NONE),  # their δ
    "grad": (ALONE, UP_TO, UP_TO),
}


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", list(REACHED))
@pytest.mark.parametrize("heads", [1, 64], ids=["segments", "whole"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_that_know_nothing_of_a_nonfinite_row_stay_clean(
    hopper: None, dim: int, heads: int, nonfinite: str
) -> None:
    tensors = [torch.randn(1, heads, ROWS, dim, device="cuda").to(BF16) for _ in range(4)]
    clean = gradients(tensors[:3], tensors[3], "triton")
    tensors[list(REACHED).index(nonfinite)][:, :, NONFINITE] = torch.nan
    found = gradients(tensors[:3], tensors[3], "hopper")
    for got, by_triton, (first, end) in zip(found, clean, REACHED[nonfinite], strict=True):
        reached = torch.zeros(ROWS, dtype=torch.bool, device="cuda")
        reached[first:end] = True
        assert torch.equal(got.isnan().any(-1), reached.expand(1, heads, -1))
        rest, wanted = got[:, :, ~reached].float(), by_triton[:, :, ~reached].float()
        # Both are off by less than 1e-2 of what gradients are (bfloat16).
        assert float((rest - wanted).norm()) <= 0.02 * float(wanted.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["hopper", "triton"])
def test_gradients_come_in_any_layout_and_are_bit_equal(hopper: None, implementation: str) -> None:
    tensors = [torch.randn(2, 3, 700, 128, device="cuda").to(BF16) for _ in range(4)]
    turned = tensors[3].transpose(1, 2).contiguous().transpose(1, 2)
    expected = gradients(tensors[:3], tensors[3], implementation)
    for got, other in zip(gradients(tensors[:3], turned, implementation), expected, strict=True):
        assert torch.equal(got, other)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 64], ids=["segments", "whole"])
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_are_off_by_what_is_rounded_once(hopper: None, dim: int, heads: int) -> None:
    tensors = [torch.randn(1, heads, 1500, dim, device="cuda").to(BF16) for _ in range(4)]
    found = gradients(tensors[:3], tensors[3], "hopper")
    exact = gradients([rows.double() for rows in tensors[:3]], tensors[3].double(), "reference")
    # The relative RMS error of one rounding is 1.65e-3. The result is rounded once; so are the
    # weights of its own chunk and the state before that, which together make it; the output, which
    # δ is of; and features less 1 where they are negative, so half of them, and smaller than 1.
    allowed = 1.65e-3 * (1 + 1 + 1 + 0.5**2) ** 0.5
    for got, truth in zip(found, exact, strict=True):
        assert float((got.double() - truth).norm() / truth.norm()) < allowed

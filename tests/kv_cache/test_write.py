"""Writing by slot mapping against the reference, and against attention on what was written."""

from typing import Any

import pytest
import torch

import saccade
from saccade.rotary import rotated
from saccade.testing import paged

F8, I8 = torch.float8_e4m3fn, torch.int8
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def pool(dtype: torch.dtype, dim: int, memory: str = "pages_first") -> torch.Tensor:
    shape = (5, 2, 4, dim) if memory == "pages_first" else (2, 5, 4, dim)
    pages = torch.full(shape, 7.0).to(dtype)
    return pages if memory == "pages_first" else pages.transpose(0, 1)


def written(function, dtype, page_dtype, **options):
    """Pages (and scales) after a write of ten tokens, two of them skipped."""
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(10, 2, 6, generator=generator).to(dtype)
    value = torch.randn(10, 2, 3, generator=generator).to(dtype)
    slots = torch.tensor([3, 4, 5, -1, 19, 0, 9, 11, -1, 12])
    found = [pool(page_dtype, 6, "heads_first"), pool(page_dtype, 3)]
    if options.pop("scaled", False):
        found += [torch.full((5, 2, 4), torch.nan) for _ in range(2)]
        options |= {"key_scales": found[2], "value_scales": found[3]}
    function(key, value, *found[:2], slots, **options)
    return found


DTYPES = [
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float64, torch.float64, False),
    (torch.float16, I8, True),
    (torch.float32, F8, True),
    (torch.bfloat16, F8, False),
]


@pytest.mark.parametrize(("dtype", "page_dtype", "scaled"), DTYPES)
@pytest.mark.parametrize("pairs", [0, 2, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_the_reference(dtype, page_dtype, scaled, pairs, interleaved):
    angles = normal(10, pairs)
    of_reference = {"interleaved": interleaved, "scaled": scaled}
    of_write = dict(of_reference)
    if pairs:
        of_reference |= {"cos": angles.cos(), "sin": angles.sin()}
        of_write |= {"rotary": (angles.cos(), angles.sin())}
    wanted = written(paged.write, dtype, page_dtype, **of_reference)
    found = written(saccade.write_kv_cache, dtype, page_dtype, **of_write)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=0, equal_nan=True)


def test_only_the_slots_that_are_named_change():
    key_pages, value_pages = written(saccade.write_kv_cache, torch.float32, torch.float32)
    changed = {3, 4, 5, 19, 0, 9, 11, 12}
    for slot in range(20):
        rows = key_pages[slot // 4, :, slot % 4], value_pages[slot // 4, :, slot % 4]
        assert all(bool((row == 7).all()) != (slot in changed) for row in rows)


def test_rotation_turns_pairs_by_their_angle():
    rows, angles = normal(5, 2, 8).double(), normal(5, 3).double()
    turned = rotated(rows, angles.cos(), angles.sin(), True)
    as_complex = torch.view_as_complex(rows[..., :6].reshape(5, 2, 3, 2).contiguous())
    wanted = torch.view_as_real(as_complex * torch.exp(1j * angles).unsqueeze(1)).flatten(2)
    torch.testing.assert_close(turned[..., :6], wanted)
    assert torch.equal(turned[..., 6:], rows[..., 6:])
    halves = rotated(rows, angles.cos(), angles.sin(), False)
    order = torch.tensor([0, 3, 1, 4, 2, 5, 6, 7])  # pairs (i, i + 3) side by side
    torch.testing.assert_close(
        halves[..., order], rotated(rows[..., order], angles.cos(), angles.sin(), True)
    )


def test_rotated_scores_depend_on_distance_alone():
    query, key, angle = normal(1, 1, 8).double(), normal(1, 1, 8).double(), normal(1, 4).double()
    products = []
    for shift in (0, 5):
        turned = [
            rotated(rows, (angle * at).cos(), (angle * at).sin(), False)
            for rows, at in ((query, 7 + shift), (key, 3 + shift))
        ]
        products.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(*products)


@pytest.mark.parametrize("page_dtype", [torch.float32, F8, I8])
def test_attention_reads_what_was_written(page_dtype):
    key, value, query = normal(11, 2, 16), normal(11, 2, 16), normal(1, 4, 2, 16)
    key_pages, value_pages = (torch.zeros(4, 2, 4, 16).to(page_dtype) for _ in range(2))
    scales: dict[str, Any] = {}
    if page_dtype != torch.float32:
        scales = {name: torch.zeros(4, 2, 4) for name in ("key_scales", "value_scales")}
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    row = torch.arange(11)
    slots = table[0].long()[row // 4] * 4 + row % 4
    saccade.write_kv_cache(key, value, key_pages, value_pages, slots, **scales)
    lens = torch.tensor([11], dtype=torch.int32)
    output = saccade.attention_paged(query, key_pages, value_pages, table, lens, **scales)
    wanted = saccade.attention(query, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
    # int8 moves each number by half a step of 1/127, fp8 by 1/16 of itself
    allowed = {torch.float32: 1e-5, F8: 0.25, I8: 0.03}[page_dtype]
    assert float((output - wanted).abs().max()) < allowed


def test_nothing_to_write():
    pages = pool(torch.float32, 6), pool(torch.float32, 3)
    saccade.write_kv_cache(normal(0, 2, 6), normal(0, 2, 3), *pages, torch.zeros(0).long())
    saccade.write_kv_cache(normal(1, 2, 6), normal(1, 2, 3), *pages, torch.tensor([-1]))
    assert all(bool((each == 7).all()) for each in pages)


@pytest.mark.parametrize("page_dtype", [torch.float32, I8])
def test_operator(page_dtype):
    key, value = normal(3, 2, 6), normal(3, 2, 3)
    angles = normal(3, 2)
    pages = pool(page_dtype, 6), pool(page_dtype, 3)
    scales = [torch.ones(5, 2, 4) for _ in range(2)] if page_dtype == I8 else [None, None]
    given = (
        key,
        value,
        *pages,
        torch.tensor([1, -1, 8]),
        *scales,
        angles.cos(),
        angles.sin(),
        True,
    )
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.saccade.write_kv_cache.default, given, test_utils=tests)


def test_compiles():
    def step(key, value, key_pages, value_pages, slots):
        saccade.write_kv_cache(key * 2, value, key_pages, value_pages, slots)
        return key_pages.sum()

    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    key, value, slots = normal(3, 2, 6), normal(3, 2, 3), torch.tensor([1, -1, 8])
    found, wanted = ((pool(torch.float32, 6), pool(torch.float32, 3)) for _ in range(2))
    assert torch.equal(compiled(key, value, *found, slots), step(key, value, *wanted, slots))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


KEY, VALUE, SLOTS = torch.zeros(3, 2, 6), torch.zeros(3, 2, 3), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key": 1}, TypeError, "key: got int, takes a tensor"),
        ({"key": KEY[0]}, ValueError, r"key: got shape \(2, 6\)"),
        ({"key": KEY.long(), "value": VALUE.long()}, TypeError, "key: got torch.int64"),
        ({"value": VALUE.double()}, TypeError, "value: got torch.float64 on cpu, takes key's"),
        ({"value": VALUE[:2]}, ValueError, "value: got 2 tokens, takes key's 3"),
        ({"key": KEY[:, :1]}, ValueError, r"key: got \(1, 6\) heads and channels"),
        ({"slot_mapping": [0]}, TypeError, "slot_mapping: got list"),
        ({"slot_mapping": SLOTS.float()}, TypeError, "slot_mapping: got torch.float32"),
        ({"slot_mapping": SLOTS[:2]}, ValueError, r"slot_mapping: got shape \(2,\)"),
        ({"slot_mapping": SLOTS + 18}, ValueError, "slot_mapping: got slot 20, takes -1 to 19"),
        ({"slot_mapping": SLOTS - 2}, ValueError, "slot_mapping: got slot -2, takes -1 to 19"),
        ({"rotary": KEY}, TypeError, "rotary: got Tensor"),
        ({"rotary": (KEY[:, 0], KEY[:, 0])}, ValueError, r"rotary: got shape \(3, 6\)"),
        ({"rotary": (KEY[:, 0, :2], KEY[:, 0, :1])}, ValueError, "rotary: got .* cosines"),
        ({"rotary": (SLOTS, SLOTS)}, TypeError, "rotary: got Tensor, takes"),
        ({"interleaved": 1}, TypeError, "interleaved: got 1"),
        ({"key_scales": KEY}, TypeError, "key_scales: got scales for pages of"),
    ],
)
def test_complaint(changes, error, message):
    given = {"key": KEY, "value": VALUE, "slot_mapping": SLOTS}
    pages = {"key_pages": pool(torch.float32, 6), "value_pages": pool(torch.float32, 3)}
    with pytest.raises(error, match=message):
        saccade.write_kv_cache(**{**given, **pages, **changes})
    assert all(bool((each == 7).all()) for each in pages.values())


def test_a_gradient_is_refused():
    key = KEY.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"under torch\.no_grad"):
        saccade.write_kv_cache(key, VALUE, pool(torch.float32, 6), pool(torch.float32, 3), SLOTS)


def test_scales_are_needed_by_int8():
    with pytest.raises(TypeError, match="key_scales: got None for pages of int8"):
        saccade.write_kv_cache(KEY, VALUE, pool(I8, 6), pool(I8, 3), SLOTS)


def test_a_profiler_sees_the_operator():
    pages = pool(torch.float32, 6), pool(torch.float32, 3)
    saccade.write_kv_cache(KEY, VALUE, *pages, SLOTS)  # past the dispatcher
    with torch.profiler.profile() as profile:
        saccade.write_kv_cache(KEY, VALUE, *pages, SLOTS)
    assert "saccade::write_kv_cache" in {average.key for average in profile.key_averages()}

"""What transformers' mask functions say of each pair, and what saccade makes of them."""

from typing import Any

import pytest
import torch
from tiny_models import model, tokens
from torch import Tensor
from transformers import masking_utils

import saccade
import saccade.integrations.transformers as integration
from saccade import masks
from saccade.integrations.transformers.masks import LazyMask, MaskRequest

PADDINGS = {
    "none": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]],
    "both": [[0, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1]],
    "nothing": [[0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]],
    "short": [[0, 1, 1, 1], [1, 1, 1, 1]],  # what is behind its end is padding
}
causal = masking_utils.causal_mask_function
FUNCTIONS = {
    "causal": causal,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([1, 0])),
    "everything": masking_utils.bidirectional_mask_function,
    "around": masking_utils.sliding_window_bidirectional_mask_function(2),
}


def lazy(function: Any = causal, real: Any = None, **changes: Any) -> Any:
    request: dict[str, Any] = {"batch_size": 2, "q_length": 7, "kv_length": 7}
    return integration.lazy_mask(
        **request | changes, mask_function=function, attention_mask=real, device="cpu"
    )


def shown(mask: LazyMask) -> Tensor:
    """Bools [batch, query_len, kv_len]: rows average the numbers of the keys that they see."""
    batch, _, query_len, kv_len = mask.shape
    query, key = torch.zeros(batch, 1, query_len, 1), torch.zeros(batch, 1, kv_len, 1)
    value = torch.eye(kv_len).expand(batch, 1, kv_len, kv_len)
    return saccade.attention(query, key, value, mask=mask.visible())[:, 0] > 0


# (query_len, kv_len, query_offset, kv_offset): in place; behind a past that was cut off; in the
# middle of a cache that is longer than its contents
PLACES = ((9, 9, 0, 0), (4, 7, 5, 2), (3, 9, 4, 0))
BLOCKS = torch.tensor([[0, 0, -1, 1, 1, 1, -1, -1, 2], [-1, 0, 0, 0, 0, -1, 1, 1, 1]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [4, 0, 1, 2, 3, 4, 5, 6, 7]])
REAL = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1, 0]]).bool()
PADDED = torch.tensor([0, 2])
COMPOSED = {
    "causal": lambda m: causal,
    "sliding_window_overlay": lambda m: m.and_masks(m.sliding_window_overlay(3), causal),
    "sliding_window_bidirectional_overlay": lambda m: m.sliding_window_bidirectional_overlay(2),
    "chunked_overlay": lambda m: m.and_masks(m.chunked_overlay(3, PADDED), causal),
    "blockwise_overlay": lambda m: m.or_masks(causal, m.blockwise_overlay(BLOCKS)),
    "padding_mask_function": lambda m: m.and_masks(causal, m.padding_mask_function(REAL)),
    "packed_sequence_mask_function": lambda m: m.and_masks(
        causal, m.packed_sequence_mask_function(DOCUMENTS)
    ),
    "remap_positions_for_packed_sequence": lambda m: m.and_masks(
        m.packed_sequence_mask_function(DOCUMENTS),
        m.remap_positions_for_packed_sequence(
            m.and_masks(m.chunked_overlay(3, PADDED), causal), POSITIONS
        ),
    ),
}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", COMPOSED)
def test_what_transformers_composes_is_traced(name, place, monkeypatch):
    if name != "causal" and not hasattr(masking_utils, name):
        assert name == "remap_positions_for_packed_sequence"  # came after 5.17
        return
    query_len, kv_len, query_offset, kv_offset = place
    mask = lazy(
        COMPOSED[name](masking_utils), q_length=query_len, kv_length=kv_len, q_offset=query_offset,
        kv_offset=kv_offset,
    )  # fmt: skip
    exact = mask.request.dense()[:, 0]
    monkeypatch.setattr(MaskRequest, "dense", None)  # nobody may write it out
    assert torch.equal(shown(mask), exact)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding_hides_keys(function, padding):
    mask = lazy(FUNCTIONS[function], torch.tensor(PADDINGS[padding]).bool())
    exact = mask.request.dense()[:, 0]
    assert torch.equal(shown(mask), exact)
    assert mask._dense is None
    assert bool(exact.any()) and (padding == "none" or not bool(exact.all()))


@pytest.mark.parametrize("offsets", [(5, 2), (2, 2), (9, 4)])
def test_padding_is_counted_from_the_first_key(offsets):
    """As a sliding layer of a cache has it: its first keys are gone."""
    real = torch.ones(2, 12).bool()
    real[0, :6] = False
    where = {"q_length": 3, "q_offset": offsets[0], "kv_offset": offsets[1]}
    mask = lazy(FUNCTIONS["window"], real, **where)
    assert torch.equal(shown(mask), mask.request.dense()[:, 0])


@pytest.mark.parametrize(
    ("plainest", "function", "changes"),
    [
        (masks.causal(), causal, {}),
        (masks.causal(), causal, {"q_length": 3, "q_offset": 4}),
        (masks.causal("top_left"), causal, {"kv_length": 9}),
        (None, causal, {"q_length": 1, "q_offset": 6}),
        (masks.window(2, 0), FUNCTIONS["window"], {}),
        (masks.causal(), masking_utils.sliding_window_causal_mask_function(7), {}),
        (None, FUNCTIONS["window"], {"q_length": 1, "q_offset": 2, "kv_length": 3}),
        (None, FUNCTIONS["everything"], {}),
        (None, masking_utils.or_masks(causal, FUNCTIONS["everything"]), {}),
    ],
)  # fmt: skip
def test_the_plainest_mask_is_chosen(plainest, function, changes):
    visible = lazy(function, torch.ones(2, 7).bool() if not changes else None, **changes).visible()
    assert visible == plainest


@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_grows_with_the_length_and_not_with_its_square(function):
    length = 2**20  # 137 GB as a bool for each pair
    real = torch.ones(2, length).bool()
    real[1, :5] = False
    mask = lazy(FUNCTIONS[function], real, q_length=length, kv_length=length).visible()
    assert mask is not None
    assert sum(tensor.numel() for tensor in mask.captured.tensors) <= 8 * length


def test_static_cache_may_count_on_before_layers_ask():
    position = torch.tensor(2)
    mask = lazy(q_length=1, q_offset=position)
    position += 1
    assert shown(mask)[0, 0].tolist() == [True, True, True, False, False, False, False]


# ---- as a tensor ---------------------------------------------------------------------------------


def test_models_that_slice_a_mask_get_it_written_out():
    mask = lazy(FUNCTIONS["window"])
    exact = mask.request.dense()
    assert mask.shape == exact.shape and mask.dtype == exact.dtype and mask.device == exact.device
    assert torch.equal(mask[:, :, 2:5], exact[:, :, 2:5])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(exact, 0.0, -1.0))
    assert mask.contiguous() is mask  # as generate calls it for a static cache
    assert "LazyMask(shape=(2, 1, 7, 7)" in repr(mask)


def test_mask_moves_with_its_layers():
    """As device maps have it: layers on several devices share one mask."""
    mask = lazy(FUNCTIONS["chunks"], torch.tensor(PADDINGS["left"]).bool())
    moved = mask.to("meta")
    assert isinstance(moved, LazyMask) and moved.device.type == "meta"
    back = moved.to("cpu")
    assert isinstance(back, LazyMask) and back.device.type == "cpu"
    assert torch.equal(shown(back), mask.request.dense()[:, 0])


def test_table_that_is_read_at_positions_is_traced():
    """Within packed sequences the mask function of a block says where in its own sequence."""
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        return  # came after 5.17
    inner = masking_utils.or_masks(causal, masking_utils.blockwise_overlay(BLOCKS))
    function = masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(DOCUMENTS),
        masking_utils.remap_positions_for_packed_sequence(inner, POSITIONS),
    )
    mask = lazy(function, q_length=9, kv_length=9)
    assert torch.equal(shown(mask), mask.request.dense()[:, 0])


def test_change_in_place_is_refused():
    with pytest.raises(NotImplementedError, match=r"changes its argument in place, and got a Lazy"):
        lazy().logical_not_()


# ---- masks of users ------------------------------------------------------------------------------


def every_third(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 3 == 0


def test_function_of_a_user_is_traced():
    for function in (every_third, masking_utils.or_masks(causal, every_third)):
        mask = lazy(function, torch.tensor(PADDINGS["left"]).bool())
        assert torch.equal(shown(mask), mask.request.dense()[:, 0])
        visible = mask.visible()
        assert visible is not None and mask._dense is None


def test_function_of_equal_name_is_no_match():
    def sliding_window_overlay(sliding_window: int) -> Any:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx > q_idx + sliding_window

        return inner_mask

    mask = lazy(sliding_window_overlay(2))
    assert torch.equal(shown(mask)[0], torch.ones(7, 7).triu(3).bool())


def fails(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx if q_idx > kv_idx else q_idx


def counts(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


@pytest.mark.parametrize(
    ("function", "problem"), [(fails, "fails on"), (counts, "gives torch.int")]
)
def test_what_is_not_understood_raises_when_layers_attend(function, problem):
    mask = lazy(function)  # transformers may ask for masks that no layer uses
    with pytest.raises(TypeError, match=rf"mask_function: got \S+\.{function.__name__}.*{problem}"):
        mask.visible()


def logits(implementation: str, name: str = "llama", **options: Any) -> Tensor:
    tiny = model(name)
    tiny.set_attn_implementation(implementation)
    with torch.no_grad():
        return tiny(tokens(2, 12), use_cache=False, **options).logits


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_mask_of_four_dimensions_is_taken_as_it_is(dtype):
    mask = (torch.rand(2, 1, 12, 12) > 0.4) | torch.eye(12).bool()
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    own = logits("sdpa", attention_mask=mask)
    assert torch.equal(logits("saccade", attention_mask=mask).argmax(-1), own.argmax(-1))
    # norms in float32 make of one rounding in float64 one in float32
    torch.testing.assert_close(logits("saccade", attention_mask=mask), own, rtol=0, atol=1e-5)
    assert not torch.equal(own, logits("sdpa"))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 1, 12, 11).bool(), r"got shape \(2, 1, 12, 11\) for 12 query rows and 12"),
        (torch.ones(2, 1, 12, 12).int(), r"attention_mask: got torch.int32, takes a bool tensor"),
    ],
)
def test_mask_of_another_form_is_refused(mask, message):
    with pytest.raises((TypeError, ValueError), match=message):
        logits("saccade", attention_mask=mask)


# transformers 5.17 itself counts chunks from the first of all packed tokens.
PACKED = ["llama", "qwen3"]
PACKED += ["llama4"] if hasattr(masking_utils, "remap_positions_for_packed_sequence") else []


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_do_not_see_each_other(name, monkeypatch):
    def refuse(self: MaskRequest) -> Tensor:
        raise AssertionError("a mask was written out")

    monkeypatch.setattr(MaskRequest, "dense", refuse)
    positions = torch.cat([torch.arange(3), torch.arange(9)])[None].expand(2, -1)
    together = logits("saccade", name, position_ids=positions)
    for start, stop in ((0, 3), (3, 12)):
        alone = model(name)(tokens(2, 12)[:, start:stop], use_cache=False).logits
        torch.testing.assert_close(together[:, start:stop], alone, rtol=0, atol=1e-5)
    assert not torch.allclose(together, logits("saccade", name), rtol=0, atol=1e-2)

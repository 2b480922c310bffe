"""Pages under generate: they hold what transformers' own cache holds, and are shared and let go."""

import random
from typing import Any

import pytest
import torch
import transformers
from tiny_models import left_padded, model, tokens
from torch import Tensor
from transformers import DynamicCache

import saccade
from saccade.integrations.transformers import PagedGenerationCache
from saccade.integrations.transformers import cache as sliding
from saccade.integrations.transformers.cache import PagedRows


def rows(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, length, 8), torch.randn(batch, 2, length, 6)


def grow(caches: list[Any], batch: int, length: int) -> None:
    """One step in two layers; both caches must give the same keys and values."""
    for layer in range(2):
        key, value = rows(batch, length)
        given = [cache.update(key, value, layer) for cache in caches]
        for ours, own in zip(*given, strict=True):
            assert ours.shape == own.shape and ours.dtype == own.dtype
            assert torch.equal(ours.clone(), own)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    assert caches[0].get_mask_sizes(3, 1) == caches[1].get_mask_sizes(3, 1)


@pytest.mark.parametrize("seed", range(4))
def test_holds_what_a_dynamic_cache_holds(seed):
    """Whatever generate does to it, in any order."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    ours, own = PagedGenerationCache(2, num_pages=200, page_size=4), DynamicCache()
    batch = 3
    grow([ours, own], batch, 6)
    for _ in range(60):
        step = chance.choice(["grow", "grow", "grow", "crop", "reorder", "repeat", "select"])
        if step == "grow":
            grow([ours, own], batch, chance.choice([1, 1, 5]))
        elif step == "crop":
            removed = chance.randrange(min(6, own.get_seq_length()))
            for cache in (ours, own):
                cache.crop(-removed)
        elif step == "reorder":
            picks: Any = torch.tensor([chance.randrange(batch) for _ in range(batch)])
            for cache in (ours, own):
                cache.reorder_cache(picks)
        elif step == "repeat" and batch < 4:
            batch *= 2
            for cache in (ours, own):
                cache.batch_repeat_interleave(2)
        elif step == "select" and batch > 2:
            kept = torch.zeros(batch, dtype=torch.bool)
            kept[chance.sample(range(batch), 2)] = True
            chosen = kept if chance.random() < 0.5 else kept.nonzero()[:, 0]
            batch = 2
            for cache in (ours, own):
                cache.batch_select_indices(chosen)
        assert ours.batch_size == batch
        assert ours.pages is not None
        ours.pages.check()
    assert ours.pages is not None and ours.pages.statistics().copied > 0


def test_crop_takes_both_conventions_and_tensors():
    cache = PagedGenerationCache(1, num_pages=10, page_size=4)
    cache.crop(-3)  # of nothing
    cache.update(*rows(2, 20), 0)
    for given, left in ((-2, 18), (torch.tensor(-3), 15), (0, 15), (30, 15), (9, 9), (-100, 0)):
        cache.crop(given)  # type: ignore[arg-type]  # assisted generation of 5.17 gives tensors
        assert cache.get_seq_length() == left


def test_beams_share_pages_until_they_write():
    tiny = model("llama")
    tiny.set_attn_implementation("saccade")
    cache = PagedGenerationCache.for_model(tiny, max_tokens=40, batch_size=4, page_size=4)
    prompt = tokens(1, 28)
    tiny.generate(prompt, num_beams=4, max_new_tokens=12, min_new_tokens=12, past_key_values=cache)
    assert cache.pages is not None
    found = cache.pages.statistics()
    assert found.tokens == 4 * 39 and found.copied > 0
    assert found.used < 4 * 10  # as many as four sequences of 39 tokens have, each on its own
    cache.reset()
    assert cache.pages.statistics().used == 0 and cache.batch_size == -1
    cache.pages.check()


def test_too_few_pages_are_an_error_that_loses_nothing():
    tiny = model("llama")
    tiny.set_attn_implementation("saccade")
    cache = PagedGenerationCache.for_model(tiny, num_pages=8, page_size=4)
    with pytest.raises(saccade.OutOfPagesError) as caught:
        tiny.generate(**left_padded(), max_new_tokens=12, past_key_values=cache)
    assert caught.value.needed > caught.value.available
    cache.reset()
    assert cache.pages is not None
    cache.pages.check()
    prompt = tokens(1, 9)
    wanted = tiny.generate(prompt, max_new_tokens=12, do_sample=False)
    got = tiny.generate(prompt, max_new_tokens=12, do_sample=False, past_key_values=cache)
    assert torch.equal(got, wanted)


def test_cache_goes_on_where_a_generation_ended():
    tiny = model("qwen3")
    tiny.set_attn_implementation("saccade")
    outcomes = []
    for cache in (
        DynamicCache(config=tiny.config),
        PagedGenerationCache.for_model(tiny, num_pages=9),
    ):
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        first = tiny.generate(tokens(2, 9), past_key_values=cache, **options)
        more = torch.cat([first, tokens(2, 4, seed=1)], 1)
        outcomes.append(tiny.generate(more, past_key_values=cache, **options))
    assert torch.equal(*outcomes)


def test_any_other_attention_gets_gathered_rows():
    tiny, options = model("llama"), {"max_new_tokens": 8, "do_sample": False}
    tiny.set_attn_implementation("sdpa")
    wanted = tiny.generate(**left_padded(), **options)
    cache = PagedGenerationCache.for_model(tiny, max_tokens=24, batch_size=3, page_size=8)
    assert torch.equal(tiny.generate(**left_padded(), **options, past_key_values=cache), wanted)


def test_eight_bit_pages_hold_rounded_rows():
    torch.manual_seed(0)
    cache = PagedGenerationCache(1, num_pages=8, page_size=4, dtype=torch.int8)
    first, second = rows(2, 5), rows(2, 1)
    cache.update(*first, 0)
    given = cache.update(*second, 0)
    for got, before, new in zip(given, first, second, strict=True):
        exact = torch.cat([before, new], 2)
        half_a_step = exact.abs().amax(3, keepdim=True) / 127 / 2
        assert bool(((got.clone() - exact).abs() <= half_a_step * (1 + 1e-6)).all())
    query = torch.randn(2, 4, 1, 8)
    key, value = given
    assert isinstance(key, PagedRows) and isinstance(value, PagedRows)
    dense = saccade.attention(query, key.clone(), value.clone())
    torch.testing.assert_close(key.attended(query, value), dense)


def test_wrong_use_is_named():
    with pytest.raises(TypeError, match="num_pages, max_tokens: got None and None"):
        PagedGenerationCache.for_model(model("llama"))
    counts: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"max_tokens": 8, "page_size": 0}, ValueError), ({"max_tokens": 2.5}, TypeError),
        ({"max_tokens": 0}, ValueError), ({"max_tokens": 8, "batch_size": 0}, ValueError),
    ]  # fmt: skip
    for options, error in counts:
        name, got = [*options.items()][-1]
        with pytest.raises(error, match=f"^{name}: got {got}, takes a whole number of at least 1"):
            PagedGenerationCache.for_model(model("llama"), **options)
    mixed: Any = transformers.LlamaConfig()
    mixed.layer_types = ["full_attention", "linear_attention"] * 16
    hybrid = type("Hybrid", (), {"config": mixed})
    with pytest.raises(ValueError, match="model: got layers of linear_attention, takes"):
        PagedGenerationCache.for_model(hybrid, num_pages=1)
    cache = PagedGenerationCache(2, num_pages=8)
    cache.update(*rows(2, 5), 0)
    with pytest.raises(ValueError, match="got 1 tokens for a layer of 0, takes what other layers"):
        cache.update(*rows(2, 1), 1)
    cache.update(*rows(2, 5), 1)
    with pytest.raises(ValueError, match="key_states: got a batch of 3, takes the cache's 2"):
        cache.update(*rows(3, 1), 0)
    with pytest.raises(ValueError, match="num_layers: got 2 for a model whose layer 2 writes"):
        cache.update(*rows(2, 1), 2)
    halved = PagedGenerationCache(2, num_pages=8, dtype=torch.float16)
    key, value = (each.float() for each in rows(2, 5))
    with pytest.raises(TypeError, match=r"dtype: got torch\.float16 for keys of torch\.float32"):
        halved.update(key, value, 0)
    layer: Any = cache.layers[0]
    for call in (layer.reset, lambda: layer.reorder_cache(torch.tensor([0]))):
        with pytest.raises(NotImplementedError, match="of the cache"):
            call()
    assert cache.get_max_length() == cache.get_max_cache_shape() == -1
    assert cache.is_croppable and not any(cache.is_sliding) and not cache.is_compileable


def test_gradients_do_not_go_through_pages():
    tiny = model("llama")
    tiny.set_attn_implementation("saccade")
    cache = PagedGenerationCache.for_model(tiny, num_pages=8)
    tiny(tokens(1, 5), past_key_values=cache).logits.sum().backward()
    tiny.zero_grad()
    with pytest.raises(NotImplementedError, match="gradient"):
        tiny(tokens(1, 1), past_key_values=cache)


WINDOW = 5


@pytest.mark.parametrize("seed", range(3))
def test_sliding_layers_hold_what_can_be_seen(seed, monkeypatch):
    """Whatever generate does, with chunks shorter and longer than the window; few pages do."""
    monkeypatch.setattr(sliding, "MOST_DRAFTS", 4)
    torch.manual_seed(seed)
    chance, batch = random.Random(seed), 2
    pages = {None: 400, WINDOW: batch * sliding.most_pages(1000, WINDOW, 4)}
    ours = PagedGenerationCache(2, num_pages=pages, windows=[None, WINDOW], page_size=4)
    own = DynamicCache()
    for _ in range(60):
        length = chance.choice([1, 1, 1, 4, 6, 7, 30])
        for layer, window in enumerate([None, WINDOW]):
            key, value = rows(batch, length)
            mine, given = (cache.update(key, value, layer) for cache in (ours, own))
            seen = slice(0 if window is None else max(given[0].shape[2] - length - window, 0), None)
            for got, wanted in zip(mine, given, strict=True):
                assert got.shape == wanted.shape
                assert torch.equal(got.clone()[:, :, seen], wanted[:, :, seen])
        if chance.random() < 0.3:
            removed = chance.randrange(1 + min(length, 4))
            for cache in (ours, own):
                cache.crop(-removed)
        if chance.random() < 0.3:
            picks: Any = torch.tensor([chance.randrange(batch) for _ in range(batch)])
            for cache in (ours, own):
                cache.reorder_cache(picks)
        assert ours.pages is not None
        ours.pages.check()
    assert ours.pages is not None and ours.pages.statistics().released > 50


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_models_whose_layers_slide_in_part_give_pages_back(name, monkeypatch):
    monkeypatch.setattr(sliding, "MOST_DRAFTS", 4)
    compared = model(name)
    compared.set_attn_implementation("saccade")
    prompt, more = tokens(2, 40), tokens(2, 25, seed=1)
    cache = PagedGenerationCache.for_model(compared, max_tokens=160, batch_size=2, page_size=4)
    options: Any = {
        "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 30,
    }  # fmt: skip

    def turn(text: Tensor) -> Tensor:
        options["attention_mask"] = torch.ones_like(text)
        made = compared.generate(text, past_key_values=cache, **options)
        assert torch.equal(made, compared.generate(text, use_cache=False, **options))
        return made

    turn(torch.cat([turn(prompt), more], 1))  # the second one is longer than the window
    assert cache.pages is not None
    assert cache.pages.windows == (None, 7)
    assert cache.pages.num_pages == (2 * 40, 2 * 10)  # though 125 tokens take 32 pages
    assert cache.pages.groups[1].counts["released"] > 20
    assert cache.pages.groups[0].counts["released"] == 0
    cache.pages.check()


def test_sliding_layers_take_back_no_more_than_they_keep(monkeypatch):
    monkeypatch.setattr(sliding, "MOST_DRAFTS", 4)
    cache = PagedGenerationCache(1, num_pages=20, windows=[WINDOW], page_size=4)
    cache.update(*rows(1, 40), 0)
    cache.crop(-4)
    with pytest.raises(ValueError, match="earlier pages are released"):
        cache.crop(-10)
    assert cache.get_seq_length() == 36

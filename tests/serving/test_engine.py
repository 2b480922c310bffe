"""The engine against greedy generation without a cache, token for token."""

import copy
import itertools
import pickle
from typing import Any, cast

import numpy as np
import pytest
import served
import tiny_models
import torch
from pairs import covering

import saccade
from saccade.serving import capacity

NEW = 10
GREEDY = {"max_new_tokens": NEW, "stop_tokens": ()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in served.NAMES),
        *covering(
            served.NAMES,
            [
                {"num_pages": 400, "max_batch_tokens": 512, "max_sequences": 64},
                {"num_pages": 13, "preemption": "swap"},
                {"num_pages": 13, "preemption": "recompute"},
                {"num_pages": 13, "host_pages": 3},
                {"page_size": 1, "num_pages": 80, "max_batch_tokens": 6},
                {"batch_invariant": True},
            ],
        )[::2],  # every model with three or so, and every option with two or three models
    ],
    ids=str,
)
def test_tokens_are_those_of_generation_without_a_cache(name, options):
    wanted = served.wanted(name, NEW)
    engine = served.engine(name, **options)
    generated = engine.generate(served.prompts(), **GREEDY)
    assert served.tokens_of(generated) == wanted
    assert all(each.reason == "length" and each.text is None for each in generated)
    served.assert_nothing_is_held(engine)
    if options.get("num_pages") == 13 and name != "mistral":  # whose window lets go of pages
        assert engine.statistics().preemptions > 0


def test_layers_that_all_slide_let_go_of_pages():
    engine = served.engine("mistral", num_pages=10, max_sequences=2, max_batch_tokens=4)
    prompt = served.prompts()[3] * 2
    generated = engine.generate([prompt], **GREEDY)[0]
    assert generated.tokens == served.uncached("mistral", tuple(prompt), NEW)
    assert engine.statistics().cache.released > 10
    assert len(prompt) + NEW > engine.num_pages * 4


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_sliding_layers_let_go_of_pages_beside_others_that_keep_them(name):
    engine = served.engine(name, num_pages=24, max_sequences=1, max_batch_tokens=4)
    assert engine.cache.windows == (None, 7)
    # A sequence's window, the rows of two steps, and a page; nobody else runs.
    assert engine.cache.num_pages == (24, -(-(7 + 2 * 4 + 4) // 4))
    prompt = served.prompts()[3] * 2
    generated = engine.generate([prompt], **GREEDY)[0]
    assert generated.tokens == served.uncached(name, tuple(prompt), NEW)
    assert engine.cache.groups[0].counts["released"] == 0
    assert engine.cache.groups[1].counts["released"] > 10
    served.assert_nothing_is_held(engine)


def test_memory_is_shared_out_as_kinds_of_layers_can_use_it():
    engine = saccade.Engine(
        served.model("qwen3"), page_size=4, max_sequences=2, max_batch_tokens=8, max_length=200
    )
    useful = 2 * 200 // 4, 2 * -(-(7 + 2 * 8 + 4) // 4)
    assert engine.cache.num_pages == useful
    of_page = engine.cache.pages(0).key_pages[0].nbytes * 2
    half = saccade.Engine(
        served.model("qwen3"), page_size=4, max_sequences=2, max_batch_tokens=8, max_length=200,
        memory=sum(useful) * of_page // 2,
    )  # fmt: skip
    assert half.cache.num_pages == tuple(pages // 2 for pages in useful)


@pytest.mark.parametrize(("room", "host_pages"), [(None, 24), (100, 24), (5, 5), (0, 1)])
def test_swapped_pages_take_a_part_of_what_the_host_has_left(
    monkeypatch: pytest.MonkeyPatch, room: int | None, host_pages: int
) -> None:
    """As many as on the device may be more than the host has, and page-locked memory is gone."""
    model = served.model("llama")
    of_page = 0
    monkeypatch.setattr(
        capacity,
        "available_memory",
        lambda: None if room is None else int(room * of_page / capacity.PART_OF_HOST),
    )
    pages = saccade.Engine(model, num_pages=1, page_size=4).cache.pages
    of_page = sum(
        2 * pages(layer).key_pages[0].nbytes for layer in range(model.config.num_hidden_layers)
    )
    engine = saccade.Engine(model, num_pages=24, page_size=4)
    assert engine.cache.groups[0].host_pool.num_pages == host_pages
    asked = saccade.Engine(model, num_pages=24, page_size=4, host_pages=7)
    assert asked.cache.groups[0].host_pool.num_pages == 7
    kept = saccade.Engine(model, num_pages=24, page_size=4, preemption="recompute")
    assert kept.cache.groups[0].host_pool.num_pages == 0


def test_equal_beginnings_are_computed_once():
    engine = served.engine(num_pages=64)
    prompt = served.prompts()[3]
    first = engine.generate([prompt], **GREEDY)[0]
    second = engine.generate([prompt], **GREEDY)[0]
    assert first.tokens == second.tokens == served.uncached("llama", tuple(prompt), NEW)
    assert (first.statistics.cached_tokens, second.statistics.cached_tokens) == (0, 32)
    # What was written is found too.
    third = engine.generate([prompt + first.tokens], **GREEDY)[0]
    assert third.statistics.cached_tokens == 40


def test_what_other_weights_computed_is_not_found():
    model, prompt = copy.deepcopy(served.model("llama")), served.prompts()[3]
    engine = saccade.Engine(model, num_pages=64, page_size=4, run_ahead=True)
    before = engine.generate(prompt, max_new_tokens=4, stop_tokens=())[0].tokens
    runs = engine.submit(prompt, max_new_tokens=12, stop_tokens=())
    written = list(itertools.islice(runs, 3))
    assert written == before[:3]
    tiny_models.sharpened(model, seed=9)
    found = engine.generate([*prompt, 5], max_new_tokens=8, stop_tokens=())[0]
    fresh = saccade.Engine(model, num_pages=64, page_size=4)
    assert found.tokens == fresh.generate([*prompt, 5], max_new_tokens=8, stop_tokens=())[0].tokens
    # The old weights' step that was under way is not looked at.
    rest = fresh.generate([*prompt, *written], max_new_tokens=9, stop_tokens=())[0].tokens
    assert runs.result().tokens == written + rest
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("num_pages", [64, 14])
def test_samples_are_what_each_seed_draws_alone(preemption, num_pages):
    prompt = served.prompts()[1][:18]  # four and a half pages
    options = {"max_new_tokens": 12, "temperature": 1.5, "stop_tokens": ()}
    alone = [served.engine().generate([prompt], seed=7 + n, **options)[0].tokens for n in range(4)]
    engine = served.engine(num_pages=num_pages, preemption=preemption)
    samples = engine.submit_samples(prompt, 4, seed=7, **options)
    found = [sample.result() for sample in samples]
    assert served.tokens_of(found) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert [each.statistics.cached_tokens for each in found][1:] == [18, 18, 18]
    assert engine.statistics().cache.copied >= (3 if num_pages == 64 else 0)
    served.assert_nothing_is_held(engine)


def test_what_a_request_draws_does_not_depend_on_the_others():
    options = {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "stop_tokens": ()}
    prompts = served.prompts()
    together = served.engine(batch_invariant=True).generate(
        prompts, max_new_tokens=NEW, seed=3, **options
    )
    for prompt, found in list(zip(prompts, together, strict=True))[:4]:
        alone = served.engine(num_pages=200).generate(
            [prompt], max_new_tokens=NEW, seed=3, **options
        )
        assert alone[0].tokens == found.tokens


def test_stop_tokens_end_a_request_and_are_part_of_it():
    prompt = served.prompts()[1]
    whole = served.uncached("llama", tuple(prompt), NEW)
    stop = whole[4]
    generated = served.engine().generate([prompt], max_new_tokens=NEW, stop_tokens=[stop])[0]
    assert generated.tokens == whole[: whole.index(stop) + 1]
    assert generated.reason == "stop_token"


def test_the_models_own_end_of_text_is_a_stop_token(monkeypatch):
    prompt = served.prompts()[1]
    whole = served.uncached("llama", tuple(prompt), NEW)
    monkeypatch.setattr(served.model("llama").generation_config, "eos_token_id", [whole[3], 90])
    generated = served.engine().generate([prompt], max_new_tokens=NEW)[0]
    assert generated.tokens == whole[: whole.index(whole[3]) + 1]


def test_without_max_new_tokens_a_request_goes_on_to_the_greatest_length():
    engine = served.engine(max_length=24)
    assert len(engine.generate([[5] * 7], stop_tokens=())[0].tokens) == 17


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
def test_pages_of_eight_bits(page_dtype):
    engine = served.engine("gemma2", page_dtype=page_dtype, num_pages=100)
    generated = engine.generate(served.prompts(), **GREEDY)
    alike = sum(
        found == wanted
        for each, tokens in zip(generated, served.wanted("gemma2", NEW), strict=True)
        for found, wanted in zip(each.tokens, tokens, strict=True)
    )
    assert alike > 20  # of 100; they part for good where a rounding decides
    assert engine.cache.pages(0).key_pages.dtype == page_dtype


def test_memory_says_how_many_pages_there_are():
    # 2 layers × 2 heads × 4 slots × (16 + 16) numbers of 8 bytes
    engine = served.engine(memory=10 * 4096 + 5)
    assert engine.num_pages == engine.statistics().pages == 10
    assert saccade.Engine(served.model("llama"), max_sequences=2).num_pages == 2 * 256 // 16


def test_statistics_count_what_happened():
    engine = served.engine(num_pages=13)
    generated = engine.generate(served.prompts(), **GREEDY)
    found = engine.statistics()
    assert found.done == 10 and found.new_tokens == 10 * NEW
    assert found.prompt_tokens == sum(map(len, served.prompts()))
    assert found.preemptions == sum(each.statistics.preemptions for each in generated)
    assert found.busy > 0 and found.tokens_per_second == found.new_tokens / found.busy
    for each, prompt in zip(generated, served.prompts(), strict=True):
        what = each.statistics
        assert (what.prompt_tokens, what.new_tokens, what.state) == (len(prompt), NEW, "done")
        assert what.to_first_token is not None and what.tokens_per_second is not None
        assert 0 <= what.queued <= what.to_first_token <= what.total
        assert what.tokens_per_second > 0
        assert 1 <= what.pages <= 13


def test_options_are_numbers_of_numpy_too():
    engine = served.engine()
    plain: dict[str, Any] = {
        "max_new_tokens": 5, "temperature": 0.75, "seed": 3, "top_k": 9, "logit_bias": {7: 2.5},
    }  # fmt: skip
    theirs: dict[str, Any] = {
        "max_new_tokens": np.int64(5), "temperature": np.float32(0.75), "seed": np.uint8(3),
        "top_k": np.int32(9), "logit_bias": {np.int64(7): np.float16(2.5)},
    }  # fmt: skip
    wanted, found = (engine.generate([[5, 6]], **each)[0] for each in (plain, theirs))
    assert found.tokens == wanted.tokens and len(found.tokens) == 5
    with pytest.raises(TypeError, match=r"temperature: got bool_?, takes a number"):
        engine.submit([5], max_new_tokens=2, temperature=cast("Any", np.bool_(True)))
    with pytest.raises(TypeError, match="prompt: got ndarray, takes text or token numbers"):
        engine.submit(cast("Any", np.array([[5, 6], [7, 8]])))


def test_one_prompt_may_be_given_alone():
    engine = served.engine(tokenizer=served.LetterTokenizer())
    tokens = served.LetterTokenizer().encode("hello")
    wanted = served.uncached("llama", tuple(tokens), NEW)
    for prompt in ("hello", tokens, tuple(tokens), torch.tensor(tokens), np.array(tokens)):
        assert served.tokens_of(engine.generate(prompt, **GREEDY)) == [wanted]
    for prompts in (["hello"] * 2, iter([tokens] * 2), torch.tensor([tokens] * 2)):
        assert served.tokens_of(engine.generate(prompts, **GREEDY)) == [wanted] * 2
    assert engine.generate([], **GREEDY) == []
    assert served.tokens_of(engine.generate(tokens, stop=None, **GREEDY)) == [wanted]
    for wrong in ({"input_ids": [tokens]}, 5, {5, 6}, torch.tensor(5)):
        with pytest.raises(TypeError, match="prompts: got "):
            engine.generate(wrong, **GREEDY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="prompt: got int"):
        engine.generate([tokens, 5], **GREEDY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="prompt: got Tensor, takes text or token numbers"):
        engine.generate([torch.tensor(5), torch.tensor(6)], **GREEDY)
    with pytest.raises(ValueError, match="prompt: got half of a surrogate pair at 1"):
        engine.generate("h\ud800", **GREEDY)


def test_every_seed_draws_its_own_text():
    engine = served.engine(num_pages=64)
    options = {"max_new_tokens": 12, "temperature": 1.5, "stop_tokens": ()}
    seeds = [-2, -1, 0, 1, 2]
    texts = [tuple(engine.generate([5, 6], seed=seed, **options)[0].tokens) for seed in seeds]
    assert len(set(texts)) == len(seeds)
    samples = engine.submit_samples([5, 6], 5, seed=-2, **options)
    assert [tuple(each.result().tokens) for each in samples] == texts
    assert engine.generate([5, 6], top_k=2**70, **options)  # as many as there are


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_an_engine_is_neither_pickled_nor_copied(copied):
    engine = saccade.Engine(served.model("llama"), num_pages=8, page_size=4)
    with pytest.raises(TypeError, match=r"^Engine: got a copy or a pickle of one"):
        copied(engine)

"""Layers with states are served right, whatever else is served in the same step."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import random
from typing import Any

import pytest
import torch
from served import engine_of
from tiny_families import DECODERS, HYBRIDS

import saccade
from saccade.integrations.transformers import StateLayers, StateRows
from saccade.serving import states as step_states

DOCS = pathlib.Path(__file__).parents[2] / "docs"
FAMILIES = {family.name: family for family in (*DECODERS, *HYBRIDS)}
# The kinds of layers: gated delta rule, convolution alone, scan that takes no state to begin with,
# scan beside attention in one layer, scan without any attention.
KINDS = ("Qwen3-Next", "LFM2", "Jamba", "Falcon-H1", "Mamba-2")
PROMPTS = [[5, 9, 20, 33, 41], [7], [4] * 11, [*range(10, 31)], [8, 9], [60, 3]]
NEW_TOKENS = 5


@functools.cache
def model(name: str) -> Any:
    return FAMILIES[name].make("eager")


@functools.cache
def uncached(name: str, prompt: tuple[int, ...], new_tokens: int = NEW_TOKENS) -> list[int]:
    """What a model writes by its own code, every token from a pass over all before it."""
    served = model(name)
    served.set_attn_implementation("eager")
    rows = torch.tensor([prompt])
    found = served.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=new_tokens, do_sample=False,
        use_cache=False,
    )  # fmt: skip
    served.set_attn_implementation("saccade")
    return found[0, len(prompt) :].tolist()


def made(name: str, **options: Any) -> saccade.Engine:
    """An engine of few pages and short chunks, whose states hold NaN until they are written."""
    few = {"num_pages": 24, "page_size": 4, "max_batch_tokens": 9, "max_sequences": 4}
    found = engine_of(model(name), **{**few, **options})
    for pool in found.cache.states:
        pool.fill_(torch.nan)
    return found


def assert_right(
    name: str, served: saccade.Engine, new_tokens: int = NEW_TOKENS, prompts: Any = PROMPTS
) -> None:
    results = served.generate(prompts, max_new_tokens=new_tokens, stop_tokens=())
    wanted = [uncached(name, tuple(prompt), new_tokens) for prompt in prompts]
    assert [result.tokens for result in results] == wanted
    assert_nothing_is_held(served)


def assert_nothing_is_held(served: saccade.Engine) -> None:
    served.cache.check()
    held = served.cache.statistics()
    assert (held.used, held.states_used, held.host_states_used, held.sequences) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", [family.name for family in HYBRIDS if family.name not in KINDS])
def test_family_is_served_as_uncached_generation(name: str) -> None:
    assert_right(name, made(name), prompts=PROMPTS[:4])


def test_the_page_names_the_families_that_are_served() -> None:
    """Those without states are tested, and written into transformers.md, with the integration."""
    lines = (DOCS / "transformers.md").read_text(encoding="utf-8").splitlines()
    equal = [line.split(" | ")[0].strip("| ") for line in lines if line.endswith(" | equal |")]
    shown = (DOCS / "serving.md").read_text(encoding="utf-8").split("<!-- served: ")[1]
    rows = [line.strip("| ").split(" | ")[1] for line in shown.splitlines()[3:] if line[:1] == "|"]
    assert sorted(", ".join(rows).split(", ")) == sorted({*equal, *(each.name for each in HYBRIDS)})
    assert len(equal) >= 30


@pytest.mark.parametrize("name", KINDS)
def test_mixed_steps_and_slots_that_others_had(name: str) -> None:
    """More requests than states, twice over: what the first left is nobody's."""
    served = made(name)
    assert_right(name, served)
    assert_right(name, served)
    assert (served.max_sequences, served.statistics().states) == (4, 8)
    assert served.statistics().cached_tokens > 0


@pytest.mark.parametrize(
    ("name", "preemption"),
    [("Qwen3-Next", "swap"), ("Jamba", "recompute"), ("Falcon-H1", "swap"), ("LFM2", "recompute")],
)
def test_requests_that_give_way(name: str, preemption: Any) -> None:
    served = made(name, num_pages=8, preemption=preemption)
    assert_right(name, served, 8)
    assert served.statistics().preemptions > 0
    swapped = served.statistics().cache.swapped_out
    assert (swapped > 0) == (preemption == "swap")


@pytest.mark.parametrize("name", ["Qwen3-Next", "Mamba-2"])
def test_steps_ahead_and_padded_batches(name: str) -> None:
    """A step is begun before the tokens of the one before are seen; a stop token ends one late."""
    served = made(name, run_ahead=True, batch_sizes=[3, 4])
    assert_right(name, served)
    tokens = uncached(name, tuple(PROMPTS[0]))
    found = served.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS, stop_tokens=[tokens[2]])
    others = [served.submit(prompt, max_new_tokens=3, stop_tokens=()) for prompt in PROMPTS[1:]]
    assert found.result().tokens == tokens[: tokens.index(tokens[2]) + 1]
    for other, prompt in zip(others, PROMPTS[1:], strict=True):
        assert other.result().tokens == uncached(name, tuple(prompt))[:3]
    served.run()
    assert_nothing_is_held(served)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Jamba", "LFM2"])
def test_beginnings_are_shared_where_a_state_was_kept(name: str) -> None:
    served = made(name, max_sequences=2, num_pages=40)

    def served_tokens(prompt: list[int]) -> int:
        (found,) = served.generate([prompt], max_new_tokens=NEW_TOKENS, stop_tokens=())
        assert found.tokens == uncached(name, tuple(prompt))
        return found.statistics.cached_tokens

    common, ends = [*range(20, 34)], ([50, 51, 52], [60, 61, 62], [70, 71, 72])
    assert served_tokens(common + ends[0]) == 0
    assert served_tokens(common + ends[0]) == 16  # the last full page before its last token
    assert served_tokens(common + ends[0] + [5] * 6) == 16  # and so for what goes on from it
    assert served_tokens(common + ends[1]) == 0  # its beginning has pages, and no state yet
    assert served_tokens(common + ends[2]) == 12  # which that one has left there
    assert_nothing_is_held(served)


def test_samples_share_a_prompts_state() -> None:
    served = made("Qwen3-Next")
    greedy = served.submit_samples(PROMPTS[2], 3, max_new_tokens=NEW_TOKENS, stop_tokens=())
    drawn = served.submit_samples(
        PROMPTS[3], 2, max_new_tokens=NEW_TOKENS, temperature=3.0, stop_tokens=()
    )
    assert [each.result().tokens for each in greedy] == [uncached("Qwen3-Next", (4,) * 11)] * 3
    one, other = (tuple(each.result().tokens) for each in drawn)
    alone = made("Qwen3-Next").submit(
        PROMPTS[3], max_new_tokens=NEW_TOKENS, temperature=3.0, seed=1, stop_tokens=()
    )
    assert one != other and tuple(alone.result().tokens) == other
    assert_nothing_is_held(served)


@pytest.mark.parametrize("name", ["LFM2", "Jamba"])
def test_cancelled_requests_and_steps_that_fail(name: str, monkeypatch: Any) -> None:
    served = made(name)
    options: Any = {"max_new_tokens": NEW_TOKENS, "stop_tokens": ()}
    requests = [served.submit(prompt, **options) for prompt in PROMPTS]
    for _ in range(3):
        served.step()
    requests[0].cancel()
    steps, keep = iter(range(100)), step_states.StepStates.write

    def failing(self: Any, *arguments: Any) -> None:
        if next(steps) == 3:
            raise RuntimeError("no memory")
        keep(self, *arguments)

    monkeypatch.setattr(step_states.StepStates, "write", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        served.run()
    served.run()  # some states had been written by that step, and are worked out anew
    for request, prompt in zip(requests[1:], PROMPTS[1:], strict=True):
        assert request.result().tokens == uncached(name, tuple(prompt))
    assert_nothing_is_held(served)


def test_a_request_with_nan_leaves_none_to_the_next() -> None:
    served = made("Qwen3-Next", max_sequences=1)
    embedding: Any = model("Qwen3-Next").get_input_embeddings()
    kept = embedding.weight[50].clone()
    embedding.weight.data[50] = torch.nan
    with pytest.raises(FloatingPointError, match="logits"):
        served.generate([[50, 3, 4]], max_new_tokens=2)
    embedding.weight.data[50] = kept
    assert all(bool(pool.isnan().any()) for pool in served.cache.states)
    assert_right("Qwen3-Next", served)


def test_memory_is_shared_by_states_and_pages() -> None:
    served = saccade.Engine(model("Qwen3-Next"), memory=100_000, page_size=4, max_sequences=64)
    states = sum(pool.nbytes for pool in served.cache.states)
    pages = sum(tensor.nbytes for tensor in served.cache.pages(0)[:2] if tensor is not None)
    assert 50_000 < states + pages <= 100_000
    assert served.max_sequences == min(64, served.cache.num_states)
    few = saccade.Engine(model("Qwen3-Next"), memory=30_000, page_size=4, max_sequences=64)
    assert few.max_sequences == few.cache.num_states < 64
    with pytest.raises(ValueError, match=f"n: got 64, takes at most .*{few.max_sequences}"):
        few.submit_samples([1, 2], 64)
    assert_right("Qwen3-Next", few)
    with pytest.raises(
        ValueError, match="memory: got 10 bytes, takes at least a page's and of one"
    ):
        saccade.Engine(model("Qwen3-Next"), memory=10)
    said = served.explain()
    assert "1 layers keep a state of each sequence" in said and "beside pages" in said
    assert "token by token" in made("Jamba").explain()
    assert "no layers are compiled: states" in made("LFM2", compile=True).explain()


def test_float32_states_of_a_model_in_bfloat16_stay_so() -> None:
    low = FAMILIES["Qwen3-Next"].make("eager").to(torch.bfloat16)
    served = saccade.Engine(low, num_pages=16, page_size=4, max_sequences=2)
    assert [pool.dtype for pool in served.cache.states] == [torch.bfloat16, torch.float32]
    found = served.generate(PROMPTS[:3], max_new_tokens=3, stop_tokens=())
    assert [len(each.tokens) for each in found] == [3, 3, 3]


def test_layers_are_what_they_were_for_everybody_else() -> None:
    served = model("Qwen3-Next")
    layers = StateLayers.of(served)
    assert layers is not None and len(layers) == 1

    class Alone:
        def rows(self) -> list[StateRows]:
            return [StateRows(slice(None), 1, True, None)]

        def write(self, layer: int, rows: StateRows, states: Any) -> None:
            raise KeyboardInterrupt

    before = [module._compiled_call_impl for module in served.modules()]
    with pytest.raises(KeyboardInterrupt):
        layers.call(Alone(), lambda: served(torch.tensor([[1, 2, 3]]), use_cache=False))  # type: ignore[arg-type]
    assert [module._compiled_call_impl for module in served.modules()] == before


@pytest.mark.slow  # what it mixes at random is tested above, one by one
@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_cancels_and_faults(seed: int, monkeypatch: Any) -> None:
    chance = random.Random(seed)
    name = chance.choice([*KINDS, "Zamba2"])
    sequences = chance.choice([2, 3, 4])
    options: dict[str, Any] = {
        "num_pages": chance.choice([9, 12, 24]), "page_size": chance.choice([2, 4, 8]),
        "max_batch_tokens": chance.choice([5, 9, 16]), "max_sequences": sequences,
        "preemption": chance.choice(["swap", "recompute"]), "host_pages": chance.choice([None, 3]),
        "run_ahead": chance.choice([None, True]), "batch_sizes": chance.choice([None, [sequences]]),
    }  # fmt: skip
    served = made(name, **options)
    beginnings = [[chance.randrange(3, 97) for _ in range(length)] for length in (0, 9, 17)]
    live: list[tuple[Any, list[int], int]] = []
    write, faults = step_states.StepStates.write, [0]

    def failing(self: Any, *arguments: Any) -> None:
        faults[0] -= 1
        if faults[0] == 0:
            raise RuntimeError("no memory")
        write(self, *arguments)

    monkeypatch.setattr(step_states.StepStates, "write", failing)
    for _ in range(50):
        if chance.random() < 0.3:
            prompt = [*chance.choice(beginnings), *(chance.randrange(3, 97) for _ in range(4))]
            count = chance.randint(1, 8)
            if sum(served._scheduler.pages_for(len(prompt) + count - 1)) <= options["num_pages"]:
                samples = served.submit_samples(
                    prompt, chance.randint(1, 2), max_new_tokens=count, stop_tokens=()
                )
                live += [(sample, prompt, count) for sample in samples]
        if live and chance.random() < 0.06:
            live.pop(chance.randrange(len(live)))[0].cancel()
        faults[0] = chance.randint(1, 4) if chance.random() < 0.05 else 0
        with contextlib.suppress(RuntimeError):
            served.step()
        served.cache.check()
    faults[0] = 0
    for sample, prompt, count in live:
        assert sample.result().tokens == uncached(name, tuple(prompt), count)
    served.run()
    assert_nothing_is_held(served)

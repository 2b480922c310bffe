"""Decode steps at fixed addresses: padded, ahead of the host, and without a look at any number."""

import contextlib
import random
import weakref
from typing import Any

import pytest
import served
import torch
from blind import Blind, beside
from pairs import covering
from replayed import with_graphs
from sampled import REQUESTS, of_one_alone
from transformers.utils import import_utils

import saccade
from saccade.gpu.launcher import Launch
from saccade.ops.attention.triton import call_spec
from saccade.runtime.spec import KernelConfig, PagedInputs
from saccade.runtime.validation import prepare_paged
from saccade.serving import decode_steps
from saccade.serving.decode_steps import Decoder, batch_sizes
from saccade.serving.decoding import Sampling
from saccade.serving.model import PackedModel
from saccade.serving.prompt_steps import packed_sizes
from saccade.serving.scheduler import Scheduler

NEW = 10
GREEDY = {"max_new_tokens": NEW, "stop_tokens": ()}
DRAWN: dict[str, Any] = {"max_new_tokens": 12, "stop_tokens": (), "temperature": 1.3, "seed": 5}


@pytest.mark.parametrize(
    ("name", "preemption", "num_pages", "batch_sizes"),
    covering(served.NAMES, ["swap", "recompute"], [13, 400], [None, [2, 6], [6]]),
)
def test_tokens_are_the_same_in_padded_batches_and_ahead(name, preemption, num_pages, batch_sizes):
    engine = served.engine(
        name, num_pages=num_pages, preemption=preemption, batch_sizes=batch_sizes, run_ahead=True
    )
    generated = engine.generate(served.prompts(), **GREEDY)
    assert served.tokens_of(generated) == served.wanted(name, NEW)
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    "settings", [{"run_ahead": True}, {"run_ahead": True, "batch_sizes": [3, 6]}, {}], ids=str
)
def test_a_request_gets_the_same_tokens_whatever_else_is_served(settings):
    wanted = [
        of_one_alone(prompt, options)
        for prompt, options in zip(served.prompts(), REQUESTS, strict=False)
    ]
    engine = served.engine(num_pages=14, **settings)
    asked = [
        engine.submit(prompt, max_new_tokens=9, stop_tokens=[4, 8, 15, 16], **options)
        for prompt, options in zip(served.prompts(), REQUESTS, strict=False)
    ]
    for completion, alone in zip(asked, wanted, strict=True):
        found = completion.result()
        assert (found.tokens, found.reason) == (alone.tokens, alone.reason)
        if alone.logprobs is None:
            assert found.logprobs is None
            continue
        assert len(found.logprobs or ()) == len(found.tokens)
        for one, other in zip(found.logprobs or (), alone.logprobs, strict=True):
            assert one.token == other.token and len(one.likeliest) == len(other.likeliest)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
    assert engine.statistics().preemptions > 0
    served.assert_nothing_is_held(engine)


def test_biases_end_with_their_request():
    engine = served.engine(num_pages=64, max_sequences=2)
    prompt = served.prompts()[0]
    biased: dict[str, Any] = {"logit_bias": {5: 50.0}}
    first = engine.generate([prompt], max_new_tokens=2, stop_tokens=(), **biased)
    assert first[0].tokens == [5, 5]
    plain, other = (
        engine.submit(prompt, **GREEDY),  # in the lane that the first one had, or the other has it
        engine.submit(prompt, **GREEDY, **biased),
    )
    again = engine.submit(prompt, **GREEDY)
    assert other.result().tokens == [5] * NEW
    wanted = served.uncached("llama", tuple(prompt), NEW)
    assert plain.result().tokens == again.result().tokens == wanted


def test_samples_that_share_a_prompt_run_ahead_too():
    prompt = served.prompts()[1][:18]
    seeds: list[dict[str, Any]] = [{**DRAWN, "seed": 5 + n} for n in range(4)]
    alone = [served.engine().generate([prompt], **options)[0].tokens for options in seeds]
    engine = served.engine(num_pages=64, run_ahead=True)
    samples = engine.submit_samples(prompt, 4, **DRAWN)
    assert [sample.result().tokens for sample in samples] == alone
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize("after", range(6))
def test_what_is_cancelled_while_its_token_is_under_way_harms_no_other(after):
    engine = served.engine(num_pages=64, run_ahead=True, batch_sizes=[4, 6])
    completions = [engine.submit(prompt, **GREEDY) for prompt in served.prompts()[:6]]
    for _ in range(2 + after):
        engine.step()
    for number in (1, 2):
        completions[number].cancel()
        engine.cache.check()
    engine.run()
    for number, wanted in enumerate(served.wanted("llama", NEW)[:6]):
        found = completions[number].result()
        assert found.tokens == (wanted if number not in (1, 2) else wanted[: len(found.tokens)])
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_pages_may_be_moved_between_steps(run_ahead):
    engine = served.engine(num_pages=400, run_ahead=run_ahead)
    asked = [engine.submit(prompt, **GREEDY) for prompt in served.prompts()]
    moved = 0
    while engine.step():
        moved += engine.cache.compact()
    assert moved > 0
    assert [each.result().tokens for each in asked] == served.wanted("llama", NEW)


def test_rows_are_said_anew_after_an_exception(monkeypatch):
    engine = served.engine(num_pages=400, page_size=1)  # then one token is left to compute again
    asked = [engine.submit(prompt, **GREEDY) for prompt in served.prompts()]
    for _ in range(5):
        engine.step()
    commit = Scheduler.commit

    def fail(scheduler, chunks):
        commit(scheduler, chunks)
        raise RuntimeError("between a step and the next")

    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "commit", fail)
        with pytest.raises(RuntimeError, match="between"):
            engine.step()
    assert [each.result().tokens for each in asked] == served.wanted("llama", NEW)


def test_rows_that_go_on_are_not_said_anew(monkeypatch):
    written = list[int]()
    write = decode_steps.Inbox.write
    monkeypatch.setattr(
        decode_steps.Inbox, "write", lambda *given: (written.append(given[1]), write(*given))
    )
    engine = served.engine(num_pages=400)
    engine.generate(served.prompts()[:3], max_new_tokens=30, stop_tokens=())
    # The prompts' step, the first that decodes, and those whose pages no longer fit the tables.
    assert len(written) <= 3 * 5


def test_beginnings_that_were_written_ahead_are_found_again():
    engine = served.engine(num_pages=64, run_ahead=True)
    prompt = served.prompts()[3]
    first = engine.generate([prompt], **GREEDY)[0]
    again = engine.generate([prompt + first.tokens], **GREEDY)[0]
    assert again.statistics.cached_tokens == 40
    wanted = served.uncached("llama", tuple(prompt + first.tokens), NEW)
    assert again.tokens == wanted


def test_the_host_is_a_step_behind_and_no_further():
    engine = served.engine(num_pages=64, run_ahead=True, max_batch_tokens=64)
    completion = engine.submit(served.prompts()[1], **GREEDY)
    came = []
    while engine.step():
        came.append(completion.statistics.new_tokens)
    assert came == list(range(NEW + 1))
    assert engine.statistics().steps == NEW


def test_a_prompt_that_fills_a_step_keeps_no_other_waiting():
    engine = served.engine(num_pages=200, run_ahead=True, max_batch_tokens=16)
    prompts = [served.prompts()[3][:16], served.prompts()[6][:16], served.prompts()[1][:16]]
    for prompt in prompts:
        engine.submit(prompt, **GREEDY)
    for _ in range(2 * len(prompts)):  # a call begins a step, or looks at what it gave
        engine.step()
    assert engine.statistics().running == len(prompts)
    engine.run()
    assert engine.statistics().steps <= len(prompts) + NEW


def test_prompts_are_read_ahead_of_the_tokens_beside_them(monkeypatch):
    known, real = [], Scheduler.plan_ahead

    def plan_ahead(self: Scheduler, plan: Any) -> Any:
        following = real(self, plan)
        if following is not None and not following.decodes:
            known.append([chunk.known for chunk in following.chunks])
        return following

    monkeypatch.setattr(Scheduler, "plan_ahead", plan_ahead)
    engine = served.engine(num_pages=64, run_ahead=True, max_batch_tokens=8)
    prompts = [served.prompts()[0], served.prompts()[3]]  # the second takes five steps or more
    asked = [engine.submit(prompt, **GREEDY) for prompt in prompts]
    for completion, prompt in zip(asked, prompts, strict=True):
        assert completion.result().tokens == served.uncached("llama", tuple(prompt), NEW)
    assert known.count([False, True]) > 2  # a token that nobody has seen, beside a prompt's
    served.assert_nothing_is_held(engine)


def test_a_page_of_an_unchecked_step_is_found_by_nobody(monkeypatch):
    engine = served.engine(num_pages=64, run_ahead=True, max_batch_tokens=64)
    prompt = served.prompts()[1][:15]
    named, real = [], engine.cache.name

    def name(sequence: int, tokens: list[int]) -> None:
        named.append(len(tokens))
        real(sequence, tokens)

    monkeypatch.setattr(engine.cache, "name", name)
    completion = engine.submit(prompt, **GREEDY)
    while engine.step():
        known = len(prompt) + completion.statistics.new_tokens
        assert all(length <= known for length in named)
    assert named == [15, 16, 20, 24]


# ---- no look at any number -----------------------------------------------------------------------


# Experts of transformers find their tokens by `nonzero`, unless they multiply in groups.
@pytest.mark.parametrize("name", [name for name in served.NAMES if name != "gpt_oss"])
def test_a_step_waits_for_nothing(name, monkeypatch):
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    for operator in ("attention_paged", "write_kv_cache"):
        monkeypatch.setattr(saccade, operator, beside(getattr(saccade, operator)))
    real, blind = Decoder.run, []

    def run(self: Decoder, traits: Any) -> Any:
        with Blind():
            blind.append(traits)
            return real(self, traits)

    monkeypatch.setattr(Decoder, "run", run)
    engine = served.engine(name, batch_sizes=[2, 6], run_ahead=True)
    completions = [
        engine.submit(prompt, max_new_tokens=6, stop_tokens=[4], **options)
        for prompt, options in zip(served.prompts(), REQUESTS, strict=False)
    ]
    assert all(completion.result().tokens for completion in completions)
    assert all(map(any, zip(*blind, strict=True)))  # each trait was asked for


def test_the_blind_see_what_waits():
    with Blind():
        number = torch.ones(3)
        for reading in (number.sum().item, number.nonzero, lambda: number[number > 0]):
            with pytest.raises(AssertionError):
                reading()


def test_padded_rows_write_nothing_and_count_nothing():
    engine = served.engine(num_pages=64, batch_sizes=[6])
    engine.generate([served.prompts()[1]], **GREEDY)
    layer = engine.cache.pages(0).key_pages
    held = layer.isfinite().all(-1).sum()  # pages were filled with NaN
    engine.generate([served.prompts()[2]], **GREEDY)
    # A row of another request, and no more: the last token is never computed.
    written = layer.isfinite().all(-1).sum() - held
    assert int(written) == 2 * (len(served.prompts()[2]) + NEW - 1)


# ---- sizes and graphs ----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 30, 64, 100, 256, 1000])
def test_batch_sizes_waste_little(most):
    sizes = batch_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes)) and len(sizes) < 40
    for number in range(1, most + 1):
        size = next(size for size in sizes if size >= number)
        assert size - number < max(8, size / 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_sizes": [2]}, ValueError, "batch_sizes: got .2., takes .* max_sequences, 6"),
        ({"batch_sizes": []}, ValueError, "batch_sizes: got "),
        ({"batch_sizes": [0, 6]}, ValueError, "batch_sizes: got 0"),
        ({"batch_sizes": 6}, TypeError, "batch_sizes: got int"),
        ({"cuda_graphs": True}, ValueError, "cuda_graphs: got True for a model on cpu"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        served.engine(**options)


def test_explain_says_why_there_are_no_graphs():
    said = served.engine().explain()
    assert said == ("decode steps run eagerly: the model is on cpu, where there are no CUDA graphs")


def test_warming_up_takes_every_size_and_leaves_nothing(monkeypatch):
    sizes, real = [], PackedModel.logits

    def logits(self: PackedModel, step: Any) -> Any:
        sizes.append((step.begin()[0].shape[1], len(step.last_rows)))
        return real(self, step)

    plain = served.engine("qwen3", num_pages=30)
    assert "were tried" not in plain.explain()
    monkeypatch.setattr(PackedModel, "logits", logits)
    engine = served.engine("qwen3", num_pages=30, max_batch_tokens=13, warm_up=True)
    assert {(rows, each) for rows in (1, 2, 4, 8, 13) for each in (1, 2, 4, 6) if each <= rows} <= {
        *sizes
    }
    decoding = [(1, 1), (2, 2), (4, 4), (6, 6)]  # without graphs
    assert any(sizes[at : at + 4] == decoding for at in range(len(sizes)))
    assert "\nsteps of all sizes were tried (" in engine.explain()
    assert engine.cache.statistics().asked == 0
    served.assert_nothing_is_held(engine)
    generated = engine.generate(served.prompts(), **GREEDY)
    assert served.tokens_of(generated) == served.wanted("qwen3", NEW)


def kernels_of(rows: int, sequences: int, pages: int, mask: Any) -> set[str]:
    """What kernels of a packed step are compiled for, as an H100 would have them."""
    from saccade.ops.paged_attention.hopper import HopperPagedForward

    pool = torch.empty(4, 2, 16, 64, dtype=torch.bfloat16)
    ends = [rows * number // sequences for number in range(sequences + 1)]
    table = torch.zeros(sequences, pages, dtype=torch.int32)
    lens = torch.ones(sequences, dtype=torch.int32)
    inputs = PagedInputs(
        torch.empty(rows, 8, 64, dtype=torch.bfloat16), pool, pool, table, lens,
        torch.tensor(ends, dtype=torch.int32), None, None, None,
    )  # fmt: skip
    inputs, variant, _, _ = prepare_paged(
        inputs, mask=mask, score=None, scale=None, batch_invariant=False, return_lse=False,
        config=None,
    )  # fmt: skip
    made = HopperPagedForward(inputs, variant, KernelConfig(), False)
    launches = [(type(of), name, getattr(of, name)) for of in made.passes for name in vars(of)]
    return {
        f"{kind} {name} {launch.constants} {launch.options}"
        for kind, name, launch in launches
        if isinstance(launch, Launch)
    }


@pytest.mark.parametrize("mask", [saccade.masks.causal(), saccade.masks.window(100)], ids=str)
def test_steps_that_are_tried_need_all_kernels_that_others_need(mask, monkeypatch):
    monkeypatch.setattr(call_spec, "architecture", lambda tensor: "sm_90")
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: 132)
    tried = {
        kernel
        for rows, each in packed_sizes(range(1, 513), 24)
        for kernel in kernels_of(rows, each, 8, mask)
    }
    chance = random.Random(0)
    for _ in range(60):
        each = chance.randint(1, 24)
        rows = chance.randint(each, 512)
        assert kernels_of(rows, each, chance.choice([1, 8, 64, 200]), mask) <= tried
    assert 10 < len(tried) < 60


def test_what_has_no_room_is_not_tried():
    engine = served.engine(num_pages=2, max_batch_tokens=64, warm_up=True)
    served.assert_nothing_is_held(engine)
    assert len(engine.generate([[5]], max_new_tokens=3)[0].tokens) == 3


def test_captured_steps_give_the_same_tokens(monkeypatch):
    with_graphs(monkeypatch)
    engine = served.engine(num_pages=20, cuda_graphs=True, compile=False, warm_up=False)
    assert engine.explain().startswith("decode steps are CUDA graphs for 1, 2, 4, 6 sequences (")
    asked = [
        engine.submit(prompt, max_new_tokens=9, stop_tokens=[4, 8, 15, 16], **options)
        for prompt, options in zip(served.prompts(), REQUESTS, strict=False)
    ]
    for completion, prompt, options in zip(asked, served.prompts(), REQUESTS, strict=False):
        assert completion.result().tokens == of_one_alone(prompt, options).tokens
    served.assert_nothing_is_held(engine)


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_why(monkeypatch):
    def captured(work: Any, pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    with_graphs(monkeypatch, captured)
    engine = served.engine(cuda_graphs=True, compile=False, warm_up=False)
    assert engine.explain() == (
        "decode steps run eagerly: LlamaForCausalLM cannot be captured: operation not permitted "
        "when stream is capturing"
    )
    generated = engine.generate(served.prompts(), **GREEDY)
    assert served.tokens_of(generated) == served.wanted("llama", NEW)


def test_a_graph_keeps_what_it_reads(monkeypatch):
    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())
    read = torch.arange(3)
    alive = weakref.ref(read)

    def work(rows: torch.Tensor = read) -> torch.Tensor:
        return rows + 1

    replay = decode_steps.captured(work, None)
    del read, work
    assert alive() is not None
    assert replay().tolist() == [1, 2, 3]


def test_a_greedy_row_needs_nothing():
    assert not any(Sampling().traits)

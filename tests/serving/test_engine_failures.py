"""What goes wrong: nothing is lost, the right request is told, and others go on."""

from typing import Any

import pytest
import served
import torch
import transformers
from torch import nn

import saccade
from saccade.serving import decoding
from saccade.serving.decode_steps import DecodeStep
from saccade.serving.decoding import TextStream
from saccade.serving.model import BatchStep

NEW = 6
GREEDY = {"max_new_tokens": NEW, "stop_tokens": ()}


class Broken(RuntimeError):
    pass


class Failing:
    """A function that fails at its call of that number, and works before and after."""

    def __init__(self, real, turn, error):
        self.real, self.turn, self.error = real, turn, error
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.turn + 1:
            raise self.error
        return self.real(*args, **kwargs)

    @property
    def failed(self):
        return self.calls > self.turn


def fails_at(real, turn, error):
    """The same as a plain function, which may become a method."""
    failing = Failing(real, turn, error)
    return lambda *args, **kwargs: failing(*args, **kwargs)


def run_through(engine):
    """Steps until all is done; how many of them failed."""
    failed = 0
    while True:
        try:
            if not engine.step():
                return failed
        except (Broken, saccade.OutOfPagesError):
            failed += 1
        engine.cache.check()


@pytest.mark.parametrize(
    ("method", "preemption"),
    [("grow", "swap"), ("grow", "recompute"), ("swap_out", "swap"), ("swap_in", "swap")],
)
def test_out_of_pages_at_every_point_changes_no_token(method, preemption, monkeypatch):
    prompts, wanted = served.prompts()[2:], served.wanted("llama", 14)[2:]
    fired = 0
    for turn in range(0, 24, 5) if method == "grow" else range(3):
        engine = served.engine(num_pages=13, preemption=preemption)
        error = saccade.OutOfPagesError(3, 1, "host" if method == "swap_out" else "device")
        real = getattr(engine.cache, method)
        failing = Failing(real, turn, error)
        monkeypatch.setattr(engine.cache, method, failing)
        completions = [
            engine.submit(prompt, max_new_tokens=14, stop_tokens=()) for prompt in prompts
        ]
        assert run_through(engine) <= 1  # where one request was alone
        fired += failing.failed
        assert served.tokens_of([each.result() for each in completions]) == wanted
        served.assert_nothing_is_held(engine)
    assert fired >= (1 if method.startswith("swap") else 4)


@pytest.mark.parametrize("part", ["forward", "attend", "choose"])
def test_a_step_that_fails_changes_nothing(part, monkeypatch):
    prompts, wanted = served.prompts()[:4], served.wanted("llama", NEW)[:4]
    place = {
        "forward": (served.model("llama").model.layers[1].mlp, "forward"),
        "attend": (saccade, "attention_paged"),
        "choose": (decoding, "choose"),
    }[part]
    for turn in range(0, 14, 2):
        engine = served.engine(num_pages=13)
        with monkeypatch.context() as patch:
            patch.setattr(*place, fails_at(getattr(*place), turn, Broken()))
            samples = engine.submit_samples(prompts[0], 2, **GREEDY)
            completions = [*samples, *(engine.submit(prompt, **GREEDY) for prompt in prompts[1:])]
            assert run_through(engine) == 1
        found = served.tokens_of([each.result() for each in completions])
        assert found == [wanted[0], *wanted]
        served.assert_nothing_is_held(engine)


def failing_from(patch, position, error):
    """The model fails in every pass that has a row there or behind it."""
    model = served.model("llama")
    real = model.forward

    def forward(**options):
        if int(options["position_ids"].max()) >= position:
            raise error()
        return real(**options)

    patch.setattr(model, "forward", forward)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("position", [35, 20, 16])
def test_a_request_whose_steps_always_fail_ends_and_others_go_on(ahead, position, monkeypatch):
    short = [prompt for prompt in served.prompts() if len(prompt) + NEW <= 14]
    wanted = [served.uncached("llama", tuple(prompt), NEW) for prompt in short]
    engine = served.engine(num_pages=64, run_ahead=ahead)
    failing_from(monkeypatch, position, Broken)
    before = [engine.submit(prompt, **GREEDY) for prompt in short[:2]]
    samples = engine.submit_samples(served.prompts()[3], 2, **GREEDY)  # of 33 tokens
    after = engine.generate(short[2:], **GREEDY)  # which waits, and is not at fault
    assert served.tokens_of([*(each.result() for each in before), *after]) == wanted
    for each in samples:
        with pytest.raises(Broken):
            each.result()
        assert each.statistics.reason == "error"
    served.assert_nothing_is_held(engine)


def test_three_steps_that_fail_end_a_request_and_two_do_not(monkeypatch):
    prompts = served.prompts()
    engine, wanted = served.engine(num_pages=64), served.wanted("llama", NEW)
    with monkeypatch.context() as patch:
        failing_from(patch, 35, Broken)
        sound, at_fault = (engine.submit(prompts[n], **GREEDY) for n in (1, 3))
        assert run_through(engine) == 3
    assert (sound.statistics.reason, at_fault.statistics.reason) == ("length", "error")
    assert sound.result().tokens == wanted[1]
    with monkeypatch.context() as patch:
        failing_from(patch, 35, Broken)
        sound, at_fault = (engine.submit(prompts[n], **GREEDY) for n in (1, 3))
        failed = 0
        while failed < 2:
            try:
                engine.step()
            except Broken:
                failed += 1
    assert served.tokens_of([each.result() for each in (sound, at_fault)]) == [wanted[1], wanted[3]]
    served.assert_nothing_is_held(engine)


def test_interrupts_end_no_request_however_many_come(monkeypatch):
    engine = served.engine(num_pages=64)
    asked = engine.submit(served.prompts()[3], **GREEDY)
    with monkeypatch.context() as patch:
        failing_from(patch, 0, KeyboardInterrupt)
        for _ in range(10):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    assert asked.result().tokens == served.wanted("llama", NEW)[3]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_where_every_step_fails_every_request_ends(preemption, monkeypatch):
    engine = served.engine(num_pages=13, preemption=preemption)
    completions = [engine.submit(prompt, **GREEDY) for prompt in served.prompts()]
    for _ in range(6):
        engine.step()
    with monkeypatch.context() as patch:
        failing_from(patch, 0, Broken)
        unfinished = [each for each in completions if not each.done]
        assert unfinished
        for each in unfinished:
            with pytest.raises(Broken):
                each.result()
    served.assert_nothing_is_held(engine)
    generated = engine.generate(served.prompts()[:2], **GREEDY)
    assert served.tokens_of(generated) == served.wanted("llama", NEW)[:2]


def test_a_model_that_was_changed_keeps_nobody_waiting(monkeypatch):
    engine = served.engine(num_pages=64)
    waiting = engine.submit(served.prompts()[1], **GREEDY)

    def changed(**options):
        raise Broken

    monkeypatch.setattr(engine._model, "seems_same", lambda: False)
    monkeypatch.setattr(engine._model, "check_same", changed)
    with pytest.raises(Broken):
        waiting.result()
    served.assert_nothing_is_held(engine)


def table_models():
    """Models that look positions up in a table of 32, some behind rows of another meaning."""
    sizes: Any = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    opt = transformers.OPTConfig(
        **sizes, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return [transformers.GPT2LMHeadModel(gpt2), transformers.OPTForCausalLM(opt)]


@pytest.mark.parametrize("model", table_models(), ids=lambda model: type(model).__name__)
def test_more_tokens_than_a_table_has_positions_are_refused(model):
    for length in (33, 100):
        with pytest.raises(
            ValueError, match=f"max_length: got {length}, takes at most 32, which the model has"
        ):
            served.engine_of(model, num_pages=64, page_size=4, max_length=length)
    engine = served.engine_of(model, num_pages=64, page_size=4)
    assert engine.max_length == 32
    prompt = [5, 6, 7]
    generated = engine.generate(prompt, max_new_tokens=29, stop_tokens=())[0]
    assert len(generated.tokens) == 29
    model.config.max_position_embeddings = 64  # the table tells, whatever the settings say
    assert served.engine_of(model, num_pages=64, page_size=4).max_length == 32


def test_rotations_go_on_beyond_the_model_s_own_length():
    longest = served.model("llama").config.max_position_embeddings
    assert served.engine(max_length=3 * longest).max_length == 3 * longest


def test_a_request_whose_logits_are_nan_fails_alone(monkeypatch):
    prompts = [[5, 6, 7], [50, 6, 7]]
    wanted = served.uncached("llama", (50, 6, 7), NEW)
    model = served.model("llama")
    real = model.forward

    def forward(**options):
        output = real(**options)
        starts = options["position_ids"][0] == 0
        row = int((options["input_ids"][0] == 5).nonzero()[0]) if starts.any() else None
        if row is not None:  # the prompt that begins with 5 is the first of the step
            output.logits[0, 0] = torch.nan
        return output

    engine = served.engine()
    monkeypatch.setattr(model, "forward", forward)
    nonfinite, sound = (engine.submit(prompt, **GREEDY) for prompt in prompts)
    assert sound.result().tokens == wanted
    assert nonfinite.statistics.reason == "error"
    with pytest.raises(FloatingPointError, match="logits"):
        nonfinite.result()
    with pytest.raises(FloatingPointError):
        list(nonfinite)
    served.assert_nothing_is_held(engine)


def make_keys_nonfinite(patch, turn):
    """Keys are NaN in the rows of that pass, as a broken kernel's would be."""
    passes = []

    def broken(real):
        def attend(self, layer, query, key, value, **options):
            if self not in passes:
                passes.append(self)
            if passes.index(self) == turn:
                key = torch.full_like(key, torch.nan)
            return real(self, layer, query, key, value, **options)

        return attend

    for step in (BatchStep, DecodeStep):
        patch.setattr(step, "attend", broken(step.attend))


@pytest.mark.parametrize(("name", "turn"), [("llama", 0), ("llama", 2), ("qwen3", 1), ("llama", 3)])
def test_pages_of_a_pass_that_gave_nan_are_found_by_nobody(name, turn, monkeypatch):
    engine = served.engine(name, num_pages=64)
    prompt = served.prompts()[3]  # 33 tokens: three chunks, so that pass 3 is the first new token's
    with monkeypatch.context() as patch:
        make_keys_nonfinite(patch, turn)
        samples = engine.submit_samples(prompt, 2, **GREEDY)
        for each in samples:
            with pytest.raises(FloatingPointError, match="logits: the model gave NaN"):
                each.result()
    served.assert_nothing_is_held(engine)
    again, once_more = (engine.generate([prompt], **GREEDY)[0] for _ in range(2))
    assert again.tokens == once_more.tokens == served.uncached(name, tuple(prompt), NEW)
    assert again.statistics.cached_tokens == 0 and once_more.statistics.cached_tokens > 0


def test_pages_that_make_nan_are_forgotten_with_the_request_that_found_them():
    engine = served.engine(num_pages=64)
    prompt = served.prompts()[3]
    engine.generate([prompt], **GREEDY)
    for layer in range(2):
        engine.cache.pages(layer).value_pages[:] = torch.nan
    with pytest.raises(FloatingPointError):
        engine.generate([prompt], **GREEDY)
    generated = engine.generate([prompt], **GREEDY)[0]
    assert generated.tokens == served.uncached("llama", tuple(prompt), NEW)
    served.assert_nothing_is_held(engine)


def test_a_tokenizer_that_fails_harms_its_request_only(monkeypatch):
    engine = served.engine(tokenizer=served.LetterTokenizer())
    monkeypatch.setattr(TextStream, "push", fails_at(TextStream.push, 1, Broken()))
    completions = [engine.submit(prompt, **GREEDY) for prompt in served.prompts()[:2]]
    engine.run()
    reasons = [each.statistics.reason for each in completions]
    assert set(reasons) == {"error", "length"}
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize("after", [0, 1, 3, 8])
def test_cancelled_requests_give_their_pages_back(after):
    engine = served.engine(num_pages=13)
    completions = [engine.submit(prompt, **GREEDY) for prompt in served.prompts()]
    samples = engine.submit_samples(served.prompts()[1], 3, **GREEDY)
    for _ in range(after):
        engine.step()
    for cancelled in (completions[1], completions[3], completions[9], samples[0]):
        cancelled.cancel()
        cancelled.cancel()
        engine.cache.check()
    engine.run()
    wanted = served.wanted("llama", NEW)
    for number, completion in enumerate(completions):
        found = completion.result()
        if number in (1, 3, 9) and found.reason == "cancelled":
            assert found.tokens == wanted[number][: len(found.tokens)]
        else:
            assert found.tokens == wanted[number]
    assert [sample.result().tokens for sample in samples[1:]] == [wanted[1], wanted[1]]
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, ValueError, "prompt: got no token"),
        ([97], {}, ValueError, "prompt: got token 97, takes 0 to 96"),
        ([1.5], {}, TypeError, "prompt: got float"),
        ("text", {}, TypeError, "prompt: got text, takes token numbers"),
        ([1] * 256, {}, ValueError, "prompt: got 256 tokens, takes fewer than max_length, 256"),
        ([1] * 90, {"max_new_tokens": 20}, ValueError, "need 28 pages; takes what fits into 24"),
        ([1], {"max_new_tokens": 256}, ValueError, "max_new_tokens: got 256 .* at most 255"),
        ([1], {"max_new_tokens": 0}, ValueError, "max_new_tokens: got 0, takes 1 or more"),
        (
            [1],
            {"max_new_tokens": 4, "min_new_tokens": 5},
            ValueError,
            "min_new_tokens: got 5, takes at most max_new_tokens, 4",
        ),
        ([1], {"max_new_tokens": 4, "temperature": -1}, ValueError, "temperature: got -1"),
        ([1], {"max_new_tokens": 4, "stop": "x"}, ValueError, "stop: got texts where tokenizer"),
        ([1], {"max_new_tokens": 4, "seed": "a"}, TypeError, "seed: got str"),
        ([1], {"max_new_tokens": 4, "temperature": 10**400}, ValueError, "temperature: got 1000"),
        ([2**63], {}, ValueError, "prompt: got token 9223372036854775808, takes 0 to 96"),
        ([-1], {}, ValueError, "prompt: got token -1"),
        ([True], {}, TypeError, "prompt: got bool"),
        (torch.tensor([1.0]), {}, TypeError, "prompt: got float"),
        (torch.tensor([[1, 2]]), {}, TypeError, "prompt: got list"),
        ({"input_ids": [1]}, {}, TypeError, "prompt: got dict, takes text or token numbers"),
        (5, {}, TypeError, "prompt: got int, takes text or token numbers"),
        ({1, 2}, {}, TypeError, "prompt: got set, takes text or token numbers"),
        (b"to be", {}, TypeError, "prompt: got bytes, takes text or token numbers"),
        (torch.tensor(1), {}, TypeError, "prompt: got Tensor without dimensions, takes text"),
        ([1], {"n": 2}, TypeError, "n: is no option of a request"),
        ([1], {"stop": 5}, TypeError, "stop: got int, takes a text, or a list of texts"),
        ([1], {"stop": {"a": 1}}, TypeError, "stop: got dict, takes a text, or a list of texts"),
        ([1], {"stop": b"a"}, TypeError, "stop: got bytes, takes a text, or a list of texts"),
        ([1], {"stop_tokens": torch.tensor(2)}, TypeError, "stop_tokens: got Tensor without dim"),
        ([1], {"stop_tokens": b"."}, TypeError, "stop_tokens: got bytes, takes a list of token"),
        ([1], {"stop_tokens": [97]}, ValueError, "stop_tokens: got token 97, takes 0 to 96"),
        ([1], {"stop_tokens": [2**63]}, ValueError, "stop_tokens: got token 9223372036854775808"),
        ([1], {"stop_tokens": [-1]}, ValueError, "stop_tokens: got token -1"),
        ([1], {"stop_tokens": [True]}, TypeError, "stop_tokens: got bool"),
        ([1], {"stop_tokens": [2.0]}, TypeError, "stop_tokens: got float"),
        ([1], {"stop_tokens": 2}, TypeError, "stop_tokens: got int, takes a list"),
        ([1], {"max_tokens": 4}, TypeError, "max_tokens: .*did you mean max_new_tokens?"),
        ([1], {"temprature": 1.0}, TypeError, "temprature: .*did you mean temperature?"),
        ([1], {"best_of": 2}, TypeError, "best_of: is no option .* takes max_new_tokens, temp"),
        (
            [1],
            {"max_new_tokens": 4, "logprobs": 21},
            ValueError,
            "logprobs: got 21, takes at most 20",
        ),
        (
            [1],
            {"max_new_tokens": 4, "logit_bias": {97: 1.0}},
            ValueError,
            "logit_bias: got token 97",
        ),
    ],
)
def test_requests_that_can_never_be_served_are_refused(prompt, options, error, message):
    engine = served.engine()
    with pytest.raises(error, match=message):
        engine.submit(prompt, **options)
    assert not engine.step()


def test_prompts_before_one_that_is_refused_are_not_served_either():
    engine = served.engine()
    with pytest.raises(ValueError, match="prompt: got token 97"):
        engine.generate([[5, 6], [97]], **GREEDY)
    assert not engine.step()
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"preemption": "beg"}, ValueError, "preemption: got 'beg', takes \"swap\""),
        ({"max_sequences": 0}, ValueError, "max_sequences: got 0"),
        (
            {"max_batch_tokens": 5},
            ValueError,
            "max_batch_tokens: got 5, takes 6 or more, which is max_sequences",
        ),
        (
            {"page_dtype": "int8"},
            TypeError,
            r"page_dtype: got 'int8', takes a torch.dtype: torch.float64, torch.int8, torch.fl",
        ),
        (
            {"page_dtype": torch.float16},
            ValueError,
            "page_dtype: got torch.float16 for a model of torch.float64, takes torch.float64, tor",
        ),
        ({"page_dtype": torch.int32}, ValueError, "page_dtype: got torch.int32 for a model of"),
        ({"num_pages": 10**12}, ValueError, "num_pages: got 10{12}, which asks for 4096.* bytes"),
        ({"num_pages": 10**24}, ValueError, "num_pages: got 10{24}, which asks for 4096.* bytes"),
        ({"memory": 10**15}, ValueError, "memory: got 10{15}, which asks for 10{15} bytes, takes"),
        ({"host_pages": 10**12}, ValueError, "host_pages: got 10{12}, which asks for 4096.* byt"),
        ({"host_pages": 10**24}, ValueError, "host_pages: got 10{24}, which asks for 4096.* byt"),
        ({"host_pages": "many"}, TypeError, "host_pages: got str"),
        ({"memory": 100}, ValueError, "memory: got 100 bytes, takes at least a page's 4096"),
        ({"page_size": 2000}, ValueError, "page_size: got 2000"),
        ({"num_pages": True}, TypeError, "num_pages: got bool"),
        ({"host_pages": -1}, ValueError, "host_pages: got -1"),
        ({"max_length": 1}, ValueError, "max_length: got 1"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer: got str, takes a tokenizer with encode and"),
        ({"run_ahead": "auto"}, TypeError, "run_ahead: got 'auto', takes True or False"),
        ({"warm_up": 1}, TypeError, "warm_up: got 1, takes True or False"),
        ({"cuda_graphs": 0}, TypeError, "cuda_graphs: got 0, takes True or False"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        served.engine(**options)


def test_memory_and_pages_are_not_given_both():
    with pytest.raises(ValueError, match="memory: got it beside num_pages"):
        saccade.Engine(served.model("llama"), num_pages=4, memory=10**6)


def test_more_samples_than_run_at_once_are_refused():
    with pytest.raises(ValueError, match="n: got 7, takes at most max_sequences, 6"):
        served.engine().submit_samples([1], 7)


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(TypeError, match="model: got Linear, takes a causal language model"):
        saccade.Engine(nn.Linear(2, 2))

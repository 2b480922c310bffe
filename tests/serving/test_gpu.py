"""Decode steps as CUDA graphs on a GPU, against the same padded steps run eagerly."""

import copy
import random
from typing import Any

import disturbed
import pytest
import served
import tiny_models
import torch
import transformers

import saccade
from saccade.gpu import machine_code

pytestmark = [
    pytest.mark.gpu,
    # Inductor would have float32 products rounded to TF32.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

STOPS = [4, 8, 15, 16]
REQUESTS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"repetition_penalty": 1.3, "logprobs": 2}, {"stop_tokens": STOPS},
    {"min_new_tokens": 20, "stop_tokens": STOPS}, {"logit_bias": {5: 2.0}}, {},
]  # fmt: skip


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tiny_models.SIZES)
    made: Any = tiny_models.sharpened(transformers.LlamaForCausalLM(config))
    return made.to("cuda", request.param)


def tokens(model: Any, **options: Any) -> list[list[int]]:
    engine = saccade.Engine(
        model, num_pages=200, max_sequences=5, max_batch_tokens=64, max_length=200,
        batch_sizes=[2, 4, 5], warm_up=False, **options,
    )  # fmt: skip
    graphs = engine.explain().startswith("decode steps are CUDA graphs for 2, 4, 5 sequences")
    assert graphs == options["cuda_graphs"]
    assert ("2 layers are compiled as one" in engine.explain()) == options["compile"]
    several: list[dict[str, Any]] = [
        {"max_new_tokens": 40, "stop_tokens": (), **each} for each in REQUESTS
    ]
    asked = [
        engine.submit(prompt, **each)
        for prompt, each in zip(served.prompts(), several, strict=False)
    ]
    found = [completion.result().tokens for completion in asked]
    served.assert_nothing_is_held(engine)
    return found


@pytest.mark.parametrize("prompt_sizes", [None, [8, 24, 64]], ids=["", "prompts-too"])
@pytest.mark.parametrize("compiled", [False, True], ids=["as-it-is", "compiled"])
def test_graphs_give_the_tokens_of_eager_steps(model, compiled, prompt_sizes):
    # The same kernels over the same padded rows, so not one bit differs.
    options = {"compile": compiled, "prompt_sizes": prompt_sizes}
    wanted = tokens(model, cuda_graphs=False, **options)
    for _ in range(3):
        found = tokens(model, cuda_graphs=True, run_ahead=False, **options)
        assert found == wanted


@pytest.mark.parametrize("compiled", [False, True], ids=["as-it-is", "compiled"])
def test_merged_products_give_the_models_tokens(model, compiled):
    # In float32, where rounding turns no choice between tokens.
    merged = copy.deepcopy(model)
    engine = saccade.Engine(
        merged, num_pages=200, max_sequences=5, max_length=200, warm_up=False, compile=compiled,
        merge_products=True,
    )  # fmt: skip
    assert "4 groups of products are merged" in engine.explain()
    assert ("2 layers are compiled as one" in engine.explain()) == compiled
    made = engine.generate(served.prompts(), max_new_tokens=30, stop_tokens=())
    if next(model.parameters()).dtype == torch.float32:
        plain = saccade.Engine(
            model, num_pages=200, max_sequences=5, max_length=200, cuda_graphs=False
        )
        wanted = plain.generate(served.prompts(), max_new_tokens=30, stop_tokens=())
        assert served.tokens_of(made) == served.tokens_of(wanted)
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_no_token_changes(model, seed, monkeypatch):
    """Arrivals, cancels, faults and interrupts in any line, while graphs run ahead of the host."""
    engine = saccade.Engine(
        model, num_pages=24, page_size=4, max_sequences=6, max_batch_tokens=16, max_length=64,
        compile=False, progress=False,
    )  # fmt: skip
    assert "steps that read prompts are CUDA graphs for 16 rows" in engine.explain()
    found = disturbed.disturb(engine, 250, random.Random(seed), monkeypatch)
    assert len(found) > 20  # of some 60 asked; others were cancelled, or met three faults
    if next(model.parameters()).dtype == torch.float32:
        alone = saccade.Engine(
            model, num_pages=64, page_size=4, max_sequences=6, max_length=64, cuda_graphs=False
        )
        for prompt, options, tokens in found:
            assert disturbed.ask(alone, prompt, options).result().tokens == tokens


def test_compiled_layers_give_the_models_tokens(model):
    # In float32, where rounding turns no choice between tokens.
    if next(model.parameters()).dtype == torch.float32:
        assert tokens(model, cuda_graphs=True, compile=True) == tokens(
            model, cuda_graphs=False, compile=False
        )


def test_requests_alone_get_the_same_tokens_ahead_of_the_host(model):
    def alone(**options: Any) -> list[int]:
        engine = saccade.Engine(
            model, num_pages=50, max_sequences=1, max_length=200, warm_up=False, **options
        )
        prompt = served.prompts()[3]
        return engine.generate([prompt], max_new_tokens=100, stop_tokens=())[0].tokens

    assert alone() == alone(cuda_graphs=False, compile=True, batch_sizes=[1])


# PyTorch warns that its mode does not know of all that waits.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device(model):
    engine = saccade.Engine(
        model, num_pages=50, max_sequences=2, max_length=200, compile=False, warm_up=False
    )
    asked = [
        engine.submit(prompt, max_new_tokens=60, stop_tokens=()) for prompt in served.prompts()[:2]
    ]
    while min(completion.statistics.new_tokens for completion in asked) < 4:
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.run()
    assert all(len(completion.result().tokens) == 60 for completion in asked)


def test_warming_up_leaves_nothing(model):
    engine = saccade.Engine(
        model, num_pages=50, max_sequences=3, max_batch_tokens=32, max_length=200,
        progress=False,
    )  # fmt: skip
    assert "2 layers are compiled as one" in engine.explain()
    assert "steps that read prompts are CUDA graphs for 32 rows" in engine.explain()
    assert "were tried" not in engine.explain()
    served.assert_nothing_is_held(engine)


def test_random_steps_compile_nothing(model, monkeypatch):
    """2,000 steps of whatever comes, after the engine has tried its steps."""
    engine = saccade.Engine(
        model, num_pages=300, max_sequences=12, max_batch_tokens=64, max_length=200, progress=False
    )
    if next(model.parameters()).dtype == torch.bfloat16:  # else Inductor may round to TF32
        assert "2 layers are compiled as one" in engine.explain()

    def compile_nothing(kernel: Any, *others: Any) -> Any:
        raise AssertionError(f"{kernel.__name__} was compiled in a step")

    monkeypatch.setattr(machine_code, "compiled", compile_nothing)
    chance, asked, steps = random.Random(7), [], 0
    with torch.compiler.set_stance("fail_on_recompile"):
        while steps < 2000:
            if len(asked) < 30 and chance.random() < 0.3:
                prompt = [chance.randrange(60) for _ in range(chance.choice((1, 3, 17, 60, 150)))]
                drawn = chance.choice(REQUESTS[:4])
                new = chance.randrange(1, 49)
                asked.append(engine.submit(prompt, max_new_tokens=new, **drawn))
            if asked and chance.random() < 0.02:
                asked.pop(chance.randrange(len(asked))).cancel()
            steps += engine.step()
            for completion in [each for each in asked if each._request.reason]:
                assert completion.result().tokens
                asked.remove(completion)
        for completion in asked:
            completion.cancel()
    served.assert_nothing_is_held(engine)

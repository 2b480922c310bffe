"""Cases of an engine whose model is shared out over two processes.

    python tests/rank_cases.py FOLDER

Processes are forked once the models are made, and what one process gives is known. Each rank writes
what went wrong, "" where nothing did, to a file. What ends a rank has worlds of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import served
import tiny_families
import tiny_models
import torch
import torch.distributed as dist
from transformers.distributed.configuration_utils import DistributedConfig
from worlds import joined, run_worlds

import saccade
from saccade.serving import compiled_layers, rank_sums
from saccade.serving.request import Generated

WORLD = 2
VOCABULARY = 98  # which the ranks divide, as transformers 5.17 takes no other
MODELS = ("llama", "qwen3")
FEW: dict[str, Any] = {
    "num_pages": 24, "page_size": 4, "max_batch_tokens": 16, "max_sequences": 6,
}  # fmt: skip
DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {5: 2.0, 9: -torch.inf}},
]
CASES: dict[str, Callable[[int, Path], None]] = {}


def case(check: Callable[[int, Path], None]) -> Callable[[int, Path], None]:
    CASES[check.__name__] = check
    return check


def shared_out(model: Any, ranks: int = WORLD) -> Any:
    """A model that every rank has whole, as transformers shares it out by its own plan."""
    kind = type(model)
    config, _, mesh = kind.prepare_distribute_model(DistributedConfig(tp_size=ranks))
    return kind.maybe_distribute_model(model, config, mesh)


def refused(error: type[Exception], texts: list[str], call: Callable[[], Any]) -> None:
    try:
        call()
    except error as found:
        assert all(text in str(found) for text in texts), str(found)
    else:
        raise AssertionError(f"nothing was refused: {texts}")


def with_ranks(rank: int, engine: saccade.Engine, work: Callable[[], None]) -> None:
    """Do something on rank 0, which the others follow; in the end nothing is held anywhere."""
    if rank == 0:
        work()
        engine.close()
    else:
        engine.follow()
    served.assert_nothing_is_held(engine)
    held = engine.statistics()
    books: list[Any] = [None] * WORLD
    dist.all_gather_object(books, [held.steps, held.rows, held.done, held.new_tokens, held.cache])
    assert books[0] == books[1]


# ---- what is computed ----------------------------------------------------------------------------


def drawn(engine: saccade.Engine) -> list[list[Generated]]:
    """Requests of all kinds at once, each with two samples."""
    prompts = served.prompts()
    handles = [
        engine.submit_samples(prompts[number], 2, max_new_tokens=8, stop_tokens=[], **options)
        for number, options in enumerate(DRAWN)
    ]
    return [[handle.result() for handle in samples] for samples in handles]


def texts(engine: saccade.Engine) -> list[Generated]:
    return engine.generate(["abc", "Saccade"], max_new_tokens=12, stop=["a", "Q", "xy"])


ALONE: dict[str, Any] = {}  # what one process gives


def compute_alone() -> None:
    for name in MODELS:
        ALONE[name] = served.wanted(name)
    ALONE["drawn"] = drawn(saccade.Engine(served.model("llama"), **FEW))
    letters = served.LetterTokenizer()
    ALONE["texts"] = texts(saccade.Engine(served.model("llama"), letters, **FEW))


SHARED: dict[str, Any] = {}


def engine_of(name: str, tokenizer: Any = None, **options: Any) -> saccade.Engine:
    if name not in SHARED:
        SHARED[name] = shared_out(served.model(name))
    return saccade.Engine(SHARED[name], tokenizer, **{**FEW, "rank_timeout": 30, **options})


@case
def tokens_are_those_of_one_process(rank: int, folder: Path) -> None:
    for name in MODELS:
        engine = engine_of(name, host_pages=4)
        assert "2 ranks, each with 1 kv heads" in engine.explain()

        def work(engine: saccade.Engine = engine, name: str = name) -> None:
            found = engine.generate(served.prompts(), max_new_tokens=10, stop_tokens=[])
            assert served.tokens_of(found) == ALONE[name]
            assert engine.statistics().preemptions > 0

        with_ranks(rank, engine, work)


class MemoryByMessages(rank_sums.PeerMemory):
    """What GPUs read of one another, where there is none: parts come by gloo."""

    sums = 0
    reverse = False  # whether ranks add from the last one on

    def __init__(self, group: Any, nbytes: int, device: torch.device) -> None:
        self.group, self.nbytes = group, nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(WORLD)]
        dist.all_gather(parts, part, group=self.group)
        type(self).sums += 1
        if self.reverse:  # so that ranks differ in the last bit, as no rounding is alike
            return parts[1] * 1.0000001 + parts[0]
        return parts[0] + parts[1]


def compiled_engine(rank: int, memory: Any, **options: Any) -> saccade.Engine:
    """An engine whose ranks say that they reach each other's memory."""
    seat = rank_sums.Seat("here", str(rank), ("0", "1"), "")
    plain = functools.partial(compiled_layers.CompiledLayers, backend="aot_eager")
    rank_sums._memory_of.clear()
    with (
        patch.object(rank_sums, "seat_of", lambda device: seat),
        patch.object(rank_sums, "PeerMemory", memory),
        patch.object(rank_sums, "DTYPES", (torch.float64,)),  # of the model, whose tokens are exact
        patch.object(compiled_layers, "CompiledLayers", plain),
    ):
        return engine_of("llama", compile=True, **options)


@case
def sums_by_memory_give_the_tokens_of_one_process(rank: int, folder: Path) -> None:
    engine = compiled_engine(rank, MemoryByMessages, merge_products=True)
    said = engine.explain()
    assert "4 groups of products are merged in compiled layers" in said, said
    assert "sums of at most 256 KiB in their layers go by memory that all of them read" in said
    assert "2 layers are compiled as one" in said and ", 2 sums over ranks in each" in said
    MemoryByMessages.sums = 0

    def work() -> None:
        found = engine.generate(served.prompts(), max_new_tokens=10, stop_tokens=[])
        assert served.tokens_of(found) == ALONE["llama"]

    with patch.object(rank_sums, "DTYPES", (torch.float64,)):
        with_ranks(rank, engine, work)
    layers = served.model("llama").config.num_hidden_layers
    assert MemoryByMessages.sums == 2 * layers * engine.statistics().steps  # none by messages


@case
def memory_that_gives_something_else_is_not_used(rank: int, folder: Path) -> None:
    class Reversed(MemoryByMessages):
        reverse = True

    class Apart(MemoryByMessages):
        def __init__(self, *arguments: Any) -> None:
            if rank == 1:  # and rank 0 begins no sum alone
                raise RuntimeError("no handle for this memory\nand more")
            super().__init__(*arguments)

    for memory, reason in (
        (Reversed, "sums in torch.float64 were not those of all ranks' parts"),
        (Apart, "no handle for this memory"),
    ):
        engine = compiled_engine(rank, memory)
        assert "their sums go by gloo: " in engine.explain() and reason in engine.explain()
        assert not rank_sums._memory_of

        def work(engine: saccade.Engine = engine) -> None:
            found = engine.generate(served.prompts()[:1], max_new_tokens=4, stop_tokens=[])
            assert served.tokens_of(found) == [ALONE["llama"][0][:4]]

        with_ranks(rank, engine, work)


@case
def drawn_tokens_are_those_of_one_process(rank: int, folder: Path) -> None:
    engine = engine_of("llama", run_ahead=True)

    def work() -> None:
        for found, wanted in zip(drawn(engine), ALONE["drawn"], strict=True):
            assert served.tokens_of(found) == served.tokens_of(wanted)
            for one, other in zip(found, wanted, strict=True):
                for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
                    assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-9

    with_ranks(rank, engine, work)


@case
def texts_stop_and_stream_as_by_one_process(rank: int, folder: Path) -> None:
    engine = engine_of("llama", served.LetterTokenizer())

    def work() -> None:
        found = texts(engine)
        wanted = ALONE["texts"]
        assert [(e.text, e.reason) for e in found] == [(e.text, e.reason) for e in wanted]
        streamed = engine.submit("abc", max_new_tokens=12, stop=["a", "Q", "xy"])
        assert "".join(streamed) == wanted[0].text

    with_ranks(rank, engine, work)


@case
def cancelled_requests_end_on_all_ranks(rank: int, folder: Path) -> None:
    engine = engine_of("llama", served.LetterTokenizer())

    def work() -> None:
        handles = [engine.submit("abc" * n, max_new_tokens=30, stop_tokens=[]) for n in (1, 2, 5)]
        late = engine.submit("z", max_new_tokens=30)
        late.cancel()  # before any rank has heard of it
        for _ in range(4):
            engine.step()
        handles[1].cancel()
        handles[1].cancel()  # which says nothing more
        last = engine.submit_samples("Saccade", 3, max_new_tokens=6, temperature=1.0)
        engine.step()
        last[0].cancel()
        assert [handle.result().reason for handle in handles] == ["length", "cancelled", "length"]
        reasons = [each.result().reason for each in last]
        assert reasons[0] == "cancelled"
        assert late.result().tokens == [] and engine.statistics().waiting == 0

    with_ranks(rank, engine, work)


@case
def idle_ranks_wait_longer_than_a_message_may_take(rank: int, folder: Path) -> None:
    engine = engine_of("llama", rank_timeout=1)

    def work() -> None:
        for _ in range(2):
            assert len(engine.generate([[5, 6]], max_new_tokens=2)[0].tokens) == 2
            time.sleep(1.5)
        assert engine.failure == ""

    with_ranks(rank, engine, work)
    if rank == 0:
        refused(RuntimeError, ["the engine is closed"], lambda: ask(engine))


# ---- what is refused -----------------------------------------------------------------------------


@case
def what_cannot_be_shared_is_refused_by_name(rank: int, folder: Path) -> None:
    def engine_for(model: Any, **options: Any) -> saccade.Engine:
        return saccade.Engine(model, **{**FEW, **options})

    one_head = shared_out(tiny_models.llama(num_key_value_heads=1))
    texts = ["model: got LlamaForCausalLM with 1 kv heads over 2 ranks"]
    refused(ValueError, texts, lambda: engine_for(one_head))
    family = tiny_families.HYBRIDS[0]
    family = dataclasses.replace(family, sizes={**family.sizes, "vocab_size": VOCABULARY})
    hybrid = shared_out(family.make("sdpa"))
    texts = ["model: got Qwen3_5ForCausalLM, whose layers keep states of sequences, over 2 ranks"]
    refused(ValueError, texts, lambda: engine_for(hybrid))
    model = SHARED["llama"]
    refused(
        ValueError, ["merge_products: got True"], lambda: engine_for(model, merge_products=True)
    )
    refused(ValueError, ["rank_timeout: got 0,"], lambda: engine_for(model, rank_timeout=0))
    refused(TypeError, ["rank_timeout: got str"], lambda: engine_for(model, rank_timeout="long"))


@case
def ranks_that_were_given_something_else_say_so(rank: int, folder: Path) -> None:
    def differing(**options: Any) -> Callable[[], Any]:
        return lambda: engine_of("llama", **(options if rank else {}))

    texts = ["pages: got", "24", "on rank 0", "30", "on rank 1; takes the same on every rank"]
    refused(ValueError, texts, differing(num_pages=30))
    texts = ["sizes: got (16, 6, 256, ", "on rank 0", "(16, 5, 256, "]
    refused(ValueError, texts, differing(max_sequences=5))
    refused(ValueError, ["tokenizer: got none on rank 0"], differing(
        tokenizer=served.LetterTokenizer()
    ))  # fmt: skip
    engine = engine_of("llama")
    if rank:
        refused(RuntimeError, ["submit: got rank 1 of 2, takes rank 0"], lambda: engine.submit([5]))
        refused(RuntimeError, ["step: got rank 1 of 2"], engine.step)
    else:
        refused(RuntimeError, ["follow: got rank 0 of 2"], engine.follow)
    with_ranks(rank, engine, engine.run)


# ---- over HTTP -----------------------------------------------------------------------------------


@case
def clients_are_answered_over_http(rank: int, folder: Path) -> None:
    if not has_http():
        return
    engine = engine_of("llama", served.LetterTokenizer(), num_pages=64)
    with_ranks(rank, engine, lambda: ask_over_http(engine))


def has_http() -> bool:
    try:
        import openai
        import uvicorn
    except ImportError:
        return False
    return bool(openai and uvicorn)


SERVED_BY = (
    "openai.resources", "saccade.serving.server", "uvicorn.lifespan.on", "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
)  # fmt: skip


def started(engine: saccade.Engine) -> tuple[Any, Any, threading.Thread]:
    """A server in a thread, and a client of it."""
    import openai
    import uvicorn

    from saccade.serving import server as servers

    limits = servers.ServerLimits()
    made = servers.Server(
        engine, served.LetterTokenizer(), name="tiny", api_key=None, limits=limits
    )
    config = uvicorn.Config(made.app, port=0, log_level="critical", ws="none", lifespan="on")
    running = uvicorn.Server(config)
    made.driver.when_failed = lambda: setattr(running, "should_exit", True)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=30
    )
    return running, client, thread


def ask_over_http(engine: saccade.Engine) -> None:
    running, client, thread = started(engine)
    wanted: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "stop": ["a", "Q", "xy"]}
    whole = client.completions.create(prompt=["abc", "Saccade"], temperature=0, **wanted)
    assert [choice.text for choice in whole.choices] == [each.text for each in ALONE["texts"]]
    stream = client.completions.create(prompt="abc", temperature=0, stream=True, **wanted)
    assert "".join(piece.choices[0].text for piece in stream) == ALONE["texts"][0].text
    left = client.completions.create(
        model="tiny", prompt="abc", max_tokens=200, temperature=0, stream=True,
        extra_body={"min_tokens": 200},
    )  # fmt: skip
    next(iter(left))
    left.close()  # which cancels it on all ranks
    client.close()
    running.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


# ---- ranks that end ------------------------------------------------------------------------------


def ask(engine: saccade.Engine) -> list[Generated]:
    return engine.generate([[5, 6]], max_new_tokens=8, stop_tokens=[])


GONE = "a rank that ends, or hangs, ends the engine on all"


def a_rank_dies(rank: int, folder: Path) -> None:
    engine = engine_of("llama", rank_timeout=5)
    if rank:
        engine._ranks.hear = lambda: os._exit(7)  # type: ignore[union-attr, method-assign]
        engine.follow()
    refused(RuntimeError, ["ranks: rank 0 of 2 failed while", GONE], lambda: ask(engine))
    assert "rank 0 of 2 failed" in engine.failure
    refused(RuntimeError, ["failed while"], lambda: ask(engine))  # and at once


def rank_0_dies(rank: int, folder: Path) -> None:
    engine = engine_of("llama", rank_timeout=5)
    if rank == 0:
        engine.generate([[5]], max_new_tokens=2)
        os._exit(7)
    refused(RuntimeError, ["rank 1 of 2 failed while waiting for rank 0", GONE], engine.follow)


def a_rank_hangs(rank: int, folder: Path) -> None:
    engine = engine_of("llama", rank_timeout=1)
    if rank:
        time.sleep(4)
        os._exit(7)
    refused(RuntimeError, ["ranks: rank 0 of 2 failed while", GONE], lambda: ask(engine))


def a_rank_comes_to_other_tokens(rank: int, folder: Path) -> None:
    engine = engine_of("llama", rank_timeout=5)
    if rank:
        engine._worker._drawn = 1  # type: ignore[attr-defined]
        refused(RuntimeError, ["rank 1 has come to other tokens or pages"], engine.follow)
        os._exit(7)
    refused(RuntimeError, [GONE], lambda: ask(engine))


def a_rank_dies_under_a_server(rank: int, folder: Path) -> None:
    if not has_http():
        return
    import openai

    engine = engine_of("llama", served.LetterTokenizer(), num_pages=64, rank_timeout=5)
    if rank:
        told = [engine._ranks.hear] * 6  # type: ignore[union-attr]
        engine._ranks.hear = lambda: told.pop()() if told else os._exit(7)  # type: ignore
        engine.follow()
    _, client, thread = started(engine)
    wanted: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "extra_body": {"min_tokens": 200}}
    refused(openai.InternalServerError, ["the model failed: ranks: rank 0 of 2"], lambda: (
        client.completions.create(prompt="abc", **wanted)
    ))  # fmt: skip
    thread.join(30)
    assert not thread.is_alive() and "rank 0 of 2 failed" in engine.failure
    client.close()


ENDINGS: dict[str, Callable[[int, Path], None]] = {
    each.__name__: each
    for each in (
        a_rank_dies, rank_0_dies, a_rank_hangs, a_rank_comes_to_other_tokens,
        a_rank_dies_under_a_server,
    )
}  # fmt: skip


# ---- ranks ---------------------------------------------------------------------------------------


def run_cases(rank: int, folder: Path, cases: dict[str, Callable[[int, Path], None]]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    said = {}
    for name, check in cases.items():
        start = time.monotonic()
        try:
            check(rank, folder)
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
        print(f"{time.monotonic() - start:.2f} s, rank {rank}: {name} {said[name]}", flush=True)
        if said[name]:
            break  # ranks are apart
    path = folder / f"found.{rank}"
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(before | said), encoding="utf-8")


def run_rank(rank: int, world: int, folder: Path) -> None:
    with joined(rank, world, folder):
        run_cases(rank, folder, CASES)


def run_ending(name: str) -> Callable[[int, int, Path], None]:
    def run(rank: int, world: int, folder: Path) -> None:
        (folder / name).mkdir(exist_ok=True)
        with joined(rank, world, folder / name, seconds=3):
            run_cases(rank, folder, {name: ENDINGS[name]})
            os._exit(0)  # without a word to ranks that have ended

    return run


if __name__ == "__main__":
    tiny_models.SIZES["vocab_size"] = VOCABULARY
    compute_alone()
    where = Path(sys.argv[1])
    imported = SERVED_BY if has_http() else ()
    failed = run_worlds(run_rank, where, [WORLD], imports=imported)
    for ending in ENDINGS:
        run_worlds(run_ending(ending), where, [WORLD])  # a rank of it ends badly
    sys.exit(failed)

"""Time decode steps of `saccade.Engine` on a GPU: run eagerly, and as CUDA graphs.

Usage: python tools/serving_steps.py [CASE ...] [--json FILE] [--seconds 300]

A case is a way and a batch, such as compiled:32, and 8b before it for a larger model
(8b:compiled:32). "compiled" is what an engine does by itself: layers are compiled, steps are CUDA
graphs and begin ahead of the host. "apart" multiplies each weight by itself (merge_products=False).
"graphs" compiles no layers, "waiting" does not begin ahead,
"drawn" draws by temperature and top_p, "eager" captures nothing. Each runs in a process
of its own, so that one that fails harms no other; kernels that one compiles the next ones find in
the cache. First come the tokens of a batch of 4, which must be those of eager steps.

The models are Llamas with random weights in bfloat16: 16 layers of 2048 and 32 query heads over 8
of 64, or 8b: 32 layers of 4096 and 32 over 8 of 128.
The floor of a step is the bytes of its weights and of its cache, read once at the rate of a copy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saccade.bench import results

CASES = ("compiled:1", "compiled:32", "compiled:128", "graphs:1", "graphs:32", "graphs:128",
         "waiting:32", "drawn:128", "eager:1", "eager:32", "eager:128")  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "apart": {"merge_products": False},
    "graphs": {"compile": False},
    "drawn": {},
    "waiting": {"run_ahead": False, "compile": False},
    "eager": {"cuda_graphs": False, "compile": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
           "vocab_size": 128_256, "tie_word_embeddings": True},
    "8b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
           "head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": False},
}  # fmt: skip
CHECK = "check"
CONTEXT, STEPS = 1000, 40
COLUMNS = {"median_ms": 10, "mean_ms": 10, "worst_ms": 10, "floor_ms": 9, "over_floor": 11,
           "graph_ms": 9, "made_s": 8}  # fmt: skip


def main() -> int:
    """Run every case, and show a table; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument(
        "--json", type=Path, help="a file that gets a result a case, as the bench's"
    )
    parser.add_argument("--seconds", type=float, default=300, help="for all of it")
    parser.add_argument("--no-check", action="store_true", help="compare no tokens first")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(check() if given.here == CHECK else timed(given.here)))
        return 0
    end, rows, failed = time.monotonic() + given.seconds, [], 0
    for case in (*(() if given.no_check else (CHECK,)), *given.cases):
        row = in_a_process([__file__, "--here", case], end - time.monotonic())
        if "failed" in row:
            failed += 1
            print(f"{case} failed:", *row["failed"], sep="\n", flush=True)
            continue
        rows.append(row)
        print(json.dumps(row), flush=True)
    if given.json is not None:
        timed_rows = [row for row in rows if row["case"] != CHECK]
        results.append(given.json, map(result_of, timed_rows))
    print(f"{'case':24}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    for row in rows:
        numbers = (f"{row.get(name, 0):{width}.2f}" for name, width in COLUMNS.items())
        print(f"{row['case']:24}" + "".join(numbers))
    return int(failed > 0)


def result_of(row: Mapping[str, Any]) -> results.Result:
    """A case's times as the bench keeps them, with the floor beside them."""
    sizes = MODELS[row["case"].split("-")[1]]
    now = datetime.datetime.now(datetime.timezone.utc)
    case = {
        "name": row["case"], "batch": row["batch"], "query_heads": 32, "kv_heads": 8,
        "query_len": 1, "kv_len": CONTEXT + STEPS, "head_dim": sizes["head_dim"],
        "value_dim": sizes["head_dim"], "dtype": "bfloat16", "mask": "causal",
    }  # fmt: skip
    return results.Result(
        date=f"{now:%Y-%m-%dT%H:%M:%SZ}", commit=results.commit(), device=row["device"], threads=1,
        versions=results.versions(), case=case, which_pass="step", who="saccade/engine",
        median_ms=row["median_ms"], min_ms=row["least_ms"], max_ms=row["worst_ms"], rounds=STEPS,
        run=f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}", floor_ms=row["floor_ms"],
    )  # fmt: skip


def in_a_process(
    arguments: list[str], seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a script prints last, in a process of its own; "failed": the end of what it said."""
    if seconds <= 0:
        return {"failed": ["no time is left"]}
    try:
        done = subprocess.run(
            [sys.executable, *arguments], env={**os.environ, **(environment or {})},
            capture_output=True, text=True, timeout=seconds, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        if error.returncode < 0:  # the system may end a process for its memory, without a word
            ended = f"ended by {signal.Signals(-error.returncode).name}"
            return {"failed": [*error.stderr.splitlines()[-12:], ended]}
        return {"failed": error.stderr.splitlines()[-12:]}
    except subprocess.TimeoutExpired:
        return {"failed": [f"it took longer than {seconds:.0f} s"]}
    return json.loads(done.stdout.splitlines()[-1])


def model_of(sizes: dict[str, Any]) -> Any:
    """A Llama with random weights on the GPU."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **{"max_position_embeddings": 4096, **sizes}, num_attention_heads=32, num_key_value_heads=8
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator("cuda").manual_seed(0)
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.data.normal_(0, 0.02, generator=generator)
    return model


def engine_of(model: Any, way: str, sequences: int) -> Any:
    """An engine that tries no steps first: those that come compile what they need."""
    import saccade

    return saccade.Engine(
        model, max_sequences=sequences, batch_sizes=[sequences], max_batch_tokens=4096,
        max_length=CONTEXT + 4 * STEPS, preemption="recompute", warm_up=False, progress=False,
        **WAYS[way],
    )  # fmt: skip


def prompts_of(model: Any, lengths: list[int]) -> list[list[int]]:
    """Random tokens."""
    import torch

    chance = torch.Generator().manual_seed(1)
    most = model.config.vocab_size
    return [torch.randint(most, (length,), generator=chance).tolist() for length in lengths]


def check() -> dict[str, Any]:
    """Compare tokens of graphs with those of the same padded steps run eagerly.

    Raises:
        ValueError: where they differ.
    """
    model = model_of({**MODELS["1b"], "num_hidden_layers": 1, "vocab_size": 1000})
    prompts = prompts_of(model, [3, 40, 17])

    def tokens(way: str) -> list[list[int]]:
        engine = engine_of(model, way, 4)
        asked = [
            engine.submit(prompt, max_new_tokens=40, stop_tokens=(), temperature=0.7 * number,
                          seed=number)
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        return [completion.result().tokens for completion in asked]

    wanted, found = tokens("eager"), tokens("waiting")
    if found != wanted:
        raise ValueError(f"graphs gave {found}, eager steps {wanted}")
    return {"case": CHECK}


def timed(case: str) -> dict[str, Any]:
    """The times of a case's steps."""
    import torch

    *of, way, batch = case.split(":")
    name = of[0] if of else "1b"
    sequences = int(batch)
    model = model_of(MODELS[name])
    rate = copy_rate()
    begin = time.perf_counter()
    engine = engine_of(model, way, sequences)
    made = time.perf_counter() - begin
    drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95} if way == "drawn" else {}
    asked = [
        engine.submit(prompt, max_new_tokens=3 * STEPS, stop_tokens=(), seed=number, **drawn)
        for number, prompt in enumerate(prompts_of(model, [CONTEXT] * sequences))
    ]
    while min(completion.statistics.new_tokens for completion in asked) < 4:
        engine.step()
    single: list[float] = []
    for _ in range(STEPS):  # as a caller sees them, who waits for nothing else
        start = time.perf_counter()
        engine.step()
        single.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    in_a_row = seconds_of(lambda: [engine.step() for _ in range(STEPS)]) / STEPS
    config = model.config
    of_token = 2 * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    moved = sequences * (CONTEXT + 4 + 2 * STEPS) * of_token
    moved += sum(weights.nbytes for weights in model.parameters())
    row = {
        "case": f"serving-{name}-{way}-{batch}", "batch": sequences, "pass": "step", "explain":
        engine.explain(), "median_ms": 1e3 * statistics.median(single), "mean_ms": 1e3 * in_a_row,
        "least_ms": 1e3 * min(single), "worst_ms": 1e3 * max(single),
        "floor_ms": 1e3 * moved / rate,
        "over_floor": in_a_row * rate / moved, "made_s": made, "copy_tb_s": rate / 1e12,
        "device": torch.cuda.get_device_name(),
    }  # fmt: skip
    replay = engine._decoder._passes.get(sequences)  # the device's part, without the host's
    if replay is not None:
        row["graph_ms"] = 1e3 * seconds_of(lambda: [replay() for _ in range(20)]) / 20
    return row


def copy_rate() -> float:
    """Bytes a second that a copy reads and writes."""
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds_of(lambda: target.copy_(source))
    return 40 * source.nbytes / seconds_of(lambda: [target.copy_(source) for _ in range(20)])


def seconds_of(work: Callable[[], object]) -> float:
    """The time until the device is done with some work."""
    import torch

    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())

"""Cases of trl: its defaults turn checkpointing of activations and bfloat16 on."""

# Where the tools are installed: their own annotations are narrower than what they take.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import datasets
import transformers
import trl
from cases_trainer import QUIET, STEPS
from tiny import Run, texts, tokenizer
from trained import Trained, by_trainer


def options(run: Run, **changes: Any) -> dict[str, Any]:
    """What every trainer is told: where, how long, nothing reported."""
    return {
        "output_dir": "out",
        "use_cpu": True,
        **STEPS,
        **QUIET,
        **run.precision,
    } | (changes)


def sft(run: Run, **changes: Any) -> Trained:
    """Supervised fine-tuning on texts."""
    data = datasets.Dataset.from_list([{"text": text} for text in texts(96)])
    made = trl.SFTTrainer(
        run.model(), trl.SFTConfig(**options(run, **changes)), train_dataset=data,
        processing_class=tokenizer(),
    )  # fmt: skip
    return by_trainer(made)


def wrapped(run: Run) -> Trained:
    """Texts end to end, cut at one length."""
    return sft(run, packing=True, packing_strategy="wrapped", max_length=24)


def best_fit(run: Run) -> Trained:
    """Whole texts side by side, which do not see each other."""
    return sft(run, packing=True, packing_strategy="bfd", max_length=24)


def best_fit_split(run: Run) -> Trained:
    """The same, where long ones go on in the next row."""
    return sft(run, packing=True, packing_strategy="bfd_split", max_length=12)


def padding_free(run: Run) -> Trained:
    """A batch side by side in one row."""
    return sft(run, padding_free=True, max_length=None)


def completions(run: Run) -> Trained:
    """Prompts whose completions alone are learnt."""
    data = datasets.Dataset.from_list(
        [
            {"prompt": f"{a} ", "completion": b}
            for a, b in zip(texts(64), texts(64, seed=1), strict=True)
        ]
    )
    made = trl.SFTTrainer(
        run.model(), trl.SFTConfig(**options(run)), train_dataset=data,
        processing_class=tokenizer(),
    )  # fmt: skip
    return by_trainer(made)


def preferences() -> datasets.Dataset:
    """Prompts with an answer that is liked and one that is not."""
    triples = zip(texts(64), texts(64, seed=1), texts(64, seed=2), strict=True)
    return datasets.Dataset.from_list(
        [{"prompt": f"{a} ", "chosen": b, "rejected": c} for a, b, c in triples]
    )


def dpo(run: Run) -> Trained:
    """Direct preference optimisation; trl loads the reference from where the model came from."""
    run.model().save_pretrained("start")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        "start", attn_implementation=run.attention
    )
    made = trl.DPOTrainer(
        model, args=trl.DPOConfig(**options(run, learning_rate=1e-4)),
        train_dataset=preferences(), processing_class=tokenizer(),
        ref_model=run.model() if run.exact else None,
    )  # fmt: skip
    assert made.ref_model.config._attn_implementation == run.attention
    return by_trainer(made)


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: how many tokens differ."""
    return [float(len(set(ids)) + sum(ids) % 5) for ids in completion_ids]


def grpo(run: Run) -> Trained:
    """Answers that the model draws and a function rewards."""
    data = datasets.Dataset.from_list([{"prompt": text} for text in texts(32)])
    made = trl.GRPOTrainer(
        run.model(), variety,
        args=trl.GRPOConfig(**options(
            run, num_generations=4, max_completion_length=8, learning_rate=1e-4
        )),
        train_dataset=data, processing_class=tokenizer("left"),
    )  # fmt: skip
    return by_trainer(made)

"""Cases of transformers' own Trainer."""

# Where the tools are installed: their own annotations are narrower than what they take.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import transformers
from tiny import Run, rows, texts, tokenizer
from trained import Trained, by_trainer

STEPS: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1}
QUIET: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}


def arguments(**changes: Any) -> Any:
    """The Trainer's defaults, for a few steps, with nothing reported or kept."""
    return transformers.TrainingArguments(output_dir="out", use_cpu=True, **STEPS | QUIET | changes)


def language(
    run: Run, padding_side: str = "right", collator: Any = None, **changes: Any
) -> Trained:
    """Next tokens of texts of unequal length, a batch as long as its longest."""
    collator = collator or transformers.DataCollatorForLanguageModeling(
        tokenizer(padding_side), mlm=False
    )
    made = transformers.Trainer(
        model=run.model(), args=arguments(**changes), train_dataset=rows(64),
        data_collator=collator,
    )  # fmt: skip
    return by_trainer(made)


def plain(run: Run) -> Trained:
    """Padding on the right."""
    return language(run)


def left(run: Run) -> Trained:
    """Padding on the left."""
    return language(run, "left")


def checkpointing(run: Run) -> Trained:
    """Activations computed again: every batch has a shape that was not met before."""
    return language(run, gradient_checkpointing=True)


def accumulation(run: Run) -> Trained:
    """Two batches a step, and smoothed labels."""
    return language(run, gradient_accumulation_steps=2, label_smoothing_factor=0.1)


def padding_free(run: Run) -> Trained:
    """Side by side in one row, told apart by their positions."""
    return language(run, collator=transformers.DataCollatorWithFlattening())


def padding_free_offsets(run: Run) -> Trained:
    """The same with the offsets that flash attention takes, and nothing else."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return language(run, collator=collator)


def mixed(run: Run) -> Trained:
    """Mixed precision."""
    return language(run, bf16=not run.exact)


def compiled(run: Run) -> Trained:
    """By torch.compile, with activations computed again; no compiler of C++ is asked for."""
    return language(run, torch_compile_backend="aot_eager", gradient_checkpointing=True)


def classifier(run: Run) -> Trained:
    """An encoder: two classes of texts, which are padded."""
    read = tokenizer()
    data = [{**read(text), "label": index % 2} for index, text in enumerate(texts(64, shortest=2))]
    made = transformers.Trainer(
        model=run.classifier(), args=arguments(), train_dataset=data,
        data_collator=transformers.DataCollatorWithPadding(read),
    )  # fmt: skip
    return by_trainer(made)

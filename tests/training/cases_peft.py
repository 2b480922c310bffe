"""Cases of peft, through the Trainer and through trl."""

# Where the tools are installed: their own annotations are narrower than what they take.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import datasets
import peft
import transformers
import trl
from cases_trainer import arguments
from cases_trl import options
from tiny import Run, rows, texts, tokenizer
from trained import Trained, by_trainer

PROJECTIONS = ["q_proj", "k_proj", "v_proj"]


def adapted(run: Run, config: Any, **changes: Any) -> Trained:
    """A model whose adapters alone are trained."""
    model = peft.get_peft_model(run.model(), config)
    made = transformers.Trainer(
        model=model.double() if run.exact else model,
        args=arguments(learning_rate=1e-2, **changes),
        train_dataset=rows(64),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    )
    return by_trainer(made)


def lora(run: Run) -> Trained:
    """Matrices of low rank, with checkpointing, which then starts at inputs without gradients."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS)
    return adapted(run, config, gradient_checkpointing=True)


def dora(run: Run) -> Trained:
    """The same with lengths of their own."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS, use_dora=True)
    return adapted(run, config)


def ia3(run: Run) -> Trained:
    """Factors of keys, values and the feed-forward layer."""
    config = peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    )
    return adapted(run, config)


def prefix(run: Run) -> Trained:
    """Keys and values before the first token, as a cache that is already there."""
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return adapted(run, config)


def prompt(run: Run) -> Trained:
    """Rows of embeddings before the first token."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return adapted(run, config)


def sft_lora(run: Run) -> Trained:
    """trl's own way to adapters."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS)
    data = datasets.Dataset.from_list([{"text": text} for text in texts(96)])
    made = trl.SFTTrainer(
        run.model(), trl.SFTConfig(**options(run, learning_rate=1e-2)), train_dataset=data,
        processing_class=tokenizer(), peft_config=config,
    )  # fmt: skip
    if run.exact:
        made.model.double()
    return by_trainer(made)

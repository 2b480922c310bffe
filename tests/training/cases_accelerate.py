"""Cases of accelerate."""

# Where the tools are installed: their own annotations are narrower than what they take.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import accelerate
import torch
from tiny import Run, padded
from torch.utils.data import DataLoader
from trained import Trained, weights


def loop(run: Run) -> Trained:
    """A loop that accumulates and clips, with checkpointing."""
    model = run.model()
    model.gradient_checkpointing_enable()
    before, losses = weights(model), []
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    whole = padded(32)
    data = [{name: rows[index] for name, rows in whole.items()} for index in range(32)]
    model, optimizer, loader = accelerator.prepare(
        model.train(),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        DataLoader(data, batch_size=4),
    )
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, before, weights(accelerator.unwrap_model(model)))

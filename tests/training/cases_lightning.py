"""Cases of lightning."""

# Where the tools are installed: their own annotations are narrower than what they take.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import lightning
import torch
from tiny import Run, padded
from torch.utils.data import DataLoader
from trained import Trained, Weights, weights

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Language(lightning.LightningModule):
    """A model that learns next tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.before: Weights = weights(model)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One step."""
        loss = self.model(**batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Called by lightning."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fitted(run: Run, **changes: Any) -> Trained:
    """A fit of one epoch."""
    batches = padded(32)
    data = [{name: rows[index] for name, rows in batches.items()} for index in range(32)]
    module = Language(run.model())
    made = lightning.Trainer(max_epochs=1, default_root_dir="out", **OPTIONS | changes)
    made.fit(module, DataLoader(data, batch_size=4))
    return Trained(module.losses, module.before, weights(module.model))


def plain(run: Run) -> Trained:
    """In float32."""
    return fitted(run)


def mixed(run: Run) -> Trained:
    """Mixed precision, two batches a step, gradients clipped."""
    precision = "64-true" if run.exact else "bf16-mixed"
    return fitted(run, precision=precision, accumulate_grad_batches=2, gradient_clip_val=1.0)


def ddp(run: Run) -> Trained:
    """Two processes."""
    return fitted(run, strategy="ddp", devices=2)

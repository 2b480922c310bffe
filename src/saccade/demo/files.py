"""Files: the trained model and all results, written where the user wants them."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import saccade
from saccade.demo.comparison import HEAD_DIM, HEADS, Measured
from saccade.demo.exactness import Finding
from saccade.demo.model import ByteModel
from saccade.demo.settings import ModelShape


def save_model(model: ByteModel, folder: Path) -> Path:
    """Write the weights and, beside them as JSON, the sizes; gives the weights' path."""
    weights = folder / "model.pt"
    torch.save(model.state_dict(), weights)
    _write(folder / "model.json", asdict(model.shape))
    return weights


def load_model(folder: Path) -> ByteModel:
    """The model that `save_model` wrote."""
    sizes = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    model = ByteModel(ModelShape(**{**sizes, "windows": tuple(sizes["windows"])}))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.eval()


def save_results(
    path: Path,
    about: dict[str, Any],
    bits: dict[str, float],
    findings: list[Finding],
    measured: list[Measured],
) -> None:
    """Write every number that the demo printed, as JSON."""
    _write(
        path,
        {
            "device": device_name(),
            "versions": versions(),
            **about,
            "bits_per_byte": bits,
            "exactness": [
                {
                    **finding._asdict(),
                    "output": finding.output._asdict(),
                    "gradient": finding.gradient._asdict(),
                }
                for finding in findings
            ],
            "comparison": {
                "batch": 1,
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "dtype": "float32",
                "measured": [one._asdict() for one in measured],
            },
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of what computed the results."""
    return {
        "saccade": saccade.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def device_name() -> str:
    """The processor, as well as the system knows it, and the threads that PyTorch uses."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")  # Linux says more here than Python's platform module does
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"

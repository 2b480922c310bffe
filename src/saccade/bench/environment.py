"""Environment: what must be known of a machine to judge times that were taken on it."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import saccade

PACKAGES = (
    "triton", "transformers", "flash-attn", "xformers", "flash-attention-triton",
    "flash-linear-attention",
)  # fmt: skip


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of everything that takes part."""
    found = {
        "saccade": saccade.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the source that runs, "+" behind it where files differ; None outside of git."""
    here = Path(__file__)
    try:
        _git("ls-files", "--error-unmatch", here.name)  # or it is somebody else's repository
        changed = _git("status", "--porcelain", "--untracked-files=no", ":/src")
        return _git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()

"""Info: the names of `xformers.info`, which say what answers attention here."""

from __future__ import annotations

import torch

import saccade
from saccade.integrations.xformers import operators


def get_features_status() -> dict[str, str]:
    """Of each kernel that a call may name, that it may, and what answers instead.

    Examples:
        >>> from saccade.integrations.xformers import info
        >>> info.get_features_status()["memory_efficient_attention.flashF"]
        'available (answered by saccade)'
    """
    named = [*operators.ALL_FW_OPS, *operators.ALL_BW_OPS]
    return {
        f"memory_efficient_attention.{operator.NAME}": f"{operator.info()} (answered by saccade)"
        for operator in named
    }


def print_info() -> None:
    """Print that, versions, and the GPU."""
    lines = {**get_features_status(), "saccade.version": saccade.__version__}
    lines |= {"pytorch.version": torch.__version__}
    lines["pytorch.cuda"] = "available" if torch.cuda.is_available() else "not available"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        lines["gpu.compute_capability"] = ".".join(map(str, capability))
        lines["gpu.name"] = torch.cuda.get_device_name()
    for name, said in lines.items():
        print(f"{f'{name}:':<50} {said}")

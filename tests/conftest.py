"""Where there is no GPU, Triton's interpreter runs the kernels; it is told before their import."""

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import hasten, mend

    hasten()
    mend()

os.environ["SACCADE_CONFIGS"] = ""  # a developer's own table of configs must not change the tests

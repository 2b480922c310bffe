"""Where there is no GPU, Triton's interpreter runs the kernels; it is told before their import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["SACCADE_CONFIGS"] = ""  # a developer's own table of configs must not change the tests

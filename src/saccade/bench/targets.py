"""Targets: what saccade is meant to reach, on a CPU and on one GPU of Hopper's size."""

from saccade.bench.cpu_targets import CPU_TARGETS as CPU_TARGETS
from saccade.bench.gpu_targets import GPU_TARGETS as GPU_TARGETS

TARGETS = (*CPU_TARGETS, *GPU_TARGETS)

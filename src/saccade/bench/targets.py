"""Targets: what saccade is meant to reach, on a CPU and on one GPU of Hopper's size."""

from saccade.bench.cpu_targets import CPU_TARGETS as CPU_TARGETS
from saccade.bench.hopper_targets import HOPPER_TARGETS
from saccade.bench.linear_targets import LINEAR_TARGETS
from saccade.bench.paged_targets import PAGED_TARGETS
from saccade.bench.portable_targets import PORTABLE_TARGETS

GPU_TARGETS = (*PORTABLE_TARGETS, *LINEAR_TARGETS, *PAGED_TARGETS, *HOPPER_TARGETS)
TARGETS = (*CPU_TARGETS, *GPU_TARGETS)

"""Catalogue: which calls the kernels are compiled for, so that each default config is seen once.

All widths meet the plain and the causal case; what else can be combined does so at width 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from saccade.kernel_check.calls import (
    KERNELS,
    LONG_CHUNK,
    MASKS,
    PASSES,
    SHORT,
    Call,
    KernelCall,
    LinearCall,
    PagedCall,
    call_of,
)
from saccade.runtime.spec import KernelConfig

NAN_SAFE = ("backward_keys, NaN-safe", "backward_shared, NaN-safe")
ORDERED = ("forward", "backward_keys", "backward_queries")
ALL = (*ORDERED, "backward_shared")
LINEAR = ("linear_output", *PASSES["linear backward"])


class Job(NamedTuple):
    """Kernels to compile: some of those that a pass of a call starts."""

    architecture: str
    call: Call
    which: str  # one of calls.PASSES
    kernels: tuple[str, ...]
    config: KernelConfig | None = None  # None: the default of each kernel

    def plain(self) -> list[Any]:
        """The job as JSON holds it."""
        return [*self[:4], None if self.config is None else self.config.numbers()]

    @staticmethod
    def of_plain(plain: Sequence[Any]) -> Job:
        """The inverse of `plain`."""
        architecture, fields, which, kernels, numbers = plain
        config = None if numbers is None else KernelConfig.of_numbers(numbers)
        return Job(architecture, call_of(which, fields), which, tuple(kernels), config)


Entry = tuple[Call, tuple[str, ...]]
"""A call, and the kernels of it that are compiled."""

HOPPER_FORMS = ("hopper_backward", "hopper_backward, ordered", "hopper_backward, in key order")
HOPPER: tuple[Entry, ...] = (
    *(
        (KernelCall(dim, mask=mask), PASSES["hopper"])
        for dim in (64, 128, 256)
        for mask in MASKS[:2]
    ),
    *((KernelCall(64, mask=mask, length=2 * SHORT), PASSES["hopper"]) for mask in MASKS[:2]),
    (KernelCall(128, mask="causal", length=2 * SHORT), PASSES["hopper"]),
    (KernelCall(96), PASSES["hopper"]),
    (KernelCall(192, mask="causal"), PASSES["hopper"]),
    (KernelCall(192, mask="causal", value_dim=128), PASSES["hopper"]),
    (KernelCall(128, "fp16", "window"), PASSES["hopper"]),
    (KernelCall(128, mask="documents"), PASSES["hopper"]),
    (KernelCall(128, mask="blocks"), PASSES["hopper"]),
    (KernelCall(128, mask="causal", score="softcap"), PASSES["hopper"]),
    (KernelCall(128, mask="causal", packed=True), PASSES["hopper"]),
    *((KernelCall(dim, mask=mask), HOPPER_FORMS) for dim in (64, 128) for mask in MASKS[:2]),
    (KernelCall(128, "fp16", "window"), (HOPPER_FORMS[0], HOPPER_FORMS[2])),
    (KernelCall(128, mask="documents"), HOPPER_FORMS[:1]),
    (KernelCall(128, mask="blocks"), HOPPER_FORMS[:1]),
    (KernelCall(128, mask="causal", score="softcap"), HOPPER_FORMS[:1]),
    (KernelCall(128, mask="causal", packed=True), PASSES["hopper_shared"]),
    *((KernelCall(256, mask=mask), PASSES["hopper_apart"]) for mask in MASKS[:2]),
    (KernelCall(256, mask="causal", score="softcap"), PASSES["hopper_apart"]),
    (KernelCall(256, mask="causal", packed=True), PASSES["hopper_apart"]),
    (KernelCall(192, mask="causal", value_dim=128), PASSES["hopper_apart"]),
    *(
        (PagedCall(dim, "bf16", "causal", size, query_len=LONG_CHUNK), ("hopper_pages_forward",))
        for dim, size in ((64, 64), (128, 64), (128, 16), (128, 256), (256, 64))
    ),
    (LinearCall(64), ("hopper_linear_forward", "hopper_linear_backward_keys")),
    (
        LinearCall(128),
        (
            "hopper_linear_forward",
            "hopper_linear_output_nan_safe",
            "hopper_linear_backward_queries",
            "hopper_linear_backward_keys",
            "hopper_linear_grad_key_nan_safe",
        ),
    ),
    (
        LinearCall(128, length=8192, batch=1, heads=2),
        ("hopper_linear_forward", "hopper_linear_collect", "hopper_linear_collect_queries"),
    ),
    (
        LinearCall(256),
        (
            "hopper_linear_wide_output",
            "hopper_linear_wide_grad_query",
            "hopper_linear_wide_grad_key",
            "hopper_linear_wide_grad_value",
        ),
    ),
)


def entries(architecture: str) -> list[Entry]:
    """The calls for an architecture. Turing has no products of bf16."""
    half = "fp16" if architecture == "sm_75" else "bf16"
    return [
        *(HOPPER if architecture == "sm_90" else ()),
        (KernelCall(64, half), ALL),
        (KernelCall(64, half, "causal"), (*ALL, *NAN_SAFE)),
        (KernelCall(128, half), (*ALL, "row_statistics")),
        (KernelCall(128, half, "causal"), (*ALL, *NAN_SAFE)),
        (KernelCall(128, half, "documents"), (*ALL, *NAN_SAFE, "find_tile_ranges")),
        (KernelCall(128, half, "blocks"), (*ORDERED, "list_blocks")),
        (KernelCall(128, half, "dense"), ("forward", "classify_pairs", "list_tiles")),
        (KernelCall(128, half, packed=True), (*ORDERED, "row_statistics")),
        (KernelCall(128, half, "causal", packed=True), ORDERED),
        (KernelCall(128, half, "documents", packed=True), ("forward", "find_tile_ranges")),
        (KernelCall(128, half, score="softcap"), ORDERED),
        (KernelCall(128, half, score="bias"), ("backward_bias",)),
        (KernelCall(128, half, dropout_p=0.1), ALL),
        (KernelCall(256, half), ALL),
        (KernelCall(256, half, "causal"), (*ALL, *NAN_SAFE)),
        (KernelCall(64, "fp32"), ORDERED),
        (KernelCall(128, "fp32", "causal"), (*ORDERED, NAN_SAFE[0])),
        *paged_entries(half),
        *linear_entries(half),
    ]


def paged_entries(half: str) -> list[Entry]:
    """The calls over pages: short chunks are split, long ones take the dense kernel."""
    chunk, few = LONG_CHUNK, 20
    return [
        (PagedCall(64, half), ("pages", "merge_partials")),
        (PagedCall(128, half), ("pages", "merge_partials")),
        (PagedCall(128, half, "causal", 16), ("pages", "plan_pages")),
        (PagedCall(128, half, pages="fp8"), ("pages",)),
        (PagedCall(256, half), ("pages", "merge_partials")),
        (PagedCall(64, half, "causal", query_len=few), ("pages",)),
        (PagedCall(128, half, "causal", query_len=few), ("pages", "merge_partials")),
        (PagedCall(128, half, "causal", 16, query_len=few), ("pages",)),
        (PagedCall(128, half, "causal", pages="int8", query_len=chunk), ("pages",)),
        (PagedCall(128, half, "tree", query_len=chunk), ("pages", "plan_pages")),
        (PagedCall(256, half, "causal", query_len=few), ("pages",)),
        *(
            (PagedCall(dim, half, "causal", size, query_len=chunk), ("pages_forward",))
            for dim, size in ((64, 64), (128, 64), (128, 16), (256, 64))
        ),
        (PagedCall(64, "fp32", "causal"), ("pages",)),
        (PagedCall(128, "fp32", "causal", query_len=few), ("pages",)),
        (PagedCall(128, half), ("write_pages",)),
        (PagedCall(128, half, pages="fp8"), ("write_pages",)),
    ]


def linear_entries(half: str) -> list[Entry]:
    """The calls of linear attention."""
    some = ("linear_output", "linear_grad_key")  # they take the most registers
    return [
        (LinearCall(64, half), some),
        (LinearCall(128, half), (*LINEAR, "linear_step")),
        # So few heads that segments run side by side.
        (LinearCall(128, half, length=8192, batch=1, heads=2), ("linear_collect", "linear_chain")),
        (LinearCall(128, half, decay=True), some),
        (LinearCall(128, half, group=4), ("linear_grad_key",)),
        (LinearCall(256, half), (*some, "linear_grad_query", "linear_count")),
        (LinearCall(64, "fp32"), some[:1]),
    ]


def jobs(
    architectures: tuple[str, ...], kernels: str = "*", head_dim: int | None = None
) -> list[Job]:
    """What to compile for some architectures: kernels whose names a glob fits, of one head_dim.

    Raises:
        ValueError: for a glob that no kernel's name fits, or a head_dim that no call has.
    """
    catalogue = [(name, *entry) for name in architectures for entry in entries(name)]
    dims = sorted({call.head_dim for _, call, _ in catalogue})
    if head_dim is not None and head_dim not in dims:
        raise ValueError(f"--head-dim: got {head_dim}, takes {', '.join(map(str, dims))}")
    if not any(fnmatchcase(kernel, kernels) for kernel in KERNELS):
        raise ValueError(f"no kernel is named {kernels!r}; there are {'; '.join(KERNELS)}")
    found = [
        Job(
            name, call, which, tuple(k for k in of_call if k in of_pass and fnmatchcase(k, kernels))
        )
        for name, call, of_call in catalogue
        for which, of_pass in PASSES.items()
        if head_dim in (None, call.head_dim)
    ]
    return [job for job in found if job.kernels]

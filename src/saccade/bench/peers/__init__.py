"""Peers: everything that computes attention and can be timed, or says why it cannot.

Packages that may be installed beside PyTorch are here; PyTorch's own attention and Saccade's have
files of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saccade.bench.case import BenchCase, Tensors
from saccade.bench.cases import matching
from saccade.bench.timing import Runnable

Layout = Literal["heads first", "rows first", "packed"]


class Call(NamedTuple):
    """A peer's call for one case, ready to run.

    Attributes:
        run: the output from query, key and value, and what else a case has.
        layout: how the peer lays out its tensors: "heads first" [batch, heads, length, dim],
            "rows first" [batch, length, heads, dim], or "packed" [tokens, heads, dim].
        around: what must be switched on around the call; entered outside of what is timed.
    """

    run: Callable[..., Tensor]
    layout: Layout = "heads first"
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Peer:
    """An implementation of attention, or a yardstick, that takes its turn in a run.

    Attributes:
        who: the name in tables and result files.
        about: a description in one line.
        prepare: a `Call` for a case on a device, or the reason why there is none.
        by_default: whether it takes part when no peer is named.
        compiles: whether a first call compiles for its shapes.
        attention: the kinds of cases that it serves: "softmax", "linear", "paged", "delta", "fp8".
        computes_attention: whether its results are checked; a mere yardstick has none.
        moves: bytes that a call reads and writes, where these are not the case's own.
    """

    who: str
    about: str
    prepare: Callable[[BenchCase, torch.device], Call | str]
    by_default: bool = True
    compiles: bool = False
    attention: tuple[str, ...] = ("softmax",)
    computes_attention: bool = True
    moves: int | None = None


def all_peers() -> list[Peer]:
    """Every peer, in the order of the tables' columns."""
    from saccade.bench import peers
    from saccade.bench.peers import fp8, ours, pytorch

    return [
        *ours.peers(), *pytorch.peers(), *peers.peers(), *pytorch.yardsticks(),
        *ours.paged_peers(), *fp8.peers(),
    ]  # fmt: skip


def choose_peers(patterns: Sequence[str], peers: Sequence[Peer]) -> list[Peer]:
    """The peers that names and globs name; without any, those of a normal run.

    Raises:
        ValueError: for a name or glob that no peer has, listing those that exist.
    """
    if not patterns:
        return [peer for peer in peers if peer.by_default]
    names = [peer.who for peer in peers]
    chosen = {name for pattern in patterns for name in matching("peer", pattern, names)}
    return [peer for peer in peers if peer.who in chosen]


def to_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor [batch, heads, length, ...], contiguous in a peer's own layout."""
    if layout == "heads first":
        return tensor.contiguous()
    tensor = tensor.transpose(1, 2)
    return (tensor.flatten(0, 1) if layout == "packed" else tensor).contiguous()


def from_layout(tensor: Tensor, layout: Layout, batch: int) -> Tensor:
    """The tensor again as [batch, heads, length, ...]."""
    if layout == "heads first":
        return tensor
    if layout == "packed":
        tensor = tensor.unflatten(0, (batch, -1))
    return tensor.transpose(1, 2)


def in_layout(call: Call, tensors: Tensors, *, gradients: bool) -> tuple[list[Tensor], Tensor]:
    """All that the peer takes, as it wants it, and the gradient of its output."""
    inputs = (to_layout(tensor, call.layout) for tensor in tensors.inputs)
    leaves = [tensor.detach().requires_grad_(gradients) for tensor in inputs]
    return leaves, to_layout(tensors.grad_output, call.layout)


def runnable(call: Call, which_pass: str, tensors: Tensors) -> Runnable:
    """A pass of a peer's call, ready to be timed.

    "forward" and "decode" run without gradients; "backward" runs the forward pass once, now, and
    keeps what it saved. The passes of the host's time do without `torch.no_grad`, as users do.
    """
    records = which_pass not in ("forward", "decode", "host")
    leaves, grad_output = in_layout(call, tensors, gradients=records)

    def forward() -> Tensor:
        return call.run(*leaves)

    def forward_without_gradients() -> Tensor:
        with torch.no_grad():
            return call.run(*leaves)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call.run(*leaves), leaves, grad_output)

    if which_pass == "backward":
        with call.around():
            output = call.run(*leaves)
        return Runnable(
            lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True), call.around
        )
    if which_pass.endswith("forward+backward"):
        return Runnable(both, call.around)
    measures_host = which_pass.startswith("host")
    return Runnable(forward if measures_host else forward_without_gradients, call.around)


Maker = Callable[[Any, BenchCase, torch.device], Call | str]


def peers() -> list[Peer]:
    """Each package that is known here, whether it is installed or not."""
    return [
        _peer("flash_attn", "flash_attn", "FlashAttention-2", flash_attn),
        _peer("flash_attn_3", "flash_attn_interface", "FlashAttention-3", flash_attn),
        _peer("xformers", "xformers.ops", "memory_efficient_attention", _xformers),
        _peer("flash_attention_triton", "flash_attention_triton", "FlashAttention-2", _triton),
        _peer("fla", "fla.ops", FLA, _fla, "linear", "delta"),
    ]


def _peer(who: str, module_name: str, about: str, make: Maker, *attention: str) -> Peer:
    """attention: the kinds of cases that it serves; softmax alone where none is named."""
    package = module_name.split(".")[0]
    kinds = attention or ("softmax",)

    def prepare(case: BenchCase, device: torch.device) -> Call | str:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == package
            return "not installed" if missing else f"import fails: {error}"
        if device.type != "cuda":
            return "it takes tensors on a GPU"
        if kinds == ("softmax",) and case.torch_dtype not in (torch.float16, torch.bfloat16):
            return f"it takes float16 and bfloat16, not {case.dtype}"
        return make(module, case, device)

    installed = importlib.util.find_spec(package) is not None
    about = f"{about}, by the package {package}"
    return Peer(who, about, prepare, by_default=installed, attention=kinds)


def flash_attn(module: Any, case: BenchCase, device: torch.device) -> Call | str:
    """FlashAttention-2 and -3, whose functions take the same arguments."""
    kind, documents = case.visibility.kind, case.visibility.documents
    if kind not in ("full", "causal", "window") or (documents and not case.packed):
        return f"it has no {case.mask} mask"
    masked: dict[str, Any] = {
        "causal": kind != "full",
        "window_size": (case.visibility.size, 0) if kind == "window" else (-1, -1),
    }
    if case.packed:
        offsets, longest = case.visibility.offsets(device), max(documents)

        def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return _first(
                module.flash_attn_varlen_func(
                    query, key, value, offsets, offsets, longest, longest, **masked
                )
            )

        return Call(packed, "packed")

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _first(module.flash_attn_func(query, key, value, **masked))

    return Call(run, "rows first")


def _xformers(module: Any, case: BenchCase, device: torch.device) -> Call | str:
    if case.query_heads != case.kv_heads:
        return "its 4-D call takes equal numbers of query and kv heads"
    if case.visibility.needs_table:
        return f"not set up here for a {case.mask} mask"
    bias = module.LowerTriangularMask() if case.visibility.kind == "causal" else None

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return module.memory_efficient_attention(query, key, value, attn_bias=bias)

    return Call(run, "rows first")


def _triton(module: Any, case: BenchCase, device: torch.device) -> Call | str:
    if case.visibility.kind != "causal" or case.visibility.needs_table:
        return f"its mask is always causal, not {case.mask}"
    if case.query_heads != case.kv_heads:
        return "it takes equal numbers of query and kv heads"
    # [batch, heads, length, dim]; other dtypes than float16 it converts, there and back.
    return Call(module.flash_attention_v2)


def _first(result: Any) -> Tensor:
    """Some versions give the output alone, others a tuple that begins with it."""
    return result[0] if isinstance(result, tuple) else result


FLA = "chunk_linear_attn, elu + 1 outside, and gated delta rules, tuned quickly"
FLA_KERNELS = ("fla.ops.common.chunk_h", "fla.ops.common.chunk_o", "fla.ops.utils.cumsum")
WARM_MS, TIMED_MS = 3, 15  # of each config; Triton's own are 25 and 100
MOST_COMPILERS = 16


def _fla(module: Any, case: BenchCase, device: torch.device) -> Call | str:
    """chunk_linear_attn with its normaliser; features are taken outside, as it has none. Of the
    gated delta rule its calls by name.

    module: fla.ops.
    """
    if case.attention == "delta":
        from saccade.bench.peers import delta

        return delta.of_fla(module, case, device)
    if case.decodes:
        return "chunk_linear_attn goes on from no state in place"
    for name in FLA_KERNELS:
        tune_quickly(importlib.import_module(name), is_plausible)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = (torch.nn.functional.elu(rows) + 1 for rows in (query, key))
        return module.chunk_linear_attn(query, key, value, scale=1.0, normalize=True)[0]

    return Call(run, "rows first")


def tune_quickly(module: ModuleType, plausible: Callable[[Any], bool] | None = None) -> None:
    """Have Triton tune a module's kernels among plausible configs, which are compiled side by side;
    among all where nothing says what is plausible."""
    for kernel in [*vars(module).values()]:
        while kernel is not None and not hasattr(kernel, "prune_configs"):
            kernel = getattr(kernel, "fn", None)
        if kernel is None or isinstance(kernel, type):  # modules import classes of tuners, too
            continue
        if "prune_configs" not in vars(kernel):
            _tune_quickly(kernel, plausible)


def _tune_quickly(tuner: Any, plausible: Callable[[Any], bool] | None) -> None:
    from triton.testing import do_bench

    prune = tuner.prune_configs

    def pruned(meta: dict[str, Any]) -> list[Any]:
        configs = prune(meta)
        kept = [*filter(plausible, configs)] if plausible else configs
        kept = kept or configs
        named = dict(tuner.nargs)

        def compile_one(config: Any) -> None:
            options = {**named, **meta, **config.all_kwargs(), "warmup": True}
            try:
                tuner.fn.run(**options)
            except Exception:  # it will fail again where it is timed, which Triton expects
                return

        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_COMPILERS)) as pool:
            list(pool.map(compile_one, kept))
        return kept

    def bench(call: Any, quantiles: Any) -> Any:
        return do_bench(call, warmup=WARM_MS, rep=TIMED_MS, quantiles=quantiles)

    tuner.prune_configs, tuner.do_bench = pruned, bench


def is_plausible(config: Any) -> bool:
    """Whether a config may win on a GPU of today: not the small tiles, and no single warp."""
    tiles = [config.kwargs[name] for name in ("BK", "BV") if name in config.kwargs]
    rows = config.kwargs.get("BT")
    if rows is not None:  # a sum along the rows
        return rows >= 64 and config.num_warps >= 4 and config.num_stages in (1, 3)
    if tiles and config.num_stages == 4:
        return False
    return min(tiles, default=64) >= 64 and config.num_warps > 1

"""The backend for vLLM, against what vLLM 0.33 asks of one.

vLLM itself is too large to install here, so the classes and calls that the backend meets stand in:
their names and arguments are those of vLLM 0.33.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

import saccade
from saccade.integrations import vllm as ours
from saccade.masks import Mask

M = TypeVar("M")
OURS = "saccade.integrations.vllm.backend"


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...
    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...
    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...


class AttentionMetadata:
    pass


class AttentionMetadataBuilder(ABC, Generic[M]):
    @abstractmethod
    def __init__(
        self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any
    ) -> None: ...
    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any: ...


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def __init__(self, num_heads: int, head_size: int, scale: float) -> None: ...
    @abstractmethod
    def forward(self, *arguments: Any) -> Tensor: ...


def modules() -> dict[str, ModuleType]:
    package, envs = ModuleType("vllm"), ModuleType("vllm.envs")
    backend, registry = ModuleType("vllm.v1.attention.backend"), ModuleType(ours.REGISTRY)
    vars(envs).update(VLLM_BATCH_INVARIANT=False)
    vars(package).update(envs=envs)
    vars(backend).update(
        {kind.__name__: kind for kind in (
            AttentionType, AttentionCGSupport, AttentionBackend, AttentionMetadata,
            AttentionMetadataBuilder, AttentionImpl,
        )}
    )  # fmt: skip
    members: dict[str, str] = {}
    vars(registry).update(
        AttentionBackendEnum=SimpleNamespace(__members__=members),
        register_backend=members.__setitem__,
    )
    return {module.__name__: module for module in (package, envs, backend, registry)}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield importlib.import_module(OURS)
    sys.modules.pop(OURS, None)


def test_the_registry_learns_of_the_backend_once(vllm: ModuleType) -> None:
    ours.register()
    ours.register()
    known = sys.modules[ours.REGISTRY].AttentionBackendEnum.__members__
    assert known == {"SACCADE": f"{OURS}.Backend"}
    assert vllm.Backend.get_name() == ours.NAME


def test_other_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for stand_in in (None, ModuleType(ours.REGISTRY)):
        monkeypatch.setitem(sys.modules, ours.REGISTRY, stand_in)
        with pytest.raises(ImportError, match=r"takes vLLM 0\.33"):
            ours.register()


def test_the_backend_has_all_that_is_asked(vllm: ModuleType) -> None:
    backend = vllm.Backend
    assert not backend.__abstractmethods__
    assert not backend.get_impl_cls().__abstractmethods__
    assert not backend.get_builder_cls().__abstractmethods__
    assert [backend.supports_block_size(size) for size in (None, 16, 1024, 2048)] == [1, 1, 1, 0]
    assert backend.supports_sink() and backend.supports_sliding_window()
    assert backend.supports_non_causal() and not backend.forward_includes_kv_cache_update
    assert [backend.supports_head_size(size) for size in (64, 512, 66, 576)] == [1, 1, 0, 0]


HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
NEW, LENS = [1, 3, 5], [9, 3, 6]  # a request that decodes, a prompt, the rest of a prompt


def step(causal: Any = True) -> SimpleNamespace:
    table = torch.tensor([[7, 2, 5], [0, 9, 9], [3, 1, 9]], dtype=torch.int32)
    starts = torch.tensor([0, *NEW]).cumsum(0).int()
    slots = [
        int(table[r, row // BLOCK]) * BLOCK + row % BLOCK
        for r in range(3)
        for row in range(LENS[r] - NEW[r], LENS[r])
    ]
    return SimpleNamespace(
        num_actual_tokens=sum(NEW), max_query_len=max(NEW), query_start_loc=starts, causal=causal,
        seq_lens=torch.tensor(LENS, dtype=torch.int32), block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )  # fmt: skip


HOW: list[dict[str, Any]] = [
    {},
    {"sliding_window": 4},
    {"logits_soft_cap": 2.0},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "logits_soft_cap": 3.0},
    {"sinks": torch.tensor([0.1, 1.0, -1.0, 0.5])},
]


def expected(how: dict[str, Any], causal: bool) -> tuple[Mask | None, Any]:
    window = how.get("sliding_window")
    mask = saccade.masks.causal() if causal else None
    if window is not None:
        mask = saccade.masks.window(window - 1, 0 if causal else window - 1)
    parts = []
    if "logits_soft_cap" in how:
        parts.append(saccade.scores.softcap(how["logits_soft_cap"]))
    if "alibi_slopes" in how:
        parts.append(saccade.scores.alibi(torch.tensor(how["alibi_slopes"])))
    score = None
    for part in parts:
        score = part if score is None else score >> part
    return mask, score


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how) or "plain")
def test_a_mixed_step(vllm: ModuleType, how: dict[str, Any], causal: bool) -> None:
    torch.manual_seed(0)
    impl = vllm.Impl(HEADS, DIM, 0.3, KV_HEADS, **how)
    builder = vllm.Builder(None, ["layer"], None, torch.device("cpu"))
    keys = [torch.randn(n, KV_HEADS, DIM) for n in LENS]
    values = [torch.randn(n, KV_HEADS, DIM) for n in LENS]
    cache = torch.full((10, KV_HEADS, BLOCK, 2 * DIM), torch.nan)
    common = step(causal)
    for r, table in enumerate(common.block_table_tensor):  # what earlier steps wrote
        for row in range(LENS[r] - NEW[r]):
            place = int(table[row // BLOCK]), slice(None), row % BLOCK
            cache[place] = torch.cat((keys[r][row], values[r][row]), -1)
    query = torch.randn(sum(NEW) + 2, HEADS, DIM)  # two rows of padding
    new = [
        torch.cat([rows[-n:] for rows, n in zip(side, NEW, strict=True)]) for side in (keys, values)
    ]
    new = [torch.cat((rows, torch.full((2, KV_HEADS, DIM), torch.nan))) for rows in new]
    impl.do_kv_cache_update(None, *new, cache, common.slot_mapping)
    output = torch.full((sum(NEW) + 2, HEADS * DIM), 7.0)
    metadata = builder.build(0, common)
    found = impl.forward(None, query, *new, cache, metadata, output)
    assert found is output and (output[-2:] == 7.0).all()
    mask, score = expected(how, causal)
    for r, rows in enumerate(query[: sum(NEW)].split(NEW)):
        wanted = saccade.attention(
            *(side.transpose(0, 1)[None].double() for side in (rows, keys[r], values[r])),
            mask=mask, score=score, scale=0.3,
            sinks=how["sinks"].double() if "sinks" in how else None,
        )  # fmt: skip
        mine = output[: sum(NEW)].split(NEW)[r].unflatten(-1, (HEADS, DIM))
        torch.testing.assert_close(mine.double(), wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


# ---- caches of eight bits ------------------------------------------------------------------------

EIGHT_BITS = {
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_per_token_head": torch.float8_e4m3fn, "int8_per_token_head": torch.int8,
}  # fmt: skip
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.05))


def in_eight_bits(rows: Tensor, kind: str, scale: Tensor) -> Tensor:
    """What a cache makes of keys or values: numbers of eight bits times a scale."""
    dtype, largest = EIGHT_BITS[kind], 448.0
    if kind.endswith("per_token_head"):
        largest = 127.0 if dtype == torch.int8 else largest
        scale = rows.abs().amax(-1, keepdim=True) / largest
    units = (rows / scale).clamp(-largest, largest)
    return (units.round() if dtype == torch.int8 else units).to(dtype).float() * scale


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_caches_of_eight_bits(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, implementation: str
) -> None:
    if implementation == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("takes Triton's interpreter")
    call = saccade.attention_paged
    monkeypatch.setattr(
        saccade, "attention_paged", lambda *a, **k: call(*a, **k, implementation=implementation)
    )
    torch.manual_seed(0)
    assert kind in vllm.Backend.supported_kv_cache_dtypes
    impl = vllm.Impl(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype=kind)
    keys, values = ([torch.randn(n, KV_HEADS, DIM) for n in LENS] for _ in "kv")
    keys[0][0, 0, 0], values[0][0, 0, 0] = (
        100.0,
        -100.0,
    )  # beyond what fp8 with LAYER's scales holds
    beside = 4 if kind.endswith("per_token_head") else 0
    dtype = torch.int8 if EIGHT_BITS[kind] == torch.int8 else torch.uint8  # as vLLM allocates
    cache = torch.full((10, KV_HEADS, BLOCK, 2 * (DIM + beside)), -1, dtype=torch.int8).view(dtype)
    common = step()
    for old in (True, False):  # earlier steps, then this one
        rows, slots = [list[Tensor](), list[Tensor]()], list[int]()
        for r, table in enumerate(common.block_table_tensor.tolist()):
            first, last = (0, LENS[r] - NEW[r]) if old else (LENS[r] - NEW[r], LENS[r])
            for side, of_side in zip(rows, (keys, values), strict=True):
                side.append(of_side[r][first:last])
            slots += [table[n // BLOCK] * BLOCK + n % BLOCK for n in range(first, last)]
        new = [torch.cat(side) for side in rows]
        impl.do_kv_cache_update(LAYER, *new, cache, torch.tensor(slots))
    query, output = torch.randn(sum(NEW), HEADS, DIM), torch.empty(sum(NEW), HEADS * DIM)
    metadata = vllm.Builder(None, ["layer"], None, torch.device("cpu")).build(0, common)
    impl.forward(LAYER, query, *new, cache, metadata, output)
    for r, mine in enumerate(output.split(NEW)):
        key = in_eight_bits(keys[r], kind, LAYER._k_scale)
        value = in_eight_bits(values[r], kind, LAYER._v_scale)
        wanted = saccade.attention(
            *(side.transpose(0, 1)[None].double() for side in (query.split(NEW)[r], key, value)),
            causal=True, scale=0.3,
        )  # fmt: skip
        found = mine.unflatten(-1, (HEADS, DIM)).double()
        torch.testing.assert_close(found, wanted[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


# ---- what is declared ----------------------------------------------------------------------------


def test_batch_invariance_reaches_the_call(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[bool]()
    call = saccade.attention_paged

    def noted(*tensors: Any, **options: Any) -> Tensor:
        asked.append(options["batch_invariant"])
        return call(*tensors, **options)

    monkeypatch.setattr(saccade, "attention_paged", noted)
    assert vllm.Backend.supports_batch_invariance()
    metadata = vllm.Builder(None, [], None, torch.device("cpu")).build(0, step())
    rows = torch.zeros(sum(NEW), HEADS, DIM)
    for wanted in (False, True):
        monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", wanted)
        impl = vllm.Impl(HEADS, DIM, 0.3, KV_HEADS)
        cache = torch.zeros(10, KV_HEADS, BLOCK, 2 * DIM)
        impl.forward(None, rows, rows, rows, cache, metadata, torch.empty(sum(NEW), HEADS * DIM))
    assert asked == [False, True]


def test_steps_that_only_decode_are_a_batch_and_may_be_graphs(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = vllm.Builder(None, [], None, torch.device("cpu"))
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    common = step()
    common.num_actual_tokens, common.max_query_len = 3, 1
    common.query_start_loc = torch.arange(4, dtype=torch.int32)
    common.seq_lens = torch.tensor([9, 3, 0], dtype=torch.int32)  # the last one is padding
    asked = list[Any]()
    call = saccade.attention_paged

    def noted(*tensors: Any, **options: Any) -> Tensor:
        asked.append((tuple(tensors[0].shape), options["cu_seqlens_q"]))
        return call(*tensors, **options)

    monkeypatch.setattr(saccade, "attention_paged", noted)
    torch.manual_seed(0)
    impl, cache = vllm.Impl(HEADS, DIM, 0.3, KV_HEADS), torch.randn(10, KV_HEADS, BLOCK, 2 * DIM)
    rows, outputs = torch.randn(3, HEADS, DIM), torch.empty(2, 3, HEADS * DIM)
    metadata = builder.build(0, common)
    impl.forward(None, rows, rows, rows, cache, metadata, outputs[0])
    assert asked == [((3, HEADS, 1, DIM), None)]  # as `Engine` captures its steps
    metadata.decodes = False
    impl.forward(None, rows, rows, rows, cache, metadata, outputs[1])
    torch.testing.assert_close(*outputs)
    assert (outputs[:, 2] == 0).all()
    common.num_actual_tokens = 2  # fewer rows than requests: a request has none
    assert not builder.build(0, common).decodes


def test_what_is_not_served_is_declared_so(vllm: ModuleType) -> None:
    backend = vllm.Backend
    assert not backend.supports_mm_prefix()
    assert not backend.supports_alibi_sqrt()
    assert not backend.supports_per_head_quant_scales()
    assert not vllm.Impl.can_return_lse_for_decode  # of decode context parallelism
    assert not vllm.Impl.supports_quant_query_input
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=2))
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size: got 2, takes 1"):
        vllm.Builder(None, [], config, torch.device("cpu"))
    common = step()
    common.mm_req_doc_ranges = {0: [(1, 4)]}
    with pytest.raises(NotImplementedError, match="mm_req_doc_ranges: got some"):
        vllm.Builder(None, [], None, torch.device("cpu")).build(0, common)


def test_while_memory_is_measured_nothing_is_computed(vllm: ModuleType) -> None:
    output = torch.full((3, HEADS * DIM), torch.nan)
    rows = torch.zeros(3, HEADS, DIM)
    impl = vllm.Impl(HEADS, DIM, 0.3, KV_HEADS)
    impl.forward(None, rows, rows, rows, torch.empty(0), None, output)
    assert not output.any()


def test_what_is_not_served_is_refused(vllm: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="attn_type: got"):
        vllm.Impl(HEADS, DIM, 0.3, attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype: got fp8_e5m2, takes auto"):
        vllm.Impl(HEADS, DIM, 0.3, kv_cache_dtype="fp8_e5m2")
    builder = vllm.Builder(None, [], None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="causal: got a tensor"):
        builder.build(0, step(causal=torch.ones(3).bool()))
    rows, scale = torch.zeros(3, HEADS, DIM), torch.ones(1)
    with pytest.raises(NotImplementedError, match="output_scale: got a tensor"):
        vllm.Impl(HEADS, DIM, 0.3).forward(None, rows, rows, rows, rows, None, rows, scale)

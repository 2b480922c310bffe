"""The public calls of linear attention: maps, steps, states, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

import saccade
from saccade import LinearState, feature_maps


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Dynamo does not trace through jaxtyping's checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def qkv(length: int = 12, heads: int = 2, dim: int = 8, dtype: Any = None) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(2, heads, length, dim, dtype=dtype) for _ in range(3)]


MAPS: dict[str, Any] = {
    "elu+1": "elu+1",
    "softmax": "softmax",
    "pair": ("relu", "exp"),
    "own": torch.nn.functional.softplus,
    "fourier": lambda: feature_maps.RandomFourierFeatures(8),
    "smoothed": lambda: feature_maps.SmoothedRandomFourierFeatures(8, smoothing=2.0),
    "generalized": lambda: feature_maps.GeneralizedRandomFeatures(8, 20),
    "favor": lambda: feature_maps.Favor(8, 12),
}


def made(name: str) -> Any:
    torch.manual_seed(1)
    found = MAPS[name]
    return found() if name in ("fourier", "smoothed", "generalized", "favor") else found


def in_pairs(features: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Normalised linear attention by its definition, from features in float64."""
    of_query, of_key = features
    scores = (of_query(query) @ of_key(key).mT).tril()
    return scores @ value / scores.sum(-1, keepdim=True)


def as_functions(one: Any) -> tuple[Any, Any]:
    named = {
        "elu+1": lambda x: torch.nn.functional.elu(x) + 1,
        "relu": torch.relu,
        "exp": torch.exp,
        "softmax": lambda x: x.softmax(-1),
    }
    pair = one if isinstance(one, tuple) else (one, one)
    return tuple(named.get(part, part) if isinstance(part, str) else part for part in pair)  # type: ignore[return-value]


def overlapping(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape whose entries lie one number apart."""
    strides = (1, *tensor.stride()[1:])
    return torch.zeros(tensor.numel() + len(tensor)).as_strided(tensor.shape, strides)


class TestFeatureMaps:
    @pytest.mark.parametrize("name", list(MAPS))
    def test_against_the_definition(self, name: str) -> None:
        feature_map, tensors = made(name), qkv(dtype=torch.float64)
        found = saccade.linear_attention(*tensors, feature_map=feature_map, eps=0.0)
        torch.testing.assert_close(found, in_pairs(as_functions(feature_map), *tensors))

    @pytest.mark.parametrize("name", list(MAPS))
    def test_gradcheck(self, name: str) -> None:
        feature_map = made(name)
        tensors = [rows[:1, :1, :4] for rows in qkv(dtype=torch.float64)]

        def function(*rows: Tensor) -> Tensor:
            return saccade.linear_attention(*rows, feature_map=feature_map, eps=0.1)

        assert torch.autograd.gradcheck(function, [rows.requires_grad_() for rows in tensors])

    @pytest.mark.parametrize("normalize", ["sum", "none"])
    @pytest.mark.parametrize("name", list(MAPS))
    def test_steps_go_on_where_a_call_ended(self, name: str, normalize: str) -> None:
        feature_map, (query, key, value) = made(name), qkv(dtype=torch.float64)
        options: dict[str, Any] = {"feature_map": feature_map, "normalize": normalize, "eps": 0.0}
        whole = saccade.linear_attention(query, key, value, **options)
        parts = [rows[:, :, :5] for rows in (query, key, value)]
        output, state = saccade.linear_attention(*parts, return_state=True, **options)
        outputs = [output]
        for rows in (slice(5, 6), slice(6, 7), slice(7, 12)):
            parts = [tensor[:, :, rows] for tensor in (query, key, value)]
            outputs.append(saccade.linear_attention_step(state, *parts, **options))
        torch.testing.assert_close(torch.cat(outputs, 2), whole)

    def test_packed_sequences_have_scales_of_their_own(self) -> None:
        feature_map = made("favor")
        query, key, value = (rows[0].transpose(0, 1) for rows in qkv(dtype=torch.float64))
        key = key * torch.linspace(0.1, 4, 12).double().view(-1, 1, 1)
        offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
        for normalize in ("sum", "none"):
            options: dict[str, Any] = {"feature_map": feature_map, "normalize": normalize}
            found, state = saccade.linear_attention_varlen(
                query, key, value, offsets, eps=0.0, return_state=True, **options
            )
            for b, rows in enumerate((slice(0, 5), slice(5, 5), slice(5, 12))):
                dense = [t[rows].transpose(0, 1)[None] for t in (query, key, value)]
                alone, last = saccade.linear_attention(
                    *dense, eps=0.0, return_state=True, **options
                )
                torch.testing.assert_close(found[rows], alone[0].transpose(0, 1))
                torch.testing.assert_close(state.kv[b], last.kv[0])
                assert state.log_scale is not None and last.log_scale is not None
                torch.testing.assert_close(state.log_scale[b], last.log_scale[0])

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("packed", [False, True])
    def test_favor_does_not_underflow(self, packed: bool, causal: bool) -> None:
        """The first rows see keys that are e^-100 of later ones; float16 holds e^-16."""
        feature_map = feature_maps.Favor(64)
        options: dict[str, Any] = {"feature_map": feature_map, "causal": causal}
        call: Any = saccade.linear_attention
        for dtype, std in ((torch.float32, 3), (torch.float32, 8), (torch.float16, 3)):
            torch.manual_seed(0)
            rows = [(torch.randn(1, 2, 256, 64) * s).to(dtype) for s in (std, std, 1)]
            if packed:
                call = saccade.linear_attention_varlen
                rows = [part[0].transpose(0, 1) for part in rows]
                options["cu_seqlens_q"] = torch.tensor([0, 100, 100, 256], dtype=torch.int32)
            exact = call(*(part.double() for part in rows), **options)
            error = (call(*rows, **options) - exact).norm(dim=-1) / exact.norm(dim=-1)
            assert float(error.max()) < max(2e-4, torch.finfo(dtype).eps)

    def test_favor_goes_on_from_any_state(self) -> None:
        """In parts, by steps, with decay, and with gradients of state and units: one call's."""
        feature_map = made("favor")
        query, key, value = (rows.requires_grad_() for rows in qkv(dtype=torch.float64))
        decay = -torch.rand(2, 2, 12, dtype=torch.float64)
        call: Any = saccade.linear_attention
        sums = torch.rand(2, 2, 12, 8), torch.rand(2, 2, 12), torch.tensor([[9.0, -40.0]] * 2)
        leaves = [query, key, value, *(part.double().requires_grad_() for part in sums)]
        options: dict[str, Any] = {"feature_map": feature_map, "return_state": True}
        first = LinearState(*leaves[3:])
        whole, last = call(query, key, value, decay=decay, initial_state=first, **options)
        outputs, state = [], first
        for rows in (slice(0, 5), slice(5, 12)):
            parts = [tensor[:, :, rows] for tensor in (query, key, value)]
            output, state = call(*parts, decay=decay[:, :, rows], initial_state=state, **options)
            outputs.append(output)
        factors = [as_functions(feature_map)[0](rows) for rows in (query, key)]
        decay_factor = decay.cumsum(-1)
        gap = (decay_factor.unsqueeze(-1) - decay_factor.unsqueeze(-2)).exp().tril()
        scores = factors[0] @ factors[1].mT * gap
        old = factors[0] * (decay_factor + leaves[5].unsqueeze(-1)).exp().unsqueeze(-1)
        total = scores.sum(-1, keepdim=True) + old @ leaves[4].unsqueeze(-1)
        wanted = (scores @ value + old @ leaves[3]) / total
        grad = torch.randn_like(wanted)
        truth = torch.autograd.grad(wanted, leaves, grad)
        for found in (whole, torch.cat(outputs, 2)):
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), truth)
        for one, other in zip(last, state, strict=True):
            torch.testing.assert_close(one, other)

    def test_autocast_leaves_exponents_exact(self) -> None:
        feature_map, tensors = made("favor"), qkv()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = saccade.linear_attention(*tensors, feature_map=feature_map)
        cast = [rows.bfloat16() for rows in tensors]
        assert torch.equal(found, saccade.linear_attention(*cast, feature_map=feature_map))

    def test_padded_keys_do_not_reach_a_map_or_its_scale(self) -> None:
        feature_map, (query, key, value) = made("favor"), qkv(dtype=torch.float64)
        lengths = torch.tensor([5, 12])
        nonfinite = key.clone()
        nonfinite[0, :, 5:] = torch.nan
        options: dict[str, Any] = {"feature_map": feature_map, "causal": False}
        nonfinite.requires_grad_()
        found = saccade.linear_attention(query, nonfinite, value, key_lengths=lengths, **options)
        short = saccade.linear_attention(query[:1], key[:1, :, :5], value[:1, :, :5], **options)
        torch.testing.assert_close(found[:1], short)
        (grad,) = torch.autograd.grad(found.sum(), nonfinite)
        assert bool(grad.isfinite().all()) and not bool(grad[0, :, 5:].any())


class TestStep:
    def test_a_step_is_the_call_bit_for_bit(self) -> None:
        query, key, value = qkv()
        before = [rows[:, :, :11] for rows in (query, key, value)]
        _, state = saccade.linear_attention(*before, return_state=True)
        now = [rows[:, :, 11:] for rows in (query, key, value)]
        output, last = saccade.linear_attention(*now, initial_state=state, return_state=True)
        stepped = saccade.linear_attention_step(state, *now)
        assert torch.equal(stepped, output)
        assert torch.equal(state.kv, last.kv) and torch.equal(state.key_sum, last.key_sum)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["elu+1", "favor"])
    def test_states_in_a_pool(self, name: str, dtype: torch.dtype) -> None:
        feature_map, (query, key, value) = made(name), qkv(3)
        decay = torch.tensor([-0.1, -0.2])
        features = 12 if name == "favor" else 8
        pool = LinearState(
            torch.rand(5, 2, features, 8).to(dtype), torch.rand(5, 2, features).to(dtype),
            torch.rand(5, 2) if name == "favor" else None,
        )  # fmt: skip
        picked = LinearState(*(None if rows is None else rows[[3, 1]] for rows in pool))  # type: ignore[arg-type]
        untouched = pool.clone()
        index = torch.tensor([3, 1], dtype=torch.int32)
        options: dict[str, Any] = {"feature_map": feature_map, "decay": decay}
        found = saccade.linear_attention_step(pool, query, key, value, state_index=index, **options)
        wanted, last = saccade.linear_attention(
            query, key, value, initial_state=picked, return_state=True, **options
        )
        torch.testing.assert_close(found, wanted)
        for rows, new, old in zip(pool, last, untouched, strict=True):
            if rows is not None and new is not None and old is not None:
                torch.testing.assert_close(rows[[3, 1]], new.to(rows.dtype), atol=1e-5, rtol=1e-2)
                assert torch.equal(rows[[0, 2, 4]], old[[0, 2, 4]])

    def test_compiles(self, unchecked_shapes: None) -> None:
        def function(kv: Tensor, key_sum: Tensor, *rows: Tensor) -> Tensor:
            return saccade.linear_attention_step(LinearState(kv, key_sum), *rows)

        sums = torch.rand(2, 2, 8, 8), torch.rand(2, 2, 8)
        theirs = [part.clone() for part in sums]
        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*theirs, *qkv(1)), function(*sums, *qkv(1)))
        torch.testing.assert_close(theirs, list(sums))

    def test_gradients_are_refused(self) -> None:
        state = LinearState(torch.rand(2, 2, 8, 8), torch.rand(2, 2, 8))
        rows = [tensor.requires_grad_() for tensor in qkv(1)]
        with pytest.raises(ValueError, match="initial_state and return_state"):
            saccade.linear_attention_step(state, *rows)
        with pytest.raises(ValueError, match="features that require gradients"):
            saccade.linear_attention_step(state, *qkv(1), feature_map=torch.nn.Linear(8, 8))
        with torch.no_grad():
            saccade.linear_attention_step(state, *rows)

    def test_vmap_is_refused(self) -> None:
        def step(kv: Tensor, key_sum: Tensor) -> Tensor:
            return saccade.linear_attention_step(LinearState(kv, key_sum), *qkv_of_one)

        qkv_of_one = qkv(1)
        with pytest.raises(NotImplementedError, match="linear_attention_step: got tensors under"):
            torch.func.vmap(step)(torch.rand(3, 2, 2, 8, 8), torch.rand(3, 2, 2, 8))


STATE = LinearState(torch.rand(2, 2, 8, 8), torch.rand(2, 2, 8))
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"feature_map": "elu"}, ValueError, "feature_map: got 'elu'"),
    ({"feature_map": 3}, TypeError, "feature_map: got int"),
    ({"feature_map": ("elu+1",)}, ValueError, "feature_map: got 1 maps"),
    ({"feature_map": lambda rows: rows.sum(2)}, ValueError, "feature_map: got"),
    ({"feature_map": (torch.relu, lambda rows: rows[..., :3])}, ValueError, "feature_map: got 3"),
    ({"feature_map": ("elu+1", feature_maps.Favor(8))}, ValueError, "ScaledMap"),
    ({"feature_map": feature_maps.Favor}, TypeError, "feature_map: got the class Favor"),
    ({"feature_map": feature_maps.Favor(9, 8)}, ValueError, "feature_map: got rows of 8 channels"),
    ({"feature_map": (feature_maps.Favor(8), feature_maps.Favor(8, 4))}, ValueError, "got 4 feat"),
    ({"feature_map": feature_maps.Favor(8), "initial_state": (1, 2)}, TypeError, "got tuple"),
    ({"normalize": "mean"}, ValueError, "normalize: got 'mean'"),
    ({"normalize": True}, TypeError, "normalize: got True, takes one of"),
    ({"eps": -1.0}, ValueError, "eps: got -1.0"),
    ({"eps": "small"}, TypeError, "eps: got 'small'"),
    ({"scale": float("inf")}, ValueError, "scale: got inf"),
    ({"causal": 1}, TypeError, "causal: got 1"),
    ({"align": "start"}, ValueError, "align: got 'start'"),
    ({"decay": 0.9}, TypeError, "decay: got float"),
    ({"decay": torch.tensor([0.9, 0.9])}, ValueError, "decay: got 0.8999"),
    ({"decay": torch.full((2,), torch.nan)}, ValueError, "decay: got nan"),
    ({"decay": torch.full((2,), -torch.inf)}, ValueError, "decay: got -inf"),
    ({"decay": -torch.ones(3)}, ValueError, "decay: got shape (3,)"),
    ({"decay": -torch.ones(2, dtype=torch.int32)}, TypeError, "decay: got torch.int32"),
    ({"key_lengths": torch.tensor([1, 13])}, ValueError, "key_lengths: got 1 to 13"),
    ({"key_lengths": torch.tensor([1])}, ValueError, "key_lengths: got shape (1,)"),
    ({"key_lengths": torch.tensor([1.0, 2.0])}, TypeError, "key_lengths: got torch.float32"),
    ({"initial_state": (1, 2)}, TypeError, "initial_state: got tuple"),
    ({"initial_state": LinearState(STATE.kv[:1], STATE.key_sum)}, ValueError, "initial_state.kv"),
    ({"initial_state": LinearState(STATE.kv, STATE.key_sum.int())}, TypeError, "key_sum"),
    ({"initial_state": LinearState(*STATE[:2], torch.zeros(2, 2))}, ValueError, "log_scale"),
    ({"return_state": 1}, TypeError, "return_state: got 1"),
    ({"implementation": "flash"}, ValueError, "implementation: got 'flash'"),
    ({"implementation": "hopper"}, NotImplementedError, "hopper: it takes bfloat16"),
    ({"implementation": "reference", "config": saccade.KernelConfig(kv_tile=8)},
     NotImplementedError, "reference: it has no tiles"),
    ({"config": 128}, TypeError, "config: got int"),
]  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize(("wrong", "error", "message"), REFUSALS, ids=range(len(REFUSALS)))
    def test_says_what_it_got(
        self, wrong: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error) as caught:
            saccade.linear_attention(*qkv(), **wrong)
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            (((2, 3, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "got 2 heads, takes a divisor of 3"),
            (((2, 2, 4, 8), (2, 2, 4, 8), (2, 3, 4, 8)), "key: got 2 heads"),
            (((2, 2, 4, 8), (1, 2, 4, 8), (2, 2, 4, 8)), "key: got batch 1"),
            (((2, 2, 4, 8), (2, 2, 4, 7), (2, 2, 4, 8)), "key: got head_dim 7"),
            (((2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 5, 8)), "value: got 5 rows"),
            (((2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "query: got shape"),
        ],
    )
    def test_shapes_that_do_not_fit(
        self, shapes: tuple[tuple[int, ...], ...], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            saccade.linear_attention(*(torch.zeros(shape) for shape in shapes))

    def test_steps(self) -> None:
        rows, index = qkv(1), torch.tensor([1, 0])
        with pytest.raises(ValueError, match="state_index: got an entry twice"):
            saccade.linear_attention_step(STATE, *rows, state_index=torch.tensor([1, 1]))
        with pytest.raises(ValueError, match="state_index: got 0 to 2"):
            saccade.linear_attention_step(STATE, *rows, state_index=torch.tensor([0, 2]))
        with pytest.raises(ValueError, match="state_index: got meta, takes state's cpu"):
            saccade.linear_attention_step(STATE, *rows, state_index=index.to("meta"))
        kv, key_sum = STATE[:2]
        for state, message in (
            (LinearState(kv, key_sum[:1]), "state.key_sum: got 1 entries, takes kv's 2"),
            (LinearState(kv[:1].expand_as(kv), key_sum), "state.kv: got an expanded tensor"),
            (LinearState(overlapping(kv), key_sum), r"state.kv: got strides .*memory of their own"),
            (LinearState(kv, overlapping(key_sum)), r"state.key_sum: got strides .*own"),
            (LinearState(kv[0], key_sum), "state.kv: got shape"),
            (LinearState(kv, key_sum), "state.log_scale: got None"),
        ):
            with pytest.raises(ValueError, match=message):
                saccade.linear_attention_step(
                    state, *rows, state_index=index, feature_map=feature_maps.Favor(8)
                )
        with pytest.raises(
            TypeError, match=r"state\.log_scale: got torch\.bfloat16, takes float32"
        ):
            units = torch.zeros(2, 2, dtype=torch.bfloat16)
            saccade.linear_attention_step(
                LinearState(kv, key_sum, units), *rows, feature_map=feature_maps.Favor(8)
            )
        for whole in (LinearState(kv.long(), key_sum), LinearState(kv, key_sum.long())):
            with pytest.raises(TypeError, match=r"got torch\.int64, takes a floating-point tensor"):
                saccade.linear_attention_step(whole, *rows)
        with pytest.raises(TypeError, match=r"state\.kv: got NoneType"):
            saccade.linear_attention_step(LinearState(None, key_sum), *rows, state_index=index)  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="in place"):
            saccade.linear_attention_step(STATE, *rows, implementation="reference")
        with pytest.raises(ValueError, match="tokens"):
            saccade.linear_attention_step(STATE, rows[0], *qkv(2)[1:])
        with pytest.raises(TypeError, match="cu_seqlens_q: got None"):
            saccade.linear_attention_varlen(*rows, None)  # type: ignore[arg-type]

    def test_signed_features_without_a_divisor_are_warned_of(self) -> None:
        with pytest.warns(UserWarning, match="normalize: got 'sum'"):
            saccade.linear_attention(*qkv(), feature_map="identity")
        saccade.linear_attention(*qkv(), feature_map="identity", normalize="abs", eps=1.0)

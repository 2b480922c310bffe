"""Decoding: a token from each row of logits, and text from tokens as they come.

Tokens are chosen on the device, by settings that lie there: nothing here reads a number, so that a
step can be a CUDA graph and the next one can start from tokens that the host has not seen.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

MOST_CHANGE = 1e30  # of a logit, finite: sums of several stay in float32's range
MOST_LOGPROBS = 20  # likeliest tokens whose log probabilities are given


class Traits(NamedTuple):
    """What choosing a token has to do beside taking the likeliest; of a batch, what any row asks.

    Attributes:
        drawn: a random number decides. cut: top_k or top_p. floored: min_p.
        penalised: tokens that came before count. biased: logit_bias. held: min_new_tokens.
        logged: log probabilities are wanted.
    """

    drawn: bool = False
    cut: bool = False
    floored: bool = False
    penalised: bool = False
    biased: bool = False
    held: bool = False
    logged: bool = False

    @staticmethod
    def of_any(several: Sequence[Traits]) -> Traits:
        """What any of them asks."""
        return Traits(*map(any, zip(*several, strict=True)))


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens; temperature 0 takes the likeliest one (greedy).

    The order is that of the arguments: penalties and biases change logits, then come the
    temperature and what cuts off.

    Args:
        repetition_penalty: logits of tokens that came before, the prompt's too, are divided by it
            where they are positive and multiplied where they are not.
        presence_penalty: is taken from logits of new tokens that came before.
        frequency_penalty: the same for each time that they came.
        logit_bias: what is added to logits, by token; -inf forbids one.
        min_new_tokens: until there are so many, tokens that end the request are not chosen.
        temperature: below 1 sharpens, above 1 flattens.
        top_k: only so many of the likeliest tokens (and what is as likely as the last of them).
            None: all.
        top_p: only the likeliest tokens that together hold this much of the probability.
        min_p: only tokens that have this much of the likeliest one's probability.
        seed: equal seeds draw equal numbers, whatever else the engine serves. 0 if it is not given,
            so that the same request draws the same text.
        logprobs: how many of the likeliest tokens are given with their log probabilities, by the
            logits as the model gave them, beside the chosen one's. None: not even that.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Sources: nucleus sampling (Holtzman et al. 2020), section 3.1, for top_p; CTRL (Keskar et al.
    2019), section 4.1, for repetition_penalty; min-p sampling (Nguyen et al. 2024), section 3.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=7)
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty"):  # fmt: skip
            check_real(name, getattr(self, name))
        if not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature: got {self.temperature}, takes 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, takes a number above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: got {self.min_p}, takes 0 to 1")
        if not 1 / MOST_CHANGE <= self.repetition_penalty <= MOST_CHANGE:
            got = self.repetition_penalty
            raise ValueError(
                f"repetition_penalty: got {got}, takes a positive number, {1 / MOST_CHANGE} to "
                f"{MOST_CHANGE}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_change(name, getattr(self, name))
        if self.top_k is not None:
            check_number("top_k", self.top_k, least=1)
        check_number("min_new_tokens", self.min_new_tokens, least=0)
        check_number("seed", self.seed, least=None)
        if self.logprobs is not None:
            check_number("logprobs", self.logprobs, least=0)
            if self.logprobs > MOST_LOGPROBS:
                raise ValueError(f"logprobs: got {self.logprobs}, takes at most {MOST_LOGPROBS}")
        _check_bias(self.logit_bias)

    @functools.cached_property
    def traits(self) -> Traits:
        """What choosing by it has to do."""
        drawn = self.temperature > 0
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return Traits(
            drawn=drawn,
            cut=drawn and (self.top_k is not None or self.top_p < 1),
            floored=drawn and self.min_p > 0,
            penalised=penalties != (1, 0, 0),
            biased=bool(self.logit_bias),
            held=self.min_new_tokens > 0,
            logged=self.logprobs is not None,
        )

    @functools.cached_property
    def key(self) -> int:
        """The seed as a key of random numbers, 64 bits with a sign; seeds of any size differ."""
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _check_bias(biases: object) -> None:
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias: got {type(biases).__name__}, takes numbers by token")
    for token, bias in biases.items():
        check_number("logit_bias", token, least=0)
        check_real("logit_bias", bias)
        if bias != -math.inf:
            _check_change("logit_bias", bias, " or -inf")


def _check_change(name: str, value: float, besides: str = "") -> None:
    """Refuse what would move logits out of float32."""
    if not abs(value) <= MOST_CHANGE:
        raise ValueError(
            f"{name}: got {value}, takes a finite number from {-MOST_CHANGE} to {MOST_CHANGE}"
            f"{besides}"
        )


def check_real(name: str, value: object) -> None:
    """Refuse what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a number")


def check_flag(name: str, value: object) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, takes True or False")


def check_number(name: str, value: object, *, least: int | None) -> None:
    """Refuse what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name}: got {value}, takes {least} or more")


# ---- rows and lanes ------------------------------------------------------------------------------


class RowSettings(NamedTuple):
    """Settings of the rows of a step, one number for each row, on the device.

    Attributes:
        lanes: where what came before is kept (`Lanes`).
        keys, counters: of random numbers; a request's counter is the number of its new tokens.
        top_k: as many as the vocabulary has where all are taken.
    """

    counters: Int[Tensor, " rows"]
    lanes: Int[Tensor, " rows"]
    keys: Int[Tensor, " rows"]
    top_k: Int[Tensor, " rows"]
    min_new_tokens: Int[Tensor, " rows"]
    temperature: Float[Tensor, " rows"]
    top_p: Float[Tensor, " rows"]
    min_p: Float[Tensor, " rows"]
    repetition_penalty: Float[Tensor, " rows"]
    presence_penalty: Float[Tensor, " rows"]
    frequency_penalty: Float[Tensor, " rows"]


class Lanes:
    """What the device keeps of each request that runs: its last token, and what came before.

    A request has one lane as long as it runs. Tables over the vocabulary are made when a request
    first asks for what needs them.

    Args:
        count: of lanes; one more takes what rows without a request give.
        vocabulary: tokens that there are.
    """

    def __init__(self, count: int, vocabulary: int, device: torch.device):
        self.spare, self.vocabulary, self.device = count, vocabulary, device
        self.last_tokens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self._tables: dict[str, Tensor] = {}

    def table(self, name: str, dtype: torch.dtype) -> Tensor:
        """A number for each lane and token: 0 until it is set."""
        found = self._tables.get(name)
        if found is None:
            shape = self.spare + 1, self.vocabulary
            with torch.inference_mode(False):  # it may change outside of that mode too
                found = torch.zeros(shape, dtype=dtype, device=self.device)
            self._tables[name] = found
        return found

    @property
    def counts(self) -> Int[Tensor, "lanes vocabulary"]:
        """How often each token is among a request's new ones."""
        return self.table("counts", torch.int32)

    @property
    def prompted(self) -> Tensor:
        """Whether each token is in a request's prompt."""
        return self.table("prompted", torch.bool)

    @property
    def biases(self) -> Float[Tensor, "lanes vocabulary"]:
        """What is added to logits."""
        return self.table("biases", torch.float32)

    @property
    def ends(self) -> Tensor:
        """Whether each token ends a request."""
        return self.table("ends", torch.bool)

    def make_tables(self, traits: Traits) -> None:
        """Make the tables that such rows need: a graph holds addresses."""
        if traits.penalised:
            _ = self.counts, self.prompted
        if traits.biased:
            _ = self.biases
        if traits.held:
            _ = self.ends

    @torch.inference_mode()
    def begin(
        self, lane: int, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int],
        ends: frozenset[int],
    ) -> None:  # fmt: skip
        """A request takes a lane."""
        traits = sampling.traits
        self.make_tables(traits)
        if traits.penalised:
            counts = self._numbers(generated).bincount(minlength=self.vocabulary)
            self.counts[lane] = counts
            self.prompted[lane] = False
            self.prompted[lane, self._numbers(prompt)] = True
        if "biases" in self._tables:  # a lane's last request may have had some
            self.biases[lane] = 0.0
        if traits.biased:
            biases = on_device(list(sampling.logit_bias.values()), self.biases.dtype, self.device)
            self.biases[lane, self._numbers(list(sampling.logit_bias))] = biases
        if traits.held:
            self.ends[lane] = False
            self.ends[lane, self._numbers(sorted(ends))] = True

    def _numbers(self, tokens: Sequence[int]) -> Tensor:
        return on_device(tokens, torch.int64, self.device)


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor; the host does not wait for what a GPU does before."""
    on_gpu = device.type == "cuda"
    found = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=on_gpu)
    return found.to(device, non_blocking=on_gpu)


# ---- choosing ------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """A token for each row, on the device; log probabilities where any row wants them.

    Attributes:
        tokens: -1 for a row whose largest logit is NaN or inf, or which may take no token at all:
            that is no distribution.
        logprobs: of the chosen token, then of the likeliest ones.
        likeliest: these, the likeliest first.
    """

    tokens: Int[Tensor, " rows"]
    logprobs: Float[Tensor, "rows one_more"] | None = None
    likeliest: Int[Tensor, "rows most"] | None = None


def choose(
    logits: Float[Tensor, "rows vocabulary"], rows: RowSettings, traits: Traits, lanes: Lanes
) -> Chosen:
    """One token for each row, which depends on that row and its settings only.

    Lanes keep the tokens. Nothing is read by the host.

    Args:
        traits: at least those of all rows.
    """
    finite = logits.amax(-1).isfinite()
    changed = _changed(logits, rows, traits, lanes)
    if changed is not logits:
        finite &= changed.amax(-1).isfinite()
    tokens = changed.argmax(-1)
    if traits.drawn:
        drawn = draw(changed, rows, traits, uniform(rows.keys, rows.counters))
        tokens = torch.where(rows.temperature > 0, drawn, tokens)
    lanes.last_tokens.index_copy_(0, rows.lanes, tokens)
    if traits.penalised:
        places = rows.lanes * lanes.vocabulary + tokens
        ones = torch.ones_like(places, dtype=torch.int32)
        lanes.counts.view(-1).scatter_add_(0, places, ones)
    found = torch.where(finite, tokens, -1)
    if not traits.logged:
        return Chosen(found)
    logprobs = logits.double().log_softmax(-1)
    most = logprobs.topk(min(MOST_LOGPROBS, logits.shape[-1]), dim=-1)
    of_chosen = logprobs.gather(1, tokens.unsqueeze(1))
    return Chosen(found, torch.cat([of_chosen, most.values], 1), most.indices)


def _changed(
    logits: Float[Tensor, "rows vocabulary"], rows: RowSettings, traits: Traits, lanes: Lanes
) -> Float[Tensor, "rows vocabulary"]:
    """Logits under penalties and biases; rows without any keep theirs bit by bit."""
    if not (traits.penalised or traits.biased or traits.held):
        return logits
    found = logits if logits.dtype == torch.float64 else logits.float()
    if traits.penalised:
        counts = lanes.counts.index_select(0, rows.lanes)
        came = counts > 0
        repetition, presence, frequency = (
            each.to(found.dtype).unsqueeze(1)
            for each in (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
        )
        damped = torch.where(found > 0, found / repetition, found * repetition)
        found = torch.where(came | lanes.prompted.index_select(0, rows.lanes), damped, found)
        found = found - counts * frequency - came * presence
    if traits.biased:
        found = found + lanes.biases.index_select(0, rows.lanes)
    if traits.held:
        held = (rows.counters < rows.min_new_tokens).unsqueeze(1)
        found = found.masked_fill(lanes.ends.index_select(0, rows.lanes) & held, -torch.inf)
    return found


def draw(
    logits: Float[Tensor, "rows vocabulary"],
    rows: RowSettings,
    traits: Traits,
    numbers: Float[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """The token under which a number in [0, 1) falls, where the likely ones lie side by side.

    In float64, as sums run over a whole vocabulary.
    """
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0).unsqueeze(1)
    weights = _weights(logits, logits.amax(-1, keepdim=True), temperature)
    if traits.cut:
        weights = weights.masked_fill(logits < _least_likely(logits, temperature, rows), 0)
    if traits.floored:  # the likeliest token has the weight 1
        weights = weights.masked_fill(weights < rows.min_p.unsqueeze(1), 0)
    reached = weights.cumsum(-1)
    whole = reached[:, -1:]
    passed = (reached <= numbers.unsqueeze(1) * whole).sum(-1)
    return torch.minimum(passed, (reached < whole).sum(-1))


def _weights(
    logits: Float[Tensor, "rows vocabulary"],
    largest: Float[Tensor, "rows 1"],
    temperature: Float[Tensor, "rows 1"],
) -> Float[Tensor, "rows vocabulary"]:
    """Probabilities over that of the likeliest token."""
    return ((logits.double() - largest.double()) / temperature).exp()


def _least_likely(
    logits: Float[Tensor, "rows vocabulary"],
    temperature: Float[Tensor, "rows 1"],
    rows: RowSettings,
) -> Float[Tensor, "rows 1"]:
    """The smallest logit among the likeliest tokens that top_k and then top_p leave.

    Logits are sorted in their own dtype: 16 bits are a quarter of what float64 has a sort move.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    weights = _weights(ordered, ordered[:, :1], temperature)
    reached = weights.cumsum(-1)
    last = rows.top_k.unsqueeze(1) - 1
    enough = rows.top_p.unsqueeze(1) * reached.gather(1, last)
    kept = (reached - weights < enough).sum(-1, keepdim=True)
    return ordered.gather(1, torch.minimum(kept - 1, last).clamp_min(0))


def uniform(keys: Int[Tensor, " rows"], counters: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Random numbers in [0, 1): one for each key and counter, the same on any device.

    Source: SplitMix64 (Steele, Lea, Flood 2014), figure 16, whose state at any step is a sum.
    """
    bits = keys + (counters + 1) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shifted(bits, 31)
    return _shifted(bits, 11).double() * 2.0**-53


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Bits moved to the right, zeros after them."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


# ---- text ----------------------------------------------------------------------------------------

UNFINISHED = "\ufffd"  # what decoders give for bytes that are no whole character yet


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; those of transformers have it."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """The text of tokens."""
        ...


def check_tokenizer(tokenizer: object) -> None:
    """Refuse what is no tokenizer, such as the name of one."""
    able = [callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")]
    if tokenizer is not None and not all(able):
        got = type(tokenizer).__name__
        raise TypeError(f"tokenizer: got {got}, takes a tokenizer with encode and decode, or None")


class TextStream:
    """The text of a growing list of tokens, given out piece by piece.

    Nothing that was given out changes later: bytes of an unfinished character are held back, and
    so is an end that may become a stop string.
    """

    text: str
    stopped: bool

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]):
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop_strings)
        self._context: list[int] = []  # tokens whose text is known, as what follows may need them
        self._pending: list[int] = []  # tokens whose text is not known yet
        self._given = 0
        self._finished = False

    def push(self, token: int) -> None:
        """One more token."""
        self._pending.append(token)
        known = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if text.endswith(UNFINISHED) or len(text) <= len(known):
            return
        self._extend(text[len(known) :])
        self._context, self._pending = self._pending, []

    def finish(self) -> None:
        """No more tokens come: unfinished characters are given as they are."""
        if self._pending and not self.stopped:
            known = self._decode(self._context)
            self._extend(self._decode(self._context + self._pending)[len(known) :])
        self._pending = []
        self._finished = True

    def replay(self, tokens: Sequence[int]) -> None:
        """Begin again with these tokens; what was given out is not given out again."""
        again = TextStream(self._tokenizer, self._stop_strings)
        for token in tokens:
            again.push(token)
        again._given = self._given
        vars(self).update(vars(again))

    def piece(self) -> str:
        """The text that became certain since the last call."""
        final = self.stopped or self._finished
        end = len(self.text) - (0 if final else self._held_back())
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _extend(self, text: str) -> None:
        longest = max(map(len, self._stop_strings), default=1)
        searched_from = max(len(self.text) - longest + 1, 0)
        self.text += text
        found = [self.text.find(stop, searched_from) for stop in self._stop_strings]
        starts = [start for start in found if start >= 0]
        if starts:
            self.text, self.stopped = self.text[: min(starts)], True

    def _held_back(self) -> int:
        """How many characters at the end begin a stop string."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )

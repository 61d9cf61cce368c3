"""Choosing the next token on the device, for rows that each have settings of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashnorm.errors import Refusal
from flashnorm.runtime.decode.guard import queued

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed integer
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # the multipliers of SplitMix64


@dataclass(frozen=True)
class Sampling:
    """How one sequence's tokens are chosen; the defaults are greedy.

    As in Transformers, the repetition penalty comes first, then the temperature, top-k, top-p and min-p. With
    `temperature` 0 the likeliest token is taken, after the penalty. `seed` and the position of the token decide the
    draw, so that a sequence comes out the same alone and among others. Raises `Refusal` for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        accepted = {
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 is none"),
        }
        for name, (fine, wanted) in accepted.items():
            if not fine:
                raise Refusal(f"{name} is {getattr(self, name)}; it must be {wanted}")

    @property
    def greedy(self) -> bool:
        """Whether nothing but the argmax of the raw logits is asked for."""
        return self.temperature == 0 and self.repetition_penalty == 1


class SamplingTable:
    """The settings of all slots and the tokens that each has seen, in device memory, where a captured step reads them.

    `seen`: (slots, vocabulary) bool.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.seen = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        # temperature, top-k, top-p, min-p, penalty
        self._numbers = torch.zeros(slots, 5, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._vocabulary = vocabulary
        self._true = torch.ones((), dtype=torch.bool, device=device)
        for slot in range(slots):
            self.set(slot, Sampling())

    def set(self, slot: int, sampling: Sampling) -> None:
        """Give a slot its settings and forget the tokens that it has seen."""
        row = [sampling.temperature, sampling.top_k or self._vocabulary, sampling.top_p, sampling.min_p]
        numbers = torch.tensor([*row, sampling.repetition_penalty], dtype=torch.float32, device="cpu")
        self._numbers[slot] = queued(numbers, self._numbers.device)
        self._seeds[slot] = ((sampling.seed + 2**63) % 2**64) - 2**63
        self.seen[slot] = False

    def see(self, slots: Tensor, tokens: Tensor) -> None:
        """Note one token of each of these slots; both (rows,). Can be captured in a graph."""
        self.seen.index_put_((slots, tokens), self._true)

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Tokens (rows,) int64 for `logits` (rows, vocabulary) of the given `slots` (rows,).

        `positions`: (rows,), where the tokens will stand; part of the draw's seed.
        """
        temperature, top_k, top_p, min_p, penalty = self._numbers[slots].unbind(1)
        adjusted = penalise(logits.float(), self.seen[slots], penalty[:, None])
        drawn = draw(
            adjusted / temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None],
            top_k[:, None],
            top_p[:, None],
            min_p[:, None],
            uniform(self._seeds[slots], positions),
        )
        return torch.where(temperature > 0, drawn, adjusted.argmax(-1))


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive and multiply negative logits of seen tokens (Keskar et al., 2019). Both (rows, vocabulary)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def kept(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which of the logits, sorted from high to low, remain after top-k, then top-p, then min-p. All (rows, ...)."""
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = ranks < top_k
    probabilities = torch.softmax(torch.where(keep, ordered, -torch.inf), -1)
    # The token that crosses `top_p` stays; 1 keeps all, whatever the rounding of the sum.
    keep &= (probabilities.cumsum(-1) - probabilities < top_p) | (top_p >= 1)
    probabilities = torch.softmax(torch.where(keep, ordered, -torch.inf), -1)
    return keep & ((probabilities >= min_p * probabilities[:, :1]) | (ranks == 0))


def draw(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, chance: Tensor) -> Tensor:
    """One token per row by inversion: the first whose cumulative probability exceeds `chance` (rows,) in [0, 1)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    keep = kept(ordered, top_k, top_p, min_p)
    cumulative = torch.softmax(torch.where(keep, ordered, -torch.inf), -1).double().cumsum(-1)
    # Scaled by the sum as computed, so that rounding can leave no chance beyond it, and never a token with no chance.
    index = (cumulative <= chance.double()[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
    last = (keep.sum(-1, keepdim=True) - 1).clamp(min=0)  # nothing is kept of NaN, but a token there must be
    return order.gather(1, torch.minimum(index, last)).squeeze(1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), fp64, from a seed and a counter: SplitMix64 (Steele, Lea and Flood, 2014). Both (rows,)."""
    z = _mixed(seeds) + _GOLDEN * (positions.to(torch.int64) + 1)
    return (_mixed(z) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _MIX[0]
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _MIX[1]
    return z ^ (z >> 31 & (1 << 33) - 1)

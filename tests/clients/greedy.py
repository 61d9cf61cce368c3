"""Compare two greedy continuations of the same prompt: the same text, or first different at a near tie.

A near tie is judged by the source's own rounding noise: how much the preference between two tokens changes when the
source runs in fp32 instead of bf16. With v the variance of that change, two bf16 runs of one function differ by 2 v,
and a fold, which rounds each weight once more, adds at most v / 2 (`flashnorm.verify.bounds`). Where two such runs
part, each prefers its own token, and the two margins add up to the change: at most five standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "A matrix is orthogonal if",
    "The most important thing about writing software is",
)
SIGMAS = 5.0
VARIANCES = 2.5  # of the source, the candidate and the fold, in units of the source's


@dataclass(frozen=True)
class Step:
    """One generated token and the log-probabilities of the likeliest tokens there (its own among them)."""

    token: int
    logprobs: dict[int, float]

    def margin(self, other: int) -> float:
        """By how much this token was preferred to `other`; infinite when `other` is not among the likeliest."""
        return self.logprobs[self.token] - self.logprobs.get(other, float("-inf"))


@dataclass(frozen=True)
class Comparison:
    """How two continuations relate. `position`: the first token that differs, None when none does."""

    position: int | None
    margins: tuple[float, float]  # at that position, each run's preference for its own token, in nats
    near_tie: float  # the largest sum of the margins that rounding explains

    @property
    def accepted(self) -> bool:
        """Whether the texts agree, or part only where both runs see a near tie."""
        return self.position is None or sum(self.margins) <= self.near_tie

    def __str__(self) -> str:
        if self.position is None:
            return f"the same {TOKENS} tokens"
        kind = "a near tie" if self.accepted else "NO near tie"
        return (
            f"first differs at token {self.position}, {kind}: the source prefers its token by {self.margins[0]:.4f} "
            f"nats, the candidate its own by {self.margins[1]:.4f} (together, rounding explains {self.near_tie:.4f})"
        )


def near_tie(exact: list[list[Step]], source: list[list[Step]]) -> float:
    """The bound on the sum of two margins, from continuations of the same prompts by the source in fp32 and in bf16."""
    changes = [change for pair in zip(exact, source, strict=True) for change in _changes(*pair)]
    if not changes:
        raise ValueError("the source in fp32 and in bf16 never chose the same token, so that its noise is unknown")
    variance = sum(change**2 for change in changes) / len(changes)
    return SIGMAS * math.sqrt(VARIANCES * variance)


def compare(source: list[Step], candidate: list[Step], bound: float) -> Comparison:
    """Both continuations of one prompt, token by token. Raises `ValueError` unless each has `TOKENS` tokens."""
    if not len(source) == len(candidate) == TOKENS:
        raise ValueError(f"continuations of {len(source)} and {len(candidate)} tokens; each must have {TOKENS}")
    for position, (ours, theirs) in enumerate(zip(source, candidate, strict=True)):
        if ours.token != theirs.token:
            return Comparison(position, (ours.margin(theirs.token), theirs.margin(ours.token)), bound)
    return Comparison(None, (0.0, 0.0), bound)


def _changes(exact: list[Step], source: list[Step]) -> Iterator[float]:
    """How each preference for the chosen token changes, as long as both runs have read the same tokens."""
    for ours, theirs in zip(exact, source, strict=True):
        if ours.token != theirs.token:
            return
        shared = (ours.logprobs.keys() & theirs.logprobs.keys()) - {ours.token}
        yield from (ours.margin(other) - theirs.margin(other) for other in sorted(shared))

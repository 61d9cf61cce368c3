"""How far two answers lie apart, from their likeliest tokens alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flashnorm.verify.endpoint.client import Answer

# Half of bf16's digits: servers run in bf16 or finer, and a computation that loses more is not stable in its dtype
# (Higham, Accuracy and Stability of Numerical Algorithms, 1.7; see `flashnorm.verify.rounding.estimated`).
ALLOWED = 2.0**-4


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Half the sum of |p - q| over the tokens that both lists name: at most the total variation, so never too much.

    Token to log-probability in nats. Tokens that one of the two lists lacks are less likely there than its last one:
    they count with the least difference that this allows. NaN where a number is none.
    """
    if not one or not other:
        return 1.0 if one or other else 0.0
    floors = [math.exp(min(values.values())) for values in (one, other)]
    total = 0.0
    for token in {*one, *other}:
        p, q = (math.exp(values[token]) if token in values else math.nan for values in (one, other))
        if token not in one:
            total += max(0.0, q - floors[0])
        elif token not in other:
            total += max(0.0, p - floors[1])
        else:
            total += abs(p - q)
    return total / 2


def same_until(one: Answer, other: Answer) -> int:
    """How many tokens two answers have in common before they part."""
    for n, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            return n
    return min(len(one.tokens), len(other.tokens))


def worst_distance(one: Answer, other: Answer) -> tuple[float, int]:
    """The largest distance of two answers to one question, and its step.

    Steps count up to and with the first at which another token was chosen: both have read the same until then. There,
    what counts are the probabilities, so that a near tie which falls the other way is no difference.
    """
    steps = min(same_until(one, other) + 1, len(one.steps), len(other.steps))
    distances = [distance(a, b) for a, b in zip(one.steps[:steps], other.steps[:steps], strict=True)]
    return _largest(distances)


def _largest(values: Sequence[float]) -> tuple[float, int]:
    """The largest value and its place; NaN counts as the largest."""
    place = max(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])
    return values[place], place

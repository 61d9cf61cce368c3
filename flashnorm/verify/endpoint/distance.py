"""How far two answers lie apart, from their likeliest tokens alone, and how far two right ones may.

**Distance.** The root mean square difference of log-probabilities over the tokens that either list names, in nats. A
logit's rounding error does not depend on how likely its token is, so this noise is of one size at every step; that of
the probabilities is not. A token that one list lacks is less likely there than the list's last one: it counts with the
least difference that this allows, so the distance is never too large.

**Noise.** A server tells nothing of its rounding, but it answers one question in two ways: a step of a generated text
comes from the cache, the same prefix asked for one token is prefilled. The median of their distance over the steps is
what rounding typically does, whatever fewer than half of the steps suffer from. Should all answers be late, they match
the step before: so the least of the medians over the steps before counts. One rounding to bf16 of numbers as large as
the log-probabilities is the least that any server may do. Two right answers lie within `SIGMAS` times that; and where
one question is asked twice in one way, within `SIGMAS` such roundings, however differently two ways may round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from flashnorm.verify.bounds import SIGMAS
from flashnorm.verify.endpoint.client import Answer

_UNIT = 2.0**-8  # bf16: no server in use is coarser in what it adds up
BACK = 3  # steps before that an answer is looked for


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Token to log-probability in nats, both. Infinite where only one of the two says anything; NaN stays."""
    if not one or not other:
        return math.inf if one or other else 0.0
    floors = min(one.values()), min(other.values())
    squares = []
    for token in {*one, *other}:
        if token in one and token in other:
            squares.append((one[token] - other[token]) ** 2)
        elif token in one:
            squares.append(max(0.0, one[token] - floors[1]) ** 2)
        else:
            squares.append(max(0.0, other[token] - floors[0]) ** 2)
    return math.sqrt(statistics.fmean(squares))


def allowed_distance(steps: Sequence[Mapping[str, float]], fresh: Sequence[Mapping[str, float]]) -> float:
    """How far two right answers may lie apart, from a text's steps and the same prefixes asked afresh."""
    medians = [
        statistics.median(distance(c, f) for c, f in zip(steps[k:], fresh, strict=False))
        for k in range(min(BACK + 1, len(steps)))
    ]
    return max(SIGMAS * min(medians), same_way_distance(fresh))


def same_way_distance(fresh: Sequence[Mapping[str, float]]) -> float:
    """How far two right answers may lie apart that were computed in the same way, from steps of that server."""
    return SIGMAS * _UNIT * statistics.median(max(abs(value) for value in step.values()) for step in fresh)


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
    return largest([distance(a, b) for a, b in zip(one.steps[:steps], other.steps[:steps], strict=True)])


def largest(values: Sequence[float]) -> tuple[float, int]:
    """The largest value and its place; NaN counts as the largest."""
    place = max(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])
    return values[place], place

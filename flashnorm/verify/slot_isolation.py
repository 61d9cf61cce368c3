"""Slot isolation: a sequence is not changed by those that join, leave, or held its slot before.

A server's slots are played through what servers do, and every answer is compared with fresh logits of the same
sequence, where rounding alone may part the two (`flashnorm.verify.rounding`):

- *reused*: a long sequence runs in a slot and is freed; a short one follows in the same slot;
- *joined*: a sequence decodes while another one joins, and goes on when that has left;
- *reordered*: the slots of a step are named in another order than that of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnorm.runtime.decode.slots import Slots
from flashnorm.verify.drift import squared_drift
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check
from flashnorm.verify.rounding import Rounding, distance_check

_STEPS = 6


@dataclass(frozen=True)
class _Answer:
    """Logits (positions, vocabulary) of the last positions of `ids` (length,)."""

    ids: Tensor
    logits: Tensor


def check_slots(engine: Engine, ids: Tensor, rounding: Rounding) -> Outcome:
    """`ids`: (count,), cut into a long and two short sequences."""
    slots = engine.slots
    if slots is None:
        return Outcome("slots", skipped=f"{engine.name} has no slots that sequences join and leave")
    if slots.slots < 2:
        return Outcome("slots", skipped="it takes two slots at least for one sequence to disturb another")
    long, first, second = ids[: len(ids) // 2], ids[: len(ids) // 4], ids[-(len(ids) // 4) :]
    figures = []
    for way, answers in (
        ("reused", _reused(slots, long, second)),
        ("joined", _joined(slots, first, second)),
        ("reordered", _reordered(slots, first, second)),
    ):
        figures.append(_figure(way, list(answers), engine, rounding))
    return Outcome("slots", tuple(figures))


def _reused(slots: Slots, long: Tensor, short: Tensor) -> Iterator[_Answer]:
    place = slots.free_slots()[0]
    _run(slots, place, long)
    slots.free(place)
    yield _Answer(short, _run(slots, place, short))
    slots.free(place)


def _joined(slots: Slots, stays: Tensor, joins: Tensor) -> Iterator[_Answer]:
    """Every step of the one that stays counts: those alone, those among two, and those after the other has left."""
    here, there = slots.free_slots()[:2]
    third = max(1, (len(stays) - _STEPS) // 2)
    logits = [slots.prefill(here, stays[:third]).clone()]
    logits += [_step(slots, {here: int(token)})[0] for token in stays[third : third + _STEPS // 2]]
    other = [slots.prefill(there, joins[:-_STEPS]).clone()]
    for token, theirs in zip(stays[third + _STEPS // 2 : third + _STEPS], joins[-_STEPS:], strict=False):
        both = _step(slots, {here: int(token), there: int(theirs)})
        logits.append(both[0])
        other.append(both[1])
    slots.free(there)
    logits += [_step(slots, {here: int(token)})[0] for token in stays[third + _STEPS :]]
    slots.free(here)
    yield _Answer(stays, torch.stack(logits))
    yield _Answer(joins[: len(joins) - _STEPS + len(other) - 1], torch.stack(other))


def _reordered(slots: Slots, first: Tensor, second: Tensor) -> Iterator[_Answer]:
    places = slots.free_slots()[:2]
    pair = (first, second)
    logits: list[list[Tensor]] = [
        [slots.prefill(place, ids[:-_STEPS]).clone()] for place, ids in zip(places, pair, strict=True)
    ]
    for n in range(_STEPS):
        order = (1, 0) if n % 2 else (0, 1)
        step = _step(slots, {places[i]: int(pair[i][len(pair[i]) - _STEPS + n]) for i in order})
        for i, row in zip(order, step, strict=True):
            logits[i].append(row)
    for place in places:
        slots.free(place)
    yield from (_Answer(ids, torch.stack(rows)) for ids, rows in zip(pair, logits, strict=True))


def _run(slots: Slots, place: int, ids: Tensor) -> Tensor:
    """Prefill all but the last tokens, decode those. Returns (1 + _STEPS, vocabulary)."""
    logits = [slots.prefill(place, ids[:-_STEPS]).clone()]
    return torch.stack([*logits, *(_step(slots, {place: int(token)})[0] for token in ids[-_STEPS:])])


def _step(slots: Slots, tokens: dict[int, int]) -> Tensor:
    return slots.decode(tokens).clone()  # a step may leave its logits where the next one writes


def _figure(way: str, answers: Sequence[_Answer], engine: Engine, rounding: Rounding) -> Check:
    squares = []
    for answer in answers:
        fresh = engine.fresh(answer.ids[None])[0, -len(answer.logits) :]
        squares.append(squared_drift(answer.logits.cpu(), fresh.cpu()))

    def words(index: int, times: float) -> str:
        return (
            f"{way}: a slot's logits differ from a fresh pass over the same sequence by {times:.3g} times what "
            f"rounding explains (answer {index}): another sequence reaches into it"
        )

    return distance_check(f"disturbed ({way})", torch.cat(squares), rounding, words, everywhere=True)

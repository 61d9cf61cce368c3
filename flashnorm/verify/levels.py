"""How much the battery looks at: quick for every change, standard before a merge, thorough before a release."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """What `--level` takes."""

    quick = "quick"
    standard = "standard"
    thorough = "thorough"


@dataclass(frozen=True)
class Extent:
    """Numbers of the checks. `steps`: tokens decoded one by one; `length`, `places`: of causality's batch.

    `sample`: tokens that rounding is measured over; `repeats`: of each question that must have one answer;
    `new_tokens`: of greedy text.
    """

    steps: int
    length: int
    places: int
    sample: int
    repeats: int
    new_tokens: int


EXTENTS = {
    Level.quick: Extent(steps=96, length=48, places=6, sample=96, repeats=2, new_tokens=12),
    Level.standard: Extent(steps=512, length=128, places=12, sample=256, repeats=5, new_tokens=32),
    Level.thorough: Extent(steps=2000, length=256, places=20, sample=512, repeats=10, new_tokens=64),
}

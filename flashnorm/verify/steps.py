"""Progress of a verification: both models answer the same questions, and the first shows how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str], None]


class Steps:
    """Adds the time that has passed to each step, and for the second model how much is done and about what is left."""

    def __init__(self, show: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._start = clock()
        self._begun: list[float] = []  # when each step of the model at hand began
        self._first: list[float] | None = None  # the first model's, and when it was done

    def __call__(self, step: str) -> None:
        now = self._clock()
        self._begun.append(now)
        self._show(f"{step} ({now - self._start:.0f} s{self._outlook(now)})")

    def second_model(self) -> None:
        """The first model has answered everything."""
        self._first, self._begun = [*self._begun, self._clock()], []

    def _outlook(self, now: float) -> str:
        if self._first is None or not 0 < len(self._begun) < len(self._first):
            return ""
        left = self._first[-1] - self._first[len(self._begun) - 1]
        whole = now - self._start + left
        return f", {(whole - left) / whole:.0%}, about {left:.0f} s left" if whole > 0 else ""

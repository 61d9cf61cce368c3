"""What the battery found, as data. The JSON form is documented in docs/battery.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flashnorm.verify.report import Check

Series = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Outcome:
    """One check of the battery: its figures against their bounds.

    `skipped`: why it could not run; it has no figures then. `notes`: what a reader should know. `series`: columns of
    numbers that plots are made of. `cause`: where a failure names its likely origin.
    """

    name: str
    figures: tuple[Check, ...] = ()
    skipped: str = ""
    notes: tuple[str, ...] = ()
    cause: str = ""
    series: Series = field(default_factory=dict, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def passed(self) -> bool:
        return all(figure.passed for figure in self.figures)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(figure for figure in self.figures if not figure.passed)

    @property
    def meaning(self) -> str:
        """What went wrong, in a sentence; empty where nothing did."""
        if self.passed:
            return ""
        return self.failures[0].meaning + (f"; likely cause: {self.cause}" if self.cause else "")


@dataclass(frozen=True)
class BatteryReport:
    """Every check that was asked for, in the order in which they ran."""

    subject: str
    level: str
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether at least one check ran and none failed."""
        return any(not outcome.skipped for outcome in self.outcomes) and not self.failures

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if not outcome.passed)

    def __getitem__(self, name: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    @property
    def verdict(self) -> str:
        """One line: passed, or what failed first and what that means."""
        ran = [outcome for outcome in self.outcomes if not outcome.skipped]
        if not ran:
            return f"nothing was checked: {self.outcomes[0].skipped}" if self.outcomes else "nothing was checked"
        if self.passed:
            skipped = len(self.outcomes) - len(ran)
            rest = f", {skipped} could not run" if skipped else ""
            return f"passed: {len(ran)} checks ({', '.join(outcome.name for outcome in ran)}){rest}"
        first, *others = self.failures
        also = f" (failed as well: {', '.join(outcome.name for outcome in others)})" if others else ""
        return f"{first.name}: {first.meaning}{also}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a number that is not finite becomes a string."""
        return plain(
            {
                "subject": self.subject,
                "level": self.level,
                "passed": self.passed,
                "verdict": self.verdict,
                "checks": [_outcome_dict(outcome) for outcome in self.outcomes],
                "notes": self.notes,
            }
        )


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    figures = [
        {**asdict(figure), "meaning": "" if figure.passed else figure.meaning, "passed": figure.passed}
        for figure in outcome.figures
    ]
    return {
        "name": outcome.name,
        "passed": None if outcome.skipped else outcome.passed,
        "meaning": outcome.meaning,
        "cause": outcome.cause,
        "skipped": outcome.skipped,
        "figures": figures,
        "notes": outcome.notes,
        "series": dict(outcome.series),
        "seconds": outcome.seconds,
    }


def plain(value: Any) -> Any:
    """`value` with tuples as lists and numbers that are not finite as strings."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

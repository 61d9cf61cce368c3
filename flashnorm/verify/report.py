"""What a verification found, as data. The JSON form is documented in docs/verify.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, get_type_hints

from flashnorm.verify.greedy import Difference, GreedyPair
from flashnorm.verify.perplexity import Perplexity
from flashnorm.verify.tasks import TaskPair

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """A figure and the bound that it must not exceed. `meaning`: what a failure means; nothing where there is none."""

    name: str
    value: float
    bound: float
    meaning: str = field(compare=False)

    @property
    def passed(self) -> bool:
        return self.value <= self.bound  # False where the value is NaN


@dataclass(frozen=True)
class LogitFigures:
    """Distances from the oracle. Errors and divergences are those of the stored dtype, except `exact_relative_error`.

    Divergence (KL) in nats. Drift is the distance up to a constant for each position, which no probability depends on.
    """

    positions: int
    reference_relative_error: float
    candidate_relative_error: float
    exact_relative_error: float  # the candidate's weights in the oracle's arithmetic: rounding of the weights alone
    drift_ratio: float  # candidate's drift over the reference's
    exact_drift_ratio: float  # the same for the candidate's weights in the oracle's arithmetic
    typical_exact_drift_ratio: float  # the same as a geometric mean over positions
    reference_kl_mean: float
    reference_kl_max: float
    candidate_kl_mean: float
    candidate_kl_max: float
    reference_top1_agreement: float  # with the oracle
    candidate_top1_agreement: float  # with the oracle
    mutual_top1_agreement: float  # of the two with each other


@dataclass(frozen=True)
class VerifyReport:
    """Everything that was measured, and the checks that decide. `notes`: what a reader should know about how.

    `not_compared`: weights in which the two differ and that no check reached.
    """

    reference: str
    candidate: str
    dtype: str
    text_dtype: str
    oracle_dtype: str
    samples: str
    logits: LogitFigures | None  # None: the candidate's logits are not finite
    perplexity: Perplexity | None
    greedy: tuple[GreedyPair, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    not_compared: tuple[str, ...] = ()
    tasks: tuple[TaskPair, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        return f"{self.candidate}, compared with {self.reference}: {self.verdict}"

    @property
    def verdict(self) -> str:
        """One line: passed, or what failed and what that means."""
        if self.passed:
            rest = f", except for {len(self.not_compared)} weights that were not compared" if self.not_compared else ""
            return f"passed: {len(self.checks)} checks; the candidate computes what the reference computes{rest}"
        first, *others = self.failures
        also = f" (failed as well: {', '.join(check.name for check in others)})" if others else ""
        return first.meaning + also

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a figure that is not finite becomes the string "inf" or "nan"."""
        table = asdict(self)
        table["passed"] = self.passed
        table["checks"] = [
            {**asdict(check), "meaning": "" if check.passed else check.meaning, "passed": check.passed}
            for check in self.checks
        ]
        return _jsonable(table)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> VerifyReport:
        """The report that `to_dict` made `table` of."""
        logits, perplexity = table["logits"], table["perplexity"]
        return cls(
            **{name: table[name] for name in ("reference", "candidate", "dtype", "text_dtype", "oracle_dtype")},
            samples=table["samples"],
            logits=None if logits is None else _of(LogitFigures, logits),
            perplexity=None if perplexity is None else _of(Perplexity, perplexity),
            greedy=tuple(_pair(row) for row in table["greedy"]),
            checks=tuple(_of(Check, row) for row in table["checks"]),
            notes=tuple(table["notes"]),
            not_compared=tuple(table.get("not_compared", ())),
            tasks=tuple(_of(TaskPair, row) for row in table.get("tasks", ())),
        )


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _pair(row: Mapping[str, Any]) -> GreedyPair:
    difference = row["difference"]
    return _of(GreedyPair, {**row, "difference": None if difference is None else _of(Difference, difference)})


def _of(kind: type[T], row: Mapping[str, Any]) -> T:
    """A dataclass from its row, "inf" and "nan" become numbers again; `passed`, which is computed, is left out."""
    types = get_type_hints(kind)
    return kind(**{name: float(row[name]) if types[name] is float else row[name] for name in types})

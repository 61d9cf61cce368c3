"""Scores of tasks, source and candidate side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ERROR = "_stderr"


@dataclass(frozen=True)
class Score:
    """One metric of one task. `error`: its standard error, in the metric's own unit; None where there is none."""

    value: float
    error: float | None


@dataclass(frozen=True)
class TaskPair:
    """A score of both models. `metric`: as the harness calls it, with its filter where it has one."""

    task: str
    metric: str
    reference: float
    candidate: float
    reference_error: float | None
    candidate_error: float | None

    def __str__(self) -> str:
        return (
            f"{self.task}, {self.metric}: {shown(self.candidate, self.candidate_error)}, "
            f"the reference's {shown(self.reference, self.reference_error)}"
        )


Scores = Mapping[tuple[str, str], Score]


def read_scores(results: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Score]:
    """(task, metric) to score, from what the harness calls `results`: task to {"acc,none": 0.5, "acc_stderr,none": …}.

    A standard error that is no number ("N/A") or not finite is none.
    """
    scores = {}
    for task, entries in results.items():
        for key, value in entries.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith(_ERROR) or not isinstance(value, (int, float)):
                continue
            error = entries.get(f"{metric}{_ERROR},{kind}")
            known = isinstance(error, (int, float)) and math.isfinite(error)
            name = metric if kind == "none" else f"{metric} ({kind})"
            scores[task, name] = Score(float(value), float(error) if known and error is not None else None)
    return scores


def pair_scores(reference: Scores, candidate: Scores) -> tuple[TaskPair, ...]:
    """The scores that both have, in the order of the reference's."""
    return tuple(
        TaskPair(*key, ours.value, candidate[key].value, ours.error, candidate[key].error)
        for key, ours in reference.items()
        if key in candidate
    )


def shown(value: float, error: float | None) -> str:
    """ "0.4350 ± 0.0112"."""
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"

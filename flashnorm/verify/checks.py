"""From figures to verdicts: each check with its bound, and in one sentence what a failure means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from flashnorm.verify.bounds import (
    ADDED,
    ADDED_ROUTED,
    SIGMAS,
    perplexity_bound,
    ratio_of_sums,
    sampling_slack,
    tie_bound,
    typical_ratio,
)
from flashnorm.verify.greedy import GreedyPair
from flashnorm.verify.perplexity import Perplexity
from flashnorm.verify.report import Check
from flashnorm.verify.tasks import TaskPair, shown


def finite_check(logits: torch.Tensor, exact: torch.Tensor) -> Check:
    """No logit of the candidate, both (positions, vocabulary), is NaN or infinite."""
    bad = int((~(logits.isfinite() & exact.isfinite())).any(-1).sum())
    return Check("non_finite_positions", bad, 0, f"the candidate's logits are not finite at {bad} positions")


def drift_check(candidate: torch.Tensor, reference: torch.Tensor) -> Check:
    """Candidate's drift over the reference's, each in its own dtype. Both: squared drifts (positions,)."""
    value = math.sqrt(ratio_of_sums(candidate, reference))
    bound = math.sqrt((1 + ADDED) * sampling_slack(candidate, reference))
    return Check(
        "drift_ratio",
        value,
        bound,
        f"the candidate's logits lie {value:.3g} times as far from the exact ones as the reference's, where rounding "
        f"explains {bound:.3g}: it does not compute the same function",
    )


def exact_drift_check(candidate: torch.Tensor, reference: torch.Tensor) -> Check:
    """The same with the candidate in the oracle's arithmetic, where only the rounding of its weights is left."""
    value = math.sqrt(ratio_of_sums(candidate, reference)) if float(candidate.sum()) else 0.0
    bound = math.sqrt(ADDED_ROUTED * sampling_slack(candidate, reference))
    return Check(
        "exact_drift_ratio",
        value,
        bound,
        f"in exact arithmetic the candidate's logits lie {value:.3g} times as far from the reference's as rounding "
        f"takes those, where rounding of weights explains {bound:.3g}: it does not hold the same weights, gains folded",
    )


def typical_drift_check(candidate: torch.Tensor, reference: torch.Tensor) -> Check:
    """As `exact_drift_check`, for the typical position: a geometric mean, which a few outliers do not move."""
    ratio, slack = typical_ratio(candidate, reference)
    value, bound = math.sqrt(ratio), math.sqrt(ADDED * slack)
    return Check(
        "typical_exact_drift_ratio",
        value,
        bound,
        f"in exact arithmetic, at a typical position, the candidate's logits lie {value:.3g} times as far from the "
        f"reference's as rounding takes those, where rounding of weights explains {bound:.3g}",
    )


def divergence_check(candidate: torch.Tensor, reference: torch.Tensor) -> Check:
    """Candidate's KL divergence from the oracle over the reference's, each (positions,)."""
    value = ratio_of_sums(candidate, reference)
    bound = (1 + ADDED) * sampling_slack(candidate, reference)
    return Check(
        "kl_ratio",
        value,
        bound,
        f"the candidate's distributions diverge {value:.3g} times as much from the exact ones as the reference's, "
        f"where rounding explains {bound:.3g}",
    )


def greedy_check(pairs: Sequence[GreedyPair], logit_error: float) -> Check:
    """Every continuation that differs first differs at a near tie."""
    value = _largest(pair.difference.opposed_margin for pair in pairs if pair.difference)
    bound = tie_bound(logit_error)
    return Check(
        "greedy_margin",
        value,
        bound,
        f"a greedy continuation parts from the reference's by {value:.3g} logits, where rounding explains {bound:.3g}: "
        "that is no near tie",
    )


def perplexity_check(perplexity: Perplexity, divergence: float, finer: bool) -> Check:
    """`divergence`: mean KL from the oracle of either model in its own dtype.

    `finer`: the text was run in finer arithmetic than that, so only the rounding of weights is left.
    """
    value = abs(math.log1p(perplexity.relative_difference))
    bound = perplexity_bound(divergence * (ADDED_ROUTED if finer else 2), perplexity.tokens)
    return Check(
        "perplexity",
        value,
        bound,
        f"the perplexities, {perplexity.reference:.5g} and {perplexity.candidate:.5g}, differ by {value:.3%}, where "
        f"rounding explains {bound:.3%}",
    )


def task_checks(pairs: Sequence[TaskPair]) -> list[Check]:
    """Whether chance explains each difference of two scores; those without a standard error are only shown.

    Both models answer the same items, so the standard error of the difference lies below the sum of the two, which it
    reaches where they err in opposed ways: |difference| <= SIGMAS (sum of both). Never too small, and so blunt.
    """
    checks = []
    broken = [pair for pair in pairs if math.isfinite(pair.reference) and not math.isfinite(pair.candidate)]
    what = f"{broken[0].task}, {broken[0].metric}, is {broken[0].candidate} for the candidate" if broken else ""
    checks.append(Check("task_scores_not_finite", len(broken), 0, what))
    for pair in pairs:
        if pair.reference_error is None or pair.candidate_error is None:
            continue
        value, bound = abs(pair.candidate - pair.reference), SIGMAS * (pair.reference_error + pair.candidate_error)
        words = (
            f"{pair.task}: {pair.metric} is {shown(pair.candidate, pair.candidate_error)}, the reference's "
            f"{shown(pair.reference, pair.reference_error)}: they differ by {value:.3g}, where chance explains "
            f"{bound:.3g}"
        )
        checks.append(Check(f"task {pair.task}, {pair.metric}", value, bound, words))
    return checks


def _largest(values: Iterable[float]) -> float:
    """0 of none; NaN where any is, which Python's `max` keeps or drops by the order they come in."""
    known = tuple(values)
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)

"""The logits of both models against the oracle: figures, checks, and the noise that the other checks are judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flashnorm.verify.checks import divergence_check, drift_check, exact_drift_check, typical_drift_check
from flashnorm.verify.divergence import kl_divergence, top1_agreement
from flashnorm.verify.drift import relative_error, squared_drift
from flashnorm.verify.evaluate import Answers
from flashnorm.verify.report import Check, LogitFigures


@dataclass(frozen=True)
class Noise:
    """How far rounding carries a model from the oracle: the larger of the two models' figures.

    The candidate's counts only where its logits have passed, so where it has been held to the reference's already.
    """

    logit_error: float  # root-mean-square error of one logit, at the position where it is largest
    divergence: float  # mean KL divergence, nats


def masked_tokens(exact: torch.Tensor) -> torch.Tensor:
    """(vocabulary,) bool: tokens that the model's code rules out everywhere, by the lowest number or minus infinity."""
    return (exact <= torch.finfo(torch.float32).min).all(0)


def without_tokens(answers: Answers, masked: torch.Tensor) -> Answers:
    """The answers with only the logits of tokens that are not `masked`."""
    if not masked.any():
        return answers
    return replace(answers, logits=answers.logits[:, ~masked], exact=answers.exact[:, ~masked])


def _noise(drift: torch.Tensor, divergence: torch.Tensor, vocabulary: int) -> Noise:
    return Noise(math.sqrt(float(drift.max()) / vocabulary), float(divergence.mean()))


def compare_logits(source: Answers, folded: Answers) -> tuple[LogitFigures, list[Check], Noise]:
    """Compare finite logits, all of (positions, vocabulary); the source's in exact arithmetic are the oracle."""
    oracle = source.exact
    own, other, exact = (squared_drift(logits, oracle) for logits in (source.logits, folded.logits, folded.exact))
    kl, other_kl = (kl_divergence(oracle, logits) for logits in (source.logits, folded.logits))
    checks = [
        drift_check(other, own),
        exact_drift_check(exact, own),
        typical_drift_check(exact, own),
        divergence_check(other_kl, kl),
    ]
    noise = _noise(own, kl, oracle.shape[-1])
    if all(check.passed for check in checks):
        others = _noise(other, other_kl, oracle.shape[-1])
        noise = Noise(max(noise.logit_error, others.logit_error), max(noise.divergence, others.divergence))
    figures = LogitFigures(
        positions=len(oracle),
        reference_relative_error=relative_error(source.logits, oracle),
        candidate_relative_error=relative_error(folded.logits, oracle),
        exact_relative_error=relative_error(folded.exact, oracle),
        drift_ratio=checks[0].value,
        exact_drift_ratio=checks[1].value,
        typical_exact_drift_ratio=checks[2].value,
        reference_kl_mean=float(kl.mean()),
        reference_kl_max=float(kl.max()),
        candidate_kl_mean=float(other_kl.mean()),
        candidate_kl_max=float(other_kl.max()),
        reference_top1_agreement=top1_agreement(source.logits, oracle),
        candidate_top1_agreement=top1_agreement(folded.logits, oracle),
        mutual_top1_agreement=top1_agreement(source.logits, folded.logits),
    )
    return figures, checks, noise

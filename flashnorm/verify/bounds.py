"""How far from the exact answer a correct fold may lie. Nothing is tuned: the source's own drift sets every bound.

Notation. Rounding is an independent relative error of variance s^2 wherever the model stores a value; s is 0.42 times
the unit roundoff of the dtype (2^-24 for fp32, 2^-11 for fp16, 2^-8 for bf16). S: mean squared distance of the source's
logits from the exact ones. C and D: the candidate's, with exact arithmetic and with its own.

**What a fold adds.** W becomes round(W g), so a reader's output y = W x changes by a term of variance
s^2 sum_j W_ij^2 x_j^2. The source does that to the same y twice. It rounds x before the product: variance
s^2 sum_j W_ij^2 x_j^2, the same sum. It rounds y after it: s^2 y_i^2, in the mean over outputs the same again where
the terms of y are uncorrelated. Whatever the layers above make of a change of y, they make of all three. So the fold
adds at most S / k with k = `ROUNDINGS` = 2, and every other rounding of the source (rotary embedding, attention,
activation, residual stream) makes k larger:

    C <= S / k                 the candidate's weights in exact arithmetic
    D <= S (1 + 1 / k)         the candidate in its own dtype

Where the norm multiplies by its gain after casting, even D <= S: a product with one is exact, so the fold takes away
one rounding of x for each that it adds. KL divergence is quadratic in the error of the logits, so it obeys the same
lines.

**Routing.** A near tie between experts that rounding turns over changes the logits by an amount that does not depend on
how large the rounding was; only how often it happens does, in proportion to s and not to s^2. Squared drifts are then
proportional to s, and S / k becomes S / sqrt(k). That is the larger of the two, so it is the one that is allowed:

    C <= S / sqrt(k)

**Sampling.** S, C and D are means over a finite number of positions. For sums A = sum a_p and B = sum b_p the standard
error of log(A / B) is sqrt(sum (a_p / A - b_p / B)^2), to first order; a bound on A / B is widened by `SIGMAS` of them.
The standard error is at most sqrt(2), so nothing hides behind a few outliers: a candidate whose drift is
1.23 exp(5 sqrt(2) / 2) = 42 times the source's always fails.

**Typical positions.** Where routing has turned over at a few positions, those hold most of A and B, and a fault of the
size of ordinary rounding drowns. So C is compared with S position by position as well: the mean of log(c_p / s_p) is at
most log(1 / k), and its standard error is the usual one of a mean.

**Perplexity.** If the model is calibrated, the log-probability of the true token changes by a term of mean zero and
variance 2 KL(exact, changed), to first order. So the mean over T tokens stays within SIGMAS sqrt(2 V / T), plus the
second-order term V / 2, with V the divergence that rounding explains.

**Ties.** Let one model prefer token a and the other b, each by its margin. The two margins add up to the change of the
difference between the logits of a and b from model to model. That has variance 2 e^2 for each of the two, with e the
error of one logit. Models that differ by rounding alone therefore part only where the margins add up to little more.
"""

from __future__ import annotations

import math

import torch

ROUNDINGS = 2  # k: how often the source itself does to a reader's output what the fold does once more
SIGMAS = 5.0  # a correct fold fails one check in two million

ADDED = 1 / ROUNDINGS  # squared drift that the fold adds to the source's
ADDED_ROUTED = 1 / math.sqrt(ROUNDINGS)  # the same where it turns over near ties between experts


def sampling_slack(figures: torch.Tensor, reference: torch.Tensor) -> float:
    """The factor by which sampling widens a bound on `figures.sum() / reference.sum()`.

    Both: (positions,) fp64, non-negative. Returns exp(SIGMAS times the standard error of the log of the ratio).
    """
    shares = [f / f.sum() if f.sum() > 0 else torch.zeros_like(f) for f in (figures, reference)]
    return math.exp(SIGMAS * float((shares[0] - shares[1]).norm()))


def ratio_of_sums(figures: torch.Tensor, reference: torch.Tensor) -> float:
    """`figures.sum() / reference.sum()`; 0 / 0 is 1: then both lie at the exact answer."""
    above, below = float(figures.sum()), float(reference.sum())
    if below == 0:
        return 1.0 if above == 0 else math.inf
    return above / below


def typical_ratio(figures: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """The geometric mean of `figures / reference`, and the factor by which sampling widens a bound on it.

    Both: (positions,) fp64, non-negative; positions where either is zero say nothing and are left out. NaN where a
    figure is not finite.
    """
    if not (figures.isfinite() & reference.isfinite()).all():
        return math.nan, 1.0
    both = (figures > 0) & (reference > 0)
    logs = (figures[both] / reference[both]).log()
    if len(logs) < 2:
        return 0.0, 1.0
    return float(logs.mean().exp()), math.exp(SIGMAS * float(logs.std()) / math.sqrt(len(logs)))


def perplexity_bound(divergence: float, tokens: int) -> float:
    """The largest |log(ppl / ppl')| that rounding explains, from the mean KL divergence V (nats) that it explains."""
    return SIGMAS * math.sqrt(2 * divergence / tokens) + divergence / 2


def tie_bound(logit_error: float) -> float:
    """The largest sum of two opposed margins that rounding explains; `logit_error`: of either model, per logit."""
    return SIGMAS * math.sqrt(2 * 2) * logit_error

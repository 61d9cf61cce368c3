"""Kullback-Leibler divergence from the exact distribution, and the tokens that models prefer."""

from __future__ import annotations

import torch

_ROWS = 32
_SERIES = 1e-3  # below this, exp(d) - 1 - d loses more digits than its series leaves out


def kl_divergence(exact: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats at each position, p from `exact` and q from `logits`, both (positions, vocabulary).

    Returns (positions,) fp64. With d = log q - log p and sum p = sum q = 1,
    KL = -sum p d = sum p (exp(d) - 1 - d): no term is negative, so nothing cancels and 1e-12 is as good as 1.
    """
    parts = []
    for theirs, ours in zip(exact.split(_ROWS), logits.split(_ROWS), strict=True):
        log_p = theirs.double().log_softmax(-1)
        d = ours.double().log_softmax(-1) - log_p
        series = d * d * (1 / 2 + d * (1 / 6 + d / 24))
        parts.append((log_p.exp() * torch.where(d.abs() < _SERIES, series, d.expm1() - d)).sum(-1))
    return torch.cat(parts)


def top1_agreement(logits: torch.Tensor, others: torch.Tensor) -> float:
    """The fraction of positions at which two sets of logits, each (positions, vocabulary), prefer the same token."""
    return float((logits.argmax(-1) == others.argmax(-1)).double().mean())


def opposed_margin(logits: torch.Tensor, others: torch.Tensor) -> float:
    """The margin by which one model prefers its token a to b, plus that by which the other prefers its b to a.

    Both: (vocabulary,). By that much the difference between the two tokens' logits changes from model to model.
    """
    ours, theirs = logits.argmax(), others.argmax()
    first = logits[ours].double() - logits[theirs].double()
    second = others[theirs].double() - others[ours].double()
    return float(first + second)

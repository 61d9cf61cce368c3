from __future__ import annotations

import pytest
import torch

from flashnorm.verify.divergence import kl_divergence, opposed_margin, top1_agreement


def _logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(70, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kl_agrees_with_its_definition() -> None:
    p, q = _logits(0), _logits(1)
    expected = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl_divergence(p, q), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6, 1e-8])
def test_kl_of_close_distributions_keeps_its_digits(size: float) -> None:
    p, change = _logits(0), _logits(1)
    variance = (p.softmax(-1) * change.square()).sum(-1) - (p.softmax(-1) * change).sum(-1).square()
    relative = kl_divergence(p, p + size * change) / (size**2 * variance / 2) - 1
    assert relative.abs().max() < 20 * size + 1e-6


def test_kl_does_not_see_a_constant_and_is_never_negative() -> None:
    p = _logits(0)
    assert kl_divergence(p, p + 5).max() < 1e-28
    assert (kl_divergence(p.float(), p.bfloat16()) >= 0).all()
    assert kl_divergence(p, torch.full_like(p, float("nan"))).isnan().all()


def test_top1_agreement_is_a_fraction_of_positions() -> None:
    p = _logits(0)
    other = p.clone()
    other[:7, 3] = 100
    already = int((p[:7].argmax(-1) == 3).sum())
    assert top1_agreement(p, other) == pytest.approx(1 - (7 - already) / 70)


def test_the_opposed_margin_adds_both_preferences() -> None:
    ours, theirs = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([2.5, 2.0, 0.0])
    assert opposed_margin(ours, theirs) == pytest.approx(2.0 + 0.5)
    assert opposed_margin(ours, ours) == 0

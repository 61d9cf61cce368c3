"""Every check: fine figures pass, and one that is no number fails wherever it stands."""

from __future__ import annotations

import math

import pytest
import torch

from flashnorm.verify import checks
from flashnorm.verify.perplexity import Perplexity

POSITIONS = 16
RATIOS = [checks.drift_check, checks.exact_drift_check, checks.typical_drift_check, checks.divergence_check]


def _figures(scale: float = 1.0) -> torch.Tensor:
    return scale * (1 + torch.rand(POSITIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


@pytest.mark.parametrize("check", RATIOS)
def test_what_rounding_explains_passes_and_ten_times_as_much_does_not(check) -> None:
    assert check(_figures(0.1), _figures()).passed
    assert not check(_figures(100.0), _figures()).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, POSITIONS // 2, POSITIONS - 1])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("check", RATIOS)
def test_one_figure_that_is_not_finite_fails(check, side: int, position: int, bad: float) -> None:
    figures = [_figures(0.1), _figures()]
    figures[side][position] = bad
    assert not check(*figures).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_logit_that_is_not_finite_fails(bad: float) -> None:
    logits = torch.zeros(POSITIONS, 8)
    assert checks.finite_check(logits, logits).passed
    broken = logits.clone()
    broken[3, 5] = bad
    for pair in ((broken, logits), (logits, broken)):
        assert checks.finite_check(*pair).value == 1
        assert not checks.finite_check(*pair).passed


@pytest.mark.parametrize("difference", [math.nan, math.inf, 1.0])
def test_a_perplexity_that_is_far_or_no_number_fails(difference: float) -> None:
    assert checks.perplexity_check(Perplexity(20.0, 20.0, 1e-6, 1000), 1e-3, finer=True).passed
    assert not checks.perplexity_check(Perplexity(20.0, math.nan, difference, 1000), 1e-3, finer=True).passed
    assert not checks.perplexity_check(Perplexity(20.0, 20.0, 1e-6, 1000), math.nan, finer=True).passed

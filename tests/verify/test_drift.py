from __future__ import annotations

import pytest
import torch

from flashnorm.verify.drift import relative_error, squared_drift


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(70, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_drift_is_the_squared_distance_without_a_constant() -> None:
    exact, error = _logits(0), _logits(1)
    expected = error.square().sum(-1) - 40 * error.mean(-1).square()
    torch.testing.assert_close(squared_drift(exact + error, exact), expected)
    torch.testing.assert_close(squared_drift(exact + error + 7, exact), expected)


def test_a_single_output_has_no_constant_to_take_out() -> None:
    exact = _logits(0)[:, :1]
    torch.testing.assert_close(squared_drift(exact + 2, exact), torch.full((70,), 4.0, dtype=torch.float64))


def test_relative_error_leaves_everything_in() -> None:
    exact = _logits(0)
    assert relative_error(1.01 * exact, exact) == pytest.approx(0.01)
    assert relative_error(exact + 1, exact) == pytest.approx((2800 / float(exact.square().sum())) ** 0.5)
    assert relative_error(exact.bfloat16(), exact) == pytest.approx(0.42 * 2**-8, rel=0.1)

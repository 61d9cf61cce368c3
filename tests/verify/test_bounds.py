"""The derivation behind the bounds, checked by experiment: each claim with real rounding or simulated noise."""

from __future__ import annotations

import math

import pytest
import torch

from flashnorm.verify.bounds import (
    SIGMAS,
    perplexity_bound,
    ratio_of_sums,
    sampling_slack,
    tie_bound,
    typical_ratio,
)
from flashnorm.verify.divergence import kl_divergence


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_the_weights_the_input_and_the_output_change_a_product_equally(dtype: torch.dtype) -> None:
    x, weight = _random(400, 576), _random(300, 576, seed=1) / 24
    exact = x @ weight.T
    errors = [
        x @ weight.to(dtype).double().T - exact,
        x.to(dtype).double() @ weight.T - exact,
        exact.to(dtype).double() - exact,
    ]
    variances = [float(error.square().mean()) for error in errors]
    assert max(variances) < 1.05 * min(variances)
    unit_roundoff = torch.finfo(dtype).eps / 2
    assert math.sqrt(variances[0] / float(exact.square().mean())) == pytest.approx(0.42 * unit_roundoff, rel=0.05)


def test_sampling_slack_covers_equal_noise_and_not_ten_times_as_much() -> None:
    for seed in range(200):
        scales = _random(256, seed=seed).exp()  # positions differ in how far rounding carries them
        ours, theirs = (scales * _random(256, 20, seed=seed + n).square().sum(1) for n in (1000, 2000))
        assert ratio_of_sums(ours, theirs) < sampling_slack(ours, theirs)
        assert ratio_of_sums(10 * ours, theirs) > sampling_slack(10 * ours, theirs)


def test_the_slack_is_bounded_however_few_positions_hold_the_figure() -> None:
    alone, even = torch.zeros(256, dtype=torch.float64), torch.ones(256, dtype=torch.float64)
    alone[3] = 1
    assert sampling_slack(alone, even) < math.exp(SIGMAS * math.sqrt(2))
    assert sampling_slack(alone, alone) == sampling_slack(0 * even, 0 * even) == 1


def test_ratio_of_sums_where_the_reference_is_exact() -> None:
    zero, one = torch.zeros(4), torch.ones(4)
    assert ratio_of_sums(zero, zero) == 1
    assert ratio_of_sums(one, zero) == math.inf
    assert ratio_of_sums(3 * one, one) == 3


def test_a_few_outliers_do_not_move_the_typical_ratio_and_half_of_the_positions_do() -> None:
    ours, theirs = (_random(256, 20, seed=n).square().sum(1) for n in (0, 1))
    ours[:3] *= 1e6
    value, slack = typical_ratio(ours, theirs)
    assert value == pytest.approx(1, abs=0.25)
    assert value < slack
    ours[::2] *= 1e4
    value, slack = typical_ratio(ours, theirs)
    assert value > 10 * slack
    assert typical_ratio(0 * ours, theirs) == (0, 1)


def test_the_perplexity_bound_is_five_standard_errors_of_what_noise_in_the_logits_does() -> None:
    logits = 2 * _random(4000, 50)
    tokens = torch.distributions.Categorical(logits=logits).sample()
    changes, divergences = [], []
    for seed in range(40):
        changed = logits + 0.02 * _random(4000, 50, seed=seed + 1)
        losses = [-x.log_softmax(-1).gather(1, tokens[:, None]).mean() for x in (logits, changed)]
        changes.append(float(losses[1] - losses[0]))
        divergences.append(float(kl_divergence(logits, changed).mean()))
    bound = perplexity_bound(divergences[0], len(logits))
    spread = float(torch.tensor(changes).square().mean().sqrt())
    assert bound / SIGMAS == pytest.approx(spread, rel=0.35)  # 40 samples know a deviation to 11%, three times over
    assert max(map(abs, changes)) < bound


def test_the_tie_bound_is_five_deviations_of_a_difference_of_differences() -> None:
    error = 0.3
    change = error * (_random(4, 100_000)[[0, 1]] - _random(4, 100_000)[[2, 3]])  # two tokens, two models
    spread = float((change[0] - change[1]).std())
    assert tie_bound(error) == pytest.approx(SIGMAS * spread, rel=0.02)

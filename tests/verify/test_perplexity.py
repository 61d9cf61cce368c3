from __future__ import annotations

import math

import pytest
import torch

from flashnorm.verify.checks import perplexity_check
from flashnorm.verify.perplexity import Perplexity, compare_perplexity, token_losses
from tests.verify.tiny import VOCABULARY, tiny_model

WINDOWS = torch.arange(60).view(3, 20)


def test_losses_are_those_of_the_next_token() -> None:
    model = tiny_model("llama")
    losses = token_losses(model, WINDOWS, 1)
    with torch.inference_mode():
        log_p = model(WINDOWS).logits.double().log_softmax(-1)
    expected = -log_p[:, :-1].gather(2, WINDOWS[:, 1:, None]).flatten()
    assert losses.dtype == torch.float64
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def test_a_prefix_is_read_and_not_counted() -> None:
    model = tiny_model("llama")
    assert token_losses(model, WINDOWS, 1).view(3, 19)[:, 2:].equal(token_losses(model, WINDOWS, 3).view(3, 17))


def test_comparison() -> None:
    found = compare_perplexity(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.5]))
    assert (found.reference, found.candidate) == pytest.approx((math.exp(2), math.exp(2.25)))
    assert found.relative_difference == pytest.approx(math.exp(0.25) - 1)
    assert found.tokens == 2
    assert compare_perplexity(torch.tensor([1.0]), torch.tensor([2000.0])).candidate == math.inf


def test_the_check_fails_beyond_rounding_in_either_direction() -> None:
    for difference in (1e-3, -1e-3):
        found = Perplexity(20.0, 20.0 * (1 + difference), difference, 10_000)
        assert perplexity_check(found, 1e-4, finer=False).passed
        assert not perplexity_check(found, 1e-6, finer=False).passed
        assert not perplexity_check(found, 1e-5, finer=True).passed
    assert not perplexity_check(Perplexity(20.0, math.inf, math.inf, 10), 1e-4, finer=True).passed


def test_an_untrained_model_is_worse_than_chance() -> None:
    assert token_losses(tiny_model("llama"), WINDOWS, 1).mean() > math.log(VOCABULARY)

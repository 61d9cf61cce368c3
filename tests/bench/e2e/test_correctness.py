from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.bench.e2e.contender import Trace
from flashnorm.bench.e2e.correctness import OTHERS, OWN, Judge
from flashnorm.errors import CheckFailed
from tests.runtime.decode.models import tiny, tokens

ROWS, LENGTH, COUNT = 3, 40, 16


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny("llama", torch.bfloat16)


@pytest.fixture(scope="module")
def judge(model) -> Judge:
    return Judge(model)


@torch.no_grad()
def greedy_trace(model: torch.nn.Module) -> Trace:
    """The stock model's own, without a cache, as it is compared with."""
    ids = torch.tensor([tokens(LENGTH - COUNT + 1, seed=row) for row in range(ROWS)])
    while ids.shape[1] < LENGTH:
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    logits = model(ids, use_cache=False).logits[:, -COUNT:].float()
    # A bf16 product of another shape may turn a near tie, so what is chosen is read off the whole run's logits.
    return rechosen(Trace(ids, logits, logits.argmax(-1)))


def rechosen(trace: Trace) -> Trace:
    """The trace with logits raised where a token was fed, so that it is the likeliest of them."""
    logits = trace.logits.clone()
    fed = trace.ids[:, -COUNT + 1 :, None]
    logits[:, :-1].scatter_(-1, fed, logits[:, :-1].amax(-1, keepdim=True))
    return replace(trace, logits=logits, chosen=torch.cat([fed[..., 0], logits[:, -1:].argmax(-1)], 1))


@pytest.fixture(scope="module")
def trace(model) -> Trace:
    return greedy_trace(model)


def noisy(judge: Judge, trace: Trace, times: float) -> Trace:
    """Logits whose error is so many times the stock model's, with the same tokens likeliest."""
    with torch.no_grad():
        exact = judge._exact(trace.ids, use_cache=False).logits[:, -COUNT:].double()
    error = trace.logits.double() - exact
    logits = exact + times * error
    # The tokens are judged apart from the logits; here only the latter matter.
    peak = logits.scatter(-1, trace.chosen[..., None], logits.amax(-1, keepdim=True))
    return replace(trace, logits=peak)


def test_the_stock_model_is_as_far_as_itself(judge, trace):
    error = judge.judge("stock", trace, own=True)
    assert error.over_stock == pytest.approx(1.0, abs=0.02)
    assert error.allowed >= OWN**0.5


@pytest.mark.parametrize(("own", "bound"), [(True, OWN), (False, OTHERS)])
def test_the_bound_is_where_it_is_said_to_be(judge, trace, own, bound):
    limit = judge.judge("stock", trace, own=own).allowed
    assert limit == pytest.approx(bound**0.5, rel=0.05)  # errors alike at every position need little slack
    assert judge.judge("below", noisy(judge, trace, 0.97 * limit), own=own).over_stock < limit
    with pytest.raises(CheckFailed, match=r"above is wrong: its logits are .* nothing was timed"):
        judge.judge("above", noisy(judge, trace, 1.1 * limit), own=own)


def test_other_tokens_than_the_likeliest_are_seen(judge, trace):
    with pytest.raises(CheckFailed, match="takes other tokens than its logits prefer"):
        judge.judge("lag", replace(trace, chosen=trace.chosen.roll(1, 1)), own=True)


def test_a_step_that_goes_on_from_another_token_is_seen(judge, trace):
    with pytest.raises(CheckFailed, match="goes on from other tokens than it took"):
        judge.judge("lag", replace(trace, ids=trace.ids.roll(1, 1)), own=True)


def test_nan_is_seen(judge, trace):
    logits = trace.logits.clone()
    logits[1, 3] = float("nan")
    with pytest.raises(CheckFailed):
        judge.judge("broken", replace(trace, logits=logits), own=False)


def test_logits_of_the_step_before_are_seen(judge, trace):
    logits = trace.logits.roll(1, 1)
    with pytest.raises(CheckFailed):
        judge.judge("lag", replace(trace, logits=logits), own=False)

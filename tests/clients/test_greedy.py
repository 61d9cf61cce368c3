"""The judge of continuations: agreement and near ties pass, a planted preference does not."""

from __future__ import annotations

import pytest

from tests.clients.greedy import TOKENS, Step, compare, near_tie

BOUND = 0.5


def _continuation(token: int, second: int, margin: float) -> list[Step]:
    """`TOKENS` steps that prefer `token` to `second` by `margin`."""
    return [Step(token, {token: -1.0, second: -1.0 - margin})] * TOKENS


def test_the_same_tokens_are_accepted() -> None:
    comparison = compare(_continuation(5, 6, 3.0), _continuation(5, 6, 2.0), BOUND)
    assert comparison.accepted
    assert comparison.position is None


def test_a_near_tie_is_accepted_and_shown() -> None:
    candidate = [*_continuation(5, 6, 3.0)[:10], *_continuation(6, 5, 0.125)[10:]]
    source = [*_continuation(5, 6, 3.0)[:10], *_continuation(5, 6, 0.25)[10:]]
    comparison = compare(source, candidate, BOUND)
    assert comparison.accepted
    assert comparison.position == 10
    assert "token 10, a near tie" in str(comparison)
    assert "0.2500 nats" in str(comparison)


@pytest.mark.parametrize("margins", [(0.51, 0.0), (0.0, 0.51), (0.3, 0.3)])
def test_a_clear_preference_is_not(margins: tuple[float, float]) -> None:
    comparison = compare(_continuation(5, 6, margins[0]), _continuation(6, 5, margins[1]), BOUND)
    assert not comparison.accepted
    assert "NO near tie" in str(comparison)


def test_a_token_that_is_not_among_the_likeliest_is_not() -> None:
    assert not compare(_continuation(5, 6, 0.0), _continuation(7, 6, 0.0), BOUND).accepted


def test_a_short_continuation_is_an_error() -> None:
    with pytest.raises(ValueError, match="64 and 63 tokens"):
        compare(_continuation(5, 6, 0.0), _continuation(5, 6, 0.0)[1:], BOUND)


def test_the_bound_follows_from_the_noise_of_the_source() -> None:
    """Preferences that change by 0.1: five standard deviations of 2.5 such variances."""
    bound = near_tie([_continuation(5, 6, 3.0)], [_continuation(5, 6, 3.1)])
    assert bound == pytest.approx(5 * (2.5 * 0.1**2) ** 0.5)


def test_what_comes_after_the_first_difference_is_no_noise() -> None:
    exact = [*_continuation(5, 6, 3.0)[:32], *_continuation(5, 6, 3.0)[32:]]
    source = [*_continuation(5, 6, 3.1)[:32], Step(6, {6: -1.0, 5: -1.1}), *_continuation(5, 6, 90.0)[33:]]
    assert near_tie([exact], [source]) == pytest.approx(5 * (2.5 * 0.1**2) ** 0.5)


def test_noise_that_cannot_be_seen_is_an_error() -> None:
    with pytest.raises(ValueError, match="never chose the same token"):
        near_tie([_continuation(5, 6, 3.0)], [_continuation(7, 6, 3.0)])

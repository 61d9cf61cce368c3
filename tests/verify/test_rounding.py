"""The yardstick: what it allows holds by experiment, and what chooses is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from flashnorm.verify.drift import squared_drift
from flashnorm.verify.engines.plain import callable_engine
from flashnorm.verify.rounding import Rounding, distance_check, measure_rounding
from tests.verify.cases import engine_of, rounding_of, tokens
from tests.verify.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma", "qwen2", "mistral"])
def test_other_orders_of_adding_stay_within_what_is_allowed(family: str, dtype: torch.dtype) -> None:
    """Rows alone and in a batch: their products are computed by other kernels, which add in another order."""
    engine = engine_of(tiny_model(family, dtype), family, dtype)
    rounding = rounding_of(family, dtype)
    ids = torch.stack([tokens(48, seed) for seed in range(6)])
    together = engine.fresh(ids)
    for row, answer in zip(ids, together, strict=True):
        distances = squared_drift(engine.fresh(row[None])[0], answer).sqrt()
        assert float(distances.max()) < rounding.allowed / 2


@pytest.mark.parametrize(("family", "routed"), [("llama", False), ("gemma", False), ("mixtral", True)])
def test_a_model_that_chooses_is_noticed(family: str, routed: bool) -> None:
    assert rounding_of(family, torch.float32).routed is routed


def test_one_far_position_fails_where_nothing_chooses_and_many_where_something_does() -> None:
    squares = torch.full((100,), 1.0, dtype=torch.float64)
    one, many = squares.clone(), 1e4 * squares
    one[17] = 400.0  # 20 root mean squares: a near tie turned over
    for routed, spoilt in ((False, one), (True, many)):
        rounding = Rounding(squares, routed)
        words = lambda index, times: f"at {index}, {times:.3g}"  # noqa: E731
        for everywhere in (False, True):
            assert distance_check("x", squares, rounding, words, everywhere=everywhere).passed
            assert not distance_check("x", spoilt, rounding, words, everywhere=everywhere).passed
    assert distance_check("x", one, Rounding(squares, True), words).passed
    assert distance_check("x", one, Rounding(squares, False), words).meaning == "at 17, 2.83"
    late = torch.cat([squares[:60], 1e6 * squares[60:]])  # one that stays in the cache from position 60 on
    assert not distance_check("x", late, Rounding(squares, True), words).passed
    assert distance_check("x", late, Rounding(squares, True), words, everywhere=True).passed


@pytest.mark.parametrize("routed", [False, True])
def test_a_distance_that_is_no_number_fails(routed: bool) -> None:
    squares = torch.ones(10, dtype=torch.float64)
    broken = squares.clone()
    broken[3] = math.nan
    check = distance_check("x", broken, Rounding(squares, routed), lambda index, times: str(index))
    assert not check.passed
    assert check.meaning == "3"


def test_without_an_oracle_half_of_the_digits_must_agree() -> None:
    engine = callable_engine(lambda ids: torch.nn.functional.one_hot(ids, 8).float(), 8)
    rounding = measure_rounding(engine, torch.arange(8)[None])
    assert not rounding.measured
    assert rounding.allowed == pytest.approx(2**-12)  # sqrt(2^-24) times a length of one

"""Lag: sound caches pass, every way of reading what a step before left is found, and at the right step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.verify.lag import check_lag
from flashnorm.verify.outcome import Outcome
from tests.faults.decoding import answers_late, late_once, writes_one_place_early
from tests.faults.streams import stale_head, stale_products
from tests.verify.cases import engine_of, rounding_of, tokens
from tests.verify.tiny import tiny_model

DTYPES = (torch.float32, torch.bfloat16)


def failed(outcome: Outcome) -> set[str]:
    return {figure.name for figure in outcome.failures}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral"])
def test_a_sound_cache_passes(family: str, dtype: torch.dtype) -> None:
    engine = engine_of(tiny_model(family, dtype), family, dtype)
    outcome = check_lag(engine, tokens(96), rounding_of(family, dtype))
    assert outcome.passed
    assert outcome.series["own_distance"][0] <= outcome.series["allowed"][0]
    decided, steps = (int(word) for word in outcome.notes[0].split()[:3:2])
    assert decided >= 0.98 * steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_answers_that_are_always_late_are_found_at_the_first_step(dtype: torch.dtype) -> None:
    engine = answers_late(engine_of(tiny_model("llama", dtype), "llama", dtype))
    outcome = check_lag(engine, tokens(64), rounding_of("llama", dtype))
    assert "stale_steps" in failed(outcome)
    assert outcome.figures[0].value == 56
    assert "the logits at position 8 (and 55 more steps) are those of 1 step before" in outcome.meaning
    assert "1 step before is read at every step" in outcome.cause
    heat = torch.tensor(outcome.series["heat"])
    assert (heat[1:].argmin(1) == torch.arange(len(heat) - 1)).all()  # the shifted diagonal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_late_answer_in_five_hundred_is_found_at_its_position(dtype: torch.dtype) -> None:
    engine = late_once(engine_of(tiny_model("llama", dtype), "llama", dtype), position=300)
    outcome = check_lag(engine, tokens(500), rounding_of("llama", dtype))
    assert outcome.figures[0].value == 1
    assert "the logits at position 300 are those of 1 step before" in outcome.meaning


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lag_inside_of_the_model_is_found_and_said_to_be_partial(dtype: torch.dtype) -> None:
    faulty = engine_of(stale_products(tiny_model("llama", dtype)), "llama", dtype)
    outcome = check_lag(faulty, tokens(96), rounding_of("llama", dtype))
    assert "cached_distance" in failed(outcome)
    assert "reads what step n - 1 left behind" in outcome.cause


def test_a_stale_head_is_a_whole_lag() -> None:
    outcome = check_lag(engine_of(stale_head(tiny_model("llama"))), tokens(64), rounding_of("llama", torch.float32))
    assert "stale_steps" in failed(outcome)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_at_the_wrong_position_is_no_lag_but_fails(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    engine = writes_one_place_early(engine_of(model, "llama", dtype), model)
    outcome = check_lag(engine, tokens(96), rounding_of("llama", dtype))
    assert failed(outcome) == {"cached_distance"}
    assert "the cache holds other keys and values" in outcome.cause


def test_an_engine_without_a_cache_says_so() -> None:
    engine = replace(engine_of(tiny_model("llama")), begin=None, undecodable="it has no cache")
    outcome = check_lag(engine, tokens(16), rounding_of("llama", torch.float32))
    assert outcome.skipped == "llama cannot decode: it has no cache"
    assert outcome.passed
    assert not outcome.figures

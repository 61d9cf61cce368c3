"""Causality: sound models pass bit for bit, and each way of seeing the future is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.verify.causality import change_places, check_causality
from flashnorm.verify.rounding import measure_rounding
from tests.faults.attention import bidirectional, mask_off_by_one
from tests.runtime.decode.models import tiny as decoder
from tests.verify.cases import engine_of, rounding_of, tokens
from tests.verify.tiny import tiny_model

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral"])
def test_a_sound_model_passes_in_every_way(family: str, dtype: torch.dtype) -> None:
    engine = engine_of(tiny_model(family, dtype), family, dtype)
    outcome = check_causality(engine, tokens(40), rounding_of(family, dtype))
    assert outcome.passed
    assert len(outcome.figures) == 6  # two figures for each of three ways
    if family != "mixtral":  # whose experts see another number of tokens
        assert all(figure.value == 0 for figure in outcome.figures)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fault", "first"), [(bidirectional, 1), (bidirectional, 2), (mask_off_by_one, 2)])
def test_a_mask_that_lets_the_future_in_is_found(fault, first: int, dtype: torch.dtype) -> None:
    faulty = engine_of(fault(tiny_model("llama", dtype), first), "llama", dtype)
    outcome = check_causality(faulty, tokens(40), rounding_of("llama", dtype))
    names = {figure.name for figure in outcome.failures}
    assert names == {f"future_seen ({way})" for way in ("prefill", "chunked prefill", "padded")}
    assert "sees the future" in outcome.meaning


def test_a_mask_that_is_off_by_one_is_found_at_the_token_before() -> None:
    faulty = engine_of(mask_off_by_one(tiny_model("llama"), 2))
    meaning = check_causality(faulty, tokens(40), rounding_of("llama", torch.float32)).meaning
    changed, seen = (
        int(word.split()[0].rstrip(",")) for word in (meaning.split("token ")[1], meaning.split("at position ")[1])
    )
    assert seen == changed - 1


def test_an_engine_that_ignores_its_input_is_found() -> None:
    engine = engine_of(tiny_model("llama"))
    first = engine.fresh(tokens(40)[None])
    deaf = replace(engine, fresh=lambda ids: first.expand(len(ids), -1, -1), begin=None, padded=None)
    outcome = check_causality(deaf, tokens(40), rounding_of("llama", torch.float32))
    assert [figure.name for figure in outcome.failures] == ["changes_unheard (prefill)"]
    assert len(outcome.notes) == 2


def test_padding_that_counts_is_found() -> None:
    engine = engine_of(tiny_model("llama"))
    careless = replace(engine, padded=lambda ids, mask: engine.fresh(ids))
    outcome = check_causality(careless, tokens(40), rounding_of("llama", torch.float32))
    assert [figure.name for figure in outcome.failures] == ["future_seen (padded)"]


def test_a_sliding_window_passes_beyond_its_edge() -> None:
    model = decoder("mistral", sliding_window=8)
    engine = replace(engine_of(model), exact=None, vocabulary=101)
    assert engine.window == 8
    ids = tokens(40, vocabulary=101)
    assert check_causality(engine, ids, measure_rounding(engine, ids[None])).passed


def test_the_places_lie_at_edges_and_inside() -> None:
    assert change_places(40, 8, 12) == [1, 2, 4, 7, 8, 9, 15, 16, 20, 31, 32, 39]
    assert change_places(40, None, 3) == [20, 32, 39]
    assert change_places(2, None, 9) == [1]

"""Batching, slots and determinism: sound subjects pass, and each way of being disturbed is found by its check."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.verify.batching import check_batching
from flashnorm.verify.determinism import check_determinism
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.engines.slots import slots_engine
from flashnorm.verify.rounding import measure_rounding
from flashnorm.verify.slot_isolation import check_slots
from tests.faults.batches import UnclearedSlots, neighbour_read, shifted_after_padding, unwritten_memory
from tests.runtime.decode.models import tiny as decoder
from tests.runtime.plain_slots import PlainSlots
from tests.verify.cases import engine_of, rounding_of, tokens
from tests.verify.tiny import tiny_model

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral"])
def test_a_sound_model_answers_a_row_alike_in_any_company(family: str, dtype: torch.dtype) -> None:
    engine = engine_of(tiny_model(family, dtype), family, dtype)
    outcome = check_batching(engine, tokens(60), rounding_of(family, dtype))
    assert outcome.passed
    assert len(outcome.figures) == 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_neighbours_row_is_found(dtype: torch.dtype) -> None:
    engine = engine_of(neighbour_read(tiny_model("llama", dtype)), "llama", dtype)
    outcome = check_batching(engine, tokens(60), rounding_of("llama", dtype))
    names = {figure.name for figure in outcome.failures}
    assert {"another_answer (among others)", "another_answer (with other neighbours)"} <= names
    assert "has other logits than alone" in outcome.meaning


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_position_that_is_off_by_one_after_padding_is_found(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    engine = shifted_after_padding(engine_of(model, "llama", dtype), model)
    outcome = check_batching(engine, tokens(60), rounding_of("llama", dtype))
    names = {figure.name for figure in outcome.failures}
    assert names == {f"another_answer (padded on the {side})" for side in ("left", "right")}


def test_sound_slots_are_isolated() -> None:
    model = decoder("llama")
    program = Program(read_spec(model, max_length=64), slots=3)
    engine = slots_engine(program, model_engine(model, "tiny", lambda: decoder("llama")))
    ids = tokens(48, vocabulary=engine.vocabulary)
    outcome = check_slots(engine, ids, measure_rounding(engine, ids[None]))
    assert outcome.passed
    assert [figure.name for figure in outcome.figures] == [
        f"disturbed ({w})" for w in ("reused", "joined", "reordered")
    ]
    assert program.free_slots() == (0, 1, 2)


def test_a_slot_that_is_not_cleared_is_found() -> None:
    for slots, expected in ((PlainSlots, set()), (UnclearedSlots, {"reused", "joined", "reordered"})):
        model = tiny_model("llama")
        engine = slots_engine(slots(model, slots=2, max_length=256), engine_of(model))
        outcome = check_slots(engine, tokens(48), rounding_of("llama", torch.float32))
        assert {figure.name for figure in outcome.failures} == {f"disturbed ({way})" for way in expected}


def test_what_has_no_slots_says_so() -> None:
    outcome = check_slots(engine_of(tiny_model("llama")), tokens(48), rounding_of("llama", torch.float32))
    assert outcome.skipped == "llama has no slots that sequences join and leave"
    model = tiny_model("llama")
    alone = slots_engine(PlainSlots(model, slots=1), engine_of(model))
    assert "two slots at least" in check_slots(alone, tokens(48), rounding_of("llama", torch.float32)).skipped


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sound_model_repeats_itself(dtype: torch.dtype) -> None:
    outcome = check_determinism(engine_of(tiny_model("llama", dtype), "llama", dtype), tokens(24), 4)
    assert outcome.passed
    assert [figure.name for figure in outcome.figures] == ["other_bits (prefill)", "other_bits (decode)"]


def test_memory_that_nobody_wrote_is_found() -> None:
    outcome = check_determinism(unwritten_memory(engine_of(tiny_model("llama"))), tokens(24), 4)
    assert [figure.name for figure in outcome.failures] == ["other_bits (prefill)"]
    assert outcome.figures[0].value == 3
    assert "at 1 of 24 positions, from 23 on" in outcome.meaning


def test_a_nan_in_every_run_is_no_question_of_determinism() -> None:
    engine = engine_of(tiny_model("llama"))
    broken = replace(engine, fresh=lambda ids: engine.fresh(ids) * float("nan"), begin=None)
    assert check_determinism(broken, tokens(8), 3).passed

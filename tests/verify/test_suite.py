"""The whole battery on sound and on faulty subjects of every kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashnorm
from flashnorm.errors import Refusal
from flashnorm.verify.suite import CHECKS
from tests.faults.attention import bidirectional
from tests.faults.decoding import answers_late
from tests.runtime.decode.models import tiny as decoder
from tests.verify.cases import engine_of
from tests.verify.tiny import save, tiny_model


def test_a_sound_folder_passes_plain_and_accelerated(tmp_path: Path) -> None:
    folder = save(decoder("llama"), tmp_path / "model", with_tokenizer=False)
    for accelerated in (False, True):
        report = flashnorm.battery(folder, level="quick", accelerated=accelerated)
        assert report.passed
        assert report.notes == ()
        assert [outcome.name for outcome in report.outcomes] == list(CHECKS)
        json.dumps(report.to_dict(), allow_nan=False)


def test_what_has_no_decode_program_is_accelerated_to_level_one(tmp_path: Path) -> None:
    folder = save(tiny_model("mixtral"), tmp_path / "model")
    report = flashnorm.battery(folder, level="quick", accelerated=True)
    assert report.passed
    assert "accelerated to level one, without a decode program: " in report.notes[0]


def test_a_module_is_run_as_it_is() -> None:
    model = bidirectional(tiny_model("llama"))
    report = flashnorm.battery(model, level="quick", only=["causality"])
    assert not report.passed
    assert report.verdict.startswith("causality: prefill: changing token ")
    accelerated = flashnorm.accelerate(decoder("llama"), level=2, max_length=128)
    report = flashnorm.battery(accelerated, level="quick", only=["lag"])
    assert report.passed
    assert len(report.notes) == 2


def test_an_engine_is_run_as_it_is() -> None:
    report = flashnorm.battery(answers_late(engine_of(tiny_model("llama"))), level="quick")
    assert [outcome.name for outcome in report.failures] == ["lag", "batching"]  # which decodes a batch as well
    assert report["lag"].meaning in report.verdict


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"level": "deep"}, "level 'deep' does not exist; use one of quick, standard, thorough"),
        ({"only": ["lag", "luck"]}, "there is no check 'luck'; there are parity, causality"),
        ({"dtype": torch.bfloat16}, "an engine or a model is run as it is"),
        ({"text": "words"}, "an engine has no tokenizer"),
    ],
)
def test_refusals(options: dict, sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        flashnorm.battery(engine_of(tiny_model("llama")), **options)


def test_a_check_that_cannot_run_says_why_and_the_others_run() -> None:
    engine = engine_of(tiny_model("llama"))

    def padded(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        raise ValueError("no mask, please\nand thank you")

    report = flashnorm.battery(replace(engine, padded=padded), level="quick", only=["causality", "lag"])
    assert report["causality"].skipped == "llama cannot be asked: no mask, please"
    assert report.verdict == "passed: 1 checks (lag), 1 could not run"


def test_a_report_of_nothing_has_not_passed() -> None:
    engine = replace(engine_of(tiny_model("llama")), begin=None, undecodable="it has no cache")
    report = flashnorm.battery(engine, level="quick", only=["lag"])
    assert not report.passed
    assert not report.failures
    assert report.verdict == "nothing was checked: llama cannot decode: it has no cache"

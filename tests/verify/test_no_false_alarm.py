"""No false alarms: twenty kinds of healthy models, in two precisions and with two attentions, and a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import flashnorm
from tests import zoo
from tests.runtime.decode.models import SUPPORTED
from tests.runtime.decode.models import tiny as decoder
from tests.verify.healthy import FAMILIES
from tests.verify.tiny import tiny_model
from tests.zoo.known import known


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), *((family, torch.bfloat16) for family in FAMILIES[::2])],
)
def test_a_healthy_model_passes(family: str, dtype: torch.dtype) -> None:
    report = flashnorm.battery(zoo.tiny_model("causal", known("causal", family)).to(dtype), level="quick")
    assert report.passed, report.verdict
    assert {outcome.name for outcome in report.outcomes if outcome.skipped} <= {"parity", "slots", "ranges"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_attentions_pass(attention: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    model.set_attn_implementation(attention)
    assert flashnorm.battery(model, level="quick").passed


@pytest.mark.parametrize("name", ["llama_yarn", "mistral", "gemma2", "granite"])
def test_a_decode_program_passes(name: str, tmp_path: Path) -> None:
    assert name in SUPPORTED
    decoder(name).save_pretrained(tmp_path)
    # Eager, which a program follows: some releases run Gemma 2 through an attention that drops its soft cap.
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attn_implementation": "eager"}))
    report = flashnorm.battery(tmp_path, level="quick", accelerated=True)
    assert report.passed, report.verdict
    assert not any(outcome.skipped for outcome in report.outcomes)


@pytest.mark.slow
def test_a_real_model_passes(smollm2_bf16: Path) -> None:
    report = flashnorm.battery(smollm2_bf16, level="quick", only=["causality", "lag", "batching"])
    assert report.passed, report.verdict

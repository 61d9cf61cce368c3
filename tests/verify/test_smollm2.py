"""A real trained model: the figures that the project promises, and a fault that a name-based fold would make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashnorm


@pytest.mark.slow
def test_a_folded_bf16_model_is_as_near_to_the_exact_one_as_its_source(
    smollm2_bf16: Path, sotu_text: str, tmp_path: Path
) -> None:
    flashnorm.fold_checkpoint(smollm2_bf16, tmp_path / "folded", quiet=True)
    report = flashnorm.verify(smollm2_bf16, tmp_path / "folded", text=sotu_text, tokens=1024, new_tokens=8)
    assert report.passed
    assert report.logits.drift_ratio <= 1.05
    assert report.logits.typical_exact_drift_ratio < 0.3  # of the 0.71 that is derived
    assert abs(report.perplexity.relative_difference) <= 0.0005


@pytest.mark.slow
def test_a_single_layer_that_keeps_its_gain_is_found(smollm2: Path) -> None:
    source = flashnorm.load(smollm2, dtype=torch.bfloat16)
    candidate = flashnorm.load(smollm2, dtype=torch.bfloat16)
    gains = candidate.model.layers[20].input_layernorm.weight.data.clone()
    assert flashnorm.fold(candidate).folded
    candidate.model.layers[20].input_layernorm.weight.data.copy_(gains)
    report = flashnorm.verify(source, candidate, positions=64, new_tokens=0)
    assert not report.passed
    assert report.logits.exact_drift_ratio > 5

"""Weights that no token id reaches are compared as they are stored; where they cannot be, that is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import flashnorm
from flashnorm.checkpoint.manifest import MANIFEST, manifest_bytes, read_manifest
from flashnorm.errors import Refusal
from flashnorm.verify.report import VerifyReport
from flashnorm.verify.stored import stored_check
from tests import zoo
from tests.verify.tiny import save, tiny_model

# RMSNorms in the vision tower; LayerNorms whose bias moves into the next; both with a language model behind.
MODELS = ("qwen2_5_vl", "llava")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "source"
    zoo.tiny_model("image_text", request.param).save_pretrained(folder)
    return folder


def _verify(source: Path, candidate: Path) -> VerifyReport:
    return flashnorm.verify(source, candidate, positions=32, new_tokens=0)


def _folded(source: Path, out: Path, change: Callable[[Weights], None] | None = None, **options: bool) -> Path:
    flashnorm.fold_checkpoint(source, out, **options)
    if change is not None:
        _change(out, change)
    return out


def _change(folder: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _of_tower(weights: Weights, *parts: str) -> list[str]:
    return [n for n in weights if ("visual" in n or "vision" in n) and any(part in n for part in parts)]


def _negate_projections(weights: Weights) -> None:
    for name in _of_tower(weights, "qkv.weight", "q_proj.weight"):
        weights[name] = -weights[name]


def _one_number(weights: Weights) -> None:
    name = _of_tower(weights, "qkv.weight", "q_proj.weight")[0]
    weights[name][0, 0] *= 1 + 2**-10


def _a_bias(weights: Weights) -> None:
    name = _of_tower(weights, "qkv.bias", "q_proj.bias")[0]
    weights[name] += weights[name].abs().max() * 1e-3


def _untouched_by_the_fold(weights: Weights) -> None:
    name = _of_tower(weights, "proj.weight", "out_proj.weight")[-1]
    weights[name][..., 0] = -weights[name][..., 0]


def _gain_not_reset(weights: Weights) -> None:
    name = next(n for n in _of_tower(weights, "norm1.weight", "layer_norm1.weight"))
    weights[name] *= 1.5


def test_a_right_fold_passes_and_says_what_was_compared_how(source: Path, tmp_path: Path) -> None:
    for mode in ({}, {"strict": True}):
        report = _verify(source, _folded(source, tmp_path / f"folded-{len(mode)}", **mode))
        assert report.passed
        assert "stored_weights" in [check.name for check in report.checks]
        [note] = report.notes
        assert "token ids do not reach" in note
        assert report.not_compared == ()


@pytest.mark.parametrize("fault", [_negate_projections, _one_number, _a_bias, _untouched_by_the_fold, _gain_not_reset])
def test_a_fault_where_no_token_id_comes_fails(source: Path, tmp_path: Path, fault: Callable[[Weights], None]) -> None:
    report = _verify(source, _folded(source, tmp_path / "folded", fault))
    assert [check.name for check in report.failures] == ["stored_weights"]
    assert "are not the reference's with its gains folded in" in report.verdict


def test_what_could_not_be_compared_is_said(source: Path, tmp_path: Path) -> None:
    """Without its manifest, nothing says what the weights of the candidate should be."""
    candidate = _folded(source, tmp_path / "folded", _negate_projections)
    (candidate / MANIFEST).unlink()
    report = _verify(source, candidate)
    assert report.passed
    assert _of_tower(dict.fromkeys(report.not_compared), "qkv.weight", "q_proj.weight")
    assert any("were not compared" in note for note in report.notes)
    assert f"except for {len(report.not_compared)} weights that were not compared" in report.verdict


def test_unreached_weights_that_are_the_same_need_no_word(source: Path) -> None:
    report = _verify(source, source)
    assert (report.notes, report.not_compared) == ((), ())


def test_live_models_are_told_to_come_as_folders() -> None:
    model = zoo.tiny_model("image_text", MODELS[0])
    folded = zoo.tiny_model("image_text", MODELS[0])
    flashnorm.fold(folded)
    report = flashnorm.verify(model, folded, positions=32, new_tokens=0)
    assert report.not_compared
    assert "give checkpoint folders" in report.notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"untie": True}, {"strict": True}], ids=str)
def test_every_mode_and_dtype(tmp_path: Path, dtype: torch.dtype, options: dict[str, bool]) -> None:
    source = save(tiny_model("llama", dtype), tmp_path / "source", with_tokenizer=False)
    out = _folded(source, tmp_path / "folded", **options)
    assert stored_check(source, out).value == 0

    def swap(weights: Weights) -> None:
        weights.pop("model.layers.0.mlp.down_proj.weight")
        weights["extra"] = torch.zeros(1)

    _change(out, swap)
    assert stored_check(source, out).value == 2


def test_a_fold_of_other_norms_is_not_judged(tmp_path: Path) -> None:
    source = save(tiny_model("llama"), tmp_path / "source", with_tokenizer=False)
    out = _folded(source, tmp_path / "folded")
    manifest = read_manifest(out)
    (out / MANIFEST).write_bytes(manifest_bytes(replace(manifest, sites=manifest.sites[1:])))
    with pytest.raises(Refusal, match="this version folds other norms"):
        stored_check(source, out)

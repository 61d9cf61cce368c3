"""Norms that something outside the model reads, which the folder shows, keep their gain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.errors import Refusal
from tests.checkpoint.test_fold import IDS, SMALL, saved


def _llama(folder: Path, tied: bool = False) -> Path:
    return saved(folder, LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied)))


def _store(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(path) | named, path, metadata={"format": "pt"})


@torch.no_grad()
def _embedding(folder: Path) -> torch.Tensor:
    """What sentence-transformers pools: the last hidden state of the model without its head."""
    return AutoModel.from_pretrained(folder).eval()(IDS).last_hidden_state


@pytest.mark.parametrize("untie", [False, True])
def test_a_sentence_transformers_model_keeps_the_norm_before_its_output(tmp_path: Path, untie: bool) -> None:
    source = _llama(tmp_path, tied=untie)
    fold_checkpoint(source, tmp_path / "plain", untie=untie)
    assert not torch.allclose(_embedding(tmp_path / "plain"), _embedding(source), rtol=1e-2)
    (source / "modules.json").write_text("[]")
    report = fold_checkpoint(source, tmp_path / "out", untie=untie)
    assert "sentence-transformers loads the model without its head" in report.skipped["model.norm"]
    assert len(report.folded) == 4
    assert torch.allclose(_embedding(tmp_path / "out"), _embedding(source), rtol=1e-4, atol=1e-5)


MTP = {"mtp__fc__weight": torch.ones(32, 64), "mtp__norm__weight": torch.ones(32)}


def test_layers_that_only_an_engine_runs_keep_the_norm_before_the_head(tmp_path: Path) -> None:
    source = _llama(tmp_path)
    _store(source, **MTP)
    report = fold_checkpoint(source, tmp_path / "out")
    assert report.skipped["model.norm"].startswith(
        "the checkpoint stores mtp.fc.weight, which LlamaForCausalLM does not load"
    )
    assert len(report.folded) == 4
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in ("lm_head.weight", "model.norm.weight", "mtp.fc.weight"):
        assert torch.equal(before[name], after[name])


def test_a_head_is_not_untied_under_such_layers(tmp_path: Path) -> None:
    source = _llama(tmp_path, tied=True)
    _store(source, **MTP)
    with pytest.raises(
        Refusal, match=r"mtp\.fc\.weight, .*so untying would change what those compute; leave --untie out"
    ):
        fold_checkpoint(source, tmp_path / "out", untie=True)
    assert os.listdir(tmp_path) == ["source"]
    assert list(fold_checkpoint(source, tmp_path / "out").skipped) == ["model.norm"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(32)},
        {"model__mask": torch.ones(1, 1, 32, 32)},
        {"model__table": torch.ones(32, 2, dtype=torch.int64)},
        {"tower__weight": torch.ones(48, 24)},
    ],
    ids=lambda tensors: next(iter(tensors)),
)
def test_tables_masks_and_weights_of_another_width_are_no_such_layers(
    tmp_path: Path, harmless: dict[str, torch.Tensor]
) -> None:
    source = _llama(tmp_path)
    _store(source, **harmless)
    assert fold_checkpoint(source, tmp_path / "out").skipped == {}

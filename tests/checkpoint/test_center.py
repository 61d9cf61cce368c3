"""Centering from folder to folder: what stock loaders make of it, what is kept, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import flashnorm
from flashnorm.checkpoint.center import center_checkpoint
from flashnorm.errors import CheckpointError, OutputError, Refusal
from flashnorm.passes.center import center
from tests.checkpoint.test_fold import SMALL, close, logits, saved

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = saved(tmp_path, GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=False)))
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("kept")
    return folder


def test_stock_loaders_run_the_result_and_centering_it_again_changes_no_weight(tmp_path: Path, source: Path) -> None:
    report = center_checkpoint(source, tmp_path / "out")
    assert len(report.centered) == 5
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert close(logits(after), logits(before))
    assert (tmp_path / "out" / "notes" / "a.txt").read_text() == "kept"
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert after.transformer.h[0].ln_1.bias.abs().max() == 0
    weights = after.transformer.wte.weight.clone()
    assert len(center(after).centered) == 5
    # Centered once more, in fp32: the mean of a row that was rounded.
    assert (after.transformer.wte.weight - weights).abs().max() < 1e-8
    assert close(logits(after), logits(before))


def test_the_result_folds(tmp_path: Path, source: Path) -> None:
    center_checkpoint(source, tmp_path / "out")
    flashnorm.fold_checkpoint(tmp_path / "out", tmp_path / "folded")
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "folded"))
    assert close(logits(after), logits(before))


def test_an_untied_head_is_stored_and_the_config_says_so(tmp_path: Path) -> None:
    folder = saved(tmp_path, GPT2LMHeadModel(GPT2Config(**GPT2)))
    with pytest.raises(Refusal, match=r"nothing in .* can be centered .*--untie removes this"):
        center_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = center_checkpoint(folder, tmp_path / "out", untie=True)
    assert report.untied == {"lm_head.weight": "transformer.wte.weight"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(stored["lm_head.weight"], stored["transformer.wte.weight"])
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (folder, tmp_path / "out"))
    assert close(logits(after), logits(before))


def test_weights_of_16_bits_are_rounded_once(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=False)).to(torch.bfloat16)
    folder = saved(tmp_path, model)
    center_checkpoint(folder, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"]
    table = model.transformer.wte.weight.detach().double()
    wanted = table - table.mean(-1, keepdim=True)
    assert stored.dtype == torch.bfloat16
    # Half a unit in the last of bfloat16's 8 places, at most 2^-8 of the number, and what the fp32 mean adds.
    assert ((stored.double() - wanted).abs() <= wanted.abs() * (2**-8 + 2**-20) + 1e-8).all()


def test_refusals_leave_nothing_behind(tmp_path: Path, source: Path) -> None:
    llama = saved(tmp_path / "llama", LlamaForCausalLM(LlamaConfig(**SMALL)))
    with pytest.raises(Refusal, match="it subtracts no mean"):
        center_checkpoint(llama, tmp_path / "out")
    with pytest.raises(Refusal, match="no tied head"):
        center_checkpoint(source, tmp_path / "out", untie=True)
    flashnorm.fold_checkpoint(source, tmp_path / "folded")
    with pytest.raises(Refusal, match="folded already"):
        center_checkpoint(tmp_path / "folded", tmp_path / "out")
    with pytest.raises(OutputError, match="exists already"):
        center_checkpoint(source, tmp_path / "folded")
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError):
        center_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [*tmp_path.glob(".out*")]

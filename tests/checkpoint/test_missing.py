"""A config that asks for more than is stored: refused where a stock loader would set weights at random."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from flashnorm.checkpoint.conversion import placements
from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.checkpoint.missing import missing_weights
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from flashnorm.sites.build import hollow_model, read_config
from tests import zoo
from tests.checkpoint.test_fold import SMALL, saved


def _missing(folder: Path) -> list[str]:
    shapes = {name: tuple(info.shape) for name, info in open_source(folder).tensors.items()}
    model = hollow_model(read_config(folder))
    return missing_weights(model, {p.parameter for pieces in placements(model, shapes).values() for p in pieces})


def _drop(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _configure(folder: Path, **values: object) -> None:
    table = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: _configure(f, num_hidden_layers=3), r"for model\.layers\.2\.self_attn\.q_proj\.weight.* and 6 more"),
        (lambda f: _configure(f, attention_bias=True), r"for model\.layers\.0\.self_attn\.q_proj\.bias.* and 5 more"),
        (lambda f: _drop(f, "lm_head"), r"for lm_head\.weight, which"),
        (lambda f: _drop(f, "layers.1.input_layernorm"), r"for model\.layers\.1\.input_layernorm\.weight, which"),
    ],
)
def test_what_stock_loaders_set_at_random_is_refused_by_name(tmp_path, change, words):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    change(source)
    _, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)
    assert sorted(_missing(source)) == sorted(info["missing_keys"])
    with pytest.raises(CheckpointError, match=f"stores no tensor {words}"):
        fold_checkpoint(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("stored", ["lm_head", "embed_tokens"])
def test_a_tied_weight_is_stored_once(tmp_path, stored):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)))
    weights = load_file(source / "model.safetensors")
    weights[{"lm_head": "lm_head.weight", "embed_tokens": "model.embed_tokens.weight"}[stored]] = weights.pop(
        "model.embed_tokens.weight"
    )
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert _missing(source) == []


@pytest.mark.parametrize(
    ("family", "model_type"),
    [("causal", "mamba"), ("causal", "gptj"), ("seq2seq", "t5"), ("seq2seq", "bart"), ("masked", "bert")],
)
def test_what_a_class_computes_or_ties_or_never_stores_is_not_missing(tmp_path, family, model_type):
    zoo.tiny_model(family, model_type).save_pretrained(tmp_path)
    assert _missing(tmp_path) == []


def _mixtral(folder: Path) -> Path:
    return saved(folder, MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)))


def test_a_part_of_one_expert_is_missing(tmp_path):
    source = _mixtral(tmp_path)
    _drop(source, "layers.1.block_sparse_moe.experts.3.w1")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj .*cannot be put together"):
        fold_checkpoint(source, tmp_path / "out")


def test_a_whole_expert_is_missing(tmp_path):
    source = _mixtral(tmp_path)
    _drop(source, "experts.3.")
    with pytest.raises(CheckpointError, match=r"3 in number, make up .*for which the config asks for 4"):
        fold_checkpoint(source, tmp_path / "out")

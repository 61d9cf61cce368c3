"""From folder to folder: modes, what is kept, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MBartConfig,
    MBartForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import flashnorm
from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.checkpoint.manifest import read_manifest
from flashnorm.checkpoint.unfold import unfold_checkpoint
from flashnorm.errors import CheckpointError, ConfigError, Refusal
from tests import zoo

IDS = torch.arange(3, 15).view(2, 6)
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def randomised(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(0.1 * noise)
    return model.eval()


def saved(tmp_path: Path, model) -> Path:
    randomised(model).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def close(a, b) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm())


def test_compatible_fold_loads_with_stock_transformers(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    source = saved(tmp_path, model)
    report = fold_checkpoint(source, tmp_path / "folded")
    assert len(report.folded) == 5
    assert report.skipped == {}
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    assert close(logits(folded), logits(model))
    assert torch.all(folded.model.norm.weight == 1)


def test_one_plus_gains_are_kept_at_zero(tmp_path):
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8))
    source = saved(tmp_path, model)
    report = fold_checkpoint(source, tmp_path / "folded")
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    assert close(logits(folded), logits(model))
    assert torch.all(folded.model.layers[0].input_layernorm.weight == 0)
    assert "--untie" in report.skipped["model.norm"]
    assert "model.layers.0.post_attention_layernorm" in report.skipped


def test_strict_fold_removes_the_gains_and_loads_with_flashnorm(tmp_path):
    for offset, model in enumerate(
        [LlamaForCausalLM(LlamaConfig(**SMALL)), Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8))]
    ):
        folder = tmp_path / str(offset)
        source = saved(folder, model)
        report = fold_checkpoint(source, folder / "strict", strict=True)
        names = load_file(folder / "strict" / "model.safetensors")
        assert not any(name.startswith(norm) for norm in report.folded for name in names)
        assert json.loads((folder / "strict" / "config.json").read_text())["flashnorm"] == {"mode": "strict"}
        assert close(logits(flashnorm.load(folder / "strict")), logits(model))


def test_load_refuses_a_strict_folder_that_lacks_more_than_its_gains(tmp_path):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    fold_checkpoint(source, tmp_path / "strict", strict=True)
    shard = tmp_path / "strict" / "model.safetensors"
    tensors = load_file(shard)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj"):
        flashnorm.load(tmp_path / "strict")


def test_loading_a_strict_folder_does_not_warn_of_the_gains_that_it_lacks_by_design(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    fold_checkpoint(source, tmp_path / "strict", strict=True)
    flashnorm.load(tmp_path / "strict")
    assert caplog.text == ""
    shard = tmp_path / "strict" / "model.safetensors"
    save_file(load_file(shard) | {"model.stray.weight": torch.ones(1)}, shard, metadata={"format": "pt"})
    flashnorm.load(tmp_path / "strict")
    assert "UNEXPECTED" in caplog.text
    assert "model.stray.weight" in caplog.text
    assert "MISSING" not in caplog.text


def test_untie_folds_the_final_norm_and_fixes_every_flag(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    source = saved(tmp_path, model)
    report = fold_checkpoint(source, tmp_path / "folded", untie=True)
    assert "model.norm" in report.folded
    assert report.grown_bytes == 64 * 32 * 4
    config = json.loads((tmp_path / "folded" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    assert close(logits(folded), logits(model))
    assert torch.equal(folded.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("stored", [("embed",), ("head",), ("embed", "head")])
def test_untie_finds_the_weight_under_whichever_names_it_is_stored(tmp_path, stored):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    source = saved(tmp_path, model)
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    tensors = load_file(source / "model.safetensors")
    weight = tensors.pop(names["embed"])
    tensors |= {names[name]: weight.clone() for name in stored}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = fold_checkpoint(source, tmp_path / "folded", untie=True)
    assert "model.norm" in report.folded
    assert report.grown_bytes == (2 - len(stored)) * weight.nbytes
    folded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", output_loading_info=True)
    assert not info["missing_keys"]
    assert close(logits(folded), logits(model))
    assert torch.equal(folded.model.embed_tokens.weight, weight)
    assert read_manifest(tmp_path / "folded").untied
    unfold_checkpoint(tmp_path / "folded", tmp_path / "restored", quiet=True)
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "restored")
    assert close(logits(restored), logits(model))
    assert restored.lm_head.weight.data_ptr() == restored.model.embed_tokens.weight.data_ptr() or len(stored) == 2


def test_untie_of_a_checkpoint_without_the_weight_is_refused(tmp_path):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)))
    tensors = load_file(source / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refusal, match=r"stores no tensor for model\.embed_tokens\.weight, lm_head\.weight"):
        fold_checkpoint(source, tmp_path / "folded", untie=True)
    assert not (tmp_path / "folded").exists()


@pytest.mark.parametrize("stored_as", ["decoder.embed_tokens", "encoder.embed_tokens", "shared"])
def test_untie_parts_every_embedding_that_the_flag_ties(tmp_path, stored_as):
    """An encoder-decoder ties three tables and a head by one flag; with it off, the loader wants all four."""
    config = MBartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, tie_word_embeddings=True,
    )  # fmt: skip
    model = randomised(MBartForConditionalGeneration(config))
    model.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    (name,) = [n for n in tensors if n.endswith(("shared.weight", "embed_tokens.weight", "lm_head.weight"))]
    tensors[f"model.{stored_as}.weight"] = tensors.pop(name)
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    report = fold_checkpoint(tmp_path / "source", tmp_path / "folded", untie=True)
    assert "model.decoder.layer_norm" in report.folded
    folded, info = MBartForConditionalGeneration.from_pretrained(tmp_path / "folded", output_loading_info=True)
    assert not info["missing_keys"]
    assert close(logits(folded.eval()), logits(model))


def test_a_gain_that_norms_share_is_folded_in_every_mode(tmp_path):
    model = zoo.tiny_model("causal", "zamba")
    model.save_pretrained(tmp_path / "source")
    with torch.no_grad():
        inputs = zoo.forward_inputs(model, "causal")
        before = zoo.logits(model, inputs)
        for strict in (False, True):
            folder = tmp_path / str(strict)
            assert any(
                "shared_transf" in norm for norm in fold_checkpoint(tmp_path / "source", folder, strict=strict).folded
            )
            assert close(zoo.logits(flashnorm.load(folder), inputs), before)


def test_a_shared_gain_that_is_stored_twice_with_different_values_is_left_alone(tmp_path):
    model = zoo.tiny_model("causal", "zamba")
    model.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    names = [
        n
        for n, p in model.named_parameters(remove_duplicate=False)
        if n.endswith("shared_transf.input_layernorm.weight")
    ]
    (stored,) = [name for name in names if name in tensors]
    other = next(name for name in names if name not in tensors)
    tensors[other] = tensors[stored] + 1
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    report = fold_checkpoint(tmp_path / "source", tmp_path / "folded")
    assert "which differ" in report.skipped[stored.removesuffix(".weight")]
    before, after = (type(model).from_pretrained(tmp_path / name).eval() for name in ("source", "folded"))
    inputs = zoo.forward_inputs(model, "causal")
    with torch.no_grad():
        assert close(zoo.logits(after, inputs), zoo.logits(before, inputs))


def test_a_kept_bias_that_would_overflow_keeps_its_norm_from_folding(tmp_path):
    config = StableLmConfig(**SMALL, tie_word_embeddings=False)
    model = randomised(StableLmForCausalLM(config)).half()
    norm = model.model.layers[0].input_layernorm
    norm.weight.data[3], norm.bias.data[3] = 1e-5, 2.0
    model.save_pretrained(tmp_path / "source")
    report = fold_checkpoint(tmp_path / "source", tmp_path / "folded")
    assert "does not fit torch.float16" in report.skipped["model.layers.0.input_layernorm"]
    assert "model.layers.1.input_layernorm" in report.folded
    stored = load_file(tmp_path / "folded/model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in stored.values())


def test_untie_is_refused_where_the_flag_changes_the_computation(tmp_path):
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64)
    config.tie_word_embeddings = True
    randomised(T5ForConditionalGeneration(config)).save_pretrained(tmp_path / "source")
    with pytest.raises(Refusal, match="untied"):
        fold_checkpoint(tmp_path / "source", tmp_path / "folded", untie=True)
    assert not (tmp_path / "folded").exists()


def test_untie_without_a_tied_head_is_refused(tmp_path):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    with pytest.raises(Refusal, match="nothing to untie"):
        fold_checkpoint(source, tmp_path / "folded", untie=True)


def test_every_expert_is_scaled_where_they_are_stored_one_by_one(tmp_path):
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
    source = saved(tmp_path, model)
    stored = load_file(source / "model.safetensors")
    assert any("experts.3." in name for name in stored), "the checkpoint stores experts one by one"
    fold_checkpoint(source, tmp_path / "folded")
    folded = load_file(tmp_path / "folded" / "model.safetensors")
    gain = stored["model.layers.1.post_attention_layernorm.weight"]
    for name, tensor in stored.items():
        if ".layers.1." in name and name.rpartition(".weight")[0].endswith(("w1", "w3", "gate")):
            torch.testing.assert_close(folded[name], tensor * gain, rtol=1e-6, atol=0)
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "folded")), logits(model))


def test_layer_norm_biases_move_into_the_next_biases(tmp_path):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    model = GPT2LMHeadModel(config)
    source = saved(tmp_path, model)
    fold_checkpoint(source, tmp_path / "folded")
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    assert torch.all(folded.transformer.h[0].ln_1.bias == 0)
    assert close(logits(folded), logits(model))


def test_gains_are_multiplied_in_float32_and_rounded_once(tmp_path):
    model = randomised(LlamaForCausalLM(LlamaConfig(**SMALL))).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    fold_checkpoint(tmp_path / "source", tmp_path / "folded")
    before, after = load_file(tmp_path / "source/model.safetensors"), load_file(tmp_path / "folded/model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    exact = before[name].float() * before["model.layers.0.input_layernorm.weight"].float()
    assert torch.equal(after[name], exact.to(torch.bfloat16))
    assert all(after[name].dtype == before[name].dtype for name in before)


def test_shards_names_and_other_files_are_kept(tmp_path):
    model = randomised(LlamaForCausalLM(LlamaConfig(**SMALL)))
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    (tmp_path / "source" / "LICENSE.txt").write_bytes(b"as it was\r\n")
    fold_checkpoint(tmp_path / "source", tmp_path / "folded")
    for file in (tmp_path / "source").iterdir():
        copied = tmp_path / "folded" / file.name
        assert copied.exists()
        if file.suffix != ".safetensors":
            assert copied.read_bytes() == file.read_bytes()
            continue
        with safe_open(file, "pt") as before, safe_open(copied, "pt") as after:
            assert list(before.keys()) == list(after.keys())
            assert before.metadata() == after.metadata()


def test_a_folded_folder_is_left_alone(tmp_path):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    first = fold_checkpoint(source, tmp_path / "folded")
    again = fold_checkpoint(tmp_path / "folded", tmp_path / "twice")
    assert again.already_folded
    assert again.folded == first.folded
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gain_that_is_not_finite_is_refused(tmp_path, value):
    model = randomised(LlamaForCausalLM(LlamaConfig(**SMALL)))
    model.model.layers[1].input_layernorm.weight.data[7] = value
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(Refusal, match=r"layers\.1\.input_layernorm.*channel 7"):
        fold_checkpoint(tmp_path / "source", tmp_path / "folded")
    assert not (tmp_path / "folded").exists()


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(CheckpointError, match="do not belong together"):
        fold_checkpoint(source, tmp_path / "folded")


def test_an_unknown_model_type_is_refused(tmp_path):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "never_heard_of"}))
    with pytest.raises(ConfigError, match="trust-remote-code"):
        fold_checkpoint(source, tmp_path / "folded")


def test_a_model_with_nothing_to_fold_is_refused_with_the_reason(tmp_path):
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    BertModel(config).save_pretrained(tmp_path / "source")
    with pytest.raises(Refusal, match="nothing in"):
        fold_checkpoint(tmp_path / "source", tmp_path / "folded")


def test_negative_control_a_fold_that_misses_a_reader_is_seen(tmp_path):
    """The comparison above would catch a wrong fold: undo one reader's scaling and the logits move."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    source = saved(tmp_path, model)
    fold_checkpoint(source, tmp_path / "folded")
    before = load_file(source / "model.safetensors")
    tensors = load_file(tmp_path / "folded" / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = before[name]
    save_file(tensors, tmp_path / "folded" / "model.safetensors", metadata={"format": "pt"})
    assert not close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "folded")), logits(model))


def test_tied_copies_stored_twice_are_both_handled(tmp_path):
    """Some checkpoints store a tied head beside the embedding; it must stay a copy of it."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    source = saved(tmp_path, model)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = fold_checkpoint(source, tmp_path / "folded")
    assert "model.norm" in report.skipped
    after = load_file(tmp_path / "folded" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "folded")), logits(model))


def test_the_source_is_not_changed(tmp_path):
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    fold_checkpoint(source, tmp_path / "folded")
    assert before == {file.name: file.read_bytes() for file in source.iterdir()}


def test_in_memory_and_on_disk_folds_agree(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    source = saved(tmp_path, model)
    fold_checkpoint(source, tmp_path / "folded")
    live = copy.deepcopy(model)
    flashnorm.fold(live)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), stored.parameters(), strict=True))

"""The whole battery: healthy folds pass with room to spare, and each planted fault fails by a wide margin."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import flashnorm
from flashnorm.errors import CheckpointError, ConfigError, Refusal
from flashnorm.verify.report import VerifyReport
from tests.verify.faults import ANYWHERE, EXPERTS, Fault
from tests.verify.tiny import VOCABULARY, folded, save, tiny_model, tokenizer

FAMILIES = ("llama", "gemma", "qwen2", "mixtral")
DTYPES = (torch.float32, torch.bfloat16)
TEXT = " ".join(f"{n} squared is {n * n}, and its cube is {n**3}." for n in range(200))


def verify(reference: nn.Module | Path, candidate: nn.Module | Path, **options: object) -> VerifyReport:
    return flashnorm.verify(reference, candidate, **{"new_tokens": 0, **options})


def excess(report: VerifyReport) -> float:
    """How far the worst check lies beyond its bound."""
    return max(check.value / check.bound for check in report.checks if check.bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_correct_fold_passes_with_room_to_spare(family: str, dtype: torch.dtype) -> None:
    source = tiny_model(family, dtype)
    report = verify(source, folded(source), new_tokens=16)
    assert report.passed
    assert excess(report) < 0.85
    assert report.logits.typical_exact_drift_ratio < 0.5  # of the 0.71 that is derived


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ANYWHERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_fails_by_a_wide_margin(family: str, fault: Fault, dtype: torch.dtype) -> None:
    source = tiny_model(family, dtype)
    report = verify(source, fault(source))
    assert not report.passed
    assert excess(report) > (1e5 if dtype == torch.float32 else 5)


@pytest.mark.parametrize(("dtype", "margin"), zip(DTYPES, (1e4, 1.5), strict=True), ids=str)
@pytest.mark.parametrize("fault", EXPERTS)
def test_a_missed_expert_or_router_fails(fault: Fault, dtype: torch.dtype, margin: float) -> None:
    source = tiny_model("mixtral", dtype)
    report = verify(source, fault(source))
    assert not report.passed
    assert excess(report) > margin


def test_a_model_equals_itself() -> None:
    source = tiny_model("llama", torch.bfloat16)
    report = verify(source, source, new_tokens=16)
    assert report.passed
    assert report.logits.drift_ratio == 1
    assert report.logits.exact_relative_error == report.logits.exact_drift_ratio == 0
    assert report.logits.mutual_top1_agreement == 1
    assert all(pair.difference is None for pair in report.greedy)


def test_a_fault_of_cached_decoding_alone_shows_in_the_greedy_text() -> None:
    source = tiny_model("llama")
    candidate = folded(source)
    candidate.lm_head.register_forward_hook(lambda _, x, y: y.roll(1, -1) if x[0].shape[1] == 1 else y)
    report = verify(source, candidate, new_tokens=16)
    assert [check.name for check in report.failures] == ["greedy_margin"]
    assert excess(report) > 1e4


def test_a_fault_of_long_contexts_alone_shows_in_the_perplexity(tmp_path: Path) -> None:
    source = save(tiny_model("mistral"), tmp_path / "source")
    candidate = folded(tiny_model("mistral"))
    healthy = verify(source, save(candidate, tmp_path / "healthy"), text=TEXT, tokens=1024)
    assert healthy.passed
    assert healthy.perplexity.tokens == 1020  # four windows of half the model's context, less their first tokens

    candidate.config.sliding_window = 100  # longer than an excerpt, shorter than a window
    report = verify(source, save(candidate, tmp_path / "wrong"), text=TEXT, tokens=1024)
    assert [check.name for check in report.failures] == ["perplexity"]
    assert excess(report) > 1e3


def test_a_near_tie_is_explained_and_not_failed() -> None:
    source = tiny_model("llama")
    head = source.lm_head.weight.data
    head[7] = 3 * head[5]
    head[9] = head[7]  # an exact tie, often the best two tokens: the source takes the lower one
    candidate = folded(source)
    candidate.lm_head.weight.data[9] *= 1 + 2**-22
    report = verify(source, candidate, new_tokens=32)
    assert report.passed
    differences = [pair.difference for pair in report.greedy if pair.difference]
    assert differences
    assert all({d.reference_token, d.candidate_token} == {7, 9} for d in differences)
    assert all(d.reference_margin == 0 and 0 < d.candidate_margin < 1e-4 for d in differences)


def test_logits_that_are_not_finite_fail_in_the_candidate_and_are_refused_in_the_source() -> None:
    source = tiny_model("llama")
    broken = folded(source)
    broken.model.layers[0].mlp.down_proj.weight.data[0, 0] = float("nan")
    report = verify(source, broken)
    assert not report.passed
    assert report.logits is None
    assert "not finite at 256 positions" in report.failures[0].meaning
    with pytest.raises(CheckpointError, match="nothing to compare with"):
        verify(broken, source)


@pytest.mark.parametrize("strict", [False, True], ids=["compatible", "strict"])
def test_folders_that_fold_checkpoint_wrote(tmp_path: Path, strict: bool) -> None:
    source = save(tiny_model("gemma", torch.bfloat16), tmp_path / "source")
    flashnorm.fold_checkpoint(source, tmp_path / "folded", strict=strict, quiet=True)
    report = verify(source, tmp_path / "folded", text=TEXT, tokens=512, new_tokens=8)
    assert report.passed
    assert (report.dtype, report.text_dtype, report.oracle_dtype) == ("bfloat16", "float32", "float64")
    assert report.samples == "the text"
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_model_stored_in_fp64_is_run_in_fp32(tmp_path: Path) -> None:
    source = tiny_model("llama", torch.float64)
    report = verify(save(source, tmp_path / "source"), save(folded(source), tmp_path / "folded"))
    assert report.passed
    assert report.notes[0] == "run in float32, stored in float64"
    assert report.logits.exact_drift_ratio < 1e-6


def test_without_a_text_it_says_why_there_is_no_perplexity(tmp_path: Path) -> None:
    source = save(tiny_model("llama"), tmp_path / "source")
    assert verify(source, source).notes == ("no perplexity: it is taken of a text of yours, which --text FILE gives",)
    assert verify(source, source, text=TEXT, tokens=256).notes == ()


def test_another_dtype_can_be_asked_for_and_other_storage_is_said(tmp_path: Path) -> None:
    source = tiny_model("llama")
    report = verify(source, folded(source), dtype=torch.bfloat16)
    assert report.passed
    assert report.logits.reference_relative_error > 1e-3
    coarse = verify(source, folded(source).to(torch.bfloat16))
    assert not coarse.passed
    assert "the candidate is stored in bfloat16, not float32" in coarse.notes


def test_encoder_decoders_and_encoders() -> None:
    shape = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    t5 = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)).eval()
    for name, parameter in t5.named_parameters():
        if "layer_norm" in name:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0))
    candidate = copy.deepcopy(t5)
    assert flashnorm.fold(candidate).folded
    assert verify(t5, candidate, new_tokens=8).passed
    candidate.decoder.block[0].layer[0].layer_norm.weight.data *= 1.01
    assert not verify(t5, candidate).passed

    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    )
    report = verify(bert, bert, new_tokens=8)
    assert report.passed
    assert report.greedy == ()


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    llama = save(tiny_model("llama"), tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"differ in their model type \(llama and gemma\)"):
        verify(llama, save(tiny_model("gemma"), tmp_path / "gemma"))
    other = save(tiny_model("llama"), tmp_path / "other", with_tokenizer=False)
    changed = tokenizer()
    changed.add_tokens(["new"])
    changed.save_pretrained(other)
    with pytest.raises(ConfigError, match="differ in their tokenizer;"):
        verify(llama, other)
    smaller = json.loads((other / "config.json").read_text()) | {"vocab_size": 99}
    (other / "config.json").write_text(json.dumps(smaller))
    with pytest.raises(ConfigError, match=r"vocabulary size \(256 and 99\)"):
        verify(llama, other)
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(llama, tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        verify(tmp_path, llama)
    with pytest.raises(ConfigError, match="Linear has no config"):
        verify(nn.Linear(2, 2), llama)
    with pytest.raises(Refusal, match="positions=0"):
        verify(llama, llama, positions=0)
    (llama / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="cannot be loaded by Transformers"):
        verify(llama, llama)


def test_a_quantised_folder_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is quantised"):
        verify(folder, folder)


def test_a_model_without_logits_is_refused() -> None:
    backbone = tiny_model("llama").model
    with pytest.raises(ConfigError, match="LlamaModel gives no logits"):
        verify(backbone, backbone)


def test_the_package_is_the_function() -> None:
    assert flashnorm.verify.__name__ == "flashnorm.verify"
    assert callable(flashnorm.verify)
    assert flashnorm.VerifyReport is VerifyReport


def test_more_new_tokens_than_positions_are_refused() -> None:
    source = tiny_model("llama")
    source.config.max_position_embeddings = 24
    assert verify(source, folded(source), new_tokens=12).greedy
    with pytest.raises(Refusal, match="give --new-tokens 12 or fewer"):
        verify(source, folded(source), new_tokens=13)

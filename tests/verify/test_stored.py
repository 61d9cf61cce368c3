"""What no sample reaches is compared as it is stored; where it cannot be, that is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import flashnorm
from flashnorm.checkpoint.manifest import MANIFEST, manifest_bytes, read_manifest
from flashnorm.errors import CheckpointError, Refusal
from flashnorm.verify import stored
from flashnorm.verify.report import VerifyReport
from flashnorm.verify.stored import stored_checks
from tests import zoo
from tests.peak import marks
from tests.verify.tiny import SHAPE, save, tiny_model

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
        assert [check.name for check in report.checks][1:3] == ["stored_weights", "settings"]
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
    assert [check.value for check in stored_checks(source, out)] == [0, 0]

    def swap(weights: Weights) -> None:
        weights.pop("model.layers.0.mlp.down_proj.weight")
        weights["extra"] = torch.zeros(1)

    _change(out, swap)
    assert stored_checks(source, out)[0].value == 2


def test_a_fold_of_other_norms_is_not_judged(tmp_path: Path) -> None:
    source = save(tiny_model("llama"), tmp_path / "source", with_tokenizer=False)
    out = _folded(source, tmp_path / "folded")
    manifest = read_manifest(out)
    (out / MANIFEST).write_bytes(manifest_bytes(replace(manifest, sites=manifest.sites[1:])))
    with pytest.raises(Refusal, match="this version folds other norms"):
        stored_checks(source, out)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a table of positions, an embedding and a head that are not tied, and a tokenizer for text."""
    settings = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    ends = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**settings, **ends))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return save(model, tmp_path_factory.mktemp("gpt2") / "source")


def _rare_token(weights: Weights) -> None:
    weights["transformer.wte.weight"][255] *= -1


def _late_position(weights: Weights) -> None:
    weights["transformer.wpe.weight"][500, 3] += 1


def _rare_token_by_one_bit(weights: Weights) -> None:
    row = weights["transformer.wte.weight"][255].view(torch.int32)
    row[0] ^= 1


UNSEEN = [_rare_token, _late_position, _rare_token_by_one_bit]


@pytest.mark.parametrize("fault", UNSEEN)
def test_rows_that_no_sample_reaches_are_compared(text: Path, tmp_path: Path, fault: Callable[[Weights], None]) -> None:
    out = _folded(text, tmp_path / "folded", fault)
    report = _verify(text, out)
    assert [(check.name, check.value) for check in report.failures] == [("stored_weights", 1)]
    assert report.notes == ("no perplexity: it is taken of a text of yours, which --text FILE gives",)
    (out / MANIFEST).unlink()  # the logits do not see it, so this is what there is to see
    assert _verify(text, out).passed


def test_a_comparison_that_cannot_be_made_is_said(text: Path, tmp_path: Path) -> None:
    """Nothing tells then what the stored tensors should be, and the logits alone speak."""
    out = _folded(text, tmp_path / "folded", _rare_token)
    manifest = read_manifest(out)
    (out / MANIFEST).write_bytes(manifest_bytes(replace(manifest, sites=manifest.sites[1:])))
    report = _verify(text, out)
    assert "stored_weights" not in [check.name for check in report.checks]
    assert report.notes[-1].startswith("stored tensors and settings were not compared: ")
    assert report.notes[-1].endswith("this version folds other norms")


def test_a_damaged_manifest_is_refused(text: Path, tmp_path: Path) -> None:
    out = _folded(text, tmp_path / "folded")
    manifest = out / MANIFEST
    manifest.write_text(manifest.read_text().replace('"untied": false', '"untied": true'))
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        _verify(text, out)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("fault", [None, _rare_token])
def test_either_folder_may_be_the_folded_one(
    text: Path, tmp_path: Path, swapped: bool, fault: Callable[[Weights], None] | None
) -> None:
    pair = (text, _folded(text, tmp_path / "folded", fault))
    checks = stored_checks(*(reversed(pair) if swapped else pair))
    assert [check.value for check in checks] == [0 if fault is None else 1, 0]


def test_two_folded_folders_must_be_the_same_where_their_mode_is(text: Path, tmp_path: Path) -> None:
    first, second = _folded(text, tmp_path / "first"), _folded(text, tmp_path / "second")
    assert [check.value for check in stored_checks(first, second)] == [0, 0]
    _change(second, _rare_token)
    assert stored_checks(first, second)[0].value == 1
    with pytest.raises(Refusal, match="are both folded, in different modes"):
        stored_checks(first, _folded(text, tmp_path / "third", strict=True))


def _by_units(weights: Weights, units: int) -> None:
    """Move one element of a reader away from the product by so many representable numbers."""
    weights["model.layers.1.mlp.up_proj.weight"].view(torch.int16)[5, 7] += units


@pytest.mark.parametrize(("units", "wrong"), [(0, 0), (1, 0), (3, 1), (-3, 1)])
def test_a_reader_may_lie_one_unit_from_the_product(tmp_path: Path, units: int, wrong: int) -> None:
    source = save(tiny_model("llama", torch.bfloat16), tmp_path / "source", with_tokenizer=False)
    out = _folded(source, tmp_path / "folded", lambda weights: _by_units(weights, units))
    assert stored_checks(source, out)[0].value == wrong


@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "model.layers.1.mlp.up_proj.weight"), ("gpt2", "transformer.h.0.mlp.c_fc.bias")]
)
@pytest.mark.parametrize("special", [float("inf"), float("nan")], ids=str)
def test_an_infinity_of_the_source_excuses_nothing(
    text: Path, tmp_path: Path, kind: str, name: str, special: float
) -> None:
    """In a reader, and in a bias that a norm's bias moves into, whose largest entry is the unit for the others."""
    source = tmp_path / "source"
    if kind == "gpt2":
        shutil.copytree(text, source)
    else:
        save(tiny_model(kind), source, with_tokenizer=False)
    _change(source, lambda weights: weights[name].view(-1)[3].fill_(special))
    out = _folded(source, tmp_path / "folded")
    assert stored_checks(source, out)[0].value == 0
    _change(out, lambda weights: weights[name].view(-1)[3].fill_(1))
    assert stored_checks(source, out)[0].value == 1
    _change(out, lambda weights: weights[name].view(-1)[3].fill_(special))
    _change(out, lambda weights: weights[name].view(-1)[5].add_(1))
    assert stored_checks(source, out)[0].value == 1


@pytest.mark.parametrize("elements", [29, 100, 5000])  # a part of a row that does not divide it, rows, a tensor
def test_it_is_the_same_in_blocks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(stored, "_ELEMENTS", elements)
    source = save(tiny_model("mixtral", torch.float16), tmp_path / "source", with_tokenizer=False)
    out = _folded(source, tmp_path / "folded", untie=True)
    assert stored_checks(source, out)[0].value == 0
    _change(out, lambda weights: weights["lm_head.weight"][-1].neg_())
    assert stored_checks(source, out)[0].value == 1


COMPARE = """
checks = stored_checks(Path(sys.argv[1]), Path(sys.argv[2]))
assert [check.value for check in checks] == [0, 0]
mark()
open_source(sys.argv[1]).read("model.embed_tokens.weight").double()
mark()
"""


def test_a_table_far_larger_than_a_block_takes_no_more_memory(tmp_path: Path) -> None:
    """A table of 96 MB, which is 192 MB as fp64 numbers."""
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 500_000, "num_hidden_layers": 1}))
    source = save(model, tmp_path / "source", with_tokenizer=False)
    _folded(source, tmp_path / "folded")
    imports = """
from pathlib import Path
from flashnorm.checkpoint.source import open_source
from flashnorm.verify.stored import stored_checks
import flashnorm.checkpoint.prepare
"""
    compared, read_whole = marks(imports, COMPARE, source, tmp_path / "folded")
    assert compared < 150_000_000
    assert read_whole > 150_000_000  # so that the measure is known to see it


def test_progress_is_shown_on_request(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _folded(text, tmp_path / "folded")
    stored_checks(text, out)
    assert capsys.readouterr().err == ""
    stored_checks(text, out, quiet=False)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "verify: stored tensors: 0 B of 465.9 kB"
    assert last.startswith("verify: stored tensors: 465.9 kB of 465.9 kB, ")

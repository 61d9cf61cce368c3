"""DyT on disk: its weight goes into the next weights, its bias into the next biases, old ones or new ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import StableLmConfig, StableLmForCausalLM

from flashnorm.checkpoint import new_biases, outside, planner
from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.checkpoint.load import load
from flashnorm.checkpoint.manifest import read_manifest
from flashnorm.checkpoint.unfold import unfold_checkpoint
from flashnorm.errors import Refusal
from flashnorm.verify.stored import stored_checks
from tests.checkpoint.dyt import CODE, as_stock, load_dyt, logits, write_dyt
from tests.checkpoint.tiny import tree

WEIGHTS = "model.safetensors"
# Weights, biases and gains are rounded to fp64 once more than before, and sums of 16 and 24 products are taken in
# another order, in two layers and the head: some hundreds of 2^-53.
EXACT = 1e-12


pytestmark = pytest.mark.usefixtures("own_code")


def fold(source: Path, out: Path, **options: bool):
    return fold_checkpoint(source, out, trust_remote_code=True, **options)


def distance(folder: Path, expected: torch.Tensor) -> float:
    return float((logits(load_dyt(folder)) - expected).norm() / expected.norm())


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    tied=st.booleans(),
    add_bias=st.booleans(),
)
def test_the_folded_checkpoint_computes_the_same(seed, attention_bias, mlp_bias, tied, add_bias):
    add_bias = add_bias and not (attention_bias and mlp_bias)  # else no bias lacks a home that could be had
    with tempfile.TemporaryDirectory() as place:
        source, out = Path(place) / "source", Path(place) / "out"
        write_dyt(
            source, seed=seed, dtype=torch.float64, attention_bias=attention_bias, mlp_bias=mlp_bias,
            tie_word_embeddings=tied,
        )  # fmt: skip
        report = fold(source, out, add_bias=add_bias)
        assert len(report.folded) == 4 + (not tied)
        stored = load_file(out / WEIGHTS)
        for norm in report.folded:
            assert bool((stored[f"{norm}.weight"] == 1).all())
            assert bool(stored[f"{norm}.bias"].any()) == (norm in report.keeps_bias)
        moved = {
            "input_layernorm": attention_bias or add_bias,
            "post_attention_layernorm": mlp_bias or add_bias,
            "norm": False,  # Llama's head has no bias, and no switch for one
        }
        assert all(moved[norm.rpartition(".")[2]] == (norm not in report.keeps_bias) for norm in report.folded)
        assert distance(out, logits(load_dyt(source))) < EXACT


@pytest.mark.parametrize("strict", [False, True])
def test_new_biases_are_in_the_config_and_go_when_the_fold_is_undone(tmp_path, strict):
    source = write_dyt(tmp_path / "source", dtype=torch.float64)
    report = fold(source, tmp_path / "out", strict=strict, add_bias=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["attention_bias"] is config["mlp_bias"] is True
    manifest = read_manifest(tmp_path / "out")
    assert manifest.new_biases == report.new_biases == manifest.added
    assert len(report.new_biases) == 2 * 7
    model = load(tmp_path / "out", trust_remote_code=True, dtype=torch.float64)
    expected = logits(load_dyt(source))
    assert (logits(model) - expected).norm() < EXACT * expected.norm()

    unfold_checkpoint(tmp_path / "out", tmp_path / "back")
    before, after = tree(source), tree(tmp_path / "back")
    assert after["config.json"] == before["config.json"]
    original, back = load_file(source / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    assert original.keys() == back.keys()
    assert distance(tmp_path / "back", expected) < EXACT


def test_verification_sees_a_bias_that_did_not_arrive(tmp_path):
    source = write_dyt(tmp_path / "source")
    report = fold(source, tmp_path / "out", add_bias=True)
    weights, settings_ = stored_checks(source, tmp_path / "out", trust_remote_code=True)
    assert weights.passed
    assert settings_.passed
    stored = load_file(tmp_path / "out" / WEIGHTS)
    lost = "model.layers.1.self_attn.v_proj.bias"
    assert lost in report.new_biases
    save_file({**stored, lost: torch.zeros_like(stored[lost])}, tmp_path / "out" / WEIGHTS, metadata={"format": "pt"})
    weights, _ = stored_checks(source, tmp_path / "out", trust_remote_code=True)
    assert weights.value == 1
    assert distance(tmp_path / "out", logits(load_dyt(source))) > 1e-3


def test_a_bias_that_stays_undivided_is_seen(tmp_path, monkeypatch):
    """The control of the logits comparison where no new bias is made."""
    source = write_dyt(tmp_path / "source")
    monkeypatch.setattr(planner, "remaining_bias", lambda gain, bias: bias)
    fold(source, tmp_path / "out")
    assert distance(tmp_path / "out", logits(load_dyt(source))) > 1e-2


def test_a_gain_of_zero_folds_once_its_bias_can_move(tmp_path):
    def zero(model):
        model.model.layers[0].input_layernorm.weight[3] = 0

    source = write_dyt(tmp_path / "source", zero, dtype=torch.float64)
    left = fold(source, tmp_path / "out").skipped
    assert left == {
        "model.layers.0.input_layernorm": "its gain is zero at channel 3 while its bias, which has to stay, is not"
    }
    assert fold(source, tmp_path / "more", add_bias=True).skipped == {}
    expected = logits(load_dyt(source))
    assert distance(tmp_path / "out", expected) < EXACT
    assert distance(tmp_path / "more", expected) < EXACT


# Its linears have no biases, whatever the config says, but for a switch that gives biases and does more.
WITHOUT_SWITCH = CODE.replace(
    '    model_type = "dyt_llama"\n', '    model_type = "dyt_llama"\n    doubled_bias: bool = False\n'
).replace(
    "        super().__init__(config)\n",
    """        super().__init__(config)
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                linear.bias = None
        for layer in self.model.layers if config.doubled_bias else ():
            for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                linear.bias = nn.Parameter(torch.zeros(linear.out_features))
            layer.self_attn.register_forward_hook(lambda module, args, output: (output[0] * 2, *output[1:]))
""",
)


def test_a_config_without_a_switch_is_refused(tmp_path):
    source = write_dyt(tmp_path / "source", source=WITHOUT_SWITCH)
    with pytest.raises(Refusal, match=r"none for model\.layers\.0\.self_attn\.k_proj\.bias and 2 more, behind"):
        fold(source, tmp_path / "out", add_bias=True)
    assert not (tmp_path / "out").exists()


def test_a_switch_that_does_more_would_change_the_logits(tmp_path, monkeypatch):
    source = write_dyt(tmp_path / "source", source=WITHOUT_SWITCH)
    monkeypatch.setattr(new_biases, "_same_without", lambda wider, added, before: True)
    fold(source, tmp_path / "out", add_bias=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["doubled_bias"] is True
    assert distance(tmp_path / "out", logits(load_dyt(source))) > 1e-2


def test_where_no_bias_lacks_a_home_there_is_nothing_to_add(tmp_path):
    source = write_dyt(tmp_path / "source")
    fold(source, tmp_path / "out")
    with pytest.raises(Refusal, match="folded already, without new biases"):
        fold(tmp_path / "out", tmp_path / "again", add_bias=True)

    def unbiased(model):
        for name, parameter in model.named_parameters():
            if name.endswith("norm.bias"):
                parameter.zero_()

    code = CODE.replace(", nn.Parameter(torch.zeros(width))", ", None")
    code = code.replace("* self.weight + self.bias", "* self.weight")
    source = write_dyt(tmp_path / "without", unbiased, source=code)
    with pytest.raises(Refusal, match="no norm whose bias lacks a home"):
        fold(source, tmp_path / "more", add_bias=True)


def test_a_layer_norm_s_bias_moves_into_a_new_bias_as_well(tmp_path):
    model = StableLmForCausalLM(
        StableLmConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=32, use_qkv_bias=False, tie_word_embeddings=False,
        )
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 + torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.eval().save_pretrained(tmp_path / "source")
    report = fold_checkpoint(tmp_path / "source", tmp_path / "out", add_bias=True)
    assert report.keeps_bias == (
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
    )
    folded = StableLmForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    expected = logits(model)
    assert (logits(folded) - expected).norm() < EXACT * expected.norm()


def test_dyt_tensors_that_a_stock_model_does_not_load_are_refused(tmp_path):
    source = as_stock(write_dyt(tmp_path / "source"))
    with pytest.raises(Refusal, match=r"input_layernorm\.alpha and .*input_layernorm\.bias beside its gain"):
        fold_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folding_the_gain_alone_would_break_the_dyt_model(tmp_path, monkeypatch):
    """The control: without that refusal the folder folds as an RMSNorm model, and the DyT model is another one."""
    source = write_dyt(tmp_path / "source")
    expected, own = logits(load_dyt(source)), (source / "modeling_dyt.py").read_text()
    monkeypatch.setattr(outside, "_unread_beside", lambda *_: lambda site: ())
    fold_checkpoint(as_stock(source), tmp_path / "out")
    (tmp_path / "out" / "modeling_dyt.py").write_text(own)
    assert distance(tmp_path / "out", expected) > 1e-2

"""The measure of folding before quantisation, on tiny models: what it changes, what it must not, what it would find."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flashnorm
from benchmarks.quantise import SCHEMES, Scheme, dither, linears_of, perplexity, quantised, rounded, row
from flashnorm.kernels.codes import half_step, quantize_rows
from flashnorm.verify.perplexity import token_losses
from tests.verify.tiny import tiny_model

_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


def _losses(model):
    ids = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(0))
    return token_losses(model, ids, 1)


def _weight(n: int = 24, k: int = 128) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, n)[:, None]


@pytest.mark.parametrize("kind", list(_DTYPES))
def test_a_scale_for_each_output_is_what_the_operations_take(kind):
    codes, scale = quantize_rows(_weight(), _DTYPES[kind])
    assert torch.allclose(rounded(_weight(), Scheme(kind, "channel")), codes.float() * scale[:, None], rtol=0.13)
    agree = rounded(_weight(), Scheme(kind, "channel")) - codes.float() * scale[:, None]
    assert (agree.abs() <= 1e-5 * _weight().abs()).float().mean() > 0.999  # a middle may go either way


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("stretch", [1.0, 1.01])
def test_no_weight_moves_by_more_than_half_a_step(stretch, scheme):
    weight = _weight()
    group = {"tensor": weight, "channel": weight}.get(scheme.group, weight.unflatten(1, (-1, 64)))
    axis = None if scheme.group == "tensor" else -1
    largest = {"int8": 127, "int4": 7, "e4m3": 448}[scheme.kind]
    scale = (group.abs().amax(axis, keepdim=True) / largest * stretch).double()
    step = half_step(group / scale, torch.float8_e4m3fn) if scheme.kind == "e4m3" else 0.5
    moved = (rounded(weight, scheme, stretch).view_as(group) - group).abs().double()
    assert (moved <= step * scale * (1 + 1e-5)).all()
    assert moved.max() > 0


def test_dither_moves_weights_within_their_cells_and_leaves_no_grid():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    before = []
    for linear in linears_of(model):  # put on a grid of 16 levels for each 32 inputs
        blocks = linear.weight.data.unflatten(1, (-1, 32))
        least, step = (
            blocks.amin(-1, keepdim=True),
            (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15,
        )
        linear.weight.data = (least + ((blocks - least) / step).round() * step).view_as(linear.weight)
        before.append((linear.weight.data.clone(), step))
    dither(model)
    assert len(before) == 7
    for linear, (weight, step) in zip(linears_of(model), before, strict=True):
        moved = (linear.weight.data - weight).unflatten(1, (-1, 32)).abs() / step
        assert 0.45 < moved.max() <= 0.5 + 1e-4
        assert weight[0, :32].unique().numel() <= 2 * 16 < 2 * linear.weight[0, :32].unique().numel()


def test_finer_schemes_move_weights_less():
    weight = _weight()
    error = {scheme: (rounded(weight, scheme) - weight).norm(dim=1)[0] for scheme in SCHEMES}
    for kind in ("int8", "int4"):
        assert error[Scheme(kind, 64)] < error[Scheme(kind, "channel")] < error[Scheme(kind, "tensor")]
    assert error[Scheme("int8", "channel")] < error[Scheme("int4", "channel")]


@pytest.mark.parametrize("scheme", [Scheme("int4", "channel"), Scheme("e4m3", "channel", activations=True)], ids=str)
def test_linears_of_the_layers_are_quantised_and_given_back(scheme):
    model = tiny_model("llama")
    before, clean = {name: p.clone() for name, p in model.named_parameters()}, _losses(model)
    with quantised(model, scheme):
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert changed == {name for name, p in before.items() if p.dim() == 2 and "layers" in name}
        noisy = _losses(model)
    assert not torch.equal(noisy, clean)
    assert torch.equal(_losses(model), clean)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_activations_are_rounded_too():
    model, losses = tiny_model("llama"), []
    for activations in (False, True):
        with quantised(model, Scheme("int8", "channel", activations=activations)):
            losses.append(_losses(model))
    assert not torch.equal(*losses)


def test_gains_of_one_make_no_difference_and_wide_gains_make_one():
    """A fold that changes nothing shows nothing; one that moves outliers into a row's scale is found."""
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
    same = row(Scheme("int4", "channel"), model, _folded(model), _losses)
    assert same["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert all(same["control_differences"])
    spread = torch.ones(48)
    spread[:4] = 100.0
    for name, parameter in model.named_parameters():
        if "norm" in name and "layers" in name:
            parameter.data.copy_(spread)
    wide = row(Scheme("int4", "tensor"), model, _folded(model), _losses)
    assert wide["perplexity_quantised"] == pytest.approx(perplexity(_quantised_losses(model)))
    assert abs(wide["difference"]["mean"]) > 10 * max(map(abs, same["control_differences"]))


def _folded(model):
    folded = copy.deepcopy(model)
    assert flashnorm.fold(folded).folded
    return folded


def _quantised_losses(model):
    with quantised(model, Scheme("int4", "tensor")):
        return _losses(model)

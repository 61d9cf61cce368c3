"""Ranges: the figures are those of a plain computation, and an overflow to come is foretold."""

from __future__ import annotations

import pytest
import torch

import flashnorm
from flashnorm.verify.ranges import FP16_LARGEST, check_ranges, measure_ranges
from tests.verify.cases import tokens
from tests.verify.tiny import tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral"])
def test_every_figure_is_that_of_a_plain_computation(family: str) -> None:
    model = tiny_model(family).requires_grad_(False)
    sites = flashnorm.audit(model).sites
    ids = tokens(20)
    ranges = measure_ranges(model, sites, ids)
    assert [r.norm for r in ranges][:2] == ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]
    first = ranges[0]
    x = model.model.embed_tokens(ids)  # Gemma scales it inside
    gain = model.model.layers[0].input_layernorm.weight + (family == "gemma")
    attention = model.model.layers[0].self_attn
    products = [(x * gain) @ p.weight.T for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert first.largest == pytest.approx(float(x.abs().max()), rel=1e-5)
    assert first.product == pytest.approx(max(float(p.abs().max()) for p in products), rel=1e-5)
    assert first.epsilon == pytest.approx(model.config.rms_norm_eps / float(x.square().mean(-1).min()), rel=1e-4)


def test_a_product_beyond_fp16_is_foretold_and_said_of_which_norm() -> None:
    model = tiny_model("llama", torch.float16)
    sites, ids = flashnorm.audit(model).sites, tokens(20)
    assert check_ranges(model, sites, ids, torch.float16).passed
    model.model.embed_tokens.weight.data[:] *= 2.0**16  # up to 40,000: in range, as are the normed values
    model.model.layers[0].self_attn.q_proj.weight.data *= 8
    outcome = check_ranges(model, sites, ids, torch.float16)
    assert not outcome.passed
    assert "the product before the scale reaches" in outcome.meaning
    assert "float16 ends at 6.55e+04" in outcome.meaning
    assert any("in fp16 the product before the scale would overflow" in note for note in outcome.notes)
    assert max(outcome.series["product"]) > FP16_LARGEST
    assert check_ranges(model.float(), sites, ids, torch.float32).passed


def test_an_outlier_channel_and_a_token_where_epsilon_matters_are_seen() -> None:
    model = tiny_model("llama")
    sites, ids = flashnorm.audit(model).sites, tokens(20)
    assert measure_ranges(model, sites, ids)[0].outliers == 0
    model.model.embed_tokens.weight.data[:, 7] *= 30
    assert measure_ranges(model, sites, ids)[0].outliers == 1
    model.model.embed_tokens.weight.data[ids[3]] = 1e-4
    assert measure_ranges(model, sites, ids)[0].epsilon == pytest.approx(100, rel=0.1)


def test_a_model_without_known_norms_is_skipped() -> None:
    assert check_ranges(tiny_model("llama"), (), tokens(8), torch.float32).skipped

"""The unchecked products against fp64, eager and compiled."""

from __future__ import annotations

import pytest
import torch

from flashnorm.errors import DeviceError, DtypeError
from flashnorm.kernels.bounds import exceeds, expected_rms_linear, expected_rms_swiglu_linear
from flashnorm.runtime import products
from flashnorm.runtime.products import gated_product, rms_product

EPS = 1e-5
ACTIVATIONS = ["silu", "gelu_tanh", "relu"]


def operands(dtype=torch.float32, k=40, n=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, k, generator=generator).to(dtype)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)
    gain = 1 + 0.3 * torch.randn(k, generator=generator)
    return x, weight, gain, torch.randn(n, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_product_is_norm_and_linear_with_a_gain_in_fp32(dtype):
    x, weight, gain, bias = operands(dtype)
    out = rms_product(x, weight, EPS, gain, bias, {})
    assert out.dtype == dtype
    assert exceeds(out, expected_rms_linear(x, weight, EPS, gain, bias)) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gated_product_is_norm_projections_and_activation(activation):
    x, weight, gain, _ = operands()
    out = gated_product(x, weight, EPS, gain, activation, {})
    assert exceeds(out, expected_rms_swiglu_linear(x, weight, EPS, gain, activation=activation)) <= 1


def test_another_epsilon_exceeds_the_bound():
    x, weight, gain, bias = operands()
    assert exceeds(rms_product(x, weight, 2 * EPS, gain, bias, {}), expected_rms_linear(x, weight, EPS, gain, bias)) > 1


def test_leading_axes_are_kept_and_nothing_is_computed_from_nothing():
    x, weight, gain, bias = operands()
    assert torch.equal(
        rms_product(x[None, :, None], weight, EPS, gain, bias, {})[0, :, 0], rms_product(x, weight, EPS, gain, bias, {})
    )
    assert rms_product(x[:0], weight, EPS, gain, bias, {}).shape == (0, 24)
    assert gated_product(x[:0], weight, EPS, gain, "silu", {}).shape == (0, 12)


def test_strided_rows_are_read_where_they_lie():
    x, weight, gain, bias = operands()
    wide = torch.full((3, 80), float("nan"))
    wide[:, ::2] = x
    assert torch.equal(
        rms_product(wide[:, ::2], weight, EPS, gain, bias, {}), rms_product(x, weight, EPS, gain, bias, {})
    )


def test_how_to_run_few_rows_is_chosen_once(monkeypatch):
    asked = []
    choose = products.choose
    monkeypatch.setattr(products, "choose", lambda problem, device: asked.append(problem.m) or choose(problem, device))
    x, weight, gain, bias = operands()
    chosen = {}
    for rows in (x, x + 1, x[:2], x.repeat(40, 1), x.repeat(40, 1), torch.cat([x, x], 1)[:, : x.shape[1]]):
        rms_product(rows, weight, EPS, gain, bias, chosen)
    assert asked == [3, 2, 120, 120, 3]  # the last for rows that lie apart
    assert len(chosen) == 3


def test_compiled_without_graph_breaks_it_is_the_same():
    def both(x, weight, gain, bias):
        return rms_product(x, weight, EPS, gain, bias, {}), gated_product(x, weight, EPS, gain, "silu", {})

    given = operands()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(*given), both(*given), strict=True))


def test_operands_that_do_not_belong_together_are_refused():
    x, weight, gain, bias = operands()
    with pytest.raises(DtypeError, match=r"hidden states are torch\.float16"):
        rms_product(x.half(), weight, EPS, gain, bias, {})
    with pytest.raises(DeviceError, match="weights on meta"):
        rms_product(x, weight.to("meta"), EPS, gain, bias, {})

"""Every kernel that takes a gain takes one in fp32 beside 16-bit operands: 1 + w is not rounded on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.kernels.bounds import exceeds, expected_rms_linear, expected_rms_swiglu_linear
from flashnorm.kernels.configs import Gemv, NormLinear, Reference
from flashnorm.kernels.run import run
from tests.kernels.cases import DEVICE, EPS, HALF_DTYPES, case, need_triton

need_triton()


def with_wide_gain(m, dtype):
    operands = case(m, 96, 32, dtype, bias=True)
    gain = 1 + 0.3 * torch.randn(96, generator=torch.Generator().manual_seed(0))
    return replace(operands, gain=gain.to(DEVICE))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("config", [Reference(), Gemv(block_n=2, block_k=64), NormLinear()])
def test_a_product_takes_a_gain_in_fp32(config, dtype):
    o = with_wide_gain(3, dtype)
    out = torch.empty(3, 32, device=DEVICE, dtype=dtype)
    run(config, o.x, o.weight, EPS, o.gain, o.bias, out, static_weight=True)
    expected = expected_rms_linear(o.x, o.weight, EPS, o.gain, o.bias, rounds_input=isinstance(config, NormLinear))
    assert exceeds(out, expected) <= 1


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("config", [Reference(), NormLinear()])
def test_a_gated_product_takes_a_gain_in_fp32(config, dtype):
    o = with_wide_gain(3, dtype)
    out = torch.empty(3, 16, device=DEVICE, dtype=dtype)
    run(config, o.x, o.weight, EPS, o.gain, None, out, "gelu_tanh", static_weight=True)
    plain = isinstance(config, NormLinear)
    expected = expected_rms_swiglu_linear(o.x, o.weight, EPS, o.gain, activation="gelu_tanh", plain_sequence=plain)
    assert exceeds(out, expected) <= 1


def test_a_rounded_gain_would_be_seen():
    """In fp32 the bound is so narrow that a gain rounded to fp16 exceeds it."""
    o = with_wide_gain(3, torch.float32)
    out = torch.empty(3, 32, device=DEVICE)
    run(Reference(), o.x, o.weight, EPS, o.gain.half().float(), o.bias, out)
    assert exceeds(out, expected_rms_linear(o.x, o.weight, EPS, o.gain, o.bias)) > 1

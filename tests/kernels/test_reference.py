from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashnorm.kernels import reference


def _operands():
    torch.manual_seed(0)
    return torch.randn(3, 5, 32, dtype=torch.float64), torch.randn(24, 32, dtype=torch.float64)


def test_rms_linear():
    x, weight = _operands()
    gain, bias = torch.rand(32, dtype=torch.float64), torch.rand(24, dtype=torch.float64)
    expected = F.linear(F.rms_norm(x, (32,), gain, 1e-5), weight, bias)
    torch.testing.assert_close(reference.rms_linear(x, weight, 1e-5, gain, bias), expected)


@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", F.silu), ("relu", F.relu), ("gelu_tanh", lambda t: F.gelu(t, approximate="tanh"))],
)
def test_rms_swiglu_linear(name, activation):
    x, weight = _operands()
    gate, up = F.linear(F.rms_norm(x, (32,), None, 1e-5), weight).chunk(2, dim=-1)
    actual = reference.rms_swiglu_linear(x, weight, 1e-5, activation=name)
    torch.testing.assert_close(actual, activation(gate) * up)


def test_linear_residual_sums_what_the_next_norm_reads():
    x, weight = (t.to(torch.bfloat16) for t in _operands())
    residual = torch.randn(3, 5, 24).to(torch.bfloat16)
    value, sumsq = reference.linear_residual(x, weight, residual)
    torch.testing.assert_close(value.double(), x.double() @ weight.double().t() + residual, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(sumsq, value.float().square().sum(-1))
    assert sumsq.dtype == torch.float32


def test_add_sumsq():
    x, _ = _operands()
    value, sumsq = reference.add_sumsq(x, x)
    torch.testing.assert_close(value, 2 * x)
    torch.testing.assert_close(sumsq, (4 * x.square()).sum(-1))

from __future__ import annotations

import pytest
import torch

from flashnorm.kernels.reference import ACTIVATIONS
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.elementwise import add_sumsq, gate  # noqa: E402


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("n", [1, 100, 1500])
def test_gate_matches_fp64(n, activation):
    products = 4 * torch.randn(3, 2 * n, generator=torch.Generator().manual_seed(n))
    products[0, 0] = float("nan")
    products = products.to(cases.DEVICE, cases.HALF_DTYPES[0])
    whole = torch.full((5, n), 7.0, device=cases.DEVICE, dtype=products.dtype)
    gate(products, whole[1:4], activation)
    left, right = products.double().chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](left) * right
    # One rounding, and a few of fp32 in the activation.
    bound = torch.finfo(products.dtype).eps / 2 * expected.abs() + 2.0**-20 * left.abs() * right.abs() + 1e-7
    error = (whole[1:4].double() - expected).abs()
    assert whole[1, 0].isnan()
    assert (error[1:] <= bound[1:]).all()
    assert (error[0, 1:] <= bound[0, 1:]).all()
    assert (whole[[0, 4]] == 7).all()


@pytest.mark.parametrize("n", [1, 100, 5000])
def test_add_sumsq_adds_and_sums_what_it_wrote(n):
    generator = torch.Generator().manual_seed(n)
    x, residual = (torch.randn(3, n + 4, generator=generator).to(cases.DEVICE)[:, :n] for _ in range(2))
    value, sumsq = torch.full((5, n), 7.0, device=cases.DEVICE), torch.full((5,), 7.0, device=cases.DEVICE)
    add_sumsq(x, residual, value[1:4], sumsq[1:4])
    assert torch.equal(value[1:4], x + residual)
    assert torch.allclose(sumsq[1:4].double(), value[1:4].double().square().sum(-1), rtol=1e-5)
    assert (value[[0, 4]] == 7).all()
    assert (sumsq[[0, 4]] == 7).all()

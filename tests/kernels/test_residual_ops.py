from __future__ import annotations

import pytest
import torch

from flashnorm.errors import DtypeError, ShapeError
from flashnorm.kernels import add_sumsq, linear_residual
from flashnorm.kernels.bounds import CONFIDENCE
from tests.kernels import cases

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def _assert_sums(value: torch.Tensor, sumsq: torch.Tensor) -> None:
    """The sums are those of the rounded value; n additions of squares, all of one sign, in the wider type."""
    unit = torch.finfo(sumsq.dtype).eps / 2
    exact = value.double().square().sum(-1)
    bound = CONFIDENCE * unit * (value.shape[-1] ** 0.5 + 1) * exact + torch.finfo(sumsq.dtype).tiny
    assert ((sumsq.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_residual_matches_fp64(bias, dtype):
    operands = cases.case(6, 96, 40, dtype, bias=bias)
    residual = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(operands.x)
    value, sumsq = linear_residual(operands.x, operands.weight, residual, bias=operands.bias)
    product = operands.x.double() @ operands.weight.double().t()
    product = product + (operands.bias.double() if bias else 0)
    magnitude = operands.x.double().abs() @ operands.weight.double().abs().t()
    unit, wide = torch.finfo(dtype).eps / 2, torch.finfo(sumsq.dtype).eps / 2
    # The product may be rounded before the add, the sum is rounded, and K additions happen in the wider type.
    bound = unit * (product.abs() + (product + residual).abs()) * 1.01 + CONFIDENCE * wide * 96**0.5 * magnitude
    assert ((value.double() - product - residual).abs() <= bound).all()
    _assert_sums(value, sumsq)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 4096, 5000])
def test_add_sumsq_is_exact_to_one_rounding(width, dtype):
    generator = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(2, 3, width, generator=generator).to(cases.DEVICE, dtype) for _ in range(2))
    value, sumsq = add_sumsq(x, residual)
    assert torch.equal(value, (x.double() + residual.double()).to(dtype))
    assert sumsq.shape == (2, 3)
    _assert_sums(value, sumsq)


def test_a_row_of_zeros_and_specials():
    x = torch.zeros(3, 64, device=cases.DEVICE)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    value, sumsq = add_sumsq(x, torch.zeros_like(x))
    assert torch.equal(value, x) or value[1, 5].isnan()
    assert sumsq[0] == 0
    assert sumsq[1].isnan()
    assert sumsq[2].isinf()


def test_what_is_refused():
    x = torch.zeros(3, 64)
    with pytest.raises(ShapeError, match="residual must be of x's shape"):
        add_sumsq(x, torch.zeros(3, 63))
    with pytest.raises(DtypeError, match=r"residual is torch\.float64 but x is torch\.float32"):
        add_sumsq(x, x.double())
    with pytest.raises(ShapeError, match="residual must be of shape"):
        linear_residual(x, torch.zeros(8, 64), torch.zeros(3, 9))

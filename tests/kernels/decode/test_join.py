from __future__ import annotations

import pytest
import torch

from flashnorm.kernels.bounds import Expected, exceeds
from flashnorm.kernels.decode import reference
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.decode.join import join  # noqa: E402


def expected(x, residual, dtype, **options) -> Expected:
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    value = reference.join(x.double(), residual.double(), **wide)
    branch = (value - residual.double()).abs()
    unit = torch.finfo(dtype).eps / 2
    # The scale is a sum of squares in fp32, all of one sign, and a hardware square root; then a few roundings.
    bound = unit * value.abs() + (2.0**-20 + 8 * 2.0**-24 * x.shape[-1] ** 0.5) * (branch + residual.double().abs())
    return Expected(value, bound + torch.finfo(dtype).smallest_normal * unit)


@pytest.mark.parametrize("dtype", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("width", [1, 77, 576, 5000])
@pytest.mark.parametrize("norm", [False, True])
def test_matches_fp64(width, norm, dtype):
    x, residual = cases.case(3, width, 1, dtype).x, cases.case(3, width, 2, dtype, pad=5).x
    gain = torch.linspace(0.5, 2, width, device=cases.DEVICE) if norm else None
    options = {"eps": cases.EPS if norm else None, "gain": gain, "multiplier": 0.22}
    wanted = expected(x, residual, dtype, **options)
    out = torch.full_like(x, float("nan"))
    join(x, residual, out, **options)
    assert exceeds(out, wanted) <= 1
    join(x, residual, residual, **options)  # in place
    assert torch.equal(residual, out)


def test_a_forgotten_multiplier_exceeds_the_bound():
    x, residual = cases.case(2, 64, 1, cases.HALF).x, cases.case(2, 64, 2, cases.HALF).x
    out = torch.empty_like(x)
    join(x, residual, out, eps=None, gain=None, multiplier=1.0)
    assert exceeds(out, expected(x, residual, cases.HALF, eps=None, gain=None, multiplier=1.01)) > 1

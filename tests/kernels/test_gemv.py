from __future__ import annotations

import pytest
import torch

from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.configs import Gemv  # noqa: E402
from flashnorm.kernels.gemv import gemv  # noqa: E402

CONFIG = Gemv(block_n=4, block_k=128)


def _kernel(config: Gemv = CONFIG, *, static: bool = False) -> cases.Kernel:
    return lambda x, weight, gain, bias, out: gemv(x, weight, cases.EPS, gain, bias, out, config, static_weight=static)


@pytest.mark.parametrize("dtype", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 16), (1, 200, 10), (3, 77, 9)])
def test_matches_fp64(m, k, n, dtype):
    cases.assert_exact_enough(_kernel(), cases.case(m, k, n, dtype))


@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 16), (1, 512, 10), (3, 77, 9)])
def test_a_static_weight_gives_the_same(m, k, n):
    operands = cases.case(m, k, n, torch.float16, bias=True)
    plain = cases.run_guarded(_kernel(), operands)
    static = cases.run_guarded(_kernel(static=True), operands)
    assert torch.equal(plain, static)


@pytest.mark.parametrize("pad", [0, 3, 16])
def test_gain_bias_and_strides(pad):
    cases.assert_exact_enough(_kernel(), cases.case(2, 90, 21, cases.HALF, gain=True, bias=True, pad=pad))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_extreme_rms_in_fp16(scale):
    cases.assert_exact_enough(_kernel(), cases.case(1, 128, 16, torch.float16, scale=scale))


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_propagate(special):
    operands = cases.case(2, 64, 16, cases.HALF)
    operands.x[1, 5] = special
    out = cases.run_guarded(_kernel(), operands)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()

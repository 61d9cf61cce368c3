from __future__ import annotations

import pytest
import torch

from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.configs import NormLinear  # noqa: E402
from flashnorm.kernels.norm_linear import norm_linear  # noqa: E402


def _kernel(rows: int = 1) -> cases.Kernel:
    config = NormLinear(rows=rows, prefetch=64, stream=rows > 1)
    return lambda x, weight, gain, bias, out: norm_linear(x, weight, cases.EPS, gain, bias, out, config)


@pytest.mark.parametrize("dtype", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(("m", "k", "n", "rows"), [(1, 64, 32, 1), (21, 77, 45, 2), (70, 128, 30, 4)])
def test_matches_fp64(m, k, n, rows, dtype):
    operands = cases.case(m, k, n, dtype, gain=True, bias=True, pad=1)
    cases.assert_exact_enough(_kernel(rows), operands, rounds_input=True)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_extreme_rms_in_fp16(scale):
    cases.assert_exact_enough(_kernel(), cases.case(4, 128, 64, torch.float16, scale=scale), rounds_input=True)

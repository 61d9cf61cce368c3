from __future__ import annotations

import pytest
import torch

from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.configs import DeferredGemm  # noqa: E402
from flashnorm.kernels.deferred_gemm import deferred_gemm  # noqa: E402


def _kernel(**parameters: int) -> cases.Kernel:
    config = DeferredGemm(block_m=64, block_n=64, warps=4, stages=3, prefetch=64, **parameters)
    return lambda x, weight, gain, bias, out: deferred_gemm(x, weight, cases.EPS, bias, out, config)


@pytest.mark.parametrize("dtype", cases.HALF_DTYPES)
@pytest.mark.parametrize(("m", "k", "n", "extra"), [(64, 64, 64, 0), (70, 136, 200, 0), (130, 72, 104, 32)])
def test_matches_fp64(m, k, n, extra, dtype):
    cases.assert_exact_enough(_kernel(extra_n=extra), cases.case(m, k, n, dtype, bias=True, pad=8))


@pytest.mark.parametrize("parameter", ["halves", "own_scale"])
def test_variants(parameter):
    cases.assert_exact_enough(_kernel(**{parameter: True}), cases.case(70, 72, 104, torch.float16, bias=True))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_extreme_rms_in_fp16(scale):
    cases.assert_exact_enough(_kernel(), cases.case(66, 128, 64, torch.float16, scale=scale))

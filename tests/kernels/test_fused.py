from __future__ import annotations

import pytest
import torch

from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.configs import Fused  # noqa: E402
from flashnorm.kernels.fused import fused  # noqa: E402


def _kernel(block_m: int = 16) -> cases.Kernel:
    config = Fused(block_m=block_m, block_n=32, block_k=64)
    return lambda x, weight, gain, bias, out: fused(x, weight, cases.EPS, bias, out, config)


@pytest.mark.parametrize("dtype", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 32), (21, 77, 45), (64, 128, 30)])
def test_matches_fp64(m, k, n, dtype):
    cases.assert_exact_enough(_kernel(), cases.case(m, k, n, dtype, bias=True, pad=1))


@pytest.mark.parametrize("block_m", [32, 64])
def test_tall_tiles(block_m):
    cases.assert_exact_enough(_kernel(block_m), cases.case(70, 192, 64, cases.HALF))


def test_nan_stays_in_its_row():
    operands = cases.case(20, 64, 32, cases.HALF)
    operands.x[7, 5] = float("nan")
    out = cases.run_guarded(_kernel(), operands)
    assert out[7].isnan().all()
    assert out[:7].isfinite().all()
    assert out[8:].isfinite().all()

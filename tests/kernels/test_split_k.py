from __future__ import annotations

import pytest
import torch

from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.configs import SplitK  # noqa: E402
from flashnorm.kernels.split_k import split_k  # noqa: E402


def _kernel(split: int = 2, block_n: int = 64) -> cases.Kernel:
    config = SplitK(block_n=block_n, block_k=64, split=split, stages=3, reduce_n=64)
    return lambda x, weight, gain, bias, out: split_k(x, weight, cases.EPS, bias, out, config)


@pytest.mark.parametrize("dtype", cases.HALF_DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(2, 128, 64), (17, 200, 72), (64, 72, 40)])
def test_matches_fp64(m, k, n, dtype):
    cases.assert_exact_enough(_kernel(), cases.case(m, k, n, dtype, bias=True))


@pytest.mark.parametrize("split", [1, 3])
def test_every_share_of_k_is_summed(split):
    cases.assert_exact_enough(_kernel(split), cases.case(5, 200, 70, torch.float16, pad=8))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_extreme_rms_in_fp16(scale):
    cases.assert_exact_enough(_kernel(), cases.case(4, 128, 64, torch.float16, scale=scale))


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_propagate(special):
    operands = cases.case(3, 128, 64, torch.float16)
    operands.x[1, 5] = special
    out = cases.run_guarded(_kernel(), operands)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()

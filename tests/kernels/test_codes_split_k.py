from __future__ import annotations

import pytest
import torch

from flashnorm.kernels import quantize_weight
from flashnorm.kernels.bounds import exceeds
from flashnorm.kernels.codes import LARGEST, QuantizedWeight
from flashnorm.kernels.w8a8_bounds import expected_rms_linear_w8a8
from flashnorm.kernels.w8a8_configs import CodesSplitK
from flashnorm.kernels.w8a8_run import run
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.quantise import quantise  # noqa: E402

DTYPES = list(LARGEST)


def _run(operands: cases.Case, weight: QuantizedWeight, split: int = 2) -> torch.Tensor:
    """Both kernels, as the operation runs them."""
    config = CodesSplitK(block_n=64, block_k=64, split=split, stages=3, reduce_n=64)

    def kernel(x, codes, gain, bias, out):
        run(config, x, codes, weight.scale, cases.EPS, bias, out)

    return cases.run_guarded(kernel, cases.Case(operands.x, weight.codes, None, operands.bias))


def _exceeds(out: torch.Tensor, operands: cases.Case, weight: QuantizedWeight) -> float:
    x = operands.x
    codes = torch.empty(x.shape, device=x.device, dtype=weight.codes.dtype)
    quantise(x, cases.EPS, codes, torch.empty(len(x), device=x.device))
    units = cases.DEVICE == "cuda"
    return exceeds(out, expected_rms_linear_w8a8(x, codes, *weight, cases.EPS, operands.bias, matrix_units=units))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(("m", "k", "n", "bias"), [(2, 128, 64, False), (17, 208, 70, True), (64, 80, 45, True)])
def test_matches_fp64_and_comes_out_the_same_again(m, k, n, bias, of, dtype):
    operands = cases.case(m, k, n, of, bias=bias, pad=16)
    weight = quantize_weight(operands.weight, dtype)
    out = _run(operands, weight)
    assert _exceeds(out, operands, weight) <= 1
    assert torch.equal(out, _run(operands, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("lost", [False, True])
def test_every_share_of_k_is_summed(lost, split, dtype):
    """4 steps of 64, the last one in part; the last one lost is seen."""
    operands = cases.case(5, 240, 70, torch.float32, bias=True)
    weight = other = quantize_weight(operands.weight, dtype)
    if lost:
        other = weight._replace(codes=weight.codes.clone())
        other.codes[:, 192:] = 0
    assert (_exceeds(_run(operands, other, split), operands, weight) > 1) == lost


@pytest.mark.parametrize("split", [1, 2])
def test_sums_in_int8_are_exact(split):
    """Codes at their largest: 2048 products of 127² exceed 2^24, the integers of fp32."""
    x = torch.ones(2, 2048, device=cases.DEVICE)
    x[1, 0] = 0.5
    weight = quantize_weight(torch.ones(5, 2048, device=cases.DEVICE), torch.int8)
    codes, scale = torch.empty(x.shape, device=x.device, dtype=torch.int8), torch.empty(2, device=x.device)
    quantise(x, cases.EPS, codes, scale)
    exact = codes.long().sum(-1, keepdim=True) * 127
    assert exact.max() > 1 << 24
    out = _run(cases.Case(x, weight.codes), weight, split)
    assert torch.equal(out, exact.float() * (scale[:, None] * weight.scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, under the interpreter
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_a_special_makes_its_row_nan_and_no_other(special, dtype):
    operands = cases.case(3, 64, 16, torch.float32)
    operands.x[0] = 0
    operands.x[1, 40] = special
    out = _run(operands, quantize_weight(operands.weight, dtype))
    assert (out[0] == 0).all()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()

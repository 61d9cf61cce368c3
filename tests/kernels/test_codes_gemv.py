from __future__ import annotations

import pytest
import torch

from flashnorm.kernels import quantize_weight
from flashnorm.kernels.bounds import exceeds
from flashnorm.kernels.codes import LARGEST, QuantizedWeight
from flashnorm.kernels.w8a8_bounds import expected_rms_linear_w8a8
from flashnorm.kernels.w8a8_configs import CodesGemv
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.codes_gemv import codes_gemv  # noqa: E402
from flashnorm.kernels.quantise import quantise  # noqa: E402

DTYPES = list(LARGEST)
CONFIG = CodesGemv(block_n=4, warps=2)


def _codes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the kernel that has a pass of its own."""
    codes = torch.empty(x.shape, device=x.device, dtype=dtype)
    scale = torch.empty(len(x), device=x.device)
    quantise(x, cases.EPS, codes, scale)
    return codes, scale


def _run(operands: cases.Case, weight: QuantizedWeight, *, static: bool = False) -> torch.Tensor:
    def kernel(x, codes, gain, bias, out):
        codes_gemv(x, codes, weight.scale, cases.EPS, bias, out, CONFIG, static_weight=static)

    return cases.run_guarded(kernel, cases.Case(operands.x, weight.codes, None, operands.bias))


def _exceeds(out: torch.Tensor, operands: cases.Case, weight: QuantizedWeight) -> float:
    codes = _codes(operands.x, weight.codes.dtype)[0]
    return exceeds(out, expected_rms_linear_w8a8(operands.x, codes, *weight, cases.EPS, operands.bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(("m", "k", "n", "bias"), [(1, 96, 48, False), (3, 77, 45, True), (8, 130, 9, True)])
def test_matches_fp64_and_comes_out_the_same_again(m, k, n, bias, of, dtype):
    operands = cases.case(m, k, n, of, bias=bias, pad=16)
    weight = quantize_weight(operands.weight, dtype)
    out = _run(operands, weight)
    assert _exceeds(out, operands, weight) <= 1
    assert torch.equal(out, _run(operands, weight))
    assert torch.equal(out, _run(operands, weight, static=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
def test_its_codes_are_those_of_the_pass_that_it_does_without(shifted, dtype):
    """Weights that pick one code each give the codes back; those of a row half a step away are not taken for them."""
    k = 160
    x = cases.case(3, k, 1, torch.float32).x
    codes, scale = _codes(x, dtype)
    picking = QuantizedWeight(torch.eye(k, device=x.device).to(dtype), torch.ones(k, device=x.device))
    if shifted:
        x = x * torch.linspace(1, 1.1, k, device=x.device)
    out = _run(cases.Case(x, picking.codes), picking)
    given = codes.float() * scale[:, None]
    assert ((out - given).abs() <= 2.0**-18 * given.abs()).all() == (not shifted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_sums_beyond_the_integers_of_fp32_are_exact(dtype):
    """Codes at their largest: 2048 products of 127² exceed 2^24."""
    k = 2048
    x = torch.ones(2, k, device=cases.DEVICE)
    x[1, 0] = 0.5
    weight = quantize_weight(torch.ones(5, k, device=cases.DEVICE), dtype)
    operands = cases.Case(x, weight.codes)
    assert _exceeds(_run(operands, weight), operands, weight) <= 1
    if dtype == torch.int8:
        codes, scale = _codes(x, dtype)
        exact = codes.long().sum(-1, keepdim=True) * 127
        assert exact.max() > 1 << 24
        assert torch.equal(_run(operands, weight), exact.float() * (scale[:, None] * weight.scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["none", "epsilon", "one product", "no weight scale", "another row's scale"])
def test_faults_are_outside_the_bound(fault, dtype):
    operands = cases.case(3, 96, 16, cases.HALF, scale=1e-2)
    weight = other = quantize_weight(operands.weight, dtype)
    x = operands.x
    if fault == "one product":
        other = weight._replace(codes=weight.codes.clone())
        other.codes[:, int(x[0].abs().argmax())] = 0
    elif fault == "no weight scale":
        other = weight._replace(scale=torch.ones_like(weight.scale))
    elif fault == "epsilon":
        x = x * 0.9
    elif fault == "another row's scale":
        x = x * x.float().square().mean(-1, keepdim=True).rsqrt().to(x.dtype) * 1e-2
    out = _run(cases.Case(x, operands.weight), other)
    assert (_exceeds(out, operands, weight) > 1) == (fault != "none")


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

from __future__ import annotations

import pytest
import torch

from flashnorm.errors import DeviceError, DtypeError, GradientError, ShapeError
from flashnorm.kernels import overlapped_rms_linear, rms_linear
from flashnorm.kernels.bounds import exceeds, expected_rms_linear
from tests.kernels import cases


def _assert_right(out: torch.Tensor, operands: cases.Case) -> None:
    """Any way may have been chosen, so the normed x may have been rounded."""
    x = operands.x.reshape(-1, operands.x.shape[-1])
    expected = expected_rms_linear(x, operands.weight, cases.EPS, operands.gain, operands.bias, rounds_input=True)
    assert exceeds(out.reshape(-1, out.shape[-1]), expected) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("m", [1, 3, 17, 65])
@pytest.mark.parametrize("gain", [False, True])
def test_matches_fp64(m, dtype, gain):
    operands = cases.case(m, 96, 40, dtype, gain=gain, bias=True, pad=8)
    out = rms_linear(operands.x, operands.weight, cases.EPS, gain=operands.gain, bias=operands.bias)
    assert out.dtype == dtype
    _assert_right(out, operands)


def test_leading_axes_and_axes_that_are_not_contiguous():
    operands = cases.case(6, 64, 24, torch.bfloat16)
    flat = rms_linear(operands.x, operands.weight, cases.EPS)
    nested = operands.x.reshape(2, 3, 64)
    assert torch.equal(rms_linear(nested, operands.weight, cases.EPS), flat.view(2, 3, 24))
    columns = operands.x.t().contiguous().t()
    assert torch.equal(rms_linear(columns, operands.weight.t().contiguous().t(), cases.EPS), flat)


@pytest.mark.parametrize("transposed", [False, True])
def test_out_is_written_and_its_surroundings_are_not(transposed):
    operands = cases.case(6, 64, 24, torch.bfloat16)
    whole = torch.full((24, 8) if transposed else (8, 24), 7.0, dtype=torch.bfloat16, device=cases.DEVICE)
    guarded = whole.t() if transposed else whole
    out = guarded[1:7]
    assert rms_linear(operands.x, operands.weight, cases.EPS, out=out) is out
    _assert_right(out, operands)
    assert (guarded[[0, 7]] == 7).all()


def test_no_rows_give_no_rows():
    operands = cases.case(1, 64, 24, torch.bfloat16)
    assert rms_linear(operands.x[:0], operands.weight, cases.EPS).shape == (0, 24)


@pytest.mark.slow
def test_compiles_into_one_graph():
    operands = cases.case(4, 64, 24, torch.float32)
    function = torch.compile(lambda x, w: rms_linear(x * 2, w, cases.EPS) + 1, fullgraph=True, backend="aot_eager")
    eager = rms_linear(operands.x * 2, operands.weight, cases.EPS) + 1
    assert torch.equal(function(operands.x, operands.weight), eager)


def test_registration_is_consistent():
    operands = cases.case(4, 64, 24, torch.float32)
    arguments = (operands.x, operands.weight, cases.EPS, None, None, False)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flashnorm.rms_linear.default, arguments, test_utils=checks)
    out = torch.empty(4, 24, device=cases.DEVICE)
    torch.library.opcheck(torch.ops.flashnorm.rms_linear_out.default, (*arguments, out), test_utils=checks)


def test_two_streams_give_the_same_result():
    operands = cases.case(5, 64, 24, torch.bfloat16, bias=True)
    _assert_right(overlapped_rms_linear(operands.x, operands.weight, cases.EPS, bias=operands.bias), operands)


def test_a_product_beyond_fp16_is_scaled_before_it_is_rounded():
    operands = cases.case(2, 4096, 16, torch.float16, scale=1e4)
    operands.weight.copy_(operands.x[:1].sign())  # products up to 4096 · 1e4
    for out in (
        rms_linear(operands.x, operands.weight, cases.EPS),
        overlapped_rms_linear(operands.x, operands.weight, cases.EPS),
    ):
        assert out.isfinite().all()
        _assert_right(out, operands)


@pytest.mark.parametrize(
    ("error", "name", "arguments"),
    [
        (ShapeError, "weight", {"weight": torch.ones(4)}),
        (ShapeError, "width", {"weight": torch.ones(4, 9)}),
        (ShapeError, "gain", {"gain": torch.ones(4)}),
        (ShapeError, "bias", {"bias": torch.ones(8)}),
        (ShapeError, "out", {"out": torch.ones(2, 8)}),
        (ShapeError, "x", {"x": torch.tensor(1.0)}),
        (DtypeError, "weight", {"weight": torch.ones(4, 8, dtype=torch.float16)}),
        (DtypeError, "x", {"x": torch.ones(2, 8, dtype=torch.int64)}),
        (DeviceError, "bias", {"bias": torch.ones(4, device="meta")}),
        (GradientError, "weight", {"weight": torch.ones(4, 8, requires_grad=True), "out": torch.ones(2, 4)}),
    ],
)
def test_a_refusal_names_the_argument(error, name, arguments):
    with pytest.raises(error, match=name):
        rms_linear(**{"x": torch.ones(2, 8), "weight": torch.ones(4, 8), "eps": 1e-6, **arguments})

"""Weights that bring their own matmul, as quantised tensor subclasses do: `rms_linear` leaves it to them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashnorm.errors import DtypeError, ShapeError
from flashnorm.kernels import quantize_weight, rms_linear
from flashnorm.kernels.bounds import exceeds, expected_rms_linear
from tests.kernels import cases


class Codes(torch.Tensor):
    """An int8 weight with a scale for each output, which looks like its dequantised self and knows `linear` alone."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, dtype):
        self.codes, self.scale, self.calls = codes, scale, 0

    def dequantised(self):
        return (self.codes.float() * self.scale[:, None]).to(self.dtype)

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts, dtype, size, stride):
        return Codes(parts["codes"], parts["scale"], dtype)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, bias = args
            weight.calls += 1
            return F.linear(x, weight.dequantised(), bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise NotImplementedError(f"{operation} on codes")


def _codes(weight: torch.Tensor) -> Codes:
    return Codes(*quantize_weight(weight, torch.int8), weight.dtype)


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_the_weight_s_own_matmul_is_used(into, gain, of):
    operands = cases.case(5, 96, 40, of, gain=gain, bias=True)
    weight = _codes(operands.weight)
    out = torch.full((5, 40), float("nan"), dtype=of, device=cases.DEVICE) if into else None
    got = rms_linear(operands.x, weight, cases.EPS, gain=operands.gain, bias=operands.bias, out=out)
    assert weight.calls == 1
    assert out is None or got is out
    expected = expected_rms_linear(
        operands.x, weight.dequantised(), cases.EPS, operands.gain, operands.bias, rounds_input=True
    )
    # The library may round the product before it adds the bias.
    bound = expected.bound + torch.finfo(of).eps * (expected.value.abs() + operands.bias.double().abs())
    assert exceeds(got, expected._replace(bound=bound)) <= 1


def test_the_gain_and_the_norm_are_not_forgotten():
    operands = cases.case(5, 96, 40, torch.float32, gain=True)
    weight = _codes(operands.weight)
    expected = expected_rms_linear(operands.x, weight.dequantised(), cases.EPS, operands.gain, rounds_input=True)
    assert exceeds(rms_linear(operands.x, weight, cases.EPS), expected) > 1
    assert exceeds(F.linear(operands.x * operands.gain, weight, None), expected) > 1


def test_operands_that_do_not_fit_are_refused_as_ever():
    operands = cases.case(5, 96, 40, torch.float32)
    weight = _codes(operands.weight)
    with pytest.raises(ShapeError, match="width"):
        rms_linear(operands.x[:, :95], weight, cases.EPS)
    with pytest.raises(DtypeError, match="weight"):
        rms_linear(operands.x.half(), weight, cases.EPS)
    assert weight.calls == 0


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_torchao(bits):
    """Its weight-only tensors: int8, and int4 in groups of 32, which it keeps unpacked where it has no kernel."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed; pip install torchao")
    from torchao.quantization.granularity import PerGroup

    operands = cases.case(5, 96, 40, torch.float32, gain=True)
    layer = torch.nn.Sequential(torch.nn.Linear(96, 40, bias=False, device=cases.DEVICE))
    layer[0].weight.data = operands.weight
    if bits == 8:
        config = quantization.Int8WeightOnlyConfig()
    else:
        config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantization.quantize_(layer, config)
    weight = layer[0].weight
    with torch.no_grad():
        got = rms_linear(operands.x, weight, cases.EPS, gain=operands.gain)
        values = F.linear(torch.eye(96, device=cases.DEVICE), weight).t()
    assert (values - operands.weight).abs().max() > 0
    assert exceeds(got, expected_rms_linear(operands.x, values, cases.EPS, operands.gain, rounds_input=True)) <= 1

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashnorm.errors import GradientError, ShapeError
from flashnorm.kernels import rms_linear, rms_swiglu_linear
from flashnorm.kernels.bounds import exceeds, expected_rms_swiglu_linear
from flashnorm.kernels.reference import ACTIVATIONS
from tests.kernels import cases


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("gain", [False, True])
def test_matches_fp64(activation, gain, dtype):
    operands = cases.case(5, 96, 2 * 40, dtype, gain=gain, pad=8)
    out = rms_swiglu_linear(operands.x, operands.weight, cases.EPS, gain=operands.gain, activation=activation)
    expected = expected_rms_swiglu_linear(
        operands.x, operands.weight, cases.EPS, operands.gain, activation=activation, plain_sequence=True
    )
    assert out.shape == (5, 40)
    assert exceeds(out, expected) <= 1


def test_gate_comes_first():
    operands = cases.case(5, 96, 2 * 40, torch.float32)
    swapped = torch.cat([operands.weight[40:], operands.weight[:40]])
    out = rms_swiglu_linear(operands.x, swapped, cases.EPS)
    assert exceeds(out, expected_rms_swiglu_linear(operands.x, operands.weight, cases.EPS)) > 1
    assert exceeds(out, expected_rms_swiglu_linear(operands.x, swapped, cases.EPS)) <= 1


def test_out_and_leading_axes():
    operands = cases.case(6, 64, 2 * 24, torch.bfloat16)
    flat = rms_swiglu_linear(operands.x, operands.weight, cases.EPS)
    whole = torch.full((2, 24, 5), 7.0, dtype=torch.bfloat16, device=cases.DEVICE)
    out = whole.transpose(1, 2)[:, 1:4]
    assert rms_swiglu_linear(operands.x.view(2, 3, 64), operands.weight, cases.EPS, out=out) is out
    assert torch.equal(out, flat.view(2, 3, 24))
    assert (whole[:, :, [0, 4]] == 7).all()


def test_what_is_refused():
    operands = cases.case(4, 64, 2 * 24, torch.float32)
    x, weight = operands.x, operands.weight
    with pytest.raises(ShapeError, match="activation must be one of silu, gelu_tanh, relu, not 'tanh'"):
        rms_swiglu_linear(x, weight, cases.EPS, activation="tanh")
    with pytest.raises(ShapeError, match="as many rows for gate as for up, not 47"):
        rms_swiglu_linear(x, weight[:47], cases.EPS)
    with pytest.raises(ShapeError, match="weight must be a matrix"):
        rms_swiglu_linear(x, torch.zeros(()), cases.EPS)
    with pytest.raises(ShapeError, match="out must be of shape"):
        rms_swiglu_linear(x, weight, cases.EPS, out=x.new_empty(4, 48))
    with pytest.raises(GradientError, match="x requires grad"):
        rms_swiglu_linear(x.clone().requires_grad_(), weight, cases.EPS)


@pytest.mark.parametrize("name", ["x", "weight"])
def test_an_out_that_overlaps_an_operand_is_refused(name):
    buffer = torch.randn(8, 64, device=cases.DEVICE)
    x, weight = buffer[:4], torch.randn(64, 64, device=cases.DEVICE)
    out = buffer[2:6] if name == "x" else weight[10:14]
    with pytest.raises(ShapeError, match=f"out overlaps {name} in memory"):
        rms_linear(x, weight, cases.EPS, out=out)
    apart = buffer[4:]  # the same storage, but not the same memory
    assert torch.allclose(
        rms_linear(x, weight, cases.EPS, out=apart), F.rms_norm(x, (64,), eps=cases.EPS) @ weight.t(), atol=1e-4
    )


@pytest.mark.slow
def test_compiles_into_one_graph():
    operands = cases.case(4, 64, 2 * 24, torch.float32)
    function = torch.compile(
        lambda x, w: rms_swiglu_linear(x * 2, w, cases.EPS) + 1, fullgraph=True, backend="aot_eager"
    )
    eager = rms_swiglu_linear(operands.x * 2, operands.weight, cases.EPS) + 1
    assert torch.equal(function(operands.x, operands.weight), eager)

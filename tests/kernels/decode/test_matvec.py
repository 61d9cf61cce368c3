from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashnorm.kernels.bounds import CONFIDENCE, Expected, exceeds
from flashnorm.kernels.configs import Gemv
from flashnorm.kernels.decode import reference
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.decode.matvec import Surroundings, matvec, tile_for  # noqa: E402

CONFIG = Gemv(block_n=4, block_k=64)


def expected(x: Tensor, weight: Tensor, around: Surroundings, dtype: torch.dtype) -> Expected:
    """fp64 result and bound: K fp32 additions, the scale, the activation (slope at most 1.13), the last rounding."""
    options = {
        "eps": around.eps,
        "gain": _double(around.gain),
        "bias": _double(around.bias),
        "activation": around.activation,
        "gated": around.gated,
        "multiplier": around.multiplier,
        "residual": _double(around.residual),
    }
    value = reference.matvec(x.double(), weight.double(), **options)
    normed = reference.rms_norm(x.double(), around.eps, options["gain"])
    products = normed @ weight.double().t() + (0 if around.bias is None else options["bias"])
    magnitude = normed.abs() @ weight.double().abs().t() + (0 if around.bias is None else options["bias"].abs())
    moved = (CONFIDENCE * 2.0**-24 * x.shape[1] ** 0.5 + 2.0**-21) * magnitude
    if around.gated:
        (gate, up), (gate_moved, up_moved) = products.chunk(2, -1), moved.chunk(2, -1)
        gate = reference.ACTIVATIONS[around.activation](gate)
        moved = 1.13 * gate_moved * (up.abs() + up_moved) + gate.abs() * up_moved + 2.0**-20 * (gate * up).abs()
    elif around.activation == "relu2":
        moved = 2 * products.abs() * moved + moved.square()
    elif around.activation is not None:
        moved = 1.13 * moved + 2.0**-20 * products.abs()
    unit = torch.finfo(dtype).eps / 2
    last = unit * value.abs() + torch.finfo(dtype).smallest_normal * unit
    return Expected(value, abs(around.multiplier) * moved + 2.0**-23 * value.abs() + last)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def check(operands: cases.Case, around: Surroundings, config: Gemv = CONFIG, out: torch.dtype | None = None) -> None:
    outputs = len(operands.weight) // (2 if around.gated else 1)
    dtype = out or operands.x.dtype
    results = []
    for _ in range(2):
        whole = torch.full((len(operands.x) + 2, outputs + 16), float("nan"), device=cases.DEVICE, dtype=dtype)
        whole[0], whole[-1], whole[:, outputs:] = 7.0, 7.0, 7.0
        matvec(operands.x, operands.weight, whole[1:-1, :outputs], around, config)
        assert (whole[0] == 7).all()
        assert (whole[-1] == 7).all()
        assert (whole[:, outputs:] == 7).all()
        results.append(whole[1:-1, :outputs])
    assert exceeds(results[0], expected(operands.x, operands.weight, around, dtype)) <= 1
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 16), (1, 200, 10), (3, 77, 9)])
def test_norm_and_linear(m, k, n, dtype):
    operands = cases.case(m, k, n, dtype, gain=True, bias=True)
    check(operands, Surroundings(eps=cases.EPS))
    check(operands, Surroundings(eps=cases.EPS, gain=operands.gain.float(), bias=operands.bias))
    check(operands, Surroundings())


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activations(activation, gated):
    operands = cases.case(1, 90, 22, cases.HALF, bias=True)
    check(operands, Surroundings(eps=cases.EPS, activation=activation, gated=gated))
    check(operands, Surroundings(eps=cases.EPS, activation=activation, gated=gated, bias=operands.bias))


@pytest.mark.parametrize("pad", [0, 3, 16])
def test_residual_multiplier_and_strides(pad):
    operands = cases.case(2, 96, 21, cases.HALF, bias=True, pad=pad)
    residual = cases.case(2, 21, 1, cases.HALF, pad=pad).x
    check(operands, Surroundings(bias=operands.bias, residual=residual, multiplier=0.22))


def test_the_residual_may_be_the_output():
    operands = cases.case(1, 64, 16, cases.HALF)
    stream = cases.case(1, 16, 1, cases.HALF).x
    around = Surroundings(residual=stream.clone())
    wanted = expected(operands.x, operands.weight, around, stream.dtype)
    matvec(operands.x, operands.weight, stream, replace(around, residual=stream), CONFIG)
    assert exceeds(stream, wanted) <= 1


def test_logits_come_out_in_fp32():
    check(cases.case(1, 128, 33, cases.HALF), Surroundings(eps=cases.EPS, multiplier=1 / 6), out=torch.float32)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_propagate(special):
    operands = cases.case(2, 64, 16, cases.HALF)
    operands.x[1, 5] = special
    out = torch.empty(2, 16, device=cases.DEVICE, dtype=cases.HALF)
    matvec(operands.x, operands.weight, out, Surroundings(eps=cases.EPS), CONFIG)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()


@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (2048, 8192), (128256, 2048), (960, 576), (576, 1536)])
def test_tiles_suit_the_width(n, k):
    tile = tile_for(n, k, gated=False)
    assert tile.block_k <= 2048
    assert 1024 <= tile.block_n * tile.block_k <= 8192


def test_a_dropped_residual_exceeds_the_bound():
    operands = cases.case(1, 64, 16, cases.HALF)
    residual = 0.01 * cases.case(1, 16, 1, cases.HALF).x
    out = torch.empty(1, 16, device=cases.DEVICE, dtype=cases.HALF)
    matvec(operands.x, operands.weight, out, Surroundings(), CONFIG)
    assert exceeds(out, expected(operands.x, operands.weight, Surroundings(residual=residual), cases.HALF)) > 1

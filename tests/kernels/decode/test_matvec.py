from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.kernels.bounds import exceeds
from flashnorm.kernels.configs import Gemv
from flashnorm.kernels.decode import reference
from flashnorm.kernels.surroundings import Surroundings
from tests.kernels import cases
from tests.kernels.surrounded import expected

cases.need_triton()
from flashnorm.kernels.decode.matvec import matvec, tile_for  # noqa: E402

CONFIG = Gemv(block_n=4, block_k=64)


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

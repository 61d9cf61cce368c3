"""`flashnorm bench fp8` without a GPU: every contender runs through the interpreter, and what is wrong is not timed."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from flashnorm.bench import fp8
from flashnorm.bench.fp8 import FUSED, STATIC, Row, limit, measure, summarise
from flashnorm.bench.fp8_record import fp8_record, summary_sentence, table_lines, table_titles
from flashnorm.bench.limits import Ceilings
from flashnorm.bench.op import BARE, OURS
from flashnorm.errors import CheckFailed
from flashnorm.kernels.codes import LARGEST, quantize_rows
from flashnorm.kernels.timing import Timing
from flashnorm.kernels.tuning import Shape
from flashnorm.kernels.w8a8_bounds import codes_exceed
from tests.kernels import cases

CEILINGS = Ceilings(bytes_per_us=4e6, flops_per_us=1.5e9)
SHAPE = Shape(3, 64, 32)
CPU = torch.device("cpu")


def _has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def _row(ours: tuple[float, ...], fused: tuple[float, ...] = (10.0, 11.0, 12.0)) -> Row:
    return Row(1, 64, 32, 0.5, {BARE: Timing((8.0,) * 3), FUSED: Timing(fused), OURS: Timing(ours)}, 2.0)


@pytest.fixture
def on_the_host(monkeypatch):
    """Each contender runs once for each copy of the operands, and is said to have taken a microsecond."""
    monkeypatch.setattr(fp8, "COLD_BYTES", 1)
    monkeypatch.setattr(fp8, "_HALF", cases.HALF)

    def run(calls, count, repeats):
        for call in calls.values():
            for index in range(count):
                call(index)
        return {name: Timing((1.0,) * repeats) for name in calls}

    monkeypatch.setattr(fp8, "time_side_by_side", run)


@pytest.mark.skipif(cases.DEVICE == "cuda", reason="here kernels are compiled, and the command itself runs")
@pytest.mark.parametrize("dtype", list(LARGEST))
def test_every_contender_runs_and_is_right(dtype, on_the_host):
    cases.need_triton()
    [row] = measure(CEILINGS, CPU, [SHAPE], dtype=dtype)
    assert list(row.timings) == [BARE, FUSED, OURS]
    assert 0 < row.error <= 1
    assert row.not_above


@pytest.mark.skipif(cases.DEVICE == "cuda", reason="here kernels are compiled, and the command itself runs")
@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("fault", ["ours lacks the norm", "the baseline lacks the norm", "codes", "nothing is written"])
def test_what_is_wrong_is_not_timed(fault, dtype, on_the_host, monkeypatch):
    cases.need_triton()
    right_norm_quant, right = fp8._norm_quant, fp8.rms_linear_w8a8

    def without_norm(operands, i):
        codes, scale = right_norm_quant(operands, i)
        return codes, scale * 2

    def shifted(operands, i):
        codes, scale = fp8._our_codes(operands, i)
        return codes.roll(1, 1), scale

    if fault == "ours lacks the norm":
        monkeypatch.setattr(fp8, "rms_linear_w8a8", lambda *given, out, **_: right(*given[:3], 1.0, out=out))
    elif fault == "the baseline lacks the norm":
        monkeypatch.setattr(fp8, "_norm_quant", without_norm)
    elif fault == "codes":
        monkeypatch.setitem(fp8._CODES, OURS, shifted)
    else:
        monkeypatch.setattr(fp8, "rms_linear_w8a8", lambda *given, out, **_: out)
    with pytest.raises(CheckFailed, match="wrong"):
        list(measure(CEILINGS, CPU, [SHAPE], dtype=dtype))


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("k", [64, 77, 576])
def test_the_baseline_s_codes_are_those_of_the_normed_row_times_its_gain(k, dtype):
    cases.need_triton()
    from flashnorm.bench.norm_quant import norm_quant

    operands = cases.case(3, k, 1, torch.float32, gain=True, pad=3)
    x, gain = operands.x, operands.gain
    whole = torch.full((5, k + 16), 7.0, device=cases.DEVICE).to(dtype)
    scales = torch.full((5,), 7.0, device=cases.DEVICE)
    norm_quant(x, gain, cases.EPS, whole[1:-1, :k], scales[1:-1])
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + cases.EPS) * gain
    assert codes_exceed(normed.double(), whole[1:-1, :k]) <= 1
    assert torch.allclose(scales[1:-1], quantize_rows(normed, dtype)[1], rtol=1e-6)
    for guard in (whole[0], whole[-1], whole[:, k:], scales[0], scales[-1]):
        assert (guard.float() == 7).all()


def test_not_above_is_judged_beyond_both_spreads():
    assert _row((9.0, 9.0, 9.0)).not_above
    assert _row((10.0, 11.5, 12.0)).not_above
    assert not _row((14.0, 14.0, 14.0)).not_above
    summary = summarise([_row((5.5, 5.5, 5.5)), _row((22.0, 22.0, 22.0)), _row((11.5, 11.5, 11.5))])
    assert (summary.rows, summary.not_above, summary.median_not_above) == (3, 2, 1)
    assert summary.ratio == pytest.approx((0.5 * 2 * 11.5 / 11) ** (1 / 3))


def test_the_limit_counts_one_byte_a_weight_and_two_for_x_and_y():
    assert limit(Shape(1, 1000, 1000), CEILINGS) == pytest.approx((2000 + 1_000_000 + 2000) / 4e6)
    assert limit(Shape(4096, 4096, 4096), CEILINGS) == pytest.approx(2 * 4096**3 / 1.5e9)


def test_the_shapes_are_the_eighteen():
    assert len(fp8.shapes()) == 18
    assert {(shape.k, shape.n) for shape in fp8.shapes()} == {(576, 960), (2048, 3072), (4096, 6144)}


def test_weights_stay_cold(monkeypatch):
    for shape in fp8.shapes():
        assert fp8.copies(shape) * shape.k * shape.n > 1.5 * 60 * 2**20  # the L2 of an H200
    monkeypatch.setattr(fp8, "COLD_BYTES", 10 * SHAPE.k * SHAPE.n)
    operands = fp8.operands_of(SHAPE, CPU)
    assert len({weight.data_ptr() for weight in operands.weight}) == fp8.copies(SHAPE) == 11


def test_the_record_keeps_every_sample_and_makes_the_table():
    rows = [_row((5.0, 6.0, 7.0)), _row((20.0, 20.0, 20.0))]
    record = json.loads(json.dumps(fp8_record(rows, CEILINGS, {OURS: ["_quantise_kernel"]}, {"commit": "abc"})))
    assert record["rows"][0]["samples"][OURS] == [5.0, 6.0, 7.0]
    assert record["kernels"][OURS] == ["_quantise_kernel"]
    assert table_titles(record)[:5] == ("K,N", "M", BARE, FUSED, OURS)
    assert table_lines(record)[0] == ("64,32", "1", "8.00", "11.00", "6.00", "1.00", "0.545", "0.750", "33", "yes")
    assert [line[-1] for line in table_lines(record)] == ["yes", "no"]
    assert "in 1 of 2 rows, and with a median not above it in 1" in summary_sentence(record)


@pytest.mark.skipif(cases.DEVICE == "cuda", reason="here kernels are compiled, and the command itself runs")
@pytest.mark.parametrize("wrong", [False, True])
def test_the_static_contender_is_added_on_request_and_checked_too(wrong, on_the_host, monkeypatch):
    """FlashInfer has no CPU path, so its place is taken by plain torch, once with the scale forgotten."""
    cases.need_triton()

    def plain(codes, x, gain, scale, eps):
        normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * gain
        codes.copy_((normed / (1.0 if wrong else scale)).float())

    flashinfer = types.ModuleType("flashinfer.norm")
    flashinfer.rmsnorm_quant = plain
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.norm", flashinfer)
    if wrong:
        with pytest.raises(CheckFailed, match="codes of flashinfer"):
            list(measure(CEILINGS, CPU, [SHAPE], static=True))
    else:
        [row] = measure(CEILINGS, CPU, [SHAPE], static=True)
        assert list(row.timings) == [BARE, FUSED, OURS, STATIC]


@pytest.mark.gpu
@pytest.mark.skipif(not _has_fp8(), reason="needs a CUDA GPU with e4m3; its parts run on the CPU above")
@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("m", [1, 64])
def test_a_shape_on_the_device(m, dtype):
    """One row launches one kernel; more launch one that takes the codes, and the product."""
    device, shape = torch.device("cuda", 0), Shape(m, 576, 960)
    [row] = measure(fp8.ceilings_of(device, dtype), device, [shape], dtype=dtype)
    assert 0 < row.error <= 1
    names = fp8.launched(fp8.contenders(fp8.operands_of(shape, device, dtype), static=False)[OURS])
    assert names == [] or ("_codes_gemv_kernel" if m == 1 else "_quantise_kernel") in names[0]
    assert len(names) <= (1 if m == 1 else 3)  # no pass for the norm beside the one that takes the codes


def test_int8_codes_have_the_rows_that_the_library_needs():
    operands = fp8.operands_of(SHAPE, CPU, torch.int8)
    assert {codes.shape for codes in operands.codes} == {(32, 64)}
    assert {scale.shape for scale in operands.scale} == {(3,)}
    assert {codes.shape for codes in fp8.operands_of(SHAPE, CPU).codes} == {(3, 64)}

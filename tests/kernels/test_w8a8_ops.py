from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnorm.errors import DeviceError, DtypeError, GradientError, ShapeError
from flashnorm.kernels import quantize_weight, reference, rms_linear, rms_linear_w8a8
from flashnorm.kernels.bounds import exceeds
from flashnorm.kernels.codes import LARGEST, half_step, quantize_rows
from flashnorm.kernels.w8a8_bounds import expected_rms_linear_w8a8
from flashnorm.kernels.w8a8_configs import CodesSplitK, Library
from flashnorm.kernels.w8a8_dispatch import choose, problem_of
from flashnorm.kernels.w8a8_run import run
from tests.kernels import cases

DTYPES = list(LARGEST)
FLOAT8 = torch.float8_e4m3fn


def _exceeds(out: torch.Tensor, operands: cases.Case, weight) -> float:
    x = operands.x
    units = isinstance(choose(problem_of(x, weight.codes)), (CodesSplitK, Library))
    codes = quantize_rows(x, weight.codes.dtype)[0]
    expected = expected_rms_linear_w8a8(x, codes, *weight, cases.EPS, operands.bias, matrix_units=units)
    return exceeds(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 96, 48), (3, 77, 45), (33, 128, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_fp64_on_the_same_codes(bias, m, k, n, of, dtype):
    operands = cases.case(m, k, n, of, bias=bias, pad=16)
    weight = quantize_weight(operands.weight, dtype)
    out = rms_linear_w8a8(operands.x, *weight, cases.EPS, bias=operands.bias)
    assert out.dtype == of
    assert _exceeds(out, operands, weight) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of", [torch.float16, torch.float32])
def test_the_kernels_way_around_the_library_s_matmul(of, bias, dtype):
    """What runs on a GPU: kernels compiled or interpreted, and the library's product, which the CPU has too."""
    cases.need_triton()
    operands = cases.case(3, 96, 48, of, bias=bias)
    weight = quantize_weight(operands.weight, dtype)
    whole = torch.full((5, 64), 7.0, dtype=of, device=cases.DEVICE)
    for out in (whole[1:4, :48], torch.empty(3, 48, dtype=of, device=cases.DEVICE)):
        run(Library(), operands.x, *weight, cases.EPS, operands.bias, out)
        assert _exceeds(out, operands, weight) <= 1
    assert (whole[[0, 4]] == 7).all()
    assert (whole[:, 48:] == 7).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of", [torch.float16, torch.float32])
def test_where_the_library_has_no_kernel_with_scales_they_are_applied_after_it(of, bias, monkeypatch):
    cases.need_triton()
    operands = cases.case(3, 96, 48, of, bias=bias)
    weight = quantize_weight(operands.weight)
    library, said = torch._scaled_mm, "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"

    def refusing(codes, right, scale, *given, **options):
        if scale.numel() > 1:
            raise RuntimeError(said)
        return library(codes, right, scale, *given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", refusing)
    out = torch.empty(3, 48, dtype=of, device=cases.DEVICE)
    run(Library(), operands.x, *weight, cases.EPS, operands.bias, out)
    assert _exceeds(out, operands, weight) <= 1
    said = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        run(Library(), operands.x, *weight, cases.EPS, operands.bias, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_norm_then_linear_but_for_the_rounding_to_codes(dtype):
    """Every operand moves by half a step at most, in either dtype of codes."""
    operands = cases.case(4, 256, 32, torch.float32)
    weight = quantize_weight(operands.weight, dtype)
    out = rms_linear_w8a8(operands.x, *weight, cases.EPS)
    moved = []
    for rows in (operands.x.double(), operands.weight.double()):
        scale = rows.abs().amax(-1, keepdim=True) / LARGEST[dtype]
        moved.append((rows.abs(), half_step(rows / scale, dtype) * scale))
    (x, dx), (w, dw) = moved
    scale = torch.rsqrt(operands.x.double().square().mean(-1, keepdim=True) + cases.EPS)
    bound = (dx @ w.t() + (x + dx) @ dw.t()) * scale
    error = (out - rms_linear(operands.x, operands.weight, cases.EPS)).abs()
    assert (error <= bound * 1.0001).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_codes_of_the_normed_row_are_those_of_the_row(data, dtype):
    """Equal, but within a few roundings of the middle between two codes, where the next one may be taken."""
    exponent = data.draw(st.floats(-15, 15))
    seed = data.draw(st.integers(0, 2**31))
    eps = data.draw(st.sampled_from([0.0, 1e-6, 1e-5, 1.0]))
    gauss = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    drawn = data.draw(st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=32))
    row = torch.cat([gauss, torch.tensor(drawn) * 10.0**exponent])[None]
    normed = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    codes, again = (quantize_rows(rows, dtype)[0].double() for rows in (row, normed))
    quotient = row.double() / row.double().abs().amax() * LARGEST[dtype]
    step = 2 * half_step(quotient, dtype)
    from_middle = ((quotient / step) % 1 - 0.5).abs() * step
    assert torch.equal(codes[from_middle > 2.0**-21 * quotient.abs()], again[from_middle > 2.0**-21 * quotient.abs()])
    assert ((codes - again).abs() <= step).all()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), power=st.integers(-40, 40))
def test_a_power_of_two_changes_no_code(seed, power, dtype):
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(quantize_rows(rows, dtype)[0].float(), quantize_rows(rows * 2.0**power, dtype)[0].float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_tiny_rows_and_specials(dtype):
    operands = cases.case(6, 64, 32, torch.float32)
    x, weight = operands.x, quantize_weight(operands.weight, dtype)
    x[0], x[4, 3], x[5, 3] = 0, float("nan"), float("inf")
    x[1] *= 1e-44
    x[2] *= 1e-25
    out = rms_linear_w8a8(x, *weight, cases.EPS)
    assert (out[0] == 0).all()
    assert (out[1].abs() <= 1e-35).all()
    assert out[4:].isnan().all()
    finite = cases.Case(x[:4], operands.weight)
    assert _exceeds(out[:4], finite, weight) <= 1
    assert (out[2] != 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["no norm", "another row's scale", "no weight scale", "a product lost", "epsilon"])
def test_faults_are_outside_the_bound(fault, dtype):
    operands = cases.case(4, 256, 32, torch.float16, scale=1e-2)
    x, weight = operands.x, quantize_weight(operands.weight, dtype)
    if fault == "no norm":
        wrong = rms_linear_w8a8(x, *weight, 1.0 - float(x[0].float().square().mean()))
    elif fault == "another row's scale":
        scales = x.float().square().mean(-1).rsqrt()
        wrong = rms_linear_w8a8(x, *weight, cases.EPS) * (scales.roll(1) / scales)[:, None]
    elif fault == "no weight scale":
        wrong = rms_linear_w8a8(x, weight.codes, torch.ones_like(weight.scale), cases.EPS)
    elif fault == "a product lost":
        lost = weight.codes.clone()
        lost[:, int(x[0].abs().argmax())] = 0
        wrong = rms_linear_w8a8(x, lost, weight.scale, cases.EPS)
    else:
        wrong = rms_linear_w8a8(x, *weight, 2 * cases.EPS)
    assert _exceeds(wrong, operands, weight) > 1


@pytest.mark.parametrize("fault", ["none", "no norm", "another row's scale", "no weight scale", "a step of 128 lost"])
def test_faults_are_outside_the_wider_bound_of_matrix_units(fault):
    """What is allowed to matrix units in e4m3 hides no fault that reaches a whole row, output or tile."""
    operands = cases.case(8, 4096, 64, torch.float16)
    operands.x.mul_(torch.linspace(0.2, 1, 8, device=cases.DEVICE)[:, None])
    x, weight = operands.x, quantize_weight(operands.weight)
    codes, other = quantize_rows(x, FLOAT8)[0], weight
    scales = x.float().square().mean(-1, keepdim=True).rsqrt()
    if fault == "no weight scale":
        other = weight._replace(scale=weight.scale.mean().expand(64).contiguous())
    elif fault == "a step of 128 lost":
        other = weight._replace(codes=weight.codes.clone())
        other.codes[:, 1024:1152] = 0
    wrong = rms_linear_w8a8(x, *other, cases.EPS)
    wrong = wrong / scales if fault == "no norm" else wrong
    wrong = wrong * (scales.roll(1, 0) / scales) if fault == "another row's scale" else wrong
    expected = expected_rms_linear_w8a8(x, codes, *weight, cases.EPS, matrix_units=True)
    assert (exceeds(wrong, expected) > 1) == (fault != "none")


def test_a_weight_s_rows_have_scales_of_their_own():
    weight = cases.case(1, 64, 3, torch.float32).weight
    weight[1] *= 1e6
    weight[2] = 0
    for dtype in DTYPES:
        codes, scale = quantize_weight(weight, dtype)
        back = codes.double() * scale.double()[:, None]
        assert (codes[:2].float().abs().amax(-1) == LARGEST[dtype]).all()
        step = half_step(weight.double() / scale.double()[:, None], dtype) * scale.double()[:, None]
        assert ((back - weight).abs() <= 1.0001 * step).all()
        assert (back[2] == 0).all()


def test_a_weight_that_is_not_finite_gives_nan_in_its_outputs_alone():
    operands = cases.case(2, 64, 3, torch.float32)
    operands.weight[0, 3], operands.weight[1, 4] = float("inf"), float("nan")
    for dtype in DTYPES:
        out = rms_linear_w8a8(operands.x, *quantize_weight(operands.weight, dtype), cases.EPS)
        assert out.isnan().any(0).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_axes_transposed_operands_and_out(dtype):
    operands = cases.case(6, 64, 32, torch.bfloat16)
    weight = quantize_weight(operands.weight, dtype)
    flat = rms_linear_w8a8(operands.x, *weight, cases.EPS)
    assert torch.equal(rms_linear_w8a8(operands.x.view(2, 3, 64), *weight, cases.EPS), flat.view(2, 3, 32))
    columns = [t.t().contiguous().t() for t in (operands.x, weight.codes)]
    assert torch.equal(rms_linear_w8a8(*columns, weight.scale, cases.EPS), flat)
    whole = torch.full((32, 8), 7.0, dtype=torch.bfloat16, device=cases.DEVICE).t()
    out = whole[1:7]
    assert rms_linear_w8a8(operands.x, *weight, cases.EPS, out=out) is out
    assert torch.equal(out, flat)
    assert (whole[[0, 7]] == 7).all()
    assert rms_linear_w8a8(operands.x[:0], *weight, cases.EPS).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_registration_is_consistent_and_compiles_into_one_graph(dtype):
    operands = cases.case(4, 64, 32, torch.float32, bias=True)
    weight = quantize_weight(operands.weight, dtype)
    arguments = (operands.x, *weight, cases.EPS, operands.bias, True)
    # The schema's check multiplies operands by a random number, which torch cannot do to e4m3.
    checks = ("test_schema", "test_faketensor") if dtype == torch.int8 else ("test_faketensor",)
    torch.library.opcheck(torch.ops.flashnorm.rms_linear_w8a8.default, arguments, test_utils=checks)
    out = torch.empty(4, 32, device=cases.DEVICE)
    torch.library.opcheck(torch.ops.flashnorm.rms_linear_w8a8_out.default, (*arguments, out), test_utils=checks)
    compiled = torch.compile(
        lambda x, static: rms_linear_w8a8(x * 2, *weight, cases.EPS, static_weight=static) + 1,
        fullgraph=True,
        backend="aot_eager",
    )
    for static in (False, True):
        assert torch.equal(compiled(operands.x, static), rms_linear_w8a8(operands.x * 2, *weight, cases.EPS) + 1)
    assert torch.ops.flashnorm.rms_linear_w8a8(*arguments[:-1]).shape == (4, 32)  # as before there was the promise


def test_int8_on_the_cpu_is_the_integer_product():
    operands = cases.case(3, 4096, 16, torch.float32)
    x, weight = operands.x.cpu(), quantize_weight(operands.weight.cpu(), torch.int8)
    codes, scale = quantize_rows(x, torch.int8)
    exact = codes.long() @ weight.codes.long().t()
    row = scale * torch.rsqrt(x.square().mean(-1) + cases.EPS)
    assert torch.equal(reference.rms_linear_w8a8(x, *weight, cases.EPS), exact.float() * (row[:, None] * weight.scale))


@pytest.mark.parametrize(
    ("error", "name", "arguments"),
    [
        (ShapeError, "weight", {"weight": torch.ones(4).to(FLOAT8)}),
        (ShapeError, "width", {"weight": torch.ones(4, 9).to(FLOAT8)}),
        (ShapeError, "weight_scale", {"weight_scale": torch.ones(8)}),
        (ShapeError, "bias", {"bias": torch.ones(8)}),
        (ShapeError, "out", {"out": torch.ones(2, 8)}),
        (ShapeError, "x", {"x": torch.tensor(1.0)}),
        (DtypeError, "quantize_weight", {"weight": torch.ones(4, 8)}),
        (DtypeError, "weight_scale", {"weight_scale": torch.ones(4, dtype=torch.bfloat16)}),
        (DtypeError, "x is torch.float64", {"x": torch.ones(2, 8, dtype=torch.float64)}),
        (DtypeError, "bias", {"bias": torch.ones(4, dtype=torch.bfloat16)}),
        (DeviceError, "weight", {"weight": torch.empty(4, 8, dtype=FLOAT8, device="meta")}),
        (DeviceError, "weight_scale", {"weight_scale": torch.empty(4, device="meta")}),
        (GradientError, "x", {"x": torch.ones(2, 8, requires_grad=True)}),
        (GradientError, "weight_scale", {"weight_scale": torch.ones(4, requires_grad=True)}),
    ],
)
def test_a_refusal_names_the_argument(error, name, arguments):
    good = {"x": torch.ones(2, 8), "weight": torch.ones(4, 8).to(FLOAT8), "weight_scale": torch.ones(4), "eps": 1e-6}
    with pytest.raises(error, match=name):
        rms_linear_w8a8(**{**good, **arguments})


@pytest.mark.parametrize(
    ("error", "weight", "dtype"),
    [
        (ShapeError, torch.ones(4), FLOAT8),
        (DtypeError, torch.ones(4, 8, dtype=torch.int32), FLOAT8),
        (DtypeError, torch.ones(4, 8).to(FLOAT8), FLOAT8),
        (DtypeError, torch.ones(4, 8), torch.float8_e5m2),
    ],
)
def test_what_is_not_quantised_is_refused(error, weight, dtype):
    with pytest.raises(error):
        quantize_weight(weight, dtype)

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from flashnorm.kernels.bounds import CONFIDENCE
from flashnorm.kernels.codes import LARGEST, quantize_rows
from flashnorm.kernels.w8a8_bounds import codes_exceed
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.quantise import quantise, scale_products  # noqa: E402

DTYPES = list(LARGEST)


def _run(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales out of buffers with guards around them, which must stay."""
    m, k = x.shape
    whole = torch.full((m + 2, k + 16), 7.0, device=cases.DEVICE).to(dtype)
    scales = torch.full((m + 2,), 7.0, device=cases.DEVICE)
    quantise(x, cases.EPS, whole[1:-1, :k], scales[1:-1])
    for guard in (whole[0], whole[-1], whole[:, k:], scales[0], scales[-1]):
        assert (guard.float() == 7).all()
    return whole[1:-1, :k], scales[1:-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 64), (3, 77), (2, 576), (2, 2049)])
def test_codes_are_the_reference_s_and_the_scale_holds_the_norm(m, k, of, dtype):
    x = cases.case(m, k, 1, of, pad=3).x
    codes, scales = _run(x, dtype)
    assert torch.equal(codes.float(), quantize_rows(x, dtype)[0].float())
    assert codes_exceed(x, codes) <= 1
    wide = x.double()
    exact = wide.abs().amax(-1) / LARGEST[dtype] * torch.rsqrt(wide.square().mean(-1) + cases.EPS)
    assert ((scales.double() - exact).abs() <= (2.0**-20 + CONFIDENCE * 2.0**-24 * k**0.5) * exact).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_the_ends_of_the_range(dtype):
    """Zeros, the least and the largest numbers, magnitudes at which L/a would overflow: the same codes, no NaN."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(cases.DEVICE)
    x *= torch.tensor([0.0, 1e-42, 1e-37, 1e-30, 1e15, 1.0], device=cases.DEVICE)[:, None]
    x[5] = 0
    x[5, 3] = -torch.finfo(torch.float32).tiny
    codes, scales = _run(x, dtype)
    assert torch.equal(codes.float(), quantize_rows(x, dtype)[0].float())
    assert (codes[0].float() == 0).all()
    assert scales.isfinite().all()
    assert codes_exceed(x, codes) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, under the interpreter
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_a_special_makes_its_row_s_scale_nan_and_no_other(special, dtype):
    x = cases.case(3, 64, 1, torch.float32).x
    x[1, 40] = special
    scales = _run(x, dtype)[1]
    assert scales.isnan().tolist() == [False, True, False]


def test_codes_that_are_one_step_off_are_caught():
    x = cases.case(2, 64, 1, torch.float32).x
    for dtype in DTYPES:
        codes = quantize_rows(x, dtype)[0]
        assert codes_exceed(x, codes) <= 1
        bits = codes.view(torch.uint8).clone()
        bits[1, 5] += 1
        assert codes_exceed(x, bits.view(dtype)) > 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 40), (3, 1500)])
@pytest.mark.parametrize("shares", [1, 3])
def test_products_are_added_scaled_and_rounded_once(shares, m, n, bias):
    generator = torch.Generator().manual_seed(n)
    size, most = (shares, m + 4, n), (1 << 26) // shares
    products = torch.randint(-most, most, size, generator=generator, dtype=torch.int32).to(cases.DEVICE)
    row, column = (torch.rand(size, generator=generator).to(cases.DEVICE) * 1e-4 for size in (m, n))
    added = torch.randn(n, generator=generator).to(cases.DEVICE, cases.HALF) if bias else None
    whole = torch.full((m + 2, n + 16), 7.0, device=cases.DEVICE, dtype=cases.HALF)
    scale_products(products if shares > 1 else products[0], row, column, added, whole[1:-1, :n])
    exact = products.sum(0)[:m].double() * row.double()[:, None] * column.double()
    unit, total = torch.finfo(cases.HALF).eps / 2, exact + (0 if added is None else added.double())
    bound = unit * total.abs() + 2.0**-21 * exact.abs() + torch.finfo(cases.HALF).smallest_normal * unit
    assert ((whole[1:-1, :n].double() - total).abs() <= bound).all()
    for guard in (whole[0], whole[-1], whole[:, n:]):
        assert (guard == 7).all()


_SCRIPT = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashnorm.bench import norm_quant
from flashnorm.kernels import quantise

def ptx(kernel, kinds, **constants):
    source = ASTSource(kernel, signature={**kinds, **dict.fromkeys(constants, "constexpr")},
                       constexprs={(len(kinds) + n,): value for n, value in enumerate(constants.values())})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2}).asm["ptx"]

def row(kernel, codes, **gain):
    kinds = dict(x="*bf16", **gain, codes=codes, scale="*fp32", x_stride="i32", codes_stride="i32", K="i32", eps="fp32")
    return ptx(kernel, kinds, LARGEST=448.0, WIDTH=1024, INTEGER=codes == "*i8", INTERPRETED=False, PDL=True)

def scaled(products, split):
    kinds = dict(products=products, row_scale="*fp32", column_scale="*fp32", bias="*bf16", out="*bf16",
                 out_stride="i32", rows="i32", N="i32")
    return ptx(quantise._scale_kernel, kinds, SPLIT=split, HAS_BIAS=True, BLOCK=1024, PDL=True)

print(json.dumps({
    "fp8": row(quantise._quantise_kernel, "*fp8e4nv"), "int8": row(quantise._quantise_kernel, "*i8"),
    "baseline fp8": row(norm_quant._norm_quant_kernel, "*fp8e4nv", gain="*bf16"),
    "scaled int32": scaled("*i32", 1), "scaled fp32": scaled("*fp32", 3),
}))
"""


def test_what_is_compiled_for_hopper_rounds_to_nearest_and_reads_nothing_before_its_wait():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 5
    assert all("cvt.rn.satfinite.e4m3x2.f32" in found[name] for name in ("fp8", "baseline fp8"))
    assert "0f4B400000" in found["int8"]  # the addition that rounds is not folded away
    assert "0fCB400000" in found["int8"]
    for name, code in found.items():
        before, after = code.split("griddepcontrol.wait")
        assert "ld.global" not in before
        assert "ld.global" in after
        assert "griddepcontrol.launch_dependents" in after
        assert ("div.rn.f32" in after) != name.startswith("scaled")

"""The kernels for few rows of codes compile for Hopper without a GPU, and keep to what launches in advance allow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.kernels import cases

cases.need_triton()

# In a process of its own: in this one, kernels are interpreted.
_SCRIPT = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashnorm.kernels.codes_gemv import _codes_gemv_kernel
from flashnorm.kernels.codes_split_k import _codes_partial_kernel

TYPES = dict(x="*bf16", bias="*bf16", weight_scale="*fp32", row_scale="*fp32", column_scale="*fp32", eps="fp32")

def ptx(kernel, types, constants, **options):
    names, types = kernel.arg_names, {**TYPES, **types}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {n for n in names if signature[n].startswith("*")} | {"weight_stride", "x_stride"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    options = {"num_warps": 4, "launch_pdl": True, **options}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 227 * 1024
    return made.asm["ptx"]

def gemv(element, static):
    largest = 127.0 if element == "i8" else 448.0
    return ptx(_codes_gemv_kernel, dict(weight="*" + element, out="*bf16"), dict(
        K=4096, WIDTH=4096, ROWS=2, BLOCK_N=4, LARGEST=largest, INTEGER=element == "i8", INTERPRETED=False,
        HAS_BIAS=True, STATIC=static, PDL=True))

def split_k(element, split):
    out = "*bf16" if split == 1 else "*i32" if element == "i8" else "*fp32"
    types = dict(codes_desc=f"tensordesc<{element}[16, 256]>", weight_desc=f"tensordesc<{element}[64, 256]>")
    return ptx(_codes_partial_kernel, dict(weight="*" + element, out=out, **types), dict(
        BLOCK_M=16, BLOCK_N=64, BLOCK_K=256, SLICE=2048, SPLIT=split, PREFETCH=1024, INTEGER=element == "i8",
        HAS_BIAS=True, PDL=True), num_stages=4)

print(json.dumps({
    **{f"gemv {e} {s}": gemv(e, s == "static") for e in ("fp8e4nv", "i8") for s in ("static", "any")},
    **{f"split {e} {s}": split_k(e, s) for e in ("fp8e4nv", "i8") for s in (1, 2)},
}))
"""
_GEMV = [f"gemv {element} {kind}" for element in ("fp8e4nv", "i8") for kind in ("static", "any")]
_SPLIT = [f"split {element} {split}" for element in ("fp8e4nv", "i8") for split in (1, 2)]
pytestmark = pytest.mark.xdist_group("kernels of codes compiled")  # by one process


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    assert set(found) == {*_GEMV, *_SPLIT}
    return found


@pytest.mark.parametrize("name", _GEMV + _SPLIT)
def test_only_a_static_weight_is_read_before_the_wait_and_nothing_is_written(name, compiled):
    before, after = compiled[name].split("griddepcontrol.wait")
    assert ("ld.global" in before) == name.endswith("static")
    assert "cp.async" not in before
    assert "st.global" not in before
    assert "griddepcontrol.launch_dependents" in after
    assert "st.global" in after
    assert "atom" not in compiled[name]
    assert ("prefetch.global.L2" in before) == name.startswith("split")


@pytest.mark.parametrize("name", _GEMV)
def test_codes_are_made_as_quantise_makes_them(name, compiled):
    assert "div.rn.f32" in compiled[name]
    assert ("cvt.rn.satfinite.e4m3x2.f32" in compiled[name]) == ("fp8" in name)
    assert ("0f4B400000" in compiled[name]) == ("i8" in name)  # the addition that rounds is not folded away


@pytest.mark.parametrize("name", _SPLIT)
def test_sums_leave_the_matrix_units_every_128_products(name, compiled):
    """Of e4m3: the first of every four steps of 32 starts from zero. Of int8 all go on."""
    steps = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n16k32\.(\w+\.\w+\.\w+)", compiled[name])
    assert set(steps) == {"f32.e4m3.e4m3" if "fp8" in name else "s32.s8.s8"}
    assert len(steps) % 8 == 0
    added = len(re.findall(r"\badd(?:\.rn)?\.f32", compiled[name]))
    values = 64 * 16 // 128  # sums a thread holds
    assert (added >= len(steps) // 4 * values) == ("fp8" in name)

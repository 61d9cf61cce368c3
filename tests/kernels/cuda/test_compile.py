"""Without a GPU: the sources compile for Hopper, and what Python says of them is what the compiler says."""

from __future__ import annotations

import re
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashnorm.errors import KernelError
from flashnorm.kernels.configs import Skinny, Streamed, TmaGemm
from flashnorm.kernels.cuda.memory import SHARED_MEMORY, skinny_bytes, streamed_bytes, tma_gemm_bytes
from flashnorm.kernels.cuda.wgmma import wgmma_source
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm, StepShape
from flashnorm.kernels.dispatch import STREAMED

_INSTALL = "NVIDIA's compiler and bindings are not installed; pip install 'flashnorm[gpu]'"
pytest.importorskip("cuda.bindings.nvrtc", reason=_INSTALL)
from flashnorm.kernels.cuda import attention, compiler, decode_step, skinny, streamed, tma_gemm  # noqa: E402

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHNORM_CACHE", str(tmp_path))
    try:
        compiler._version()
    except (RuntimeError, OSError) as error:  # the bindings are there, the compiler's library is not
        pytest.skip(f"{_INSTALL} ({error})")


def with_size(text: str, last: str, size: int) -> str:
    """The source, which compiles only if `struct Shared` reaches no further than Python reckons; `last`: its end."""
    if tuple(map(int, compiler._version().split("."))) < (13, 1):
        pytest.skip("NVRTC has no offsetof before CUDA 13.1")
    end = f"__builtin_offsetof(Shared, {last}) + sizeof(Shared::{last})"
    return text + f'\nstatic_assert({end} <= {size}, "Python reckons too little");\n'


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(None, torch.bfloat16), ("silu", torch.float16), ("gelu_tanh", torch.bfloat16), ("relu", torch.float16)],
)
@pytest.mark.parametrize(
    "config",
    [
        TmaGemm(64, 48, 1, 14, "beside"),
        TmaGemm(128, 192, 2, 4, "beside"),
        TmaGemm(128, 256, 2, 4, "inside"),
        TmaGemm(256, 112, 2, 4, "inside"),
        TmaGemm(128, 240, 2, 3, "none"),
    ],
)
def test_the_gemm_compiles_and_fits_its_shared_memory(config, activation, dtype):
    aligning = 1024
    size = tma_gemm_bytes(config, gated=activation is not None) - aligning
    assert compiler.cubin(with_size(tma_gemm.source(config, dtype, activation), "scale_empty", size), "sm_90a")


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (Skinny(32, 4, 12), skinny.Form(1, torch.bfloat16, normed=False)),
        (Skinny(64, 1, 4), skinny.Form(4, torch.float16, wide=True)),
        (Skinny(128, 1, 12), skinny.Form(1, torch.bfloat16, activation="silu")),
        (Skinny(64, 8, 6), skinny.Form(8, torch.bfloat16)),
    ],
)
def test_the_kernel_for_few_rows_compiles_and_fits_its_shared_memory(config, form):
    aligning = 1024
    size = skinny_bytes(config, form.tiles) - aligning
    assert size + aligning <= SHARED_MEMORY
    asserted = f'static_assert(sizeof(Problem) == {skinny._PROBLEM.size}, "another problem");'
    assert compiler.cubin(with_size(skinny.source(config, form) + asserted, "squares", size), "sm_90a")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("k", "config"),
    [
        (576, Streamed(1024, 24, 4)),
        (1000, Streamed(1024, 5, 4, rows=8)),  # a slot of 16,000 bytes, no gap from row to row
        (4096, Streamed(4096, 3, 8, rows=4, on_the_way=2, pace=50, lead=2)),
        (11008, Streamed()),
        (28672, STREAMED),
    ],
)
def test_the_streamed_kernel_compiles_and_fits_its_shared_memory(k, config, activation, dtype):
    aligning = 128
    size = streamed_bytes(config, k, gated=activation is not None) - aligning
    asserted = f'static_assert(sizeof(Problem) == {len(packed())}, "another problem");'
    text = streamed.source(config, k, dtype, activation) + asserted
    assert compiler.cubin(with_size(text, "squares", size), "sm_90a")


@pytest.mark.parametrize("k", [8, 576, 4096, 32768])
@pytest.mark.parametrize("gated", [False, True])
def test_two_launches_of_the_streamed_kernel_find_room_beside_each_other(k, gated):
    of_a_multiprocessor, reserved = 228 << 10, 1 << 10  # the latter for each block
    assert 2 * (streamed_bytes(STREAMED, k, gated=gated) + reserved) <= of_a_multiprocessor


def packed() -> bytes:
    x, weight, out = torch.zeros(1, 8), torch.zeros(16, 8), torch.zeros(1, 16)
    return streamed.packed_problem(x, weight, 1e-6, None, out, Streamed(), static_weight=True)


@pytest.mark.parametrize(("lead", "chunks"), [(None, 2**31 - 1), (0, 0), (3, 3)])
def test_what_the_kernel_is_told_of_its_settings(lead, chunks):
    config = Streamed(prefetch=5, pace=50, lead=lead)
    x, weight, out = torch.zeros(1, 8), torch.zeros(16, 8), torch.zeros(1, 16)
    told = streamed.packed_problem(x, weight, 1e-6, None, out, config, static_weight=True)
    assert struct.unpack("QQQQqifiiii", told)[4:] == (8, 16, pytest.approx(1e-6), 5, 50, chunks, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Streamed(chunk_k=1000), "does not divide"),
        (Streamed(rows=64), "does not divide"),
        (Streamed(rows=3), "does not divide"),
    ],
)
def test_a_configuration_that_cannot_be_does_not_compile(config, message):
    with pytest.raises(KernelError, match=message):
        compiler.cubin(streamed.source(config, 4096, torch.bfloat16), "sm_90a")


STEPS = {  # a model of each kind: what it is compiled for
    "llama 1b": StepShape(2048, 8192, 32, 8, 64, 32, False, True, "silu", False, False, torch.bfloat16),
    "llama 8b": StepShape(4096, 14336, 32, 8, 128, 64, False, True, "silu", False, True, torch.bfloat16),
    "smollm2": StepShape(576, 1536, 9, 3, 64, 32, False, True, "silu", False, False, torch.float16),
    "gemma2": StepShape(2304, 9216, 8, 4, 256, 128, False, True, "gelu_tanh", True, True, torch.bfloat16),
    "odd": StepShape(48, 80, 4, 2, 16, 4, True, False, "relu2", False, False, torch.bfloat16),
}


@pytest.mark.parametrize(("name", "timed"), [*((name, False) for name in STEPS), ("llama 1b", True)])
def test_the_step_compiles_and_is_laid_out_as_python_has_it(name, timed):
    shape = STEPS[name]
    settings = replace(decode_step.settings_for(shape), timed=timed)
    size = decode_step.shared_bytes(shape, settings)
    some = torch.zeros(1, 1, 1)
    widths = decode_step._widths(shape)
    layer = decode_step.packed_layer(decode_step.LayerData(*[some] * 6, scale=1.0))
    step = decode_step.packed_step(decode_step.Ends(some, some), *[some] * 11, layers=1, spare=0)
    asserted = f"""
        static_assert(sizeof(Shared) <= {size - 128}, "Python reckons too little");
        static_assert(sizeof(Layer) == {len(layer)}, "another layer");
        static_assert(WAITING == {len(decode_step.WAITING)}, "other waits");
        {"".join(f"static_assert(Form<{w}>::columns == {decode_step._columns(w, settings.columns)});" for w in widths)}
        static_assert(sizeof(Step) == {len(step)}, "another step");
    """
    assert size <= SHARED_MEMORY
    assert compiler.cubin(decode_step.source(shape, settings) + asserted, "sm_90a")


def of_rows(shape: AttentionShape, dtype: torch.dtype = torch.bfloat16, splits: int = 4) -> attention.Form:
    return attention.form_of(torch.zeros((), dtype=dtype), shape, splits)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(32, 8, 64, 0.125, rotary=32),
        AttentionShape(8, 4, 256, 0.0625, softcap=50.0, rotary=64, interleaved=True),
        AttentionShape(3, 1, 24, 0.2, window=8),
        AttentionShape(8, 1, 128, 0.1),  # the most channels of a key head's queries
        AttentionShape(2, 2, 1024, 0.1),  # and of a head
    ],
)
def test_attention_over_rows_compiles_and_is_laid_out_as_python_has_it(shape, splits, dtype):
    aligning = 128
    form = of_rows(shape, dtype, splits)
    size = attention.shared_bytes(form)
    some = torch.zeros(1, 1, 1)
    problem = attention.packed_problem(*[some] * 5, None, some, shape, QkNorm(), early=True)
    asserted = f"""
        static_assert(sizeof(Shared) <= {size - aligning}, "Python reckons too little");
        static_assert(sizeof(Problem) == {len(problem)}, "another problem");
    """
    assert size <= SHARED_MEMORY
    assert compiler.cubin(attention.source(form) + asserted, "sm_90a")


def test_too_little_memory_is_seen():
    config = TmaGemm(64, 48, 1, 4)
    text = tma_gemm.source(config, torch.bfloat16)
    with pytest.raises(KernelError, match="Python reckons too little"):
        compiler.cubin(with_size(text, "scale_empty", tma_gemm_bytes(replace(config, stages=3))), "sm_90a")
    ring = Streamed(4096, 3, 8, rows=4)
    text = with_size(
        streamed.source(ring, 4096, torch.bfloat16), "squares", streamed_bytes(replace(ring, rows=2), 4096)
    )
    with pytest.raises(KernelError, match="Python reckons too little"):
        compiler.cubin(text, "sm_90a")


def test_machine_code_is_compiled_once(monkeypatch):
    text = 'extern "C" __global__ void nothing() {}'
    code = compiler.cubin(text, "sm_90a")
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.cubin(text, "sm_90a") == code


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHNORM_CACHE", str(tmp_path / "file"))
    assert compiler.cubin('extern "C" __global__ void nothing() {}', "sm_90a")


@pytest.mark.parametrize("columns", [8, 48, 256])
def test_the_instruction_names_every_register_once(columns):
    text = wgmma_source(columns, "bf16")
    assert sorted(map(int, re.findall(r"products\[(\d+)\]", text))) == list(range(columns // 2))
    assert f"m64n{columns}k16.f32.bf16.bf16" in text


def overtaking(text: str, folder: Path) -> list[str]:
    """The consumers' arrivals, in machine code, with loads in front of them and no use of what those loaded between."""
    knobs = pytest.importorskip("triton", reason="Triton brings the disassembler").knobs
    code = folder / "kernel.cubin"
    code.write_bytes(compiler.cubin(text, "sm_90a"))
    disassembled = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", code], capture_output=True, text=True, check=True)
    on_the_way, found = False, []
    for line in disassembled.stdout.splitlines():
        on_the_way = "LDS.128" in line or (on_the_way and "PMTRIG" not in line)
        if "SYNCS.ARRIVE.TRANS64.A1T0" in line and on_the_way:
            found.append(line.strip())
    assert "SYNCS.ARRIVE.TRANS64.A1T0" in disassembled.stdout
    return found


@pytest.mark.parametrize("kernel", ["streamed", "step", "skinny", "attention"])
def test_no_slot_is_handed_back_before_its_loads_have_come(kernel, tmp_path):
    shape = STEPS["llama 1b"]
    text = {
        "streamed": streamed.source(Streamed(2048, 2, 8, 1, 0, 4), 4096, torch.bfloat16),
        "step": decode_step.source(shape, decode_step.settings_for(shape)),
        "skinny": skinny.source(Skinny(64, 1, 4), skinny.Form(4, torch.bfloat16)),
        "attention": attention.source(of_rows(AttentionShape(32, 8, 64, 0.125, rotary=32))),
    }[kernel]
    assert overtaking(text, tmp_path) == []
    assert overtaking(text.replace("    loads_have_come(read);\n", ""), tmp_path)

"""The streamed kernel on the CPU: its source, with threads for threads and a copy engine that is late and disorderly.

`host/device.h` stands in for `primitives.cuh`. What is not seen here: speed, and what one launch does to the next.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flashnorm.kernels.bounds import exceeds, expected_rms_linear, expected_rms_swiglu_linear
from flashnorm.kernels.configs import Streamed
from flashnorm.kernels.cuda import kernel
from tests.kernels import cases

pytest.importorskip("cuda.bindings.driver", reason="NVIDIA's bindings are not installed; pip install 'flashnorm[gpu]'")
from flashnorm.kernels.cuda import streamed

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HOST = Path(__file__).parent / "host"
SMALL = Streamed(1024, 3, 4, 1, 2, rows=4)


def compiled(tmp_path, k, config, activation=None, fault=("", ""), patience=60):
    """The program; `fault`: what is in the source, and what is put in its place; `patience`: seconds until it hangs."""
    text = streamed.source(config, k, torch.bfloat16, activation)
    assert fault[0] in text
    text = text.replace(kernel._read("primitives.cuh"), '#include "device.h"\n').replace(*fault)
    source, program = tmp_path / "streamed.cpp", tmp_path / "streamed"
    source.write_text(text + (HOST / "streamed.inc").read_text())
    options = ["-std=c++20", "-O1", "-w", "-pthread", f"-I{HOST}", f"-DPATIENCE={patience}"]
    subprocess.run(["g++", *options, "-o", str(program), str(source)], check=True)
    return program


def played(program, k, n, config, activation=None, *, blocks=2, pad=0, static_weight=True):
    """The worst error in units of its bound. Raises `CalledProcessError` with what a GPU would not have forgiven."""
    generator = torch.Generator().manual_seed(k + n)
    rows = n if activation is None else 2 * n
    x, bias = torch.randn(1, k, generator=generator).mul(3).bfloat16(), torch.randn(n, generator=generator).bfloat16()
    weight = torch.full((rows, k + pad), float("nan"), dtype=torch.bfloat16)
    weight[:, :k] = torch.randn(rows, k, generator=generator).mul(0.02)
    given, taken = program.parent / "given", program.parent / "taken"
    given.write_bytes(b"".join(bytes(part.view(torch.uint8).flatten().tolist()) for part in (x, weight, bias)))
    lead = 2**31 - 1 if config.lead is None else config.lead
    settings = (n, k + pad, blocks, config.prefetch, config.pace, lead, int(static_weight))
    subprocess.run([program, given, taken, *map(str, settings)], check=True, capture_output=True, text=True)
    out = torch.frombuffer(bytearray(taken.read_bytes()), dtype=torch.bfloat16)
    assert out[:8].isnan().all()
    assert out[-8:].isnan().all()
    if activation is None:
        expected = expected_rms_linear(x, weight[:, :k], cases.EPS, bias=bias)
    else:
        expected = expected_rms_swiglu_linear(x, weight[:, :k], cases.EPS, activation=activation)
    return exceeds(out[None, 8:-8], expected)


@pytest.mark.parametrize(
    ("k", "config", "activation"),
    [
        (576, Streamed(1024, 3, 4, 1, 2, rows=8, pace=10, lead=2), None),
        (4096, Streamed(4096, 3, 8, 1, 0, rows=4, on_the_way=2, lead=0), None),
        (2880, Streamed(1024, 4, 4, 1, 5, rows=2, on_the_way=1), "silu"),
    ],
)
def test_every_stream_is_right(tmp_path, k, config, activation):
    """Shares that end inside of a slot and of a group, rows that touch and rows that do not, weights old and new."""
    program = compiled(tmp_path, k, config, activation)
    for n, pad, static_weight in ((69, 0, True), (13, 8, False)):
        assert played(program, k, n, config, activation, pad=pad, static_weight=static_weight) <= 1


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (("rows = min(ROWS, share.count - row)", "rows = ROWS"), "reads outside"),
        (("    release(&ring.empty[at.slot]);", ""), "hangs"),
    ],
)
def test_what_a_gpu_would_not_forgive_is_seen(tmp_path, fault, seen):
    program = compiled(tmp_path, 1024, SMALL, fault=fault, patience=2)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        played(program, 1024, 69, SMALL, pad=8)
    assert seen in raised.value.stdout


def test_a_wrong_sum_is_seen(tmp_path):
    fault = "shared.sums[buffer][part][row + lane]", "shared.sums[buffer][part][row]"
    program = compiled(tmp_path, 1024, SMALL, fault=fault)
    assert not played(program, 1024, 69, SMALL) <= 1

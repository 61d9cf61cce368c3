"""The streamed kernel on the CPU: its source, with threads that take turns and copies that land late and out of order.

What is not seen here: speed, and what one launch does to the next.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from flashnorm.kernels.bounds import exceeds, expected_rms_linear, expected_rms_swiglu_linear
from flashnorm.kernels.configs import Streamed
from flashnorm.kernels.cuda.memory import streamed_bytes
from tests.kernels import cases
from tests.kernels.cuda.on_host import Fault, Library, library

pytest.importorskip("cuda.bindings.driver", reason="NVIDIA's bindings are not installed; pip install 'flashnorm[gpu]'")
from flashnorm.kernels.cuda import streamed

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMALL = Streamed(1024, 3, 4, 1, 2, rows=4)


def compiled(k: int, config: Streamed, activation: str | None = None, *planted: tuple[str, str]) -> Library:
    return library(streamed.source(config, k, torch.bfloat16, activation), "streamed.inc", planted)


def played(built, k, n, config, activation=None, *, blocks=2, pad=0, static_weight=True):
    """The worst error in units of its bound. Raises `Fault` with what a GPU would not have forgiven."""
    generator = torch.Generator().manual_seed(k + n)
    rows = n if activation is None else 2 * n
    x, bias = torch.randn(1, k, generator=generator).mul(3).bfloat16(), torch.randn(n, generator=generator).bfloat16()
    weight = torch.full((rows, k + pad), float("nan"), dtype=torch.bfloat16)
    weight[:, :k] = torch.randn(rows, k, generator=generator).mul(0.02)
    weight, bias = weight[:, :k], bias if activation is None else None
    guarded = torch.full((1, n + 16), float("nan"), dtype=torch.bfloat16)
    out = guarded[:, 8:-8]
    built.allow((x, weight))
    problem = streamed.packed_problem(x, weight, cases.EPS, bias, out, config, static_weight=static_weight)
    read = built.play(problem, blocks, streamed_bytes(config, k, gated=activation is not None), seed=n)
    assert read == weight.numel() * weight.itemsize  # every weight once
    assert guarded[:, :8].isnan().all()
    assert guarded[:, -8:].isnan().all()
    if activation is None:
        expected = expected_rms_linear(x, weight, cases.EPS, bias=bias)
    else:
        expected = expected_rms_swiglu_linear(x, weight, cases.EPS, activation=activation)
    return exceeds(out, expected)


@pytest.mark.parametrize(
    ("k", "config", "activation"),
    [
        (576, Streamed(1024, 3, 4, 1, 2, rows=8, pace=10, lead=2), None),
        (4096, Streamed(4096, 3, 8, 1, 0, rows=4, on_the_way=2, lead=0), None),
        (2880, Streamed(1024, 4, 4, 1, 5, rows=2, on_the_way=1), "silu"),
    ],
)
def test_every_stream_is_right(k, config, activation):
    """Shares that end inside of a slot and of a group, rows that touch and rows that do not, weights old and new."""
    built = compiled(k, config, activation)
    for n, pad, static_weight in ((69, 0, True), (13, 8, False)):
        assert played(built, k, n, config, activation, pad=pad, static_weight=static_weight) <= 1


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        (("rows = min(ROWS, share.count - row)", "rows = ROWS"), "reads outside"),
        (("    release(&ring.empty[at.slot]);", ""), "hangs"),
        (("sums[2][PARTS][GROUP]", "sums[2][PARTS][GROUP / 2]"), "indexes outside of an array"),
    ],
)
def test_what_a_gpu_would_not_forgive_is_seen(planted, seen):
    built = compiled(1024, SMALL, None, planted)
    with pytest.raises(Fault, match=seen):
        played(built, 1024, 69, SMALL, pad=8)


def test_a_wrong_sum_is_seen():
    built = compiled(1024, SMALL, None, ("shared.sums[buffer][part][row + lane]", "shared.sums[buffer][part][row]"))
    assert not played(built, 1024, 69, SMALL) <= 1

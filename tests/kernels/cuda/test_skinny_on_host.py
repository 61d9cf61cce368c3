"""The kernel for few rows on the CPU: its source; threads take turns, and tiles land late and out of order.

What is not seen here: speed, and what one launch does to the next, but for copies before the wait.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from flashnorm.kernels.bounds import exceeds
from flashnorm.kernels.configs import Skinny
from flashnorm.kernels.cuda.memory import skinny_bytes, tiles_of
from flashnorm.kernels.surroundings import Surroundings
from tests.kernels import cases
from tests.kernels.cuda.on_host import Fault, Library, library, tensor_map
from tests.kernels.surrounded import expected

pytest.importorskip("cuda.bindings.driver", reason="NVIDIA's bindings are not installed; pip install 'flashnorm[gpu]'")
from flashnorm.kernels.cuda import skinny

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMALL = Skinny(32, 2, 2)


def compiled(config: Skinny, form: skinny.Form, *planted: tuple[str, str]) -> Library:
    return library(skinny.source(config, form), "skinny.inc", planted)


def played(config, m, k, n, around, *planted, static_weight=True, dtype=torch.bfloat16):
    """The worst error in units of its bound. Raises `Fault` with what a GPU would not have forgiven."""
    parts = 2 if around.gated else 1
    operands = cases.case(m, k, parts * n, torch.bfloat16, pad=8)
    guarded = torch.full((m, n + 16), float("nan"), dtype=dtype)
    out = guarded[:, 8:-8]
    tiles, outputs = tiles_of(m), config.rows // parts
    form = skinny.Form(tiles, torch.bfloat16, dtype == torch.float32, around.activation, around.eps is not None)
    built = compiled(config, form, *planted)
    old, new = ([operands.weight], [operands.x]) if static_weight else ([], [operands.x, operands.weight])
    built.allow(old, written=new)
    arguments = tensor_map(operands.x, 8 * tiles, 64) + tensor_map(operands.weight, outputs, 64)
    arguments += skinny.packed_problem(operands.x, out, around, static_weight=static_weight)
    blocks = -(-n // outputs) * config.split
    read = built.play(arguments, blocks, skinny_bytes(config, tiles), seed=n)
    clusters = blocks // config.split
    assert read == operands.weight.numel() * 2 + clusters * operands.x.numel() * 2  # every weight once
    assert guarded[:, :8].isnan().all()
    assert guarded[:, -8:].isnan().all()
    return exceeds(out, expected(operands.x, operands.weight, around, dtype))


@pytest.mark.parametrize(
    ("config", "m", "k", "n", "around"),
    [
        (Skinny(64, 4, 3), 3, 1088, 200, Surroundings(eps=cases.EPS)),  # 17 steps for four blocks
        (Skinny(64, 1, 2), 8, 576, 72, Surroundings()),
        (Skinny(32, 8, 2), 32, 512, 40, Surroundings(eps=cases.EPS)),  # a step for each block
        (Skinny(64, 2, 3), 17, 264, 64, Surroundings(eps=cases.EPS, activation="silu", gated=True)),
        (Skinny(64, 4, 2), 33, 64, 40, Surroundings()),  # three blocks of four have nothing to multiply
        (Skinny(128, 2, 2), 33, 200, 150, Surroundings(eps=cases.EPS)),  # two slabs of a warp, two tiles of squares
    ],
)
def test_every_row_is_right(config, m, k, n, around):
    """Tiles that end inside of a cluster's rows, a K that ends inside of a step, weights old and new."""
    generator = torch.Generator().manual_seed(n)
    for static_weight in (True, False):
        assert played(config, m, k, n, around, static_weight=static_weight) <= 1
    if around.gated:
        return
    bias = torch.randn(n, generator=generator).bfloat16()
    residual = torch.randn(m, n + 8, generator=generator).bfloat16()[:, :n]
    more = replace(around, bias=bias, residual=residual, multiplier=0.5)
    assert played(config, m, k, n, more) <= 1


def test_outputs_in_fp32():
    assert played(SMALL, 8, 576, 40, Surroundings(eps=cases.EPS), dtype=torch.float32) <= 1


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        (("    release(&ring.empty[at.slot]);", ""), "hangs"),
        (("squares[HALVES][X_ROWS]", "squares[HALVES][X_ROWS / 2]"), "indexes outside of an array"),
        (("step - steps.first >= early", "step - steps.first > early"), "hangs"),
    ],
)
def test_what_a_gpu_would_not_forgive_is_seen(planted, seen):
    with pytest.raises(Fault, match=seen):
        played(SMALL, 8, 576, 40, Surroundings(eps=cases.EPS), planted)


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        (("problem.static_weight ? ", "true ? "), "reads too early"),  # a weight that was just written
        (("    wait_for_predecessor();\n    launch_dependents();", "    launch_dependents();"), "reads too early"),
        (
            ("wait_for_predecessor();\n    launch_dependents();", "launch_dependents();\n    wait_for_predecessor();"),
            "announces",
        ),
    ],
)
def test_what_comes_before_the_wait_is_seen(planted, seen):
    with pytest.raises(Fault, match=seen):
        played(SMALL, 8, 576, 40, Surroundings(), planted, static_weight=False)


@pytest.mark.parametrize(
    "planted",
    [
        ("rank < SPLIT; rank++", "rank < SPLIT - 1; rank++"),  # a block of the cluster is forgotten
        ("((half * 4 + third) ^ row) * 16", "(half * 4 + third) * 16"),  # the swizzle is
        ("m * problem.residual_stride", "m * problem.out_stride"),
        ("int row_of(int i) { return i / 2 + i % 2 * 4; }", "int row_of(int i) { return i; }"),
    ],
)
def test_a_wrong_sum_is_seen(planted):
    residual = torch.randn(8, 48, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :40]
    around = Surroundings(eps=cases.EPS, residual=residual)
    assert not played(SMALL, 8, 576, 40, around, planted) <= 1

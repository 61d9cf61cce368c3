"""Attention over several rows on the CPU: its kernel's source; threads take turns, and copies land late, in any order.

What is not seen here: speed, and what one launch does to the next, but for copies before the wait.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from flashnorm.kernels.bounds import exceeds
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from tests.kernels import cases
from tests.kernels.cuda.on_host import Fault, library
from tests.kernels.decode.attending import PLAIN, Operands, check, operands

kernel = pytest.importorskip("flashnorm.kernels.cuda.attention", reason="NVIDIA's bindings are not installed")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
on_cpu = partial(operands, dtype=torch.bfloat16)


def played(given: Operands, splits: int, *planted: tuple[str, str], early: bool = True) -> Tensor:
    """What the kernel writes. Raises `Fault` with what a GPU would not have forgiven."""
    form = replace(kernel.form_of(given.qkv, given.shape, splits), stages=2)
    built = library(kernel.source(form).replace("#define SLOT 32768", "#define SLOT 4096"), "attention.inc", planted)
    cache = given.keys, given.values
    built.allow(cache if early else (), written=cache)
    out = torch.full((len(given.qkv), given.shape.heads * given.shape.head_dim), float("nan")).to(given.qkv)
    tensors = given.qkv, given.keys, given.values, given.slots, given.positions, given.tables, out
    problem = kernel.packed_problem(*tensors, given.shape, given.norms, early=early)
    read = built.play(problem, len(given.qkv) * form.kv_heads * splits, kernel.shared_bytes(form), seed=splits)
    window = given.shape.window or len(given.keys[0, 0]) + 1
    tokens = given.positions.clamp(max=window - 1).sum().item()
    if read != tokens * 2 * form.kv_heads * form.head_dim * 2:
        raise Fault("reads other tokens")
    return out


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_lengths_and_splits(splits, early):
    check(on_cpu(positions=(0, 1, 33, 199)), partial(played, splits=splits, early=early))


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 4, 16, 0.25, rotary=8),
        AttentionShape(3, 1, 24, 0.2, rotary=12, interleaved=True),
        AttentionShape(8, 1, 40, 0.3, rotary=4),
        AttentionShape(4, 2, 16, 1.0, softcap=2.0, rotary=8),
        AttentionShape(4, 2, 16, 0.25, window=8, rotary=8),
        AttentionShape(4, 2, 16, 0.25, window=70),
    ],
)
def test_kinds_of_attention(shape):
    check(on_cpu(shape), partial(played, splits=2))


def test_qk_norm():
    gains = [torch.linspace(low, 2, 16, device=cases.DEVICE) for low in (0.5, -1)]
    shape = AttentionShape(4, 2, 16, 0.25, rotary=8)
    check(on_cpu(shape, norms=QkNorm(1e-6, gains[0], 1e-5, gains[1])), partial(played, splits=2))
    check(on_cpu(shape, norms=QkNorm(None, None, 1e-5, None)), partial(played, splits=2))


def test_a_row_does_not_depend_on_its_company():
    together = played(on_cpu(positions=(5, 37, 150)), 4)
    for row in range(3):
        alone = on_cpu(positions=(5, 37, 150))
        alone.qkv, alone.slots, alone.positions = (t[row : row + 1] for t in (alone.qkv, alone.slots, alone.positions))
        assert torch.equal(played(alone, 4)[0], together[row])


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        (("    release(&ring.empty[at.slot]);", ""), "hangs"),
        (("float sums[ELEMENTS],", "float sums[ELEMENTS - 1],"), "indexes outside of an array"),
        (("min(TOKENS, place.span.stop - token)", "TOKENS"), "reads other tokens"),
    ],
)
def test_what_a_gpu_would_not_forgive_is_seen(planted, seen):
    with pytest.raises(Fault, match=seen):
        played(on_cpu(PLAIN, positions=(199,)), 1, planted)


def test_a_cache_that_is_read_too_early_is_seen():
    planted = (
        "if (!problem.early) wait_for_predecessor();\n    const Place place(problem);\n    Filler",
        "const Place place(problem);\n    Filler",
    )
    assert played(on_cpu(), 1, planted) is not None
    with pytest.raises(Fault, match="reads too early"):
        played(on_cpu(), 1, planted, early=False)


@pytest.mark.parametrize(
    "planted",
    [
        ("for (int split = 0; split < SPLITS; split++) {", "for (int split = 0; split < SPLITS - 1; split++) {"),
        ("place.span.start, fresh)", "place.span.start, false)"),  # the new token
        ("weight_of(best[split], highest)", "1"),
    ],
)
def test_a_wrong_result_is_seen(planted):
    given = on_cpu(positions=(5, 37, 150))
    wanted, _, _ = given.expected()
    assert not exceeds(played(given, 2, planted), wanted) <= 1

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashnorm.kernels.bounds import CONFIDENCE, Expected, exceeds
from flashnorm.kernels.decode import reference
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.decode.heads import prepare_heads  # noqa: E402

LENGTH, TOKENS, START, SLOTS, SLOT = 40, 7, 5, 3, 1
PLAIN = AttentionShape(heads=4, kv_heads=2, head_dim=16, scale=0.25)
SHAPES = [
    PLAIN,
    AttentionShape(heads=6, kv_heads=2, head_dim=16, scale=1.0, rotary=8),
    AttentionShape(heads=3, kv_heads=3, head_dim=24, scale=1.0, rotary=4, interleaved=True),
    AttentionShape(heads=2, kv_heads=1, head_dim=96, scale=1.0, rotary=48),
]


def normal(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def poisoned(like: Tensor, *sizes: int) -> Tensor:
    return torch.full(sizes, float("nan")).to(like)


def expected(heads: Tensor, eps: float | None, gain: Tensor | None, shape: AttentionShape, angles: Tensor) -> Expected:
    """fp64; the norm's sum, a division and a rotation in fp32, and one rounding to the heads' dtype."""
    x = heads.double()
    if eps is not None:
        x = reference.rms_norm(x, eps, None if gain is None else gain.double())
    largest = x.abs().amax(-1, keepdim=True)
    if shape.rotary:
        cos, sin = (a.double()[:, None] for a in (angles.cos(), angles.sin()))
        x = reference.rotate(x, cos, sin, interleaved=shape.interleaved)
    unit = torch.finfo(heads.dtype).eps / 2
    return Expected(x, unit * x.abs() + CONFIDENCE * 2.0**-24 * shape.head_dim**0.5 * largest)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [cases.HALF, torch.float32], ids=str)
@pytest.mark.parametrize(("normed", "kept"), [(False, True), (True, False), (True, True)])
def test_heads_are_prepared_and_nothing_else_is_written(shape, dtype, normed, kept):
    qkv = normal(TOKENS, (shape.heads + 2 * shape.kv_heads) * shape.head_dim).to(cases.DEVICE, dtype)
    positions = torch.arange(LENGTH)[:, None] * torch.logspace(0, -3, shape.rotary or 1)
    tables = (positions.cos().to(cases.DEVICE), positions.sin().to(cases.DEVICE)) if shape.rotary else None
    gain = 1 + 0.3 * normal(shape.head_dim).to(cases.DEVICE)
    norms = QkNorm(1e-6, gain, 1e-5, None) if normed else QkNorm()
    caches = [poisoned(qkv, SLOTS, shape.kv_heads, LENGTH, shape.head_dim) for _ in range(2)]
    own = tuple(poisoned(qkv, shape.kv_heads, TOKENS, shape.head_dim) for _ in range(2))
    out = poisoned(qkv, TOKENS, shape.heads * shape.head_dim)
    slot = torch.tensor([SLOT], device=cases.DEVICE)
    prepare_heads(qkv, *caches, slot, START, tables, out, shape, norms, own=own if kept else None)

    q, k, v = qkv.unflatten(1, (-1, shape.head_dim)).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    angles = positions[START : START + TOKENS].to(cases.DEVICE)
    wanted_q = expected(q, norms.q_eps, norms.q_gain, shape, angles)
    wanted_k = expected(k, norms.k_eps, norms.k_gain, shape, angles)
    written = slice(START, START + TOKENS)
    keys, values = (cache[SLOT] for cache in caches)
    assert exceeds(out.unflatten(1, (-1, shape.head_dim)), wanted_q) <= 1
    assert exceeds(keys[:, written].transpose(0, 1), wanted_k) <= 1
    assert torch.equal(values[:, written].transpose(0, 1), v)
    for cache, copy in zip(caches, own, strict=True):
        assert cache[[other for other in range(SLOTS) if other != SLOT]].isnan().all()
        assert cache[SLOT, :, :START].isnan().all()
        assert cache[SLOT, :, START + TOKENS :].isnan().all()
        assert torch.equal(copy, cache[SLOT, :, written]) if kept else copy.isnan().all()
    if shape.rotary:  # a position off by one is seen
        late = expected(q, norms.q_eps, norms.q_gain, shape, positions[START + 1 : START + 1 + TOKENS].to(cases.DEVICE))
        assert exceeds(out.unflatten(1, (-1, shape.head_dim)), late) > 1

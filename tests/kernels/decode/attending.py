"""Operands of attention over several rows, and what it has to make of them, shared by the tests of all its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnorm.kernels.bounds import CONFIDENCE, Expected, exceeds
from flashnorm.kernels.decode import reference
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from tests.kernels import cases

LENGTH, SLOTS = 200, 4
PLAIN = AttentionShape(heads=4, kv_heads=2, head_dim=16, scale=0.25)


@dataclass
class Operands:
    """Operands of one launch; the cache holds NaN wherever no token of a row's sequence lies."""

    qkv: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    positions: Tensor
    tables: tuple[Tensor, Tensor] | None
    shape: AttentionShape
    norms: QkNorm

    def expected(self) -> tuple[Expected, Tensor, Tensor]:
        """fp64 result with its bound, new keys and new values.

        A score moves with D fp32 additions, and, where q and k are normed or turned, by an ulp of theirs where the last
        bit before rounding falls the other way; weights move by twice that; half precision also rounds the weights
        before they meet the values.
        """
        stored, unit = self.keys.dtype, torch.finfo(self.keys.dtype).eps / 2
        norms = QkNorm(*(v.double() if isinstance(v, Tensor) else v for v in vars(self.norms).values()))
        value, k, v = reference.attention(
            self.qkv.double(), self.keys.double(), self.values.double(), self.slots, self.positions, self.tables,
            self.shape, norms, stored=stored,
        )  # fmt: skip
        largest = max(t.nan_to_num().abs().max().item() for t in (self.keys, k, self.qkv))
        products = self.shape.scale * self.shape.head_dim * largest**2
        as_given = not self.shape.rotary and self.norms.q_eps is None and self.norms.k_eps is None
        score = products * (CONFIDENCE * 2.0**-24 + 2.0**-21 + (0 if as_given else 2 * unit))
        values = max(self.values.nan_to_num().abs().max().item(), v.abs().max().item())
        bound = values * (2 * score + CONFIDENCE * 2.0**-24 * LENGTH**0.5 + 2.0**-20 + unit) + unit * value.abs()
        return Expected(value, bound), k, v


def operands(
    shape: AttentionShape = PLAIN,
    positions: tuple[int, ...] = (0, 37, 150),
    dtype: torch.dtype = cases.HALF,
    norms: QkNorm | None = None,
) -> Operands:
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    slots = torch.tensor([2, 0, 3, 1][: len(positions)])
    caches = []
    for _ in range(2):
        cache = torch.full((SLOTS, shape.kv_heads, LENGTH, shape.head_dim), float("nan"))
        for slot, position in zip(slots.tolist(), positions, strict=True):
            cache[slot, :, :position] = normal(shape.kv_heads, position, shape.head_dim)
        caches.append(cache.to(cases.DEVICE, dtype))
    angles = torch.arange(LENGTH)[:, None] * torch.logspace(0, -3, shape.rotary or 1)
    tables = (angles.cos().to(cases.DEVICE), angles.sin().to(cases.DEVICE)) if shape.rotary else None
    qkv = normal(len(positions), (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    device = cases.DEVICE
    return Operands(
        qkv.to(device, dtype), *caches, slots.to(device), torch.tensor(positions).to(device), tables, shape,
        norms or QkNorm(),
    )  # fmt: skip


def check(given: Operands, run: Callable[[Operands], Tensor]) -> None:
    """The result, the new keys and values, and that nothing else of the cache was touched; the same bits again."""
    wanted, k, v = given.expected()
    before = given.keys.clone(), given.values.clone()
    out = run(given)
    assert exceeds(out, wanted) <= 1
    unit = torch.finfo(given.keys.dtype).eps
    for cache, old, new in zip((given.keys, given.values), before, (k, v), strict=True):
        written = cache[given.slots, :, given.positions].double()
        assert (written - new).abs().max() <= unit * new.abs().max()
        cache[given.slots, :, given.positions] = old[given.slots, :, given.positions]
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())  # nothing else was touched
        assert torch.equal(cache.isnan(), old.isnan())
    assert torch.equal(run(given), out)

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flashnorm.kernels.bounds import CONFIDENCE, Expected, exceeds
from flashnorm.kernels.decode import reference
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.decode.attention import block_of, decode_attention, splits_for  # noqa: E402

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

    def run(self, splits: int) -> Tensor:
        out = torch.full((len(self.qkv), self.shape.heads * self.shape.head_dim), float("nan")).to(self.qkv)
        decode_attention(
            self.qkv, self.keys, self.values, self.slots, self.positions, self.tables, out, self.shape, self.norms,
            splits=splits, arrived=(arrived := torch.zeros(64, dtype=torch.int32, device=cases.DEVICE)),
        )  # fmt: skip
        assert not arrived.any()  # as the next launch needs it
        return out

    def expected(self) -> tuple[Expected, Tensor, Tensor]:
        """fp64 result with its bound, new keys and new values.

        A score moves with D fp32 additions, and by an ulp of q or k where the last bit before rounding falls the other
        way; weights move by twice that; half precision also rounds the weights before they meet the values.
        """
        stored, unit = self.keys.dtype, torch.finfo(self.keys.dtype).eps / 2
        norms = QkNorm(*(v.double() if isinstance(v, Tensor) else v for v in vars(self.norms).values()))
        value, k, v = reference.attention(
            self.qkv.double(), self.keys.double(), self.values.double(), self.slots, self.positions, self.tables,
            self.shape, norms, stored=stored,
        )  # fmt: skip
        largest = max(t.nan_to_num().abs().max().item() for t in (self.keys, k, self.qkv))
        products = self.shape.scale * self.shape.head_dim * largest**2
        score = products * (CONFIDENCE * 2.0**-24 + 2.0**-21 + 2 * unit)
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


def check(given: Operands, splits: int = 4) -> None:
    wanted, k, v = given.expected()
    before = given.keys.clone(), given.values.clone()
    out = given.run(splits)
    assert exceeds(out, wanted) <= 1
    unit = torch.finfo(given.keys.dtype).eps
    for cache, old, new in zip((given.keys, given.values), before, (k, v), strict=True):
        written = cache[given.slots, :, given.positions].double()
        assert (written - new).abs().max() <= unit * new.abs().max()
        cache[given.slots, :, given.positions] = old[given.slots, :, given.positions]
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())  # nothing else was touched
        assert torch.equal(cache.isnan(), old.isnan())
    assert torch.equal(given.run(splits), out)


@pytest.mark.parametrize("dtype", [*cases.HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_lengths_and_splits(splits, dtype):
    check(operands(dtype=dtype, positions=(0, 1, 33, 199)), splits)


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 4, 16, 0.25, rotary=8),
        AttentionShape(3, 1, 24, 0.2, rotary=12, interleaved=True),
        AttentionShape(4, 2, 16, 0.3, rotary=4),
        AttentionShape(4, 2, 16, 0.3, rotary=4, interleaved=True),
        AttentionShape(4, 2, 16, 1.0, softcap=2.0, rotary=8),
        AttentionShape(4, 2, 16, 0.25, window=8, rotary=8),
        AttentionShape(4, 2, 16, 0.25, window=70),
    ],
)
def test_kinds_of_attention(shape):
    check(operands(shape, dtype=torch.float32))


@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm(interleaved):
    gains = [torch.linspace(low, 2, 16, device=cases.DEVICE) for low in (0.5, -1)]
    shape = AttentionShape(4, 2, 16, 0.25, rotary=8, interleaved=interleaved)
    check(operands(shape, dtype=torch.float32, norms=QkNorm(1e-6, gains[0], 1e-5, gains[1])))
    check(operands(shape, dtype=torch.float32, norms=QkNorm(None, None, 1e-5, None)))


def test_a_row_does_not_depend_on_its_company():
    full = operands(positions=(5, 37, 150))
    together = full.run(4)
    for row in range(3):
        alone = operands(positions=(5, 37, 150))
        alone.qkv, alone.slots, alone.positions = (t[row : row + 1] for t in (alone.qkv, alone.slots, alone.positions))
        assert torch.equal(alone.run(4)[0], together[row])


def test_an_old_key_exceeds_the_bound():
    given = operands(dtype=torch.float32)
    wanted, _, _ = given.expected()
    given.keys[3, 1, 149] = given.keys[3, 1, 148]
    assert exceeds(given.run(4), wanted) > 1


@pytest.mark.parametrize(
    ("rows", "cache", "dtype", "block", "splits"),
    [
        (1, (2, 8, 768, 64), torch.bfloat16, 128, 4),  # no more than there are whole blocks, and a power of two
        (8, (9, 8, 8192, 64), torch.bfloat16, 128, 8),
        (32, (33, 8, 768, 64), torch.bfloat16, 128, 2),
        (64, (65, 32, 768, 128), torch.bfloat16, 64, 1),
        (1, (2, 3, 50, 24), torch.float32, 128, 1),
        (1, (2, 1, 100_000, 256), torch.float32, 16, 32),
    ],
)
def test_the_work_is_divided_by_rows_heads_and_room(rows, cache, dtype, block, splits):
    keys = torch.empty(cache, dtype=dtype, device="meta")
    assert block_of(keys) == block
    assert splits_for(rows, keys) == splits

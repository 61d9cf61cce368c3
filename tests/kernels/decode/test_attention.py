from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashnorm.kernels.bounds import exceeds
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from tests.kernels import cases
from tests.kernels.decode import attending
from tests.kernels.decode.attending import Operands, operands

cases.need_triton()
from flashnorm.kernels.decode.attention import block_of, decode_attention, splits_for  # noqa: E402


def run(given: Operands, splits: int = 4, *, early: bool = False) -> Tensor:
    out = torch.full((len(given.qkv), given.shape.heads * given.shape.head_dim), float("nan")).to(given.qkv)
    arrived = torch.zeros(64, dtype=torch.int32, device=cases.DEVICE)
    decode_attention(
        given.qkv, given.keys, given.values, given.slots, given.positions, given.tables, out, given.shape, given.norms,
        splits=splits, arrived=arrived, early=early,
    )  # fmt: skip
    assert not arrived.any()  # as the next launch needs it
    return out


def check(given: Operands, splits: int = 4) -> None:
    attending.check(given, lambda given: run(given, splits, early=True))


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
    together = run(full)
    for row in range(3):
        alone = operands(positions=(5, 37, 150))
        alone.qkv, alone.slots, alone.positions = (t[row : row + 1] for t in (alone.qkv, alone.slots, alone.positions))
        assert torch.equal(run(alone)[0], together[row])


def test_an_old_key_exceeds_the_bound():
    given = operands(dtype=torch.float32)
    wanted, _, _ = given.expected()
    given.keys[3, 1, 149] = given.keys[3, 1, 148]
    assert exceeds(run(given), wanted) > 1


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

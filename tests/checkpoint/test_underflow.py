"""Weights that are lost below the smallest number of fp16: a few are counted, many are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashnorm.checkpoint import edit
from flashnorm.checkpoint.blocks import blocks
from flashnorm.checkpoint.edit import Scaler
from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.checkpoint.header import CODES, TensorInfo
from flashnorm.checkpoint.manifest import read_manifest
from flashnorm.checkpoint.plan import Scale
from flashnorm.checkpoint.underflow import tolerable_fraction
from flashnorm.cli.main import main
from flashnorm.errors import CheckpointError
from tests.checkpoint.test_fold import SMALL, randomised

LEAST = 2.0**-24  # the smallest number of fp16 above zero


def vanished(weight: torch.Tensor, *scales: Scale, limit: int = edit.BLOCK_ELEMENTS) -> int:
    """How many weights a `Scaler` says to have vanished, which must be right."""
    info = TensorInfo("w", "shard", CODES[weight.dtype], tuple(weight.shape), 0, weight.nbytes)
    scaler, out = Scaler("w", info, scales), torch.empty_like(weight)
    for block in blocks(weight.shape, limit):
        span = slice(block.start, block.end)
        scaler.apply(block, weight.view(-1)[span], out.view(-1)[span])
    nonzero = weight != 0
    for scale in scales:
        nonzero &= (scale.factor != 0).view([-1 if d == scale.axis else 1 for d in range(weight.ndim)])
    assert scaler.vanished == int((nonzero & (out == 0)).sum())
    return scaler.vanished


def ones(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("limit", [1, 50, 1000, edit.BLOCK_ELEMENTS])
def test_one_weight_is_counted(limit: int) -> None:
    weight = ones(30, 40)
    weight[7, 3] = -LEAST
    assert vanished(weight, Scale(1, torch.full((40,), 0.5)), limit=limit) == 1  # the tie goes to zero, the even one
    assert vanished(weight, Scale(1, torch.full((40,), 0.51)), limit=limit) == 0


def test_zeros_that_were_zeros_or_whose_gain_is_are_not_lost() -> None:
    weight, gain = ones(30, 40), torch.full((40,), 0.5)
    weight[:, 5] = 0
    weight[3] = 0
    gain[9] = 0
    assert vanished(weight, Scale(1, gain)) == 0


@pytest.mark.parametrize(("limit", "width"), [(1, 40), (50, 4000), (1000, 4000), (edit.BLOCK_ELEMENTS, 4000)])
@pytest.mark.parametrize(("axis", "position"), [(0, 29), (1, 0), (1, 39)])
def test_a_row_or_column_that_vanishes_is_refused(axis: int, position: int, limit: int, width: int) -> None:
    """In blocks of one weight, of a part of a row, and of all of it."""
    weight = ones(30, width)
    weight.select(axis, position).fill_(LEAST)
    weight.select(axis, position)[3] = 0  # a zero of its own does not keep it alive
    with pytest.raises(CheckpointError, match=rf"all of position {position} on axis {axis} would become zero"):
        vanished(weight, Scale(1, torch.full((width,), 0.25)), limit=limit)


@pytest.mark.parametrize("shape", [(1, 40), (40, 1)])
def test_a_column_of_one_weight_is_no_column(shape: tuple[int, int]) -> None:
    """A score of one label has a row and no columns to speak of; the row is refused all the same."""
    weight = ones(*shape)
    weight.view(-1)[3] = LEAST
    gain = torch.full((shape[1],), 0.25)
    assert vanished(weight, Scale(1, gain)) == 1
    weight.fill_(LEAST)
    with pytest.raises(CheckpointError, match=r"all of position 0 on axis"):
        vanished(weight, Scale(1, gain))


def test_the_gain_alone_may_be_the_cause() -> None:
    gain = torch.ones(40)
    gain[11] = 1e-8
    with pytest.raises(CheckpointError, match=r"'w' does not fit its dtype any more: all of position 11 on axis 1"):
        vanished(ones(30, 40), Scale(1, gain))
    assert vanished(ones(30, 40, dtype=torch.bfloat16), Scale(1, gain)) == 0


@pytest.mark.parametrize(("axis", "limit"), [(0, 7), (1, 100), (2, edit.BLOCK_ELEMENTS)])
def test_experts(axis: int, limit: int) -> None:
    weight, factor = ones(4, 30, 40), torch.full(((4, 30, 40)[axis],), 0.25)
    weight[2, 7, 9] = LEAST
    assert vanished(weight, Scale(axis, factor), limit=limit) == 1
    weight[:, 7] = LEAST
    with pytest.raises(CheckpointError, match="all of position 7 on axis 1"):
        vanished(weight, Scale(axis, factor), limit=limit)


def test_more_than_the_tolerable_part_is_refused() -> None:
    """On both sides of the bound, in a tensor where no row or column goes."""
    weight = ones(500, 200)
    most = int(tolerable_fraction(torch.float16) * weight.numel())
    assert most == 19
    for row in range(most):
        weight[row, row] = LEAST
    assert vanished(weight, Scale(1, torch.full((200,), 0.25))) == most
    weight[most, most] = LEAST
    with pytest.raises(CheckpointError, match=r"20 of 100000 weights would become zero in torch\.float16"):
        vanished(weight, Scale(1, torch.full((200,), 0.25)))


def test_the_tolerable_part_is_where_numbers_are_as_far_apart_as_one_rounding_moves_them() -> None:
    """The derivation by experiment: normal weights of the deviation at which the smallest step is u of it."""
    unit = torch.finfo(torch.float16).eps / 2
    weights = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * (LEAST / unit)
    part = float((weights.half() == 0).float().mean())
    # Five standard errors of a count of about 800.
    assert part == pytest.approx(tolerable_fraction(torch.float16), rel=5 / 780**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_have_an_end_too(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weight = ones(30, 40, dtype=dtype)
    weight[7, 3] = least
    assert vanished(weight, Scale(1, torch.full((40,), 0.25))) == 1
    weight[7] = least
    with pytest.raises(CheckpointError, match="all of position 7 on axis 0"):
        vanished(weight, Scale(1, torch.full((40,), 0.25)))


def test_a_fold_that_would_lose_a_channel_leaves_nothing(tmp_path: Path) -> None:
    model = randomised(LlamaForCausalLM(LlamaConfig(**SMALL)))
    model.model.layers[1].input_layernorm.weight.data[4] = 1e-7
    model.half().save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.\w_proj\.weight.* all of position 4 on axis 1"):
        fold_checkpoint(tmp_path / "source", tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    assert len(fold_checkpoint(tmp_path / "bf16", tmp_path / "out").folded) == 5


def test_a_few_lost_weights_are_told_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = randomised(LlamaForCausalLM(LlamaConfig(**SMALL)))
    model.model.layers[0].input_layernorm.weight.data[4] = 0.25
    model.model.layers[0].self_attn.q_proj.weight.data[3, 4] = LEAST
    model.half().save_pretrained(tmp_path / "source")
    report = fold_checkpoint(tmp_path / "source", tmp_path / "out")
    assert report.lost == read_manifest(tmp_path / "out").lost == {"model.layers.0.self_attn.q_proj.weight": 1}
    assert fold_checkpoint(tmp_path / "out", tmp_path / "again").lost == report.lost
    with pytest.raises(SystemExit):
        main(["fold", str(tmp_path / "source"), str(tmp_path / "told"), "--quiet"])
    assert "1 weight of 1 tensor became zero, too small for their dtype" in capsys.readouterr().out

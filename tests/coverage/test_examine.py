"""The comparison that the whole record rests on: what it must see, and what it must look past."""

from __future__ import annotations

import math

import pytest
import torch

from tests.coverage.examine import TOLERANCE, Outcome, _relative_error

LOGITS = torch.arange(1.0, 13.0).view(3, 4)
MASK = torch.finfo(torch.float32).min


def _with(value: float, place: tuple[int, int] = (1, 2)) -> torch.Tensor:
    changed = LOGITS.clone()
    changed[place] = value
    return changed


def _right(error: float) -> bool:
    return Outcome("tiny", norms=1, folded=1, error=error).right


def test_equal_outputs_are_right() -> None:
    assert _relative_error([LOGITS], [LOGITS]) == 0
    assert _right(0.0)
    assert _right(TOLERANCE)
    assert not _right(2 * TOLERANCE)


def test_a_refused_model_is_not_counted_as_right() -> None:
    assert not Outcome("tiny", norms=0, folded=0, error=0.0, refused="cannot be run").right


@pytest.mark.parametrize("place", [(0, 0), (1, 2), (2, 3)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_no_number_is_wrong(bad: float, place: tuple[int, int]) -> None:
    for outputs in ([_with(bad, place)], [LOGITS, _with(bad, place)], [_with(bad, place), LOGITS]):
        error = _relative_error(outputs, [LOGITS] * len(outputs))
        assert error == math.inf
        assert not _right(error)


def test_two_wrongs_make_no_right() -> None:
    with pytest.raises(AssertionError, match="computes NaN"):
        _relative_error([_with(math.nan)], [_with(math.nan)])


@pytest.mark.parametrize("mask", [MASK, -math.inf])
def test_masked_entries_do_not_drown_the_rest(mask: float) -> None:
    before, wrong = _with(mask), _with(mask)
    wrong[0, 0] += 1
    assert _relative_error([before], [before]) == 0
    assert _relative_error([wrong], [before]) > 0.01
    assert _relative_error([LOGITS], [before]) == math.inf, "a mask that is gone"

"""Codes of shadows: which occur, whose they are, and which are of one gain."""

from __future__ import annotations

import pytest
import torch

from flashnorm.sites.shadow import PLAIN, ZERO, Numbering, distinct, same_gains

CLOSE = torch.randint(-1, 50, (3, 7), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
FAR = torch.tensor([[ZERO, 4, 1_000_000], [6, 4, PLAIN]], dtype=torch.int32)


@pytest.mark.parametrize("codes", [CLOSE, FAR, CLOSE[:, :1].expand(3, 1 << 40), CLOSE[:0], torch.tensor(8).int()])
def test_every_code_that_occurs_is_named_once_and_in_order(codes):
    """Also of an expanded tensor that no memory would hold, and of codes that lie too far apart to be marked."""
    few = codes[:, :1] if codes.ndim and codes.shape[1] > 100 else codes
    found = distinct(codes)
    assert found.dtype == torch.int32
    assert found.tolist() == sorted(set(few.flatten().tolist()))


def test_the_norms_of_codes():
    numbering = Numbering()
    a, b, c = (numbering.codes(name, 4) for name in "abc")
    plain, zero = torch.tensor([PLAIN], dtype=torch.int32), torch.tensor([ZERO], dtype=torch.int32)
    assert numbering.norms_in(torch.cat([plain, zero])) == []
    assert numbering.norms_in(torch.cat([zero, b[:1], plain, b[-1:] | 1])) == ["b"]
    assert numbering.norms_in(torch.cat([c[:1], plain, a[-1:]])) == ["a", "c"]
    assert numbering.channels_of("b", torch.cat([a[-1:], b | 1, c[:1], plain, zero])).tolist() == [
        -1, 0, 1, 2, 3, -1, -1, -1,
    ]  # fmt: skip


def test_of_one_gain_whatever_was_done_to_it():
    codes = torch.tensor([[2, 4]], dtype=torch.int32)
    assert same_gains(codes | 1, codes[0])
    for other in ([2, 6], [2, PLAIN], [ZERO, 4]):
        assert not same_gains(torch.tensor(other, dtype=torch.int32), codes)

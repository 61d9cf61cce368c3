from __future__ import annotations

import pytest
import torch

from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.decode.settle import settle  # noqa: E402


def settled(logits: torch.Tensor, slots: list[int], spare: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chosen, lengths and following after one step of `slots`, each of length 10 + its number."""
    device = cases.DEVICE
    chosen, lengths = torch.full((5,), -1, device=device), torch.arange(10, 15, device=device)
    at = torch.tensor(slots, device=device)
    following = torch.full((len(slots),), -1, device=device)
    settle(logits, at, chosen, lengths, following, spare=spare)
    return chosen, lengths, following


@pytest.mark.parametrize("vocabulary", [5, 101, 1024, 40000])
def test_the_likeliest_token_of_each_row(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2, vocabulary + 3, generator=generator).to(cases.DEVICE)[:, :vocabulary]
    expected = logits.argmax(-1)
    chosen, lengths, following = settled(logits, [2, 0])
    assert torch.equal(following, expected)
    assert chosen.tolist() == [expected[1].item(), -1, expected[0].item(), -1, -1]
    assert lengths.tolist() == [11, 11, 13, 13, 14]


def test_the_first_of_equals_and_the_ends_of_the_vocabulary():
    logits = torch.zeros(3, 40000, device=cases.DEVICE)
    logits[0, [17, 35000]] = 3.0
    logits[1, 0] = logits[2, -1] = 1.0
    assert settled(logits, [0, 1, 2])[2].tolist() == [17, 0, 39999]


def test_the_spare_slot_stays_empty():
    logits = torch.randn(3, 50, device=cases.DEVICE)
    _, lengths, _ = settled(logits, [1, 4, 4])
    assert lengths.tolist() == [10, 12, 12, 13, 0]


def test_infinite_and_no_numbers_give_a_token():
    logits = torch.full((2, 50), float("-inf"), device=cases.DEVICE)
    logits[0, 3], logits[1] = 0.0, float("nan")
    following = settled(logits, [0, 1])[2]
    assert following[0] == 3
    assert 0 <= following[1] < 50

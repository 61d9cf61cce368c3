from __future__ import annotations

import pytest
import torch

from flashnorm.runtime.decode.graphs import Runner, bucket_of
from flashnorm.runtime.decode.sampling import SamplingTable
from flashnorm.runtime.decode.state import State

SLOTS, VOCABULARY = 6, 10


def test_buckets_are_powers_of_two():
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 33)] == [1, 2, 4, 4, 8, 8, 16, 64]


class _Counting:
    """A step whose likeliest token is the one after the row's own; remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], list[int]]] = []

    def __call__(self, slots: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        tokens, positions = chosen[slots], lengths[slots]
        self.calls.append((tokens.tolist(), slots.tolist(), positions.tolist()))
        return torch.nn.functional.one_hot((tokens + 1) % VOCABULARY, VOCABULARY).float()


@pytest.mark.parametrize("greedy", [True, False])
def test_rows_are_filled_up_with_the_spare_slot_and_tokens_are_fed_back(greedy):
    device, step = torch.device("cpu"), _Counting()
    state = State(SLOTS, device, SamplingTable(SLOTS + 1, VOCABULARY, device))
    runner = Runner(step, state, capture=False)
    state.lengths[:SLOTS], state.chosen[:SLOTS] = torch.arange(SLOTS) * 10, torch.arange(SLOTS)
    logits, tokens = runner.run((4, 1, 2), greedy=greedy)
    assert (logits.shape, tokens.tolist()) == ((3, VOCABULARY), [5, 2, 3])
    assert step.calls[0][1:] == ([4, 1, 2, SLOTS], [40, 10, 20, 0])
    assert runner.run((1, 4, 2), greedy=greedy)[1].tolist() == [3, 6, 4]
    assert step.calls[1][1:] == ([1, 4, 2, SLOTS], [11, 41, 21, 0])
    assert runner.run((4,), greedy=greedy)[1].tolist() == [7]
    assert step.calls[2] == ([6], [4], [42])
    assert state.lengths.tolist() == [0, 12, 22, 30, 43, 50, 0]

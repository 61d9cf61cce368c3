from __future__ import annotations

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashnorm.errors import Refusal
from flashnorm.runtime.decode.sampling import Sampling, SamplingTable, kept, uniform

ROWS, VOCABULARY = 6, 50


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))


def transformers_probabilities(logits: torch.Tensor, ids: torch.Tensor, s: Sampling) -> torch.Tensor:
    steps = [RepetitionPenaltyLogitsProcessor(s.repetition_penalty)] if s.repetition_penalty != 1 else []
    steps += [TemperatureLogitsWarper(s.temperature)]
    steps += [TopKLogitsWarper(s.top_k)] if s.top_k else []
    steps += [TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    steps += [MinPLogitsWarper(s.min_p)] if s.min_p else []
    for step in steps:
        logits = step(ids, logits)
    return torch.softmax(logits, -1)


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.7),
    Sampling(temperature=0.5, repetition_penalty=0.6),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_transformers_distribution(logits, settings):
    """4,000 draws of one row: counts within 6 standard deviations of the distribution, and no forbidden token."""
    draws, ids = 4000, torch.tensor([[1, 4, 9]])
    expected = transformers_probabilities(logits[:1].clone(), ids, settings)[0].double()
    table = SamplingTable(1, VOCABULARY, torch.device("cpu"))
    table.set(0, settings)
    table.seen[0, ids[0]] = True
    slots = torch.zeros(draws, dtype=torch.int64)
    chosen = table.choose(logits[:1].expand(draws, -1), slots, torch.arange(draws))
    counts = torch.bincount(chosen, minlength=VOCABULARY).double()
    assert counts[expected == 0].sum() == 0
    deviation = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() <= 6 * deviation + 1).all()


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_kept_is_what_transformers_keeps(logits, settings):
    scaled = logits / settings.temperature
    expected = transformers_probabilities(
        scaled * settings.temperature, torch.zeros(ROWS, 0, dtype=torch.int64), settings
    )
    ordered, order = scaled.sort(dim=-1, descending=True)
    limits = [torch.full((ROWS, 1), float(x)) for x in (settings.top_k or VOCABULARY, settings.top_p, settings.min_p)]
    assert torch.equal(kept(ordered, *limits), (expected > 0).gather(1, order))


def test_greedy_and_penalised_greedy(logits):
    table = SamplingTable(2, VOCABULARY, torch.device("cpu"))
    slots, at = torch.tensor([0, 1]), torch.tensor([3, 3])
    best = logits[0].argmax()
    table.set(1, Sampling(repetition_penalty=1e6))
    table.seen[:, best] = True
    chosen = table.choose(logits[:1].expand(2, -1), slots, at)
    assert chosen[0] == best
    assert chosen[1] == logits[0].topk(2).indices[1]
    assert (Sampling().greedy, Sampling(repetition_penalty=1.1).greedy) == (True, False)


def test_rows_have_settings_of_their_own_whatever_the_order(logits):
    table = SamplingTable(len(SETTINGS), VOCABULARY, torch.device("cpu"))
    for slot, settings in enumerate(SETTINGS):
        table.set(slot, settings)
    slots, at = torch.arange(ROWS), torch.arange(ROWS) + 5
    together = table.choose(logits, slots, at)
    flipped = table.choose(logits.flip(0), slots.flip(0), at.flip(0)).flip(0)
    alone = [table.choose(logits[r : r + 1], slots[r : r + 1], at[r : r + 1]) for r in range(ROWS)]
    assert torch.equal(together, flipped)
    assert torch.equal(together, torch.cat(alone))


def test_seeds_and_positions_give_even_and_independent_numbers():
    seeds, at = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    numbers = uniform(seeds, at)
    assert (numbers.min() >= 0, numbers.max() < 1) == (True, True)
    assert len(numbers.unique()) == len(numbers)
    # 40,000 even numbers: the mean is within 6 of its standard deviations of 1/2, correlations of zero.
    assert abs(numbers.mean() - 0.5) < 6 * (1 / 12 / len(numbers)) ** 0.5
    grid = numbers.view(200, 200)
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        pairs = torch.stack([left.flatten(), right.flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 6 / left.numel() ** 0.5


def test_uniform_is_splitmix64():
    """The published sequence of seed 0 begins with this number; the seed itself is mixed first, and 0 mixes to 0."""
    first = 0xE220A8397B1DCDAF
    assert uniform(torch.tensor([0]), torch.tensor([0])).item() == (first >> 11) * 2.0**-53


def test_a_lost_penalty_or_a_shifted_row_is_seen(logits):
    """The planted fault: the settings of the neighbouring slot."""
    table = SamplingTable(2, VOCABULARY, torch.device("cpu"))
    table.set(0, Sampling(temperature=1.0, top_k=1))
    table.set(1, Sampling(temperature=50.0))
    draws = 200
    rows, at = logits[:1].expand(draws, -1), torch.arange(draws)
    right = table.choose(rows, torch.zeros(draws, dtype=torch.int64), at)
    wrong = table.choose(rows, torch.ones(draws, dtype=torch.int64), at)
    assert len(right.unique()) == 1
    assert len(wrong.unique()) > 10


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", -1), ("top_k", -2), ("top_p", 0), ("top_p", 1.1), ("min_p", 1.5), ("repetition_penalty", 0)],
)
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(Refusal, match=f"{setting} is {value}; it must be"):
        Sampling(**{setting: value})

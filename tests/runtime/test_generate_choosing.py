"""What the device draws from is what Transformers' processors leave."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashnorm.runtime.decode.sampling import Sampling, kept, penalise
from flashnorm.runtime.generate_choosing import device_sampling
from tests.runtime.plain_slots import PlainSlots
from tests.runtime.test_generate import MODEL, SINGLE, ours

DRAWS = 400
SMALLEST_P = 1e-4  # what a correct sampler falls below once in ten thousand seeds; the seed is fixed


def processors(**options: Any) -> LogitsProcessorList:
    """The list that Transformers builds for these options."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    return MODEL._get_logits_processor(config, input_ids_seq_length=5, device="cpu", model_kwargs={})


def stock_probabilities(ids: Tensor, logits: Tensor, **options: Any) -> Tensor:
    return torch.softmax(processors(**options)(ids, logits), -1)


def device_probabilities(ids: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """What `draw` draws from, put back in the order of the vocabulary."""
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    numbers = (sampling.top_k or logits.shape[-1], sampling.top_p, sampling.min_p)
    adjusted = penalise(logits, seen, torch.tensor(sampling.repetition_penalty)) / sampling.temperature
    ordered, order = adjusted.sort(dim=-1, descending=True, stable=True)
    keep = kept(ordered, *(torch.full((len(logits), 1), number) for number in numbers))
    chances = torch.softmax(ordered.masked_fill(~keep, -torch.inf), -1)
    return torch.zeros_like(logits).scatter_(1, order, chances)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "penalty"),
    list(itertools.product((1.0, 0.6), (0, 9), (1.0, 0.8), (None, 0.2), (1.0, 1.4))),
)
def test_probabilities(temperature: float, top_k: int, top_p: float, min_p: float | None, penalty: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 200, generator=generator)
    ids = torch.randint(200, (64, 20), generator=generator)
    options = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": penalty,
    }
    sampling = device_sampling(processors(**options), True, "none")
    assert sampling is not None
    expected = stock_probabilities(ids, logits.clone(), **options)
    answer = device_probabilities(ids, logits, sampling)
    assert torch.equal(answer > 0, expected > 0)
    # exp of x with |x| < 64 turns a relative error of 2^-24 of x into one of 2^-18; the sum of 200 terms adds less.
    torch.testing.assert_close(answer, expected, rtol=2**-17, atol=0)
    hotter = device_probabilities(ids, logits, replace(sampling, temperature=1.01 * temperature))
    assert not torch.allclose(hotter, expected, rtol=2**-17, atol=0)


def drawn(**options: Any) -> Tensor:
    torch.manual_seed(0)
    slots = PlainSlots(MODEL, DRAWS)
    return ours(SINGLE, slots, do_sample=True, max_new_tokens=1, num_return_sequences=DRAWS, **options)[:, -1]


def p_value(tokens: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square test; tokens that are expected less than five times are one bin."""
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    if (counts[probabilities == 0] > 0).any():
        return 0.0
    rare = expected < 5
    expected, counts = (torch.cat([t[~rare], t[rare].sum().reshape(1)]) for t in (expected, counts))
    expected, counts = expected[expected > 0], counts[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0, "temperature": 1.5},
        {"top_k": 6, "temperature": 2.0},
        {"top_k": 0, "temperature": 2.0, "top_p": 0.7},
        {"top_k": 0, "temperature": 2.0, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_what_is_drawn(options: dict[str, Any]) -> None:
    with torch.no_grad():
        logits = MODEL(SINGLE["input_ids"]).logits[:, -1].float()
    tokens = drawn(**options)
    expected = stock_probabilities(SINGLE["input_ids"], logits, **options)[0]
    assert p_value(tokens, expected) > SMALLEST_P
    flatter = {**options, "temperature": 2 * options["temperature"]}
    assert p_value(tokens, stock_probabilities(SINGLE["input_ids"], logits, **flatter)[0]) < SMALLEST_P


@pytest.mark.parametrize(
    "others",
    [
        [MinLengthLogitsProcessor(3, 2)],
        [TopPLogitsWarper(0.9), TopKLogitsWarper(4)],
        [TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(0.5)],
        [TopKLogitsWarper(4, filter_value=-9.0)],
        [TopPLogitsWarper(0.0)],
    ],
    ids=["unknown", "order", "twice", "filter", "range"],
)
def test_other_processors_are_not_for_the_device(others: list[Any]) -> None:
    assert device_sampling(others, True, "none") is None


def test_the_penalty_of_padding() -> None:
    """Only where Transformers' penalty leaves padding out, too."""
    plain, aware = RepetitionPenaltyLogitsProcessor(1.2), RepetitionPenaltyLogitsProcessor(1.2)
    aware.prompt_ignore_length = torch.tensor([1])
    assert device_sampling([plain], False, "none") == Sampling(repetition_penalty=1.2)
    assert device_sampling([aware], False, "left") == Sampling(repetition_penalty=1.2)
    for processor, padding in ((plain, "left"), (plain, "other"), (aware, "other")):
        assert device_sampling([processor], False, padding) is None

"""Language: the interval covers as often as it says, and text that goes round in circles is found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashnorm.verify.language import (
    bootstrap_interval,
    check_language,
    decode_greedily,
    repetition,
    repetition_check,
    write_afresh,
)
from tests.faults.decoding import answers_late
from tests.verify.cases import engine_of, tokens
from tests.verify.tiny import folded, tiny_model


def test_the_interval_covers_the_mean() -> None:
    generator = torch.Generator().manual_seed(1)
    missed = 0
    for _ in range(200):
        low, high = bootstrap_interval(torch.randn(512, generator=generator, dtype=torch.float64) + 1)
        missed += not low <= 1 <= high
        assert high - low < 1
    assert missed <= 4  # one in a thousand is expected of many blocks; of 32, a few more
    assert bootstrap_interval(torch.ones(20)) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("row", "share"),
    [([1, 2, 3, 4], 0.0), ([1, 1, 1, 1], 0.75), ([1, 2, 1, 2, 1], 0.6), ([1, 2, 3, 1, 2, 3], 0.5), ([7], 0)],
)
def test_repetition_is_the_share_of_tokens_that_continue_a_loop(row: list[int], share: float) -> None:
    assert repetition(row) == pytest.approx(share)


def test_text_with_and_without_a_cache_is_the_same() -> None:
    engine = engine_of(tiny_model("llama"))
    prompts = tokens(24).view(3, 8)
    assert torch.equal(decode_greedily(engine, prompts, 12), write_afresh(engine, prompts, 12))


def test_doubled_tokens_are_found_and_fewer_repetitions_are_not() -> None:
    plain = tokens(4 * 32).view(4, 32)
    doubled = plain[:, :16].repeat_interleave(2, dim=1)
    assert not repetition_check(doubled, plain).passed
    assert repetition_check(plain, doubled).passed
    assert repetition_check(plain, plain).value == 0
    one = plain.clone()
    one[0] = doubled[0]  # a single prompt proves nothing
    assert repetition_check(one, plain).passed


def _too_sure(model: torch.nn.Module) -> torch.nn.Module:
    """The final gain is three times what it should be: all logits are three times as large."""
    faulty = folded(model)
    faulty.model.norm.weight.data *= 3
    return faulty


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fold_reads_like_its_source_and_one_that_is_too_sure_of_itself_does_not(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    source = engine_of(model, "llama", dtype)
    for fault, passes in ((folded, True), (_too_sure, False)):
        subject = engine_of(fault(model), "llama", dtype)
        figure = check_language(subject, tokens(400), source, 8).figures[0]
        assert figure.name == "perplexity_difference"
        assert figure.passed is passes


def test_without_a_reference_the_text_alone_is_judged() -> None:
    engine = engine_of(tiny_model("llama"))
    outcome = check_language(engine, tokens(64), None, 8)
    assert [figure.name for figure in outcome.figures] == ["repetition"]
    assert outcome.passed
    assert check_language(answers_late(engine), tokens(64), None, 24).figures[0].value >= 0
    assert check_language(replace(engine, begin=None), tokens(64), None, 8).skipped

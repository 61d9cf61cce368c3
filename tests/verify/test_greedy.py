from __future__ import annotations

import math

import pytest
import torch
from transformers import GenerationConfig

from flashnorm.verify.checks import greedy_check
from flashnorm.verify.greedy import Continuation, compare_greedy, greedy
from tests.verify.tiny import tiny_model

PROMPT = torch.arange(40, 48)[None]


def _continuation(*logits: list[float]) -> Continuation:
    table = torch.tensor(logits)
    return Continuation(tuple(table.argmax(-1).tolist()), table)


def _decode(ids: list[int]) -> str:
    return "".join("abcdefgh"[i % 8] for i in ids)


def test_greedy_takes_the_likeliest_token_whatever_the_model_asks_for() -> None:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0, num_beams=2)
    [found] = greedy(model, PROMPT, 12)
    ids = PROMPT
    with torch.inference_mode():
        for token in found.tokens:
            logits = model(ids).logits[0, -1]
            assert token == int(logits.argmax())
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    assert len(found.tokens) == 12
    torch.testing.assert_close(found.logits[-1], logits)


def test_a_continuation_ends_with_its_end_token() -> None:
    model = tiny_model("llama")
    prompts = torch.cat([PROMPT, PROMPT + 50])
    free = greedy(model, prompts, 12)
    end = free[0].tokens[4]
    model.generation_config.eos_token_id = [end, 999]
    model.generation_config.pad_token_id = None
    stopped = greedy(model, prompts, 12)
    first = free[0].tokens.index(end)
    assert stopped[0].tokens == free[0].tokens[: first + 1]
    assert stopped[0].logits.shape[0] == first + 1


def test_the_first_difference_with_both_margins() -> None:
    ours = _continuation([0, 0, 5], [1.0, 4.0, 3.5], [9, 0, 0])
    theirs = _continuation([0, 0, 5], [1.0, 3.0, 3.25], [0, 9, 0])
    [pair] = compare_greedy(PROMPT, [ours], [theirs], _decode)
    assert (pair.reference, pair.candidate, pair.tokens) == ("cba", "ccb", 3)
    difference = pair.difference
    assert difference.position == 1
    assert (difference.reference_token, difference.candidate_token) == (1, 2)
    assert (difference.reference_text, difference.candidate_text) == ("b", "c")
    assert (difference.reference_margin, difference.candidate_margin) == (0.5, 0.25)
    assert difference.opposed_margin == 0.75


def test_the_margin_to_the_second_is_not_the_margin_to_the_other_models_token() -> None:
    ours, theirs = _continuation([5.0, 4.5, 1.0]), _continuation([0.0, 0.0, 3.0])
    difference = compare_greedy(PROMPT, [ours], [theirs], _decode)[0].difference
    assert difference.reference_margin == 0.5
    assert difference.opposed_margin == 4.0 + 3.0


@pytest.mark.parametrize(("error", "passed"), [(0.1, True), (0.05, False)])
def test_a_difference_is_judged_by_the_error_of_the_logits(error: float, passed: bool) -> None:
    ours, theirs = _continuation([1.0, 4.0, 3.5]), _continuation([1.0, 3.0, 3.25])
    check = greedy_check(compare_greedy(PROMPT, [ours], [theirs], _decode), error)
    assert check.value == 0.75
    assert check.passed is passed
    assert "no near tie" in check.meaning


def test_equal_continuations_have_no_difference() -> None:
    ours = _continuation([1.0, 4.0, 3.5], [1.0, 0.0, 0.0])
    pairs = compare_greedy(PROMPT, [ours], [ours], _decode)
    assert pairs[0].difference is None
    assert greedy_check(pairs, 0.0).passed


NAN = float("nan")


@pytest.mark.parametrize("order", [1, -1])
def test_a_margin_that_is_no_number_fails_wherever_it_stands(order: int) -> None:
    near, broken = _continuation([1.0, 4.0, 3.9]), _continuation([1.0, NAN, 3.5])
    pairs = [*compare_greedy(PROMPT, [near], [_continuation([1.0, 3.9, 4.0])], _decode)]
    pairs += compare_greedy(PROMPT, [near], [broken], _decode)
    assert greedy_check(pairs[:1], 1.0).passed
    check = greedy_check(pairs[::order], 1.0)
    assert math.isnan(check.value)
    assert not check.passed


def test_the_same_token_by_broken_logits_is_no_agreement() -> None:
    ours, theirs = _continuation([1.0, 4.0, 3.5]), _continuation([1.0, NAN, 3.5])
    assert ours.tokens == theirs.tokens
    [pair] = compare_greedy(PROMPT, [ours], [theirs], _decode)
    assert pair.difference is not None
    assert not greedy_check([pair], 1.0).passed

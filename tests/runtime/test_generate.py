"""The same ids as stock Transformers, whatever is asked for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from flashnorm.runtime.generate import generate
from tests.runtime.plain_slots import PlainSlots, tiny_llama
from tests.verify.tiny import tokenizer

MODEL = tiny_llama()
PAD = 0
SINGLE = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
BATCH = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 3, 2, 4], [50, 40, 30, 20]])}
PADDED = {"input_ids": torch.tensor([[PAD, PAD, 7, 8], [9, 3, 2, 4], [PAD, 40, 30, 20]])}
MASKED = {**PADDED, "attention_mask": (PADDED["input_ids"] != PAD).long()}
HOLES = {**BATCH, "attention_mask": torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]])}
INPUTS = {"single": SINGLE, "batch": BATCH, "derived": PADDED, "masked": MASKED, "holes": HOLES}


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.given.append(value)

    def end(self) -> None:
        self.ended = True


def stock(inputs: dict[str, Tensor], **options: Any) -> Any:
    return MODEL.generate(**inputs, **options)


def ours(inputs: dict[str, Tensor], slots: PlainSlots | None = None, **options: Any) -> Any:
    """On slots, and not by way of the stock path, which warns."""
    slots = slots or PlainSlots(MODEL)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this call of generate")
        answer = generate(MODEL, slots, **inputs, **options)
    assert slots.fed > 0
    assert slots.free_slots() == tuple(range(slots.slots))
    return answer


def ends(inputs: dict[str, Tensor]) -> list[int]:
    """Tokens that end the first row at its third new token and the others, where there are any, at their fifth."""
    new = stock(inputs, max_new_tokens=8)[:, inputs["input_ids"].shape[1] :]
    return [int(new[0, 2]), *map(int, new[1:, 4])]


def texts(inputs: dict[str, Tensor]) -> list[str]:
    """For each row, a character that it generates, not as its first one."""
    new = stock(inputs, max_new_tokens=10)[:, -8:]
    letters = [tokenizer().batch_decode(row[:, None]) for row in new]
    return [next(letter for letter in row if letter.isascii()) for row in letters]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 1},
        {"max_length": 17},
        {},  # twenty more tokens, Transformers' default
        {"max_new_tokens": 10, "min_new_tokens": 7, "eos": True},
        {"max_new_tokens": 10, "min_length": 10, "eos": True},
        {"max_new_tokens": 10, "eos": True},
        {"max_new_tokens": 10, "eos": True, "pad_token_id": 99},
        {"max_new_tokens": 12, "repetition_penalty": 1.7},
        {"max_new_tokens": 12, "no_repeat_ngram_size": 2, "suppress_tokens": [48, 33]},
        {"max_new_tokens": 5, "forced_eos_token_id": 9},
        {"generation_config": GenerationConfig(max_new_tokens=6, eos_token_id=9)},
    ],
    ids=str,
)
def test_greedy(name: str, options: dict[str, Any]) -> None:
    inputs, options = INPUTS[name], dict(options)
    if options.pop("eos", False):
        options["eos_token_id"] = ends(inputs)
    expected = stock(inputs, **options)
    answer = ours(inputs, **options)
    assert answer.dtype == expected.dtype
    assert answer.tolist() == expected.tolist()


def test_the_end_of_sequence_cases_end_rows_at_different_steps() -> None:
    """What `test_greedy` compares is ragged; and where one token differs, the comparison sees it."""
    answer = ours(MASKED, max_new_tokens=10, eos_token_id=ends(MASKED), pad_token_id=99)
    assert len({int((row == 99).sum()) for row in answer}) > 1
    assert answer.shape[1] < 4 + 10
    other = ours(MASKED, max_new_tokens=10, eos_token_id=ends(MASKED)[1:], pad_token_id=99)
    assert other.tolist() != answer.tolist()


def test_right_padding_goes_on_from_the_last_real_token() -> None:
    """Stock Transformers goes on from the padding, and warns that the result is wrong. Here it is right."""
    right = torch.tensor([[7, 8, PAD, PAD], [9, 3, 2, 4], [40, 30, 20, PAD]])
    expected = stock(MASKED, max_new_tokens=8)[:, 4:]
    answer = ours({"input_ids": right, "attention_mask": (right != PAD).long()}, max_new_tokens=8)
    assert answer[:, :4].tolist() == right.tolist()
    assert answer[:, 4:].tolist() == expected.tolist()


def test_ids_as_int32_and_positional() -> None:
    ids = BATCH["input_ids"]
    expected = MODEL.generate(ids.int(), max_new_tokens=4)
    answer = generate(MODEL, PlainSlots(MODEL), ids.int(), max_new_tokens=4)
    assert answer.dtype == expected.dtype
    assert answer.tolist() == expected.tolist()


def test_nothing_to_start_from_but_the_bos_token() -> None:
    assert ours({}, max_new_tokens=6).tolist() == MODEL.generate(max_new_tokens=6).tolist()


@pytest.mark.parametrize("inputs", [SINGLE, MASKED], ids=["single", "masked"])
@pytest.mark.parametrize("as_config", [False, True])
def test_stop_strings(inputs: dict[str, Tensor], as_config: bool) -> None:
    words = tokenizer()
    text = texts(inputs)
    options: dict[str, Any] = {"max_new_tokens": 12, "stop_strings": text, "eos_token_id": 255}
    if as_config:
        options = {"generation_config": GenerationConfig(**options)}
    expected = stock(inputs, **options, tokenizer=words)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 12
    assert ours(inputs, **options, tokenizer=words).tolist() == expected.tolist()


def test_stop_strings_without_an_end_of_sequence_token_let_finished_rows_go_on() -> None:
    new = tokenizer().batch_decode(stock(MASKED, max_new_tokens=20)[:, 4:].reshape(-1, 1))
    early = next(letter for letter in new[2:20] if letter.isascii())
    late = [next(letter for letter in new[at : at + 10] if letter.isascii()) for at in (30, 50)]
    options: dict[str, Any] = {"max_new_tokens": 20, "stop_strings": [early, *late], "tokenizer": tokenizer()}
    expected = stock(MASKED, **options)
    padded = stock(MASKED, **options, eos_token_id=255, pad_token_id=99)
    assert padded.tolist() != expected.tolist()  # with an end-of-sequence token, a row would have been padded
    assert ours(MASKED, **options).tolist() == expected.tolist()


def test_stop_strings_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        ours(SINGLE, max_new_tokens=2, stop_strings=["a"])


@pytest.mark.parametrize("inputs", [SINGLE, MASKED], ids=["single", "masked"])
def test_the_streamer_is_given_what_transformers_gives_it(inputs: dict[str, Tensor]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": ends(inputs), "pad_token_id": 99}
    expected, given = Recorder(), Recorder()
    stock(inputs, **options, streamer=expected)
    ours(inputs, **options, streamer=given)
    assert given.ended
    assert [(t.shape, t.dtype, t.tolist()) for t in given.given] == [
        (t.shape, t.dtype, t.tolist()) for t in expected.given
    ]


@pytest.mark.parametrize("name", INPUTS)
def test_scores_and_logits(name: str) -> None:
    inputs = INPUTS[name]
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "eos_token_id": ends(inputs),
        "min_new_tokens": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected, answer = stock(inputs, **options), ours(inputs, **options)
    assert answer.sequences.tolist() == expected.sequences.tolist()
    for kind in ("scores", "logits"):
        assert len(answer[kind]) == len(expected[kind])
        for step, (mine, theirs) in enumerate(zip(answer[kind], expected[kind], strict=True)):
            assert mine.dtype == theirs.dtype
            # float64 logits, whose error is far below half a unit of the float32 that they are rounded to.
            torch.testing.assert_close(mine, theirs, rtol=2**-23, atol=2**-23, msg=f"{kind} of step {step}")
    assert answer.get("logits") is not None
    only = ours(inputs, **{**options, "output_scores": False, "output_logits": False})
    assert set(only) == {"sequences"}


@pytest.mark.parametrize("options", [{"top_k": 3}, {"typical_p": 0.8}, {"min_new_tokens": 3, "eos_token_id": 7}])
def test_return_sequences(options: dict[str, Any]) -> None:
    """Each row is drawn on its own; the same seed gives the same text, and another one another."""
    options = {**options, "do_sample": True, "num_return_sequences": 4, "max_new_tokens": 8}
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(ours(SINGLE, **options).tolist())
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(row) for row in runs[0]}) > 1


def test_draws_through_the_processors_are_the_stock_ones() -> None:
    options = {"do_sample": True, "typical_p": 0.9, "max_new_tokens": 8, "eos_token_id": ends(MASKED)}
    torch.manual_seed(3)
    expected = stock(MASKED, **options)
    torch.manual_seed(3)
    assert ours(MASKED, **options).tolist() == expected.tolist()


def test_a_top_p_of_zero_leaves_the_likeliest_token() -> None:
    options = {"do_sample": True, "top_p": 0.0, "max_new_tokens": 6}
    assert (
        ours(BATCH, **options).tolist() == stock(BATCH, **options).tolist() == stock(BATCH, max_new_tokens=6).tolist()
    )


def test_greedy_text_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    ours(SINGLE, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)

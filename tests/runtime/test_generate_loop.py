"""Slots: waves, capacity, and that they are free again after whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashnorm.errors import CapacityError, Refusal
from flashnorm.runtime.generate import generate
from tests.runtime.plain_slots import PlainSlots
from tests.runtime.test_generate import MASKED, MODEL, PAD, SINGLE, ends, ours, stock

MANY = torch.randint(1, 256, (7, 5), generator=torch.Generator().manual_seed(0))


class Interrupted(PlainSlots):
    """Ctrl-C in the middle of a call, given by its name and its count."""

    def __init__(self, call: str, count: int) -> None:
        super().__init__(MODEL)
        self._call, self._count = call, count

    def _tick(self, call: str) -> None:
        if call == self._call:
            self._count -= 1
            if not self._count:
                raise KeyboardInterrupt

    def prefill(self, *arguments: Any) -> Tensor:
        answer = super().prefill(*arguments)
        self._tick("prefill")  # the slot is taken by now
        return answer

    def advance(self, active: Sequence[int]) -> Tensor:
        self._tick("advance")
        return super().advance(active)

    def decode(self, tokens: Any) -> Tensor:
        self._tick("decode")
        return super().decode(tokens)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}], ids=str)
@pytest.mark.parametrize("slots", [1, 3, 7])
def test_more_prompts_than_slots_run_in_waves(slots: int, options: dict[str, Any]) -> None:
    inputs = {"input_ids": MANY}
    options = {**options, "max_new_tokens": 9, "eos_token_id": ends(inputs)}
    assert ours(inputs, PlainSlots(MODEL, slots), **options).tolist() == stock(inputs, **options).tolist()


def test_slots_that_are_taken_are_left_alone() -> None:
    slots = PlainSlots(MODEL, 3)
    slots.prefill(1, [4, 5])
    answer = generate(MODEL, slots, MANY, max_new_tokens=6)
    assert answer.tolist() == stock({"input_ids": MANY}, max_new_tokens=6).tolist()
    assert slots.free_slots() == (0, 2)
    assert slots.length(1) == 2


def test_finished_rows_leave_the_batch() -> None:
    """Fed: the prompts, then every token but the last of each row, and one that was under way when a row ended."""
    slots = PlainSlots(MODEL)
    answer = ours(MASKED, slots, max_new_tokens=30, eos_token_id=ends(MASKED), pad_token_id=256)
    new = (answer[:, 4:] != 256).sum(1)
    assert slots.fed == int(MASKED["attention_mask"].sum() + new.sum())


@pytest.mark.parametrize(("call", "count"), [("prefill", 1), ("prefill", 2), ("advance", 1), ("advance", 4)])
def test_an_interruption_leaves_the_slots_free(call: str, count: int) -> None:
    slots = Interrupted(call, count)
    with pytest.raises(KeyboardInterrupt):
        generate(MODEL, slots, **MASKED, max_new_tokens=8)
    assert ours(MASKED, slots, max_new_tokens=8).tolist() == stock(MASKED, max_new_tokens=8).tolist()


def test_an_interruption_between_processors() -> None:
    slots = Interrupted("decode", 3)
    with pytest.raises(KeyboardInterrupt):
        generate(MODEL, slots, **MASKED, max_new_tokens=8, no_repeat_ngram_size=2)
    assert slots.free_slots() == (0, 1, 2, 3)


def test_a_streamer_that_fails_leaves_the_slots_free() -> None:
    class Failing:
        def put(self, value: Tensor) -> None:
            if value.ndim == 1:
                raise OSError("broken pipe")

    slots = PlainSlots(MODEL)
    with pytest.raises(OSError, match="broken pipe"):
        generate(MODEL, slots, **SINGLE, max_new_tokens=8, streamer=Failing())
    assert slots.free_slots() == (0, 1, 2, 3)


def test_the_last_token_needs_no_room() -> None:
    slots = PlainSlots(MODEL, max_length=12)  # 5 of the prompt, 7 of the new ones
    assert ours(SINGLE, slots, max_new_tokens=8).shape == (1, 13)


def test_padding_needs_no_room() -> None:
    padded = {"input_ids": torch.full((1, 40), PAD), "attention_mask": torch.zeros(1, 40, dtype=torch.long)}
    padded["input_ids"][0, -2:], padded["attention_mask"][0, -2:] = 7, 1
    assert ours(padded, PlainSlots(MODEL, max_length=9), max_new_tokens=8).shape == (1, 48)


@pytest.mark.parametrize("options", [{"max_new_tokens": 9}, {"max_length": 14}], ids=str)
def test_out_of_length_is_told_before_anything_runs(options: dict[str, int]) -> None:
    slots = PlainSlots(MODEL, max_length=12)
    with pytest.raises(CapacityError) as caught:
        generate(MODEL, slots, **SINGLE, **options)
    assert str(caught.value) == (
        "a prompt of 5 tokens and 9 new ones need 13 positions, but the model was accelerated with max_length=12; "
        "ask for at most 8 with max_new_tokens, or accelerate with a larger max_length"
    )
    assert slots.fed == 0


def test_out_of_slots() -> None:
    slots = PlainSlots(MODEL, 1)
    slots.prefill(0, [1])
    with pytest.raises(CapacityError, match="all 1 slots are taken; free one, or accelerate with a larger max_batch"):
        generate(MODEL, slots, **SINGLE, max_new_tokens=2)


def test_a_prompt_of_nothing_but_padding() -> None:
    mask = MASKED["attention_mask"].clone()
    mask[2] = 0
    with pytest.raises(Refusal, match="prompt 2 holds nothing but padding"):
        generate(MODEL, PlainSlots(MODEL), MASKED["input_ids"], attention_mask=mask, max_new_tokens=2)

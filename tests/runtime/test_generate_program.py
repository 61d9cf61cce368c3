"""`generate` on the real decode program, in plain torch: the ids of stock Transformers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from flashnorm.errors import CapacityError
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.generate import generate
from tests.runtime.decode.models import tiny, tokens

LENGTH, PAD = 64, 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": None},
        {},
        {"eos_token_id": [2, 17, 40, 63], "min_new_tokens": 4},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_greedy_ids(family: str, slots: int, options: dict[str, Any]) -> None:
    model = tiny(family)
    ids = torch.full((4, 12), PAD)
    for row, length in enumerate((12, 5, 9, 1)):
        ids[row, 12 - length :] = torch.tensor(tokens(length, seed=row))
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    expected = model.generate(**inputs, max_new_tokens=24, **options)
    program = Program(read_spec(model, max_length=LENGTH), slots=slots)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this call of generate")
        answer = generate(model, program, **inputs, max_new_tokens=24, **options)
    assert answer.tolist() == expected.tolist()
    assert program.free_slots() == tuple(range(slots))


def test_a_sequence_is_drawn_alike_alone_and_among_others() -> None:
    """A row's draws go by its own seed; and after an error the program is usable."""
    model = tiny("llama")
    program = Program(read_spec(model, max_length=LENGTH), slots=3)
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 20, "eos_token_id": None}
    ids = torch.tensor([tokens(6)])
    runs = []
    for rows in (1, 3):
        torch.manual_seed(5)
        runs.append(generate(model, program, ids.expand(rows, -1), **options))
        with pytest.raises(CapacityError, match="max_length=64"):
            generate(model, program, ids, max_new_tokens=60)
    assert runs[0][0].tolist() == runs[1][0].tolist() != runs[1][1].tolist()

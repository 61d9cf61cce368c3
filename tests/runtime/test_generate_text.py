from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from flashnorm.errors import Refusal
from flashnorm.runtime.generate_text import GeneratedText, encode_prompt, stream_text
from tests.verify.tiny import tokenizer

WORDS = tokenizer()
STEP = 0.02  # seconds


class Scripted:
    """A model that says what it was made to say, a token at a time, and at a known pace."""

    def __init__(self, text: str) -> None:
        self.new = WORDS(text, return_tensors="pt")["input_ids"]
        self.options: dict[str, Any] = {}

    def generate(self, input_ids: Tensor, attention_mask: Tensor, streamer: Any, **options: Any) -> Tensor:
        self.options = options
        assert attention_mask.tolist() == torch.ones_like(input_ids).tolist()
        streamer.put(input_ids)
        for token in self.new[0]:
            time.sleep(STEP)
            streamer.put(token.reshape(1))
        streamer.end()
        return torch.cat([input_ids, self.new], 1)


def said(text: str, **options: Any) -> tuple[GeneratedText, list[str], Scripted]:
    pieces: list[str] = []
    model: Any = Scripted(text)
    answer = stream_text(model, WORDS, encode_prompt(WORDS, "Count:"), pieces.append, **options)
    return answer, pieces, model


def test_words_come_one_by_one_and_the_prompt_does_not() -> None:
    answer, pieces, model = said("one two three four", max_new_tokens=18)
    assert answer.text == "".join(pieces) == "one two three four"
    assert len(pieces) >= 4
    assert model.options == {"max_new_tokens": 18}


def test_times() -> None:
    answer, _, _ = said("a b c d e f")
    assert (answer.prompt_tokens, answer.new_tokens) == (6, 11)
    assert answer.first_token_s >= STEP
    assert answer.last_token_s - answer.first_token_s >= 10 * STEP
    assert answer.tokens_per_s is not None
    assert answer.tokens_per_s <= 1 / STEP
    assert answer.tokens_per_s == 10 / (answer.last_token_s - answer.first_token_s)
    assert answer.mean_context == 6 + 5


def test_one_token_has_no_rate() -> None:
    answer, _, _ = said("a")
    assert answer.tokens_per_s is None


def test_prompts() -> None:
    plain, chatty = tokenizer(), tokenizer()
    chatty.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}>"

    def text(words: Any, chat: bool | None) -> str:
        return words.decode(encode_prompt(words, "Hi", chat)[0])

    assert text(plain, None) == text(plain, False) == text(chatty, False) == "Hi"
    assert text(chatty, None) == text(chatty, True) == "user:Hi>"
    with pytest.raises(Refusal, match="no chat template"):
        encode_prompt(plain, "Hi", chat=True)
    with pytest.raises(Refusal, match="makes no token of the prompt"):
        encode_prompt(plain, "")

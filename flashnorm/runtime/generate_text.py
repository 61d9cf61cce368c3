"""From a prompt to text that arrives piece by piece, with the time of each token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TextStreamer

from flashnorm.errors import Refusal


@dataclass(frozen=True)
class GeneratedText:
    """What came out, and how fast. Times in seconds, from the call of `generate`."""

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    last_token_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one per second; None where there is only one."""
        steps = self.new_tokens - 1
        return steps / (self.last_token_s - self.first_token_s) if steps else None

    @property
    def mean_context(self) -> float:
        """How many tokens lay in the cache at a step, on average."""
        return self.prompt_tokens + (self.new_tokens - 1) / 2


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool | None = None) -> Tensor:
    """The prompt's ids (1, length), as one user's turn of the chat template, or raw.

    `chat`: None takes the template where there is one. Raises `Refusal` where there is none to take, or no token.
    """
    if chat and not tokenizer.chat_template:
        raise Refusal("the tokenizer has no chat template; leave out --chat, or give the whole conversation with --raw")
    if tokenizer.chat_template and chat is not False:
        turns = [{"role": "user", "content": prompt}]
        encoded: Any = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if not encoded["input_ids"].numel():
        raise Refusal("the tokenizer makes no token of the prompt; give some text")
    return encoded["input_ids"].long()


def stream_text(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    write: Callable[[str], None],
    **options: Any,
) -> GeneratedText:
    """Run `model.generate` on one prompt, `ids` (1, length), and pass the text on as it comes, special tokens left out.

    `options` go to `generate`. `write` is given pieces that, joined, are the text.
    """
    streamer = _TimedStreamer(tokenizer, write)
    generation_model: Any = model
    start = time.perf_counter()
    sequences = generation_model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options
    )
    new = sequences[0, ids.shape[1] :]
    return GeneratedText(
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        prompt_tokens=ids.shape[1],
        new_tokens=len(new),
        first_token_s=streamer.times[0] - start,
        last_token_s=streamer.times[-1] - start,
    )


class _TimedStreamer(TextStreamer):
    """`times`: when each token had arrived on the host."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._write = write

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._write(text)

"""The slot interface over a stock model: one `DynamicCache` for each sequence, the device's sampling on top."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from flashnorm.errors import CapacityError
from flashnorm.runtime.decode.sampling import Sampling, SamplingTable

VOCABULARY = 256


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Random weights in float64: rounding cannot decide between two tokens. No end-of-sequence token of its own."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double().eval()


@dataclass
class _Sequence:
    cache: DynamicCache
    length: int = 0


class PlainSlots:
    """See `flashnorm.runtime.decode.slots.Slots`. `fed` counts the tokens that went through the model, for tests."""

    def __init__(self, model: PreTrainedModel, slots: int = 4, max_length: int = 64) -> None:
        self._model, self._held = model, dict[int, _Sequence]()
        self._table = SamplingTable(slots, model.config.vocab_size, model.device)
        self._tokens = torch.zeros(slots, dtype=torch.int64)
        self._answer = torch.zeros_like(self._tokens)  # one buffer for every step's answer, as a replayed graph has
        self.slots, self.max_length, self.fed = slots, max_length, 0
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def free_slots(self) -> tuple[int, ...]:
        return tuple(slot for slot in range(self.slots) if slot not in self._held)

    def length(self, slot: int) -> int:
        return self._held[slot].length

    def prefill(self, slot: int, ids: Sequence[int] | Tensor, sampling: Sampling = Sampling()) -> Tensor:  # noqa: B008
        if slot not in self.free_slots():
            raise CapacityError(f"slot {slot} is taken")
        self._held[slot] = _Sequence(DynamicCache(config=self._model.config))
        self._table.set(slot, sampling)
        return self._feed(slot, torch.as_tensor(ids))

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        return torch.stack([self._feed(slot, torch.tensor([token])) for slot, token in tokens.items()])

    def advance(self, active: Sequence[int]) -> Tensor:
        for slot in active:
            self._feed(slot, self._tokens[slot].reshape(1))
        return self.chosen(active)

    def chosen(self, slots: Sequence[int]) -> Tensor:
        self._answer[: len(slots)] = self._tokens[list(slots)]
        return self._answer[: len(slots)]

    def free(self, slot: int) -> None:
        del self._held[slot]

    @torch.no_grad()
    def _feed(self, slot: int, ids: Tensor) -> Tensor:
        held = self._held[slot]
        held.length += len(ids)
        self.fed += len(ids)
        if held.length > self.max_length:
            raise CapacityError(f"slot {slot} is full")
        logits = self._model(ids[None], **{self._cache_name: held.cache}).logits[0, -1].float()
        self._table.seen[slot, ids] = True
        place = torch.tensor([slot])
        self._tokens[slot] = self._table.choose(logits[None], place, torch.tensor([held.length]))[0]
        return logits

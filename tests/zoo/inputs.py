"""Inputs that run a tiny model's whole language part, and the logits they give."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.rules import FIRST_SPECIAL_ID

BATCH, LENGTH, DECODER_LENGTH = 2, 12, 7
_FIRST_PLAIN_ID = 5


def forward_inputs(model: torch.nn.Module, family: str) -> dict[str, Any]:
    """Deterministic keyword arguments for `model`: (2, 12) token ids, and (2, 7) decoder ids for `seq2seq`."""
    inputs: dict[str, Any] = {"input_ids": _tokens(LENGTH, seed=1)}
    if family == "seq2seq":
        inputs["decoder_input_ids"] = _tokens(DECODER_LENGTH, seed=2)
    return inputs


def logits(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The logits of one forward pass without a cache, (batch, tokens, vocabulary) for a language model."""
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def _tokens(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_FIRST_PLAIN_ID, FIRST_SPECIAL_ID, (BATCH, length), generator=generator)

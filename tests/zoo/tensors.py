"""Deterministic tensors to feed a model with."""

from __future__ import annotations

import torch

from tests.zoo.rules import FIRST_SPECIAL_ID

BATCH, LENGTH, DECODER_LENGTH, ENCODER_LENGTH = 2, 12, 7, 5
_FIRST_PLAIN_ID = 5


def tokens(length: int, seed: int, batch: int = BATCH, high: int = FIRST_SPECIAL_ID) -> torch.Tensor:
    """(batch, length) token ids that no config gives a role."""
    return torch.randint(_FIRST_PLAIN_ID, high, (batch, length), generator=torch.Generator().manual_seed(seed))


def states(*shape: int, seed: int) -> torch.Tensor:
    """(2, *shape) standard normal numbers in place of hidden states or pixels."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(seed))

"""Engines for the battery's tests, and how far apart their right answers lie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.rounding import Rounding, measure_rounding
from tests.verify.tiny import VOCABULARY, tiny_model


def tokens(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """(count,) random ids."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def engine_of(model: nn.Module, family: str = "llama", dtype: torch.dtype = torch.float32) -> Engine:
    """`model` is the sound one of the family, or that with a fault: the oracle is the sound one's."""
    return model_engine(model, family, lambda: tiny_model(family, dtype))


def rounding_of(family: str, dtype: torch.dtype, count: int = 96) -> Rounding:
    """What rounding does to the sound model."""
    return measure_rounding(engine_of(tiny_model(family, dtype), family, dtype), tokens(count)[None])

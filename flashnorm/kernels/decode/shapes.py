"""What a layer's attention is, as its kernel and its reference take it; importable where Triton is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """The static part of a layer's attention. `rotary`: half the rotated channels, 0 without rotation."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    window: int | None = None
    rotary: int = 0
    interleaved: bool = False


@dataclass(frozen=True)
class QkNorm:
    """Norms over each head's channels; an `eps` of None means no norm.

    Gains: (head_dim,) of any floating dtype, or None where they are 1.
    """

    q_eps: float | None = None
    q_gain: Tensor | None = None
    k_eps: float | None = None
    k_gain: Tensor | None = None


@dataclass(frozen=True)
class StepShape:
    """What a whole model's step is compiled for.

    `rotary`: half the turning channels; `gated`: the MLP has a gate; `capped`: attention's scores are; `gains`: some
    norm before a linear has a gain.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    interleaved: bool
    gated: bool
    activation: str
    capped: bool
    gains: bool
    dtype: torch.dtype

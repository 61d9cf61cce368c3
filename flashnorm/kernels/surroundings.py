"""What surrounds a product of few rows and a weight, as the kernels of decode steps take it: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Surroundings:
    """What surrounds the product. `gain`: (K,), `bias`: (N,), or (2N,) where `gated`; `residual`: (rows, N).

    `eps` None: no norm before. `gated`: the weight holds gate and up, gate first. The multiplier comes last but for the
    residual, which may be the buffer that is written.
    """

    eps: float | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None
    activation: str | None = None
    gated: bool = False
    multiplier: float = 1.0
    residual: Tensor | None = None

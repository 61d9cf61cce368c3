"""Llama 3's RoPE scaling, recovered from the frequency factors that a GGUF stores in its place."""

from __future__ import annotations

import math
from typing import Any

import torch

FREQUENCY_FACTORS = "rope_freqs.weight"

# What every Llama 3.1, 3.2 and 3.3 model has; only `factor` differs between them.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_CONTEXT = 1.0, 4.0, 8192
# A factor is a dozen fp32 operations (6e-8 each) on values whose differences lose at most two digits. Another
# scaling differs in the first digits.
RELATIVE_TOLERANCE = 1e-5


def llama3_rope(factors: torch.Tensor, current: dict[str, Any]) -> dict[str, Any] | None:
    """The `rope_parameters` of a config whose RoPE divides frequency i by `factors[i]`.

    `factors`: fp32, (head_dim / 2,). `current`: the config's parameters so far, with `rope_theta`. None when the
    factors are not those of Llama 3's formula: with wavelength l and original context C,
    1 where l < C/4, `factor` where l > C, and 1 / ((1 - s) / factor + s) with s = (C/l - 1) / 3 in between.
    """
    factor = float(factors.max())
    exact = _llama3_factors(2 * len(factors), current["rope_theta"], factor)
    if not torch.allclose(factors.double(), exact, rtol=RELATIVE_TOLERANCE, atol=0.0):
        return None
    return current | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }


def _llama3_factors(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """fp64, (head_dim / 2,)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = ORIGINAL_CONTEXT / (2 * math.pi * theta**exponents)  # of each frequency within the original context
    smooth = ((turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)

"""Perplexity on a text, window by window.

In arithmetic no coarser than fp32, with the weights as they are stored: what is compared is the checkpoints. Rounding
activations to bf16 puts noise on either model's perplexity that hides the fold's part: on 4,088 tokens of SmolLM2 the
difference has a standard error of 0.09%, against 0.014% in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashnorm.verify.forward import TransformersModel, logits_of


@dataclass(frozen=True)
class Perplexity:
    """Both perplexities, their relative difference, and the number of tokens that they are a mean over."""

    reference: float
    candidate: float
    relative_difference: float
    tokens: int


def token_losses(model: TransformersModel, windows: torch.Tensor, prefix: int) -> torch.Tensor:
    """-log p of every token of `windows` (count, length) from position `prefix` on. Returns (tokens,) fp64."""
    losses = []
    for window in windows:
        logits = logits_of(model, window[None])[prefix - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, window[prefix:], reduction="none").double())
    return torch.cat(losses)


def compare_perplexity(reference: torch.Tensor, candidate: torch.Tensor) -> Perplexity:
    """From the losses (tokens,) of both models on the same tokens."""
    ours, theirs = reference.mean(), candidate.mean()
    return Perplexity(
        reference=float(ours.exp()),
        candidate=float(theirs.exp()),
        relative_difference=float((theirs - ours).expm1()),
        tokens=len(reference),
    )

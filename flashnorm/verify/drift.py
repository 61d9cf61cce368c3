"""How far logits lie from the exact ones."""

from __future__ import annotations

import torch

_ROWS = 32  # positions in fp64 at a time: temporaries stay small whatever the vocabulary


def squared_drift(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Squared distance at each position, up to a constant added to all of a position's logits.

    Such a constant changes no probability, yet most of the plain distance may lie in it: one number with one rounding
    error for the whole position, so a poor statistic. Both: (positions, vocabulary). Returns (positions,) fp64.
    """
    return torch.cat(
        [_centred(ours.double() - theirs.double()).square().sum(-1) for ours, theirs in _rows(logits, exact)]
    )


def relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """||logits - exact|| / ||exact|| over all positions, nothing taken out."""
    above = sum(float((ours.double() - theirs.double()).square().sum()) for ours, theirs in _rows(logits, exact))
    return (above / float(torch.linalg.vector_norm(exact, dtype=torch.float64)) ** 2) ** 0.5


def _centred(error: torch.Tensor) -> torch.Tensor:
    return error - error.mean(-1, keepdim=True) if error.shape[-1] > 1 else error


def _rows(logits: torch.Tensor, exact: torch.Tensor) -> zip[tuple[torch.Tensor, torch.Tensor]]:
    return zip(logits.split(_ROWS), exact.split(_ROWS), strict=True)

"""A plain callable as an engine: a kernel author's forward, an ONNX session, anything that takes ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashnorm.errors import ShapeError
from flashnorm.verify.engines.engine import Begin, Engine, Fresh


def callable_engine(
    fresh: Fresh,
    vocabulary: int,
    *,
    name: str = "callable",
    exact: Fresh | None = None,
    begin: Begin | None = None,
    limit: int = 512,
) -> Engine:
    """`fresh`: ids (rows, length) int64 -> logits (rows, length, vocabulary). `begin`: rows -> a `Decoding`.

    `exact`: the same logits in fp64, which sharpens every bound; without it, rounding is estimated from the answers
    themselves. Raises `ShapeError` where the answer has another shape.
    """
    probe = _checked(fresh, vocabulary)(torch.zeros(1, 2, dtype=torch.int64))
    return Engine(name, vocabulary, probe.dtype, _checked(fresh, vocabulary), exact, begin=begin, limit=limit)


def _checked(fresh: Fresh, vocabulary: int) -> Callable[[Tensor], Tensor]:
    def run(ids: Tensor) -> Tensor:
        logits = fresh(ids)
        if logits.shape != (*ids.shape, vocabulary):
            raise ShapeError(
                f"ids of shape {tuple(ids.shape)} gave logits of shape {tuple(logits.shape)}; they must be "
                f"{(*ids.shape, vocabulary)}: rows, positions, vocabulary"
            )
        return logits

    return run

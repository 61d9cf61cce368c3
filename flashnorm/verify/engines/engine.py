"""The subject of the battery: what yields logits, described by what it can be asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashnorm.runtime.decode.slots import Slots


class Decoding(Protocol):
    """A batch of sequences that grow together against a cache."""

    def extend(self, ids: Tensor) -> Tensor:
        """Append `ids` (rows, count) int64 to the rows' sequences.

        Returns the logits (rows, count, vocabulary) at each of them, or (rows, 1, vocabulary) at the last one where the
        engine gives no more.
        """

    def close(self) -> None:
        """Let go of the cache."""


Fresh = Callable[[Tensor], Tensor]  # ids (rows, length) -> logits (rows, length, vocabulary)
Padded = Callable[[Tensor, Tensor], Tensor]  # the same with a mask (rows, length), 1 where a token counts
Begin = Callable[[int], Decoding]  # rows -> empty sequences


@dataclass(frozen=True)
class Engine:
    """What can be asked of a subject; what it cannot do is None, and the checks that need it say so.

    `fresh` computes whole sequences without a cache: the answer that a cache has to reproduce. `exact` is the same in
    arithmetic so fine that its rounding does not count, for the very weights that `fresh` reads. `begin` starts cached
    sequences; where it replays captured graphs, `eager` starts those that take the same steps launch by launch.
    `slots` is the interface of a server that lets them join and leave. `limit`: tokens of one sequence. `chunks`:
    whether `Decoding.extend` gives the logits of every token.
    """

    name: str
    vocabulary: int
    dtype: torch.dtype
    fresh: Fresh
    exact: Fresh | None = None
    padded: Padded | None = None
    begin: Begin | None = None
    eager: Begin | None = None
    slots: Slots | None = None
    limit: int = 2048
    window: int | None = None  # tokens that a sliding window reaches back, where there is one
    chunks: bool = True
    undecodable: str = "it has no cache"  # why `begin` is None, where it is

"""What is asked of everything that is timed: to show that it computes the model, then to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

CHECKED = 16  # steps whose logits are compared before anything is timed


@dataclass(frozen=True)
class Trace:
    """A greedy run: `logits` (rows, count, vocabulary) after each of the last `count` tokens of `ids` (rows, length).

    `chosen`: (rows, count), the tokens that were taken after them.
    """

    ids: Tensor
    logits: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Memory:
    """Bytes on the device: the model's, the cache as stated, and what else was allocated at the worst moment."""

    weights: int
    cache: int
    beyond: int


class Contender(Protocol):
    """One way to run a model. `tokens`: steps, or prompts' tokens, that a sample is the mean of."""

    tokens: int

    def trace(self) -> Trace:
        """What it computes, from the very program that `run` times."""

    def run(self) -> float:
        """Microseconds of a step, or of a prompt: the mean of one run, what comes before the steps left out."""

    def close(self) -> None:
        """Leave the model as it was."""

"""What the benchmarks of one operation share: a row of timings, and the check before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashnorm.bench.baselines import BARE
from flashnorm.errors import CheckFailed
from flashnorm.kernels.bounds import Expected, exceeds
from flashnorm.kernels.timing import Timing

OURS = "flashnorm"


@dataclass(frozen=True)
class TimedRow:
    """One shape: the worst error of our output in units of its bound, every timing, and the limit, in microseconds.

    `n`: outputs.
    """

    m: int
    k: int
    n: int
    error: float
    timings: dict[str, Timing]
    limit: float

    @property
    def ours(self) -> float:
        return self.timings[OURS].median

    @property
    def bare(self) -> float:
        return self.timings[BARE].median


def checked_error(what: str, call: Callable[[int], object], out: torch.Tensor, expected: Expected) -> float:
    """The worst error of what `call(0)` writes to `out`, in units of its bound; the buffer is poisoned before.

    Raises `CheckFailed` where it lies outside: nothing wrong is timed.
    """
    out.fill_(float("nan"))
    call(0)
    error = exceeds(out, expected)
    if not error <= 1:
        raise CheckFailed(f"{what} is wrong: its error is {error:.3g} times the bound")
    return error

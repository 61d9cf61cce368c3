"""`flashnorm bench op`: the deferred norm against every norm-then-linear, at 18 shapes.

All contenders of a shape are timed side by side, as CUDA graphs, weights cold. The record keeps every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

import torch

from flashnorm.bench.baselines import BARE, Baseline, baselines
from flashnorm.bench.limits import Ceilings
from flashnorm.kernels.bounds import exceeds, expected_rms_linear
from flashnorm.kernels.configs import Config
from flashnorm.kernels.dispatch import choose, problem_of
from flashnorm.kernels.ops import rms_linear
from flashnorm.kernels.timing import ColdOperands, Timing, cold_operands, time_side_by_side

WEIGHTS = ((576, 960), (2048, 3072), (4096, 6144))
ROWS = (1, 16, 64, 256, 1024, 4096)
OURS = "flashnorm"
EPS = 1e-6
REPEATS = 30
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One shape: what ran, how far its worst output lay from fp64 in units of the bound, every timing, the limit."""

    m: int
    k: int
    n: int
    config: Config
    error: float
    timings: dict[str, Timing]
    limit: float

    @property
    def ours(self) -> float:
        return self.timings[OURS].median

    @property
    def bare(self) -> float:
        return self.timings[BARE].median

    @property
    def best_baseline(self) -> str:
        """The fastest of those that do norm and linear both."""
        return min(self.timings.keys() - {OURS, BARE}, key=lambda name: self.timings[name].median)

    @property
    def best(self) -> float:
        return self.timings[self.best_baseline].median

    @property
    def won(self) -> bool:
        """Whether the gain over the best baseline clears the spreads of both."""
        theirs, ours = self.timings[self.best_baseline], self.timings[OURS]
        return theirs.median - ours.median > theirs.spread + ours.spread


@dataclass(frozen=True)
class Summary:
    """Rows won, the geometric mean of time over the best baseline, and rows not slower than the linear alone."""

    rows: int
    won: int
    ratio: float
    free: int


def summarise(rows: Sequence[Row]) -> Summary:
    """The figures of a whole run."""
    return Summary(
        len(rows),
        sum(row.won for row in rows),
        geometric_mean(row.ours / row.best for row in rows),
        sum(row.ours <= row.bare for row in rows),
    )


def measure(ceilings: Ceilings, device: torch.device, *, compiled: bool) -> Iterator[Row]:
    """Time every shape, smallest first."""
    contenders = baselines(compiled=compiled)
    for k, n in WEIGHTS:
        for m in ROWS:
            yield _measure_row(m, k, n, contenders, ceilings, device)


def _measure_row(
    m: int, k: int, n: int, contenders: dict[str, Baseline], ceilings: Ceilings, device: torch.device
) -> Row:
    operands = cold_operands(m, k, n, _DTYPE, device)
    gain = torch.ones(k, dtype=_DTYPE, device=device)
    calls: dict[str, Callable[[int], object]] = {
        name: partial(_call_baseline, baseline, operands, gain) for name, baseline in contenders.items()
    }
    calls[OURS] = partial(_call_ours, operands)
    timings = time_side_by_side(calls, len(operands), REPEATS)
    error = _error(operands)
    config = choose(problem_of(operands.x[0], operands.weight[0], None, operands.out[0]), device)
    return Row(m, k, n, config, error, timings, ceilings.limit(m, k, n, _DTYPE.itemsize))


def _call_baseline(baseline: Baseline, operands: ColdOperands, gain: torch.Tensor, index: int) -> object:
    return baseline(operands.x[index], operands.weight[index], gain, EPS, operands.out[index])


def _call_ours(operands: ColdOperands, index: int) -> object:
    return rms_linear(operands.x[index], operands.weight[index], EPS, out=operands.out[index])


def _error(operands: ColdOperands) -> float:
    """The worst error of our result, into a poisoned buffer, in units of the bound for a rounded norm."""
    out = operands.out[0].fill_(float("nan"))
    _call_ours(operands, 0)
    return exceeds(out, expected_rms_linear(operands.x[0], operands.weight[0], EPS, rounds_input=True))

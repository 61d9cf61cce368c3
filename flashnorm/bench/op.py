"""`flashnorm bench op`: the deferred norm against norm then linear, and its gated form against norm, linear, gate.

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
from flashnorm.bench.timed import OURS, TimedRow, checked_error
from flashnorm.kernels.configs import Config
from flashnorm.kernels.dispatch import choose, problem_of
from flashnorm.kernels.gated_ops import rms_swiglu_linear
from flashnorm.kernels.ops import rms_linear
from flashnorm.kernels.timing import cold_operands, time_side_by_side
from flashnorm.kernels.tuning import EPS, Shape, expected

WEIGHTS = ((576, 960), (2048, 3072), (4096, 6144))
WIDE = (4096, 28672)  # read by one row only: the figure asked there is bandwidth
GATED = ((2048, 8192), (4096, 14336))  # K and outputs; the weight has twice as many rows
ROWS = (1, 16, 64, 256, 1024, 4096)
REPEATS = 30
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Row(TimedRow):
    """Also what ran. With an `activation` the weight has 2n rows."""

    activation: str | None
    config: Config

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


def measure(ceilings: Ceilings, device: torch.device, shapes: Sequence[Shape], *, compiled: bool) -> Iterator[Row]:
    """Time the shapes one after another. Raises `CheckFailed` where our result is outside its bound."""
    for shape in shapes:
        yield _measure_row(shape, baselines(shape.activation, compiled=compiled), ceilings, device)


def linear_shapes() -> list[Shape]:
    """The norm then linear, smallest weight first."""
    return [Shape(m, k, n) for k, n in WEIGHTS for m in ROWS] + [Shape(1, *WIDE)]


def gated_shapes() -> list[Shape]:
    """The norm, gate and up projection and SwiGLU."""
    return [Shape(m, k, n, "silu") for k, n in GATED for m in ROWS]


def _measure_row(shape: Shape, contenders: dict[str, Baseline], ceilings: Ceilings, device: torch.device) -> Row:
    operands = cold_operands(shape.m, shape.k, shape.rows, _DTYPE, device)
    outs = [torch.empty(shape.m, shape.n, dtype=_DTYPE, device=device) for _ in range(len(operands))]
    gain = torch.ones(shape.k, dtype=_DTYPE, device=device)

    def theirs(baseline: Baseline, index: int) -> object:
        return baseline(operands.x[index], operands.weight[index], gain, EPS, operands.out[index])

    def ours(index: int) -> object:
        x, weight, out = operands.x[index], operands.weight[index], outs[index]
        if shape.activation is None:
            return rms_linear(x, weight, EPS, static_weight=True, out=out)
        return rms_swiglu_linear(x, weight, EPS, activation=shape.activation, static_weight=True, out=out)

    config = choose(problem_of(operands.x[0], operands.weight[0], None, outs[0], activation=shape.activation), device)
    right = expected(shape, config, operands.x[0], operands.weight[0])
    error = checked_error(f"{config} for {shape}", ours, outs[0], right)
    calls: dict[str, Callable[[int], object]] = {name: partial(theirs, call) for name, call in contenders.items()}
    timings = time_side_by_side({**calls, OURS: ours}, len(operands), REPEATS)
    limit = ceilings.limit(shape.m, shape.k, shape.rows, _DTYPE.itemsize)
    return Row(shape.m, shape.k, shape.n, error, timings, limit, shape.activation, config)

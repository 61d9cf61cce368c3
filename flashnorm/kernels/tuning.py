"""Tuning: every candidate is compared with fp64 before it may be timed; the fastest right one enters the table.

Checks run in several processes, because compiling is what takes long; the compiled kernels reach the timing process
through Triton's cache on disk. Timing runs in one process, in rounds: all candidates briefly, then the best few again,
side by side.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from flashnorm.errors import CheckFailed
from flashnorm.kernels.bounds import Expected, exceeds, expected_rms_linear, expected_rms_swiglu_linear
from flashnorm.kernels.candidates import candidates
from flashnorm.kernels.configs import Config, NormLinear, Skinny, Streamed, TmaGemm
from flashnorm.kernels.dispatch import cuda_runs
from flashnorm.kernels.run import run
from flashnorm.kernels.timing import cold_operands, time_side_by_side

EPS = 1e-6
FINALISTS = 6
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """(m, k) x and (m, n) output; with an `activation` the weight has 2n rows, gate first."""

    m: int
    k: int
    n: int
    activation: str | None = None

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.n if self.activation is None else 2 * self.n


@dataclass
class Tuned:
    """The fastest right configuration of a shape, in microseconds; what was dropped, with the reason."""

    shape: Shape
    config: Config
    microseconds: float
    spread: float
    tried: int
    dropped: dict[str, str] = field(default_factory=dict)


def tune(shapes: Sequence[Shape], device: torch.device) -> Iterable[Tuned]:
    """Check, time and choose for each shape in turn. Needs a CUDA device and Triton."""
    jobs = [(shape, config) for shape in shapes for config in candidates_of(shape)]
    workers = max(1, min(16, (os.cpu_count() or 2) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        verdicts = dict(zip(jobs, pool.starmap(fault, jobs, chunksize=8), strict=True))
    for shape in shapes:
        yield _choose(shape, {config: why for (of, config), why in verdicts.items() if of == shape}, device)


def best_of(shape: Shape, configs: Sequence[Config], device: torch.device) -> Tuned:
    """The same for a few configurations, without processes of its own. Raises `CheckFailed` where none is right."""
    return _choose(shape, {config: fault(shape, config) for config in configs}, device)


def candidates_of(shape: Shape) -> list[Config]:
    """The candidates that can run here."""
    found = candidates(shape.m, shape.k, shape.n, gated=shape.activation is not None)
    hopper = cuda_runs(torch.device("cuda", torch.cuda.current_device()))
    return [config for config in found if hopper or not isinstance(config, (Skinny, Streamed, TmaGemm))]


def fault(shape: Shape, config: Config) -> str:
    """Why `config` may not be used for `shape`: empty if its output is right, complete and inside its buffer."""
    generator = torch.Generator("cuda").manual_seed(shape.m * 31 + shape.k)
    x = torch.randn(shape.m, shape.k, generator=generator, device="cuda").mul_(3).to(_DTYPE)
    weight = torch.randn(shape.rows, shape.k, generator=generator, device="cuda").mul_(0.02).to(_DTYPE)
    guarded = torch.full((shape.m + 2, shape.n), float("nan"), device="cuda", dtype=_DTYPE)
    try:
        run(config, x, weight, EPS, None, None, guarded[1:-1], shape.activation, static_weight=True)
        torch.cuda.synchronize()
    except Exception as error:  # Triton raises its own types for a tile that does not fit; the reason is reported
        return f"{type(error).__name__}: {error}"
    worst = exceeds(guarded[1:-1], expected(shape, config, x, weight))
    if not worst <= 1:
        return f"the error is {worst:.3g} times its bound"
    return "" if guarded[0].isnan().all() and guarded[-1].isnan().all() else "it wrote outside its output"


def expected(shape: Shape, config: Config, x: torch.Tensor, weight: torch.Tensor) -> Expected:
    """What `config` may give for `shape`: the plain sequence rounds more than the others."""
    plain = isinstance(config, NormLinear)
    if shape.activation is None:
        return expected_rms_linear(x, weight, EPS, rounds_input=plain)
    return expected_rms_swiglu_linear(x, weight, EPS, activation=shape.activation, plain_sequence=plain)


def _choose(shape: Shape, verdicts: dict[Config, str], device: torch.device) -> Tuned:
    operands = cold_operands(shape.m, shape.k, shape.rows, _DTYPE, device)
    out = [whole[:, : shape.n].contiguous() for whole in operands.out]

    def call(config: Config, index: int) -> None:
        x, weight = operands.x[index], operands.weight[index]
        run(config, x, weight, EPS, None, None, out[index], shape.activation, static_weight=True)

    right = [config for config, why in verdicts.items() if not why]
    if not right:
        raise CheckFailed(
            f"no configuration is right for {shape}; the first fails with: {next(iter(verdicts.values()))}"
        )
    first = {  # one graph at a time: hundreds held at once would fill the memory
        config: time_side_by_side({"": partial(call, config)}, len(operands), 7)[""].median for config in right
    }
    finalists = sorted(right, key=first.__getitem__)[:FINALISTS]
    again = time_side_by_side(
        {str(rank): partial(call, config) for rank, config in enumerate(finalists)}, len(operands), 25
    )
    best = min(again, key=lambda rank: again[rank].median)
    return Tuned(
        shape,
        finalists[int(best)],
        again[best].median,
        again[best].spread,
        len(verdicts),
        {str(config): why for config, why in verdicts.items() if why},
    )

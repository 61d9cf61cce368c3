"""Timing on the device: CUDA graphs of many calls, operands rotated so that weights always come from memory.

A graph holds one call per copy of the operands, or several where there are few copies, so that what a replay itself
costs is shared by many calls. The copies of the weight together exceed the L2 cache, so no call finds its weight there;
one replay divided by the number of calls is one sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnorm.kernels.capture import capturing

COLD_BYTES = 150_000_000  # two and a half times the L2 of an H200
LEAST_CALLS = 16  # of one replay, whose own cost, some microseconds, is no part of a call
WARM_REPLAYS = 3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, one value per replay."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the first and the last quartile."""
        first, _, last = statistics.quantiles(self.samples, n=4)
        return (last - first) / 2


@dataclass(frozen=True)
class ColdOperands:
    """Copies of (M, K) x, (N, K) weight and (M, N) out; call i uses the i-th of each."""

    x: tuple[Tensor, ...]
    weight: tuple[Tensor, ...]
    out: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.x)


def cold_operands(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> ColdOperands:
    """Random operands, as many copies as keep the weights out of the cache, at least 4 and at most 64."""
    copies = min(64, max(4, COLD_BYTES // (k * n * dtype.itemsize) + 1))
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).mul_(scale).to(dtype)

    return ColdOperands(
        tuple(normal(m, k, 1.0) for _ in range(copies)),
        tuple(normal(n, k, 0.02) for _ in range(copies)),
        tuple(torch.empty(m, n, dtype=dtype, device=device) for _ in range(copies)),
    )


def capture(call: Callable[[int], object], order: Sequence[int]) -> torch.cuda.CUDAGraph:
    """A graph of `call(index)` for each index of `order`, after one run outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in order:
            call(index)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for index in order:
            call(index)
    return graph


def time_side_by_side(
    contenders: Mapping[str, Callable[[int], object]], copies: int, repeats: int
) -> dict[str, Timing]:
    """Time each contender's graph of calls, taking turns, so that a drifting clock touches all alike.

    A contender is a function of the copy of the operands that it takes, below `copies`. A graph goes through them all,
    again and again until it has `LEAST_CALLS` calls.
    """
    order = [*range(copies)] * -(-LEAST_CALLS // copies)
    graphs = {name: capture(call, order) for name, call in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(WARM_REPLAYS + repeats):
        for name, graph in graphs.items():
            elapsed = _replay(graph)
            if turn >= WARM_REPLAYS:
                samples[name].append(elapsed * 1e3 / len(order))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)

"""Steps in buckets of 1, 2, 4, … rows, each captured as a CUDA graph at its first use, or run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashnorm.runtime.decode.state import State
from flashnorm.runtime.decode.step import Step

_WARMUPS = 2


@dataclass(frozen=True)
class _Captured:
    """A graph and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    tokens: Tensor


def bucket_of(rows: int) -> int:
    """The smallest power of two that holds so many rows."""
    return 1 << (rows - 1).bit_length()


def warm_up(work: Callable[[], object]) -> None:
    """Do what will be captured, beside the current stream: compiling and tuning must not be captured."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARMUPS):
            work()
    current.wait_stream(stream)


class Runner:
    """Runs a state's step for any set of slots."""

    def __init__(self, step: Step, state: State, *, capture: bool) -> None:
        self._step, self._state, self._capture = step, state, capture
        self._rows: dict[int, Tensor] = {}  # bucket -> the slots of its rows, on the device
        self._filled: dict[int, tuple[int, ...]] = {}  # bucket -> what its rows hold
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pool: Any = None  # all graphs' intermediates share it: they run one after the other

    def run(self, active: tuple[int, ...], *, greedy: bool) -> tuple[Tensor, Tensor]:
        """One step of the given slots: logits (rows, vocabulary) fp32 and the next tokens (rows,).

        Both are good until the next step, which may write where they lie.
        """
        bucket = bucket_of(len(active))
        if self._capture and (bucket, greedy) not in self._captured:
            self._captured[bucket, greedy] = self._record(bucket, greedy)
        rows = self._fill(bucket, active)
        if self._capture:
            captured = self._captured[bucket, greedy]
            captured.graph.replay()
            logits, tokens = captured.logits, captured.tokens
        else:
            logits, tokens = self._state.step(self._step, rows, greedy=greedy)
        return logits[: len(active)], tokens[: len(active)]

    def close(self) -> None:
        """Drop the graphs and their memory."""
        self._captured.clear()

    def _fill(self, bucket: int, active: tuple[int, ...]) -> Tensor:
        """The bucket's rows, set to these slots and then the spare one; copied only when they change."""
        device = self._state.lengths.device
        if bucket not in self._rows:
            self._rows[bucket] = torch.full((bucket,), self._state.spare, device=device)
        rows = self._rows[bucket]
        if self._filled.get(bucket) != active:
            rows.copy_(torch.tensor([*active, *[self._state.spare] * (bucket - len(active))], device="cpu"))
            self._filled[bucket] = active
        return rows

    def _record(self, bucket: int, greedy: bool) -> _Captured:
        """Capture one step of a bucket, tried first on the spare slot."""
        rows = self._fill(bucket, ())
        warm_up(lambda: self._state.step(self._step, rows, greedy=greedy))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = self._state.step(self._step, rows, greedy=greedy)
        self._pool = graph.pool()
        return _Captured(graph, logits, tokens)

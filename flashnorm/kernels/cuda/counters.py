"""Zeroed counters for kernels whose blocks wait for each other; each kernel leaves its counters at zero.

Two launches must not run with the same counters at once. Launches on one stream never do. A captured launch may be
replayed on any stream beside any other, so it gets counters that are given to nobody else.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count

import torch
from torch import Tensor

COUNTERS = 16  # of one launch
_SETS = 65536  # four megabytes on each device
_STREAMS = 1024  # of them for streams; more than a process has


class _Pool:
    def __init__(self, device: torch.device) -> None:
        self._sets = torch.zeros((_SETS, COUNTERS), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # other streams may use them next
        self._captured = count()
        streams = count()
        self._of_stream: dict[int, int] = defaultdict(lambda: next(streams))

    def take(self, stream: torch.cuda.Stream) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            return self._sets[self._of_stream[stream.cuda_stream]]
        index = _SETS - 1 - next(self._captured)
        if index >= _STREAMS:
            return self._sets[index]
        return torch.zeros(COUNTERS, dtype=torch.int32, device=self._sets.device)  # zeroed again by every replay


_POOLS: dict[torch.device, _Pool] = {}


def prepare(device: torch.device) -> None:
    """Allocate the device's counters, which cannot be done while a graph is captured."""
    if device not in _POOLS:
        _POOLS[device] = _Pool(device)


def counters(stream: torch.cuda.Stream) -> Tensor:
    """(COUNTERS,) int32 zeros for one launch on `stream`, the current one; `prepare` must have been called."""
    return _POOLS[stream.device].take(stream)

"""Capturing CUDA graphs that own all the memory that they use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, pool: Any = None, error_mode: str = "global") -> Iterator[None]:
    """`torch.cuda.graph`, with a cuBLAS workspace of the graph's own. `error_mode`: its `capture_error_mode`.

    cuBLAS has one workspace for each stream, and PyTorch captures all graphs on one stream. So a graph would use the
    workspace that an earlier capture left in its own pool, and once that graph is gone a replay finds memory that is
    somebody else's or nobody's: an illegal access, in split-K matmuls above all (pytorch#193402). Hence there is none
    when the capture begins, which makes one in its own pool where it needs one, and none is left for others.
    """
    clear: Any = torch._C._cuda_clearCublasWorkspaces
    clear()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=error_mode):
            yield
    finally:
        clear()

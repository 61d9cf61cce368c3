"""CUDA graphs on the host: the operations of a capture are recorded, and a replay runs them again in the same memory.

What a capture freezes is frozen here as well: numbers that the host computed, tensors that were made outside, which
slot was asked. So a program's `graphs=True` runs where there is no GPU, with the kinds of fault that only it can have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def instantiate(self) -> None:
        pass

    def pool(self) -> None:
        return None

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, kept in self.calls:
            again = func(*args, **kwargs)
            for place, value in zip(_tensors(kept), _tensors(again), strict=True):
                if place.data_ptr() != value.data_ptr():  # not what was written in place, nor a view of it
                    place.copy_(value)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: HostGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, result))
        return result


@contextmanager
def _capture(graph: HostGraph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    with _Recording(graph):
        yield


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda`'s graphs and streams are these."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", HostGraph)
    monkeypatch.setattr(torch.cuda, "graph", _capture)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]

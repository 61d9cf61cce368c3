"""Capturing an operation in a CUDA graph, where a capture that CUDA refuses is an answer and leaves nothing behind.

CUDA itself checks a part of the order: a capture fails where a stream that was forked is never joined, and where a
stream waits for what no capture recorded. It ends then, and all its streams leave capture mode (CUDA programming guide,
"Cross-stream dependencies" and "Invalidation"). PyTorch stays behind, up to the version that is named at each repair:
its `graph` context leaves the capture stream current, its allocator goes on sorting allocations into the capture's
pool, and its random generator refuses every draw outside of a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

import torch

from flashnorm.errors import FlashnormError

T = TypeVar("T")

_REFUSALS = range(900, 909)  # cudaErrorStreamCaptureUnsupported up to cudaErrorStreamCaptureWrongThread
_DISORDER = {
    902: "it waits for an event of another capture: an event from a call before is waited for before it is recorded",
    904: "a stream that it forks is never joined: nothing waits for the work that was queued there last",
    905: "a stream waits for work that the capture does not hold: an event that was recorded in a call before, or on a "
    "stream that nothing forked from the current one",
}


class NotCaptured(FlashnormError):
    """CUDA refused a capture. `disorder`: because of how its streams are ordered, not of what else it does."""

    def __init__(self, code: int, message: str) -> None:
        self.disorder = code in _DISORDER
        super().__init__(_DISORDER.get(code) or f"CUDA refused the capture: {message.strip().splitlines()[0]}")


def capture(
    run: Callable[[], T], around: AbstractContextManager[object] | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of what `run` queues on the current CUDA device, ready to be replayed, and what `run` returned.

    `around`: entered inside of the capture, after what the capture itself does to streams. The graph keeps its nodes,
    so that they can be looked at. Raises `NotCaptured` where CUDA refuses, and whatever `run` raises; either way the
    current stream, the allocator and the random generator are as they were.
    """
    stream, device, pool = torch.cuda.current_stream(), torch.cuda.current_device(), torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    reason: BaseException | None = None
    try:
        with torch.cuda.graph(graph, pool=pool):
            try:
                with around or nullcontext():
                    result = run()
            except BaseException as error:
                reason = error  # ending the capture raises as well then, and would hide it
                raise
    except BaseException as error:
        reason = reason or error
    else:
        graph.instantiate()
        return graph, result
    _recover(stream, device, pool)
    code = getattr(reason, "error_code", 0)  # of torch.AcceleratorError: a cudaError_t
    if code in _REFUSALS:
        raise NotCaptured(code, str(reason)) from reason
    raise reason


def _recover(stream: torch.cuda.Stream, device: int, pool: tuple[int, int]) -> None:
    """Undo what `torch.cuda.graph` leaves when its capture fails.

    The memory of that capture's pool stays reserved before torch 2.14 (pytorch#190348): whether it was released cannot
    be asked, and releasing it twice is an internal error.
    """
    torch.cuda.set_stream(stream)  # `graph.__exit__` leaves its stream only after `capture_end` has not raised
    with suppress(RuntimeError):  # "not currently recording": done by `capture_end` since pytorch#180395 (torch 2.13)
        torch._C._cuda_endAllocateToPool(device, pool)
    # Up to torch 2.12 a generator is told that a capture began and, where it fails, not that it ended; the next one to
    # end tells it (CUDAGeneratorState::capture_epilogue).
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros((), device="cuda")

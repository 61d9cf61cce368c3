"""Widened windows: a delay queued into one side of an operation, then into the other.

A race shows when the side that should come first comes last. How long that takes by itself is chance, so a spinning
kernel is queued before its work: into the side stream when the operation enters it, or into the main stream when the
operation leaves the side stream again. Sized at several times the operation's own time, it makes the wrong order
certain wherever no event forbids it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Side = Literal["side", "main"]
SIDES: tuple[Side, ...] = ("side", "main")


@contextmanager
def delayed(side: Side, spin: Callable[[], None]) -> Iterator[None]:
    """While the block runs, `spin()` is called on the stream to be delayed at each `with torch.cuda.stream(...)`.

    `spin` queues the delay on the current stream. `torch.cuda.stream` is as it was afterwards.
    """
    before: Any = torch.cuda.stream

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        with before(given):
            if side == "side":
                spin()
            yield
        if side == "main":
            spin()

    cuda: Any = torch.cuda
    cuda.stream = stream
    try:
        yield
    finally:
        cuda.stream = before


def spinning(microseconds: float) -> Callable[[], None]:
    """A delay for `delayed`: a kernel that spins so long, at a clock of 2 GHz; a slower one spins longer."""
    cycles = int(microseconds * 2000)
    return lambda: torch.cuda._sleep(cycles)

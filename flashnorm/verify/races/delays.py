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
    """While the block runs, `spin()` is called on the stream to be delayed wherever the operation enters a side stream.

    `spin` queues the delay on the current stream. A side stream is entered by `with torch.cuda.stream(...)` or by
    `with` a `torch.cuda.Stream` itself; `torch.cuda` is as it was afterwards.
    """
    cuda: Any = torch.cuda
    kind, before = cuda.Stream, cuda.stream

    def entered() -> None:
        if side == "side":
            spin()

    def left() -> None:
        if side == "main":
            spin()

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        with before(given):
            entered()
            yield
        left()

    def after(method: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
        def both(*args: Any) -> Any:
            result = method(*args)
            then()
            return result

        return both

    own = {name: vars(kind).get(name) for name in ("__enter__", "__exit__") if hasattr(kind, name)}
    for name in own:
        setattr(kind, name, after(getattr(kind, name), entered if name == "__enter__" else left))
    cuda.stream = stream
    try:
        yield
    finally:
        cuda.stream = before
        for name, method in own.items():
            if method is None:  # it was inherited
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def spinning(microseconds: float) -> Callable[[], None]:
    """A delay for `delayed`: a kernel that spins so long, at a clock of 2 GHz; a slower one spins longer."""
    cycles = int(microseconds * 2000)
    return lambda: torch.cuda._sleep(cycles)

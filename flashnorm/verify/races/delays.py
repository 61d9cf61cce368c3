"""Widened windows: a delay queued into one side of an operation, then into the other.

A race shows when the side that should come first comes last. How long that takes by itself is chance, so a spinning
kernel is queued before its work: into a side stream when the operation enters it, or into the main stream when the
operation leaves a side stream again. Sized at several times the operation's own time, it makes the wrong order
certain wherever no event forbids it. Of several side streams one at a time is delayed: delayed alike, they would meet
as they do without a delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch


@dataclass(frozen=True)
class Side:
    """The main stream; or the side stream that each call of an operation enters as its `entry`-th of `entries`."""

    entry: int | None = None
    entries: int = 1

    def __str__(self) -> str:
        if self.entry is None:
            return "main stream"
        return "side stream" if self.entries == 1 else f"side stream {self.entry + 1} of {self.entries}"


def sides_of(call: Callable[[], object]) -> tuple[Side, ...]:
    """What can be delayed of an operation, from one `call` of it: each side stream that it enters, and the main one."""
    entries = 0

    def entered() -> None:
        nonlocal entries
        entries += 1

    with _watched(entered, lambda: None):
        call()
    return (*(Side(entry, entries) for entry in range(entries)), Side())


def delayed(side: Side, spin: Callable[[], None]) -> AbstractContextManager[None]:
    """While the block runs, `spin()` is called on the stream to be delayed: as it is entered, or as a side one is left.

    `spin` queues the delay on the current stream. A side stream is entered by `with torch.cuda.stream(...)` or by
    `with` a `torch.cuda.Stream` itself; `torch.cuda` is as it was afterwards.
    """
    number = count()

    def entered() -> None:
        if next(number) % side.entries == side.entry:
            spin()

    def left() -> None:
        if side.entry is None:
            spin()

    return _watched(entered, left)


@contextmanager
def _watched(entered: Callable[[], None], left: Callable[[], None]) -> Iterator[None]:
    """`entered` is called in each side stream as it is entered, `left` outside as it is left."""
    cuda: Any = torch.cuda
    kind, before = cuda.Stream, cuda.stream

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

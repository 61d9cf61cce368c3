"""Vector clocks: which accesses of which streams are ordered, and which pairs are not.

Each stream counts its own accesses; its clock holds, for every stream, up to which access that one is known to be done
(Mattern, 1989). An event is a copy of its stream's clock at the time of `record`, and a stream that waits for it takes
the larger of the two entries for each stream. Waiting for an event that nobody recorded orders nothing: that is what
CUDA does. An access is ordered after an earlier one when its stream's clock has reached it. Two accesses to one buffer,
at least one of them a write, that are not ordered are a race, whatever the timing was.

The host is a clock too: it learns from `synchronize`, and work that is queued later comes after what it knew.

The caching allocator hands freed memory to the next allocation on the stream that it was allocated on. So a buffer that
is freed counts as written there, except for streams that `record_stream` has named, for which the allocator waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

Clock = dict[int, int]
HOST = -1


@dataclass(frozen=True)
class Access:
    """One access to a buffer. `epoch`: which access of its stream it is. `what`: the operation, in words."""

    stream: int
    epoch: int
    write: bool
    what: str


@dataclass(frozen=True)
class Race:
    """Two accesses to one buffer that nothing orders."""

    buffer: str
    first: Access
    second: Access

    def __str__(self) -> str:
        def words(access: Access) -> str:
            return f"{access.what} on stream {access.stream} ({'writes' if access.write else 'reads'})"

        return f"{self.buffer}: {words(self.first)} and {words(self.second)} are not ordered"


@dataclass
class _History:
    """What is known of a buffer: who allocated it, its last write, the reads since, whom the allocator waits for."""

    name: str
    home: int
    write: Access | None = None
    reads: list[Access] = field(default_factory=list)
    kept_for: set[int] = field(default_factory=set)


class Clocks:
    """The state of a recording; `races` grows as accesses are told."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._buffers: dict[int, _History] = {}

    def allocate(self, buffer: int, stream: int, name: str) -> None:
        """A buffer comes to be; accesses to one of this number that was freed before are forgotten."""
        self._buffers[buffer] = _History(name, stream)

    def knows(self, buffer: int) -> bool:
        return buffer in self._buffers

    def access(self, buffer: int, stream: int, *, write: bool, what: str) -> None:
        """`stream` reads or writes the buffer as its next piece of work."""
        clock = self._clocks[stream]
        _join(clock, self._clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        access = Access(stream, clock[stream], write, what)
        history = self._buffers[buffer]
        before = [history.write] if history.write else []
        before += history.reads if write else []
        self.races += [Race(history.name, other, access) for other in before if not _ordered(other, clock)]
        if write:
            history.write, history.reads = access, []
        else:
            history.reads.append(access)

    def record(self, stream: int) -> Clock:
        """What an event recorded now on `stream` stands for."""
        _join(self._clocks[stream], self._clocks[HOST])
        return dict(self._clocks[stream])

    def wait(self, stream: int, event: Mapping[int, int] | None) -> None:
        """`stream` waits for an event; None: for one that was never recorded. `HOST` may wait as well."""
        _join(self._clocks[stream], event or {})

    def keep_for(self, buffer: int, stream: int) -> None:
        """`record_stream`: the memory is not handed out again before `stream` is done with what it has now."""
        self._buffers[buffer].kept_for.add(stream)

    def free(self, buffer: int) -> None:
        """The last reference is gone: the stream that allocated the memory may write it from now on."""
        history = self._buffers.pop(buffer)
        clock = self.record(history.home)
        reuse = Access(history.home, clock.get(history.home, 0), True, "the next allocation in its memory")
        before = [*history.reads, *([history.write] if history.write else [])]
        self.races += [
            Race(history.name, other, reuse)
            for other in before
            if other.stream not in history.kept_for and not _ordered(other, clock)
        ]


def _ordered(earlier: Access, clock: Mapping[int, int]) -> bool:
    return clock.get(earlier.stream, 0) >= earlier.epoch


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, epoch in other.items():
        clock[stream] = max(clock.get(stream, 0), epoch)

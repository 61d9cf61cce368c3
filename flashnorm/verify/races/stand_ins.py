"""Stand-ins for `torch.cuda`'s streams and events, which drive vector clocks in place of a device.

An operation may use whatever the real classes offer, so the stand-ins have every public attribute of them, with the
same parameters (`tests/verify/races/test_stand_ins.py` compares them with the installed torch). What the host learns by
asking, `query` among it, it knows from then on, as after `synchronize`.

A stand-in belongs to one play. Used after it, or handed a real stream or event during it, it raises `Refusal`: the
order would be that of neither.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from flashnorm.errors import Refusal
from flashnorm.verify.races.clocks import HOST, Clock, Clocks

_CUDA = 1  # c10::DeviceType::CUDA, what a stream's device_type says


class Stream:
    """A stand-in for `torch.cuda.Stream`; 0 is the stream that is current when the play begins."""

    def __init__(self, player: Player, number: int, priority: int = 0) -> None:
        self._player = player
        self._contexts: list[Any] = []
        self.number = self.stream_id = self.cuda_stream = self.native_handle = number
        self.device, self.device_index, self.device_type = player.device, player.device.index, _CUDA
        self.priority = priority

    def wait_event(self, event: Any) -> None:
        self._player.clock_of(event)
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self._player.clocks.wait(self.number, self._player.clocks.record(self._player.number(stream)))

    def record_event(self, event: Any = None) -> Any:
        event = self._player.event_class() if event is None else event
        self._player.clock_of(event)
        event.record(self)
        return event

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._player.clocks.wait(HOST, self._player.clocks.record(self._player.number(self)))

    def is_capturing(self) -> bool:
        return False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.number)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number

    def __enter__(self) -> Stream:
        self._contexts.append(self._player.on(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._contexts.pop().__exit__(exc_type, exc_val, exc_tb)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._player is self._player and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class Event:
    """A stand-in for `torch.cuda.Event`: empty until it is recorded."""

    def __init__(self, player: Player, number: int) -> None:
        self._player = player
        self.event_id = self.cuda_event = number
        self.device = player.device
        self.clock: Clock | None = None

    def record(self, stream: Any = None) -> None:
        self.clock = self._player.clocks.record(self._player.number(stream))

    def wait(self, stream: Any = None) -> None:
        self._player.clocks.wait(self._player.number(stream), self._player.clock_of(self))

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._player.clocks.wait(HOST, self._player.clock_of(self))

    def elapsed_time(self, end_event: Any) -> float:
        """No time passes in a play; the real one asks for both to be done."""
        self.synchronize()
        end_event.synchronize()
        return 0.0

    def ipc_handle(self) -> NoReturn:
        raise Refusal("an event that other processes wait for cannot be played: their streams are not seen")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> NoReturn:
        raise Refusal("an event of another process cannot be played: its streams are not seen")

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_event)


class Player:
    """One play: its clocks, its streams, and which of them is current.

    `stream_class` and `event_class` take the arguments of `torch.cuda.Stream` and `torch.cuda.Event`.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.device = torch.device("cuda", 0)
        self.over = False
        self.stream_class, self.event_class = _stream_class(self), _event_class(self)
        self.streams: dict[int, Stream] = {}
        self.current = [self.stream_class()]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """`torch.cuda.stream(stream)`; None changes nothing, as there."""
        self.current.append(self.current[-1] if stream is None else self.streams[self.number(stream)])
        try:
            yield
        finally:
            self.current.pop()

    def number(self, stream: Any) -> int:
        """Of a stream, or of the current one for None. Raises `Refusal` where it is not of this play."""
        stream = self.current[-1] if stream is None else stream
        self._require(stream, Stream, "stream")
        return stream.number

    def clock_of(self, event: Any) -> Clock | None:
        """What the event stands for. Raises `Refusal` where it is not of this play."""
        self._require(event, Event, "event")
        return event.clock

    def _require(self, given: Any, kind: type, what: str) -> None:
        if isinstance(given, kind) and given._player is self and not self.over:  # type: ignore[attr-defined]
            return
        raise Refusal(
            f"the operation uses a CUDA {what} that was made outside of the call that plays it, and that it does not "
            f"keep in its own attributes; make each {what} with torch.cuda.{what.capitalize()} in the call, or keep it "
            "in an attribute of the operation"
        )


def _stream_class(player: Player) -> Callable[..., Stream]:
    numbers = itertools.count()

    class PlayedStream(Stream):
        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            number = kwargs.get("stream_id")  # another object for a stream that exists
            super().__init__(player, next(numbers) if number is None else number, priority)
            player.streams.setdefault(self.number, self)

    return PlayedStream


def _event_class(player: Player) -> Callable[..., Event]:
    numbers = itertools.count(1)

    class PlayedEvent(Event):
        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            super().__init__(player, next(numbers))

    return PlayedEvent

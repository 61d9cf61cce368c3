"""Plays an operation's stream and event calls on a machine without a GPU, and reports every unordered pair of accesses.

The operation runs on fake CUDA tensors, which have shapes and storages and no data, while `torch.cuda`'s streams and
events are stand-ins that drive vector clocks (`flashnorm.verify.races.clocks`). What each torch operation reads and
writes is taken from its schema; a view touches nothing. So the very code that runs on a GPU is checked, and a race is
found whatever the timing.

What is not seen: memory that an operation touches behind its schema (a kernel launched by hand), and graph capture,
whose edges `flashnorm.verify.races.graphs` checks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flashnorm.verify.races.clocks import HOST, Clock, Clocks, Race
from flashnorm.verify.races.redirected import Redirected

Operation = Callable[..., Any]


def find_races(operation: Operation, inputs: Sequence[Tensor | float], *, calls: int = 2) -> list[Race]:
    """Races of `calls` calls in a row, each with the same inputs, as a loop over decode steps makes them.

    `inputs`: tensors on any device, of which shape and dtype count, and numbers. Between calls the result is read on
    the main stream and dropped, as the next operation and the allocator do. What the operation keeps from call to call
    (its own buffers and events) is kept.
    """
    recorder = _Recorder()
    # In inference mode, since autograd's own kernels ask for a device that is not there.
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), recorder.playing(), Redirected():
        given = [_fake(value) for value in inputs]
        for _ in range(calls):
            result = operation(*given)
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor):
                    tensor.clone()
            del result
    return recorder.clocks.races


def _fake(value: Tensor | float) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")


class _Stream:
    """A stand-in for `torch.cuda.Stream`."""

    def __init__(self, clocks: Clocks, number: int, device: torch.device) -> None:
        self._clocks, self.number, self.device = clocks, number, device

    def wait_event(self, event: _Event) -> None:
        self._clocks.wait(self.number, event.clock)

    def wait_stream(self, other: _Stream) -> None:
        self._clocks.wait(self.number, self._clocks.record(other.number))

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self._clocks, lambda: self)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._clocks.wait(HOST, self._clocks.record(self.number))


class _Event:
    """A stand-in for `torch.cuda.Event`: empty until it is recorded."""

    def __init__(self, clocks: Clocks, current: Callable[[], _Stream]) -> None:
        self._clocks, self._current = clocks, current
        self.clock: Clock | None = None

    def record(self, stream: _Stream | None = None) -> None:
        self.clock = self._clocks.record((stream or self._current()).number)

    def wait(self, stream: _Stream | None = None) -> None:
        self._clocks.wait((stream or self._current()).number, self.clock)

    def synchronize(self) -> None:
        self._clocks.wait(HOST, self.clock)


class _Recorder(TorchDispatchMode):
    """Tells the clocks what every operation touches, on the stream that is current."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self._device = torch.device("cuda", 0)
        self._streams = [_Stream(self.clocks, 0, self._device)]
        self._current = [self._streams[0]]
        self._playing = True
        self._held: Counter[int] = Counter()  # storage -> tensors that are alive
        self._storages: dict[int, Any] = {}  # kept, so that no number comes twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in tree_iter((args, kwargs)):
            self._meet(tensor, str(func))
        returned = [tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)]
        given = {_storage(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        views = bool(returned) and not _mutates(func) and all(_storage(tensor) in given for tensor in returned)
        if not views and func.namespace != "prim":  # which asks for a device or a layout
            self._touch(func, args, kwargs, returned, given)
        for tensor in returned:
            self._meet(tensor, str(func))
        return result

    def _touch(self, func: Any, args: Any, kwargs: Any, returned: Sequence[Tensor], given: set[int]) -> None:
        what, stream = str(func), self._current[-1].number
        for argument, value in _arguments(func, args, kwargs):
            write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_iter(value):
                if isinstance(tensor, Tensor):
                    self.clocks.access(_storage(tensor), stream, write=write, what=what)
        for tensor in returned:
            if _storage(tensor) not in given:
                self._meet(tensor, what)
                self.clocks.access(_storage(tensor), stream, write=True, what=what)

    def _meet(self, tensor: Any, what: str) -> None:
        """Follow a tensor from now on: its storage lives until the last of its tensors is gone."""
        if not isinstance(tensor, Tensor) or getattr(tensor, "_seen_by", None) is self:
            return
        storage = _storage(tensor)
        if not self.clocks.knows(storage):
            shape = "x".join(map(str, tensor.shape))
            self.clocks.allocate(storage, self._current[-1].number, f"the {shape} result of {what}")
            self._storages[storage] = tensor.untyped_storage()
        tensor._seen_by = self  # type: ignore[attr-defined]
        self._held[storage] += 1
        weakref.finalize(tensor, self._gone, storage)

    def _gone(self, storage: int) -> None:
        self._held[storage] -= 1
        if self._playing and self._held[storage] == 0 and self.clocks.knows(storage):
            self.clocks.free(storage)

    @contextmanager
    def playing(self) -> Iterator[None]:
        """`torch.cuda`'s streams and events are ours while this lasts."""
        names = ("Stream", "Event", "current_stream", "default_stream", "stream", "synchronize")
        before = {name: getattr(torch.cuda, name) for name in names}
        record_stream = Tensor.record_stream
        for name in names:
            setattr(torch.cuda, name, getattr(self, f"_cuda_{name.lower()}"))
        keep_for: Any = lambda tensor, stream: self._keep_for(tensor, stream)  # noqa: E731
        Tensor.record_stream = keep_for  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            self._playing = False  # what the caller still holds is freed by nobody's mistake
            for name, value in before.items():
                setattr(torch.cuda, name, value)
            Tensor.record_stream = record_stream  # type: ignore[method-assign]

    def _keep_for(self, tensor: Tensor, stream: _Stream) -> None:
        self._meet(tensor, "an input")
        self.clocks.keep_for(_storage(tensor), stream.number)

    def _cuda_stream(self, first: Any = None, *rest: Any, **options: Any) -> Any:
        """`torch.cuda.Stream(device)` makes one, `torch.cuda.stream(stream)` makes it current."""
        if isinstance(first, _Stream):
            return self._on(first)
        self._streams.append(_Stream(self.clocks, len(self._streams), self._device))
        return self._streams[-1]

    @contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def _cuda_event(self, *_: Any, **__: Any) -> _Event:
        return _Event(self.clocks, lambda: self._current[-1])

    def _cuda_current_stream(self, device: Any = None) -> _Stream:
        return self._current[-1]

    def _cuda_default_stream(self, device: Any = None) -> _Stream:
        return self._streams[0]

    def _cuda_synchronize(self, device: Any = None) -> None:
        for stream in self._streams:
            stream.synchronize()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]
        elif i < len(args):
            yield argument, args[i]


def _mutates(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)

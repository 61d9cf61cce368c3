"""Plays an operation's stream and event calls on a machine without a GPU, and reports every unordered pair of accesses.

The operation runs on fake CUDA tensors, which have shapes and storages and no data, while `torch.cuda`'s streams and
events are stand-ins (`flashnorm.verify.races.stand_ins`) that drive vector clocks (`flashnorm.verify.races.clocks`).
What each torch operation reads and writes is taken from its schema; a view touches nothing. So the very code that runs
on a GPU is checked, and a race is found whatever the timing.

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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from flashnorm.verify.races.clocks import Clocks, Race
from flashnorm.verify.races.kept import put_back
from flashnorm.verify.races.redirected import Redirected
from flashnorm.verify.races.stand_ins import Player, Stream

Operation = Callable[..., Any]


def find_races(operation: Operation, inputs: Sequence[Tensor | float], *, calls: int = 2) -> list[Race]:
    """Races of `calls` calls in a row, each with the same inputs, as a loop over decode steps makes them.

    `inputs`: tensors on any device, of which shape and dtype count, and numbers. Between calls the result is read on
    the main stream and dropped, as the next operation and the allocator do. What the operation keeps from call to call
    (its own buffers and events) is kept while this lasts, and is afterwards what it was before, so that the same
    operation can run on a device next. Raises `Refusal` where it keeps streams or events out of reach
    (see `flashnorm.verify.races.kept`).
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder(fakes)
    # In inference mode, since autograd's own kernels ask for a device that is not there.
    with (
        put_back(operation, recorder.player),
        torch.inference_mode(),
        fakes,
        recorder.playing(),
        Redirected(),
    ):
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


class _Recorder(TorchDispatchMode):
    """Tells the clocks what every operation touches, on the stream that is current."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.player = Player(self.clocks)
        self._fakes = fakes
        self._fake_of: dict[int, tuple[Tensor, Tensor]] = {}  # both kept: the mode forgets a fake that nobody holds
        self._held: Counter[int] = Counter()  # storage -> tensors that are alive
        self._storages: dict[int, Any] = {}  # kept, so that no number comes twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # of a constant, whose value the mode remembers
            # A tensor that is real, since the operation kept it from an earlier call, is one buffer with its views
            # only as the fake that the mode would make of it.
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
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
        what, stream = str(func), self.player.number(None)
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
            self.clocks.allocate(storage, self.player.number(None), f"the {shape} result of {what}")
            self._storages[storage] = tensor.untyped_storage()
        tensor._seen_by = self  # type: ignore[attr-defined]
        self._held[storage] += 1
        weakref.finalize(tensor, self._gone, storage)

    def _gone(self, storage: int) -> None:
        self._held[storage] -= 1
        if not self.player.over and self._held[storage] == 0 and self.clocks.knows(storage):
            self.clocks.free(storage)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        _, fake = self._fake_of.setdefault(id(tensor), (tensor, self._fakes.from_tensor(tensor)))
        return fake

    @contextmanager
    def playing(self) -> Iterator[None]:
        """`torch.cuda`'s streams and events are ours while this lasts."""
        replacements = self._replacements()
        before = {name: getattr(torch.cuda, name) for name in replacements}
        record_stream = Tensor.record_stream
        for name, replacement in replacements.items():
            setattr(torch.cuda, name, replacement)
        keep_for: Any = lambda tensor, stream: self._keep_for(tensor, stream)  # noqa: E731
        Tensor.record_stream = keep_for  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            self.player.over = True  # what the caller still holds is freed by nobody's mistake
            for name, value in before.items():
                setattr(torch.cuda, name, value)
            Tensor.record_stream = record_stream  # type: ignore[method-assign]

    def _replacements(self) -> dict[str, Any]:
        player = self.player

        def current_stream(device: Any = None) -> Stream:
            return player.current[-1]

        def default_stream(device: Any = None) -> Stream:
            return player.streams[0]

        def set_stream(stream: Any) -> None:
            if stream is not None:
                player.current[-1] = player.streams[player.number(stream)]

        def synchronize(device: Any = None) -> None:
            for stream in player.streams.values():
                stream.synchronize()

        return {
            "Stream": player.stream_class,
            "Event": player.event_class,
            "StreamContext": player.on,
            "stream": player.on,
            "current_stream": current_stream,
            "default_stream": default_stream,
            "set_stream": set_stream,
            "synchronize": synchronize,
            "is_current_stream_capturing": lambda: False,
        }

    def _keep_for(self, tensor: Tensor, stream: Any) -> None:
        tensor = self._as_fake(tensor)
        self._meet(tensor, "an input")
        self.clocks.keep_for(_storage(tensor), self.player.number(stream))


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

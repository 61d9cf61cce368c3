"""What an operation keeps from call to call, exchanged for a play and put back after it.

An operation may keep streams, events and buffers in its attributes, in what they refer to, or in what its functions
close over. A play that left its own there would break the operation: a stand-in is no stream for the device. And real
ones that are there already have no clocks. So before a play streams and events are exchanged for stand-ins, one for
each, and afterwards everything is as it was. What an operation keeps elsewhere (a global, a cache of its module) cannot
be reached; the stand-ins refuse to be used then.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashnorm.verify.races.stand_ins import Event, Player, Stream

_LEAVES = (type, ModuleType, Tensor, str, bytes, int, float, complex, torch.device, torch.dtype, type(None))
_PLAYED = (Stream, Event, FakeTensor)


@contextmanager
def put_back(operation: Any, player: Player) -> Iterator[None]:
    """While this lasts the operation's own streams and events are `player`'s; afterwards all it keeps is as before.

    Attributes and closed-over names are put back whatever they are; a container is only where the play left something
    of its own in it, so that a list in which results are collected keeps them.
    """
    known = {id(value): value for value in _reachable(operation, {})}
    variables, containers = _holders(known.values())
    before = [(holder, _contents(holder)) for holder in (*variables, *containers)]
    exchange = _exchange(player)
    for holder, contents in before:
        exchanged = map(exchange, contents.values() if isinstance(contents, dict) else contents)
        _fill(holder, dict(zip(contents, exchanged, strict=True)) if isinstance(contents, dict) else list(exchanged))
    try:
        yield
    finally:
        always = {id(holder) for holder in variables}
        for holder, contents in before:
            if id(holder) in always or _holds_played(holder, known):
                _fill(holder, contents)


def _exchange(player: Player) -> Callable[[Any], Any]:
    """A stand-in for a real stream or event, the same one each time; anything else as it is."""
    made: dict[Any, Any] = {}

    def exchange(value: Any) -> Any:
        if isinstance(value, torch.cuda.Stream):
            handle = getattr(value, "cuda_stream", id(value))
            made.setdefault(0, player.streams[0])  # the default stream's handle
            return made.get(handle) or made.setdefault(handle, player.stream_class())
        if isinstance(value, torch.cuda.Event):  # what came before the play is done: an event that nobody recorded
            return made.get(id(value)) or made.setdefault(id(value), player.event_class())
        return tuple(map(exchange, value)) if type(value) is tuple else value

    return exchange


def _holders(reachable: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """What can be written of what is reachable: attributes and cells, and containers."""
    variables: list[Any] = []
    containers: list[Any] = []
    for value in reachable:
        if isinstance(value, CellType):
            variables.append(value)
        elif isinstance(value, (dict, list, set, deque)):
            containers.append(value)
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            variables.append(attributes)
    attributes_of_one = {id(holder) for holder in variables}
    return variables, [container for container in containers if id(container) not in attributes_of_one]


def _reachable(root: Any, known: Mapping[int, Any]) -> Iterator[Any]:
    """`root` and what it leads to, but for what is known already and leads to nothing new by itself."""
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or (id(value) in known and value is not root):
            continue
        seen[id(value)] = value  # kept, so that no number comes twice
        yield value
        if not isinstance(value, (*_LEAVES, *_PLAYED, torch.cuda.Stream, torch.cuda.Event)):
            waiting += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (CellType, dict, list, set, deque)):
        return list(_contents(value).values()) if isinstance(value, (CellType, dict)) else list(value)
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    parts = [getattr(value, "__dict__", None)]
    if isinstance(value, FunctionType):
        parts += [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, MethodType):
        parts += [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    return parts


def _contents(holder: Any) -> Any:
    """A copy of what is in it; of a cell as a dictionary, which is empty while the name is not bound."""
    if isinstance(holder, CellType):
        try:
            return {"cell": holder.cell_contents}
        except ValueError:
            return {}
    return holder.copy()


def _fill(holder: Any, contents: Any) -> None:
    """Make the holder hold this, which may be what it holds: then nothing is written."""
    now = _contents(holder)
    if len(now) == len(contents) and all(a is b for a, b in zip(_flat(now), _flat(contents), strict=True)):
        return
    if not isinstance(holder, CellType):
        holder.clear()
        (holder.update if isinstance(holder, (dict, set)) else holder.extend)(contents)
    elif contents:
        holder.cell_contents = contents["cell"]
    else:
        del holder.cell_contents


def _flat(contents: Any) -> list[Any]:
    return [part for item in contents.items() for part in item] if isinstance(contents, dict) else list(contents)


def _holds_played(container: Any, known: Mapping[int, Any]) -> bool:
    """Itself, or in what the play made; what was there before is asked for itself."""
    return any(isinstance(value, _PLAYED) for value in _reachable(container, known))

"""One file, read once and written once: copied runs, scaled tensors, new bytes, and both SHA-256 sums on the way."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flashnorm.checkpoint.blocks import Block, blocks
from flashnorm.checkpoint.edit import BLOCK_ELEMENTS, Scaler
from flashnorm.checkpoint.header import TensorInfo
from flashnorm.checkpoint.plan import Scale
from flashnorm.checkpoint.progress import Meter
from flashnorm.checkpoint.source import read_exactly
from flashnorm.checkpoint.staging import WriteBack, write_all
from flashnorm.checkpoint.tree import reading
from flashnorm.errors import CheckpointError, FlashnormError

CHUNK_BYTES = 4 * 1024 * 1024  # one read, and at most one write; always room for one block of eight-byte elements
_SLOTS = 3  # chunks in flight: one is read or scaled or written while the hashes of two are still computed


@dataclass(frozen=True)
class Copy:
    """Source bytes `start` to `end` go out as they are. `again`: out of turn, so they do not count for the hash."""

    start: int
    end: int
    again: bool = False


@dataclass(frozen=True)
class Skip:
    """Source bytes `start` to `end` are hashed and dropped."""

    start: int
    end: int


@dataclass(frozen=True)
class New:
    """Bytes that are not in the source."""

    data: bytes


@dataclass(frozen=True)
class Scaled:
    """The source's tensor `info` goes out as `name`, scaled; `again` as in `Copy`."""

    name: str
    info: TensorInfo
    scales: tuple[Scale, ...]
    again: bool = False


Segment = Copy | Skip | New | Scaled


@dataclass(frozen=True)
class Sums:
    """SHA-256 (hexadecimal) and size in bytes of what was read and of what was written.

    `vanished`: nothing was left to write, so there is no such file in the output. `lost`: by tensor, how many weights
    became zero for being too small.
    """

    source: str
    source_size: int
    output: str
    output_size: int
    vanished: bool = False
    lost: dict[str, int] = field(default_factory=dict)


class Stopped(FlashnormError):
    """Another file failed, or the user interrupted: this one was given up half-way."""


class _Sum:
    """SHA-256 on a thread of its own: hashing is the slowest step of a copy, and releases the interpreter's lock."""

    def __init__(self, resources: ExitStack) -> None:
        self._hash = hashlib.sha256()
        self._thread = resources.enter_context(ThreadPoolExecutor(1, thread_name_prefix="sha256"))
        self.size = 0

    def update(self, data: memoryview) -> Future[None]:
        self.size += len(data)
        return self._thread.submit(self._hash.update, data)

    def hexdigest(self) -> str:
        return self._thread.submit(self._hash.hexdigest).result()


class _Known:
    """A SHA-256 that was taken before: only the size is counted."""

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._done: Future[None] = Future()
        self._done.set_result(None)
        self.size = 0

    def update(self, data: memoryview) -> Future[None]:
        self.size += len(data)
        return self._done

    def hexdigest(self) -> str:
        return self._digest


class _Slot:
    """A pair of buffers, free again when the hashes of their last contents are done."""

    def __init__(self) -> None:
        self.source = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self.output = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self.pending: list[Future[None]] = []

    def wait(self) -> None:
        for future in self.pending:
            future.result()
        self.pending.clear()


class _Stream:
    def __init__(
        self,
        source: Path,
        output: int,
        *,
        unchanged: bool,
        known: str | None,
        meter: Meter,
        stop: threading.Event,
        resources: ExitStack,
    ) -> None:
        self._source = source
        self._input = _open(source, resources)
        self._output, self._write_back = output, WriteBack(output)
        self._meter, self._stop = meter, stop
        self.output_sum = _Sum(resources)
        self.source_sum: _Sum | _Known = self.output_sum
        if not unchanged:
            self.source_sum = _Sum(resources) if known is None else _Known(known)
        self._slots = [_Slot() for _ in range(_SLOTS)]
        self._turn = 0
        self.lost: dict[str, int] = {}

    def run(self, segment: Segment) -> None:
        match segment:
            case Copy(start, end, again):
                for first, last in _runs(start, end):
                    slot = self._read(first, last, again)
                    self._write(slot, slot.source[: last - first].numpy().data)
            case Skip(start, end):
                for first, last in _runs(start, end):
                    self._read(first, last, False)
            case New(data):
                self._write(self._next(), memoryview(data))
            case Scaled(name, info, scales, again):
                self._scale(Scaler(name, info, scales), info, again)

    def _scale(self, scaler: Scaler, info: TensorInfo, again: bool) -> None:
        width = info.dtype.itemsize
        for batch in _batches(blocks(info.shape, BLOCK_ELEMENTS), CHUNK_BYTES // width):
            first, last = batch[0].start, batch[-1].end
            size = (last - first) * width
            slot = self._read(info.start + first * width, info.start + last * width, again)
            source, output = slot.source[:size].view(info.dtype), slot.output[:size].view(info.dtype)
            for block in batch:
                span = slice(block.start - first, block.end - first)
                scaler.apply(block, source[span], output[span])
            self._write(slot, slot.output[:size].numpy().data)
        if scaler.vanished:
            self.lost[scaler.name] = scaler.vanished

    def _next(self) -> _Slot:
        if self._stop.is_set():
            raise Stopped("given up because another file failed")
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        slot.wait()
        return slot

    def _read(self, start: int, end: int, again: bool) -> _Slot:
        slot = self._next()
        data = slot.source[: end - start].numpy().data
        with reading(self._source):
            read_exactly(self._input, data, start)
        if not again:
            slot.pending.append(self.source_sum.update(data))
        self._meter.add(len(data))
        return slot

    def _write(self, slot: _Slot, data: memoryview) -> None:
        if self.output_sum is not self.source_sum:
            slot.pending.append(self.output_sum.update(data))
        write_all(self._output, data)
        self._write_back.wrote(len(data))


def stream(
    source: Path,
    output: int,
    segments: Sequence[Segment],
    meter: Meter,
    stop: threading.Event,
    *,
    known: str | None = None,
) -> Sums:
    """Write `segments` of the file `source`, whose SHA-256 may be `known`, to the open file `output`.

    The segments that are not `again` must cover the source once, in order. A known sum is compared where the file is
    only copied, which takes it anyway; else it is believed, and `Source.check_unchanged` is to say that it may be.
    Raises `CheckpointError` where the source cannot be read, a copied file is not what the known sum is of, or a weight
    overflows, `OSError` where the output cannot be written, `Stopped` once `stop` is set.
    """
    with ExitStack() as resources:
        unchanged = all(isinstance(segment, Copy) and not segment.again for segment in segments)
        run = _Stream(source, output, unchanged=unchanged, known=known, meter=meter, stop=stop, resources=resources)
        for segment in segments:
            run.run(segment)
        before, after = run.source_sum, run.output_sum
        if known not in (None, before.hexdigest()):
            raise CheckpointError(f"{source} changed while it was read; leave the source alone")
        return Sums(before.hexdigest(), before.size, after.hexdigest(), after.size, lost=run.lost)


def _open(path: Path, resources: ExitStack) -> int:
    with reading(path):
        descriptor = resources.enter_context(path.open("rb", buffering=0)).fileno()
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # reads further ahead
    return descriptor


def _runs(start: int, end: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, CHUNK_BYTES):
        yield first, min(first + CHUNK_BYTES, end)


def _batches(pieces: Iterator[Block], limit: int) -> Iterator[list[Block]]:
    """Neighbouring blocks, as many as fit in `limit` elements."""
    batch: list[Block] = []
    for piece in pieces:
        if batch and piece.end - batch[0].start > limit:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch

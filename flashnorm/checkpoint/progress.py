"""Bytes done, total, rate and time left on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_SECONDS = 5.0  # between plain lines; the first one comes at once


class Meter:
    """Counts bytes from several threads and shows them."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            self._show()

    def _show(self) -> None:
        """Called with the lock held."""


class _Bar(Meter):
    def __init__(self, total: int, progress: Progress, what: str) -> None:
        super().__init__(total)
        self._progress = progress
        self._task = progress.add_task(what, total=total)

    def _show(self) -> None:
        self._progress.update(self._task, completed=self.done)


class _Lines(Meter):
    def __init__(self, total: int, stream: TextIO, what: str) -> None:
        super().__init__(total)
        self._stream, self._what = stream, what
        self._began = self._shown = time.monotonic()
        self._print()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown >= LINE_SECONDS or self.done == self.total:
            self._shown = now
            self._print()

    def _print(self) -> None:
        seconds = time.monotonic() - self._began
        text = f"{self._what}: {_size(self.done)} of {_size(self.total)}"
        if self.done and seconds > 0:
            rate = self.done / seconds
            text += f", {_size(rate)}/s, {(self.total - self.done) / rate:.0f} s left"
        print(text, file=self._stream, flush=True)


@contextmanager
def metered(what: str, total: int, *, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Meter]:
    """Show progress on `stream` (stderr) while the block runs. `total`: bytes."""
    stream = stream or sys.stderr
    if quiet:
        yield Meter(total)
    elif stream.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(file=stream)) as progress:
            yield _Bar(total, progress, what)
    else:
        yield _Lines(total, stream, what)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"

"""An output folder that appears whole or not at all.

It is built beside its final place, under a hidden name, without the file that loaders look for first: none takes it for
a model. Once everything is on the disk, that file and then the folder get their names. Whoever builds a folder holds a
lock on it, so that a later run can tell what a killed one left behind from what is still being written.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashnorm.checkpoint.tree import read_pieces
from flashnorm.errors import OutputError

LAST = "config.json"  # without it no loader takes a folder for a model
_SUFFIX = ".flashnorm-partial"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Kept free beyond the files' own bytes, for the file system's tables.
_MARGIN = 16 * 1024 * 1024
# How far the dropping of written pages stays behind the writing, for the disk to have taken them.
_BEHIND = 32 * 1024 * 1024


def check_output(source: Path, dst: Path) -> None:
    """Raise `OutputError` unless `dst` can become a new folder that has nothing to do with `source`."""
    inner, outer = source.resolve(), dst.resolve()
    if outer == inner or inner in outer.parents:
        raise OutputError(f"{dst} lies inside the source {source}; choose a folder outside it")
    if outer in inner.parents:
        raise OutputError(f"the source {source} lies inside {dst}; choose another output folder")
    if os.path.lexists(dst):
        raise OutputError(f"{dst} exists already; choose a new name, or remove it first")
    if not outer.parent.is_dir():
        raise OutputError(f"{outer.parent} is not a folder; make it first, then give {dst} again")


def free_bytes(folder: Path) -> int:
    """How much an ordinary user may still write on the disk that holds `folder`."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


@contextmanager
def new_folder(dst: Path, size: int, last: str = LAST) -> Iterator[Path]:
    """Give a hidden folder to fill through `new_file`; rename it to `dst` at the end, or remove it after an error.

    `size`: the bytes that will be written, for which there must be room. `last`: the file that makes the folder
    loadable, which must be written and gets its name after all others. Raises `OutputError` where the bytes do not fit,
    at once or while writing, or where the folder cannot be made.
    """
    try:
        remove_leftovers(dst)
        free = free_bytes(dst.resolve().parent)
        if not os.statvfs(dst.resolve().parent).f_blocks:  # /proc, /sys: no disk, which making room would not help
            raise OutputError(f"{dst} does not lie on a disk; choose another place")
        if free < size + _MARGIN:
            raise OutputError(
                f"{dst} needs {(size + _MARGIN) / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free; make room, or "
                "choose another disk"
            )
        folder, lock = _make(dst)
    except OSError as error:
        raise _output_error(error, dst) from error
    try:
        yield folder
        _publish(folder, dst, last)
    except BaseException as error:
        with uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise _output_error(error, dst) from error
        raise
    finally:
        os.close(lock)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing while the block runs: pressed twice, it would stop the removal of what the first one left.

    Interruptions reach the main thread alone, so in any other thread there is nothing to keep off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        # None stands for a handler that is not Python's, which cannot be put back.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


@contextmanager
def new_file(folder: Path, name: str, last: str = LAST) -> Iterator[int]:
    """Give an open file to write. When the block ends it is on the disk and gets its name (`last` gets it later)."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + _SUFFIX)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if name != last:
        os.rename(partial, path)


def write_file(folder: Path, name: str, data: bytes, last: str = LAST) -> None:
    """Write a whole small file through `new_file`."""
    with new_file(folder, name, last) as descriptor:
        write_all(descriptor, memoryview(data))


def copy_file(source: Path, folder: Path, name: str, last: str = LAST) -> None:
    """Copy a file through `new_file`, in pieces. Raises `CheckpointError` where `source` cannot be read."""
    with new_file(folder, name, last) as descriptor:
        for piece in read_pieces(source):
            write_all(descriptor, piece)


def write_all(descriptor: int, data: memoryview) -> None:
    """`os.write` until everything is written."""
    while len(data):
        data = data[os.write(descriptor, data) :]


class WriteBack:
    """Has the kernel bring a file to the disk while it is written, not all at once at its end, and drop it from memory.

    Without this a file larger than memory pushes out everything else, and every page written is a new one; a page that
    was dropped is taken again, still in the processor's cache. Measured on 4 GB: 9 s in the kernel become 2.4.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = self._dropped = 0

    def wrote(self, count: int) -> None:
        """`count` more bytes have been written at the end of the file."""
        if not hasattr(os, "posix_fadvise"):
            return
        # The call drops clean pages and starts to write dirty ones, so it comes twice: at once, and some way behind.
        self._advise(self._written, count)
        self._written += count
        if self._written - self._dropped > 2 * _BEHIND:
            self._advise(self._dropped, self._written - _BEHIND - self._dropped)
            self._dropped = self._written - _BEHIND

    def _advise(self, start: int, count: int) -> None:
        os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_DONTNEED)


def remove_leftovers(dst: Path) -> None:
    """Remove what killed runs for the same output left behind; what a live process still writes stays."""
    for leftover in dst.parent.glob(f".{glob.escape(dst.name)}{_SUFFIX}-*"):
        try:
            lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # gone meanwhile, not ours, or not a folder
        try:
            if _lock(lock):
                shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(lock)


def _make(dst: Path) -> tuple[Path, int]:
    while True:
        folder = dst.parent / f".{dst.name}{_SUFFIX}-{secrets.token_hex(4)}"
        folder.mkdir()
        # Until it is locked, another run may take it for a leftover and remove it.
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        if _lock(lock) is not False and folder.exists():
            return folder, lock
        os.close(lock)


def _lock(descriptor: int) -> bool | None:
    """True: locked now. False: another process holds it. None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _publish(folder: Path, dst: Path, last: str) -> None:
    if os.path.lexists(dst):  # a rename would replace an empty folder without a word
        raise OutputError(f"{dst} was made by someone else meanwhile; choose a new name, or remove it first")
    for place, _, names in os.walk(folder):
        for name in names:  # not all come through `new_file`: other libraries write files of their own
            _sync(Path(place, name))
        _sync(Path(place))
    os.rename(folder / (last + _SUFFIX), folder / last)
    os.rename(folder, dst)
    _sync(dst)
    _sync(dst.resolve().parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _output_error(error: OSError, dst: Path) -> OutputError:
    if error.errno in _NO_SPACE:
        return OutputError(
            f"the disk became full while {dst} was written, and nothing was left; make room and try again"
        )
    return OutputError(f"{dst} cannot be written: {error.strerror or error}; choose another place")

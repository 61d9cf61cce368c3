"""Read and hash a checkpoint's files while its fold is still being planned.

Planning imports Transformers and runs the model's code on one core: seconds in which the disk and the other cores would
be idle. What was read stays in the page cache, and its SHA-256 need not be taken again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashnorm.checkpoint.source import Source
from flashnorm.errors import CheckpointError

# One read. Large, because the planner holds the interpreter's lock for up to 5 ms before each of them.
_STEP_BYTES = 32 * 1024 * 1024


@contextmanager
def reading_ahead(source: Source) -> Iterator[dict[str, str]]:
    """While the block runs, read the files, in the order of `Source.by_size`, as far as memory is free.

    Yields a dictionary that holds, when the block has ended, the SHA-256 (hexadecimal) of each file that was read
    whole. At most half of the available memory is filled, with clean pages that the kernel drops at need. Errors are
    left to the real reader.
    """
    sums: dict[str, str] = {}
    stop = threading.Event()
    reader = threading.Thread(
        target=_read, args=(source, _free_bytes() // 2, stop, sums), name="read-ahead", daemon=True
    )
    reader.start()
    try:
        yield sums
    finally:
        stop.set()
        reader.join()


def _read(source: Source, room: int, stop: threading.Event, sums: dict[str, str]) -> None:
    buffer = memoryview(bytearray(_STEP_BYTES))
    try:
        for name, size in source.by_size():
            room -= size
            digest = _digest(source.folder / name, buffer, stop) if room >= 0 else None
            if digest is None:
                return
            sums[name] = digest
    except (CheckpointError, OSError):
        return


def _digest(path: Path, buffer: memoryview, stop: threading.Event) -> str | None:
    """A file's SHA-256; None where it was stopped before the end."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if stop.is_set():
                return None
            _ask_for_next(file.fileno(), file.tell())
            digest.update(buffer[:count])
    return digest.hexdigest()


def _ask_for_next(descriptor: int, position: int) -> None:
    """Have the disk work while this step is hashed."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, position, _STEP_BYTES, os.POSIX_FADV_WILLNEED)


def _free_bytes() -> int:
    """Memory that may be filled: what Linux counts as available, caches that it would drop included."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))

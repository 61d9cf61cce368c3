"""Read a checkpoint's files into the page cache while its fold is still being planned.

Planning imports Transformers and runs the model's code: seconds in which the disk would be idle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashnorm.checkpoint.source import Source
from flashnorm.errors import CheckpointError

# One request; between two of them the reader can be stopped.
_STEP_BYTES = 16 * 1024 * 1024


@contextmanager
def reading_ahead(source: Source) -> Iterator[None]:
    """While the block runs, bring the files in, in the order of `Source.by_size`, as far as memory is free.

    At most half of the available memory is filled, with clean pages that the kernel drops at need. Errors are left to
    the real reader. Does nothing where the system cannot be asked.
    """
    if not hasattr(os, "posix_fadvise"):
        yield
        return
    stop = threading.Event()
    reader = threading.Thread(target=_read, args=(source, _free_bytes() // 2, stop), name="read-ahead", daemon=True)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()


def _read(source: Source, room: int, stop: threading.Event) -> None:
    try:
        files = source.by_size()
    except CheckpointError:
        return
    for name, size in files:
        try:
            descriptor = os.open(source.folder / name, os.O_RDONLY)
        except OSError:
            return
        try:
            for start in range(0, min(size, room), _STEP_BYTES):
                if stop.is_set():
                    return
                os.posix_fadvise(descriptor, start, _STEP_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        finally:
            os.close(descriptor)
        room -= size
        if room <= 0:
            return


def _free_bytes() -> int:
    """Memory that may be filled: what Linux counts as available, caches that it would drop included."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))

"""The streaming transform: every file of a checkpoint read once, changed where asked, and written to a new folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from flashnorm.checkpoint.changes import Changes, check_changes, file_segments, output_bytes, vanishes
from flashnorm.checkpoint.progress import Meter, metered
from flashnorm.checkpoint.source import Source
from flashnorm.checkpoint.staging import check_output, new_file, new_folder, uninterrupted
from flashnorm.checkpoint.stream import Sums, stream

# More threads do not help a disk, and each holds about 30 MB of buffers.
_MAX_WORKERS = 8


def transform(
    source: Source,
    changes: Changes,
    dst: Path,
    finish: Callable[[Path, Mapping[str, Sums]], None],
    *,
    what: str,
    extra_bytes: int = 0,
    omit: frozenset[str] = frozenset(),
    known: Mapping[str, str] = MappingProxyType({}),
    quiet: bool = True,
    workers: int | None = None,
) -> None:
    """Write the changed checkpoint to the new folder `dst`, which appears whole or not at all.

    `finish` is called with the still hidden folder and the sums of every file, to check them and to add files of its
    own, of `extra_bytes` together; `omit` names files to leave out; `what` names the work beside the progress; `known`:
    SHA-256 of source files that need not be taken again. Memory: a few buffers a worker, whatever the size of the
    tensors. Raises `OutputError` and `CheckpointError`.
    """
    check_changes(source, changes)
    check_output(source.folder, dst)
    sizes = {name: size for name, size in source.by_size() if name not in omit}
    total = sum(sizes.values())
    room = total + max(0, output_bytes(source, changes)) + extra_bytes
    with new_folder(dst, room) as folder, metered(what, total + _read_again(changes), quiet=quiet) as meter:
        sums = _all_files(source, changes, folder, sizes, known, meter, workers)
        source.check_unchanged()
        finish(folder, sums)


def _all_files(
    source: Source,
    changes: Changes,
    folder: Path,
    sizes: dict[str, int],
    known: Mapping[str, str],
    meter: Meter,
    workers: int | None,
) -> dict[str, Sums]:
    stop = threading.Event()
    count = max(1, min(workers or os.cpu_count() or 1, _MAX_WORKERS, len(sizes)))
    with _one_thread_each(), ThreadPoolExecutor(count, thread_name_prefix="shard") as pool:
        try:
            futures = {
                pool.submit(_one_file, source, name, size, changes, folder, known.get(name), meter, stop): name
                for name, size in sizes.items()
            }
            return {futures[future]: future.result() for future in as_completed(futures)}
        except BaseException:  # an interruption too: the threads must end before their folder is removed
            stop.set()
            with uninterrupted():
                pool.shutdown(wait=True, cancel_futures=True)
            raise


def _one_file(
    source: Source,
    name: str,
    size: int,
    changes: Changes,
    folder: Path,
    known: str | None,
    meter: Meter,
    stop: threading.Event,
) -> Sums:
    vanished = vanishes(source, name, changes)
    with _nowhere() if vanished else new_file(folder, name) as output:
        segments = file_segments(source, name, size, changes)
        sums = stream(source.folder / name, output, segments, meter, stop, known=known)
    return replace(sums, vanished=vanished)


@contextmanager
def _nowhere() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch would split each block over all cores, which the files already keep busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read_again(changes: Changes) -> int:
    return sum(a.content.nbytes for a in changes.additions.values() if not isinstance(a.content, torch.Tensor))

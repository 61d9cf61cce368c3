"""Recheck every SHA-256 that a folded folder's manifest records."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashnorm.checkpoint.manifest import MANIFEST, read_manifest
from flashnorm.checkpoint.progress import Meter, metered
from flashnorm.checkpoint.tree import file_size, list_files, read_pieces


@dataclass(frozen=True)
class HashReport:
    """Files by what became of them since they were written; `extra`: files that the manifest does not know."""

    unchanged: tuple[str, ...]
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not (self.changed or self.missing or self.extra)


def verify_hashes(folder: str | os.PathLike[str], *, quiet: bool = True) -> HashReport:
    """Compare a folded folder with its manifest, file by file. `quiet`: without progress on stderr.

    The manifest vouches for itself by its digest. Raises `CheckpointError` where it is missing or damaged, and where a
    file cannot be read.
    """
    folder = Path(folder)
    recorded = read_manifest(folder).output
    present = [name for name in list_files(folder) if name != MANIFEST]
    known = [name for name in present if name in recorded]
    total = sum(file_size(folder / name) for name in known)
    with metered("verify", total, quiet=quiet) as meter, ThreadPoolExecutor(os.cpu_count()) as pool:
        sums = dict(zip(known, pool.map(lambda name: _sha256(folder / name, meter), known), strict=True))
    return HashReport(
        unchanged=tuple(name for name in known if sums[name] == recorded[name].sha256),
        changed=tuple(name for name in known if sums[name] != recorded[name].sha256),
        missing=tuple(name for name in recorded if name not in sums),
        extra=tuple(name for name in present if name not in recorded),
    )


def _sha256(path: Path, meter: Meter) -> str:
    digest = hashlib.sha256()
    for piece in read_pieces(path):
        digest.update(piece)
        meter.add(len(piece))
    return digest.hexdigest()

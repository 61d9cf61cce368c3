"""The files of a checkpoint folder, whatever they are."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from flashnorm.errors import CheckpointError, Refusal

# What a version control or a download tool keeps about the folder it filled. It describes the source's files, so in a
# folder with other weights it would be a false record.
_BOOKKEEPING = (".git", ".cache")


def list_files(folder: Path) -> tuple[str, ...]:
    """All files below `folder`, sorted, as paths relative to it with "/" between parts.

    Symbolic links are followed: a snapshot in the Hugging Face cache consists of links. Every file is opened once, so
    that one that cannot be read is refused here: `CheckpointError`, as for a link to nothing and for pipes, sockets
    and devices.
    """
    found: list[str] = []
    _walk(folder, "", (), found)
    return tuple(sorted(found))


def _walk(folder: Path, prefix: str, above: tuple[tuple[int, int], ...], found: list[str]) -> None:
    try:
        here = os.stat(folder)
        names = sorted(os.listdir(folder))
    except PermissionError:
        raise CheckpointError(f"{folder} cannot be read: permission denied; ask for read access to it") from None
    identity = (here.st_dev, here.st_ino)
    if identity in above:
        raise CheckpointError(f"{folder} is a link to a folder that it lies in; remove the link")
    for name in names:
        path = folder / name
        if _kind(path) == "folder":
            if prefix or name not in _BOOKKEEPING:
                _walk(path, f"{prefix}{name}/", (*above, identity), found)
        else:
            found.append(prefix + name)


def _kind(path: Path) -> str:
    """ "file" or "folder", once it is known to be readable."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "folder"
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return "file"
    except FileNotFoundError:
        raise CheckpointError(f"{path} is a link to a file that does not exist; download it again") from None
    except PermissionError:
        raise CheckpointError(f"{path} cannot be read: permission denied; ask for read access to it") from None
    raise CheckpointError(f"{path} is neither a file nor a folder; remove it")


def read_json(path: Path, error: type[Refusal] = CheckpointError) -> dict[str, Any]:
    """Read a JSON file that must hold an object; anything else is `error`."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON ({problem}); download or save it again") from None
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, not {type(value).__name__}; download or save it again")
    return value

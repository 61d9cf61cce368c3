"""The files of a checkpoint folder, whatever they are."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashnorm.errors import CheckpointError, Refusal

# What a version control or a download tool keeps about the folder it filled. It describes the source's files, so in a
# folder with other weights it would be a false record.
_BOOKKEEPING = (".git", ".cache")
_READ_BYTES = 4 * 1024 * 1024
_ADVICE = {
    errno.EACCES: "ask for read access to it",
    errno.EPERM: "ask for read access to it",
    errno.ENOENT: "download it again",
    errno.ELOOP: "it is a link that leads back to itself, so remove it",
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system says against reading `path` into a `CheckpointError`.

    Left as an `OSError` it would be taken for trouble with the output, which is on another disk.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the disk it is on")
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; {advice}") from error


def file_size(path: Path) -> int:
    """In bytes, of what a link points to. Raises `CheckpointError` where it cannot be had."""
    with reading(path):
        return path.stat().st_size


def read_pieces(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, a few MiB at a time; each piece is gone when the next is asked for."""
    buffer = memoryview(bytearray(_READ_BYTES))
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


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
    with reading(folder):
        here = os.stat(folder)
        names = sorted(os.listdir(folder))
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
    with reading(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            raise CheckpointError(f"{path} is a link to a file that does not exist; download it again") from None
        if stat.S_ISDIR(mode):
            return "folder"
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return "file"
    raise CheckpointError(f"{path} is neither a file nor a folder; remove it")


def read_json(path: Path, error: type[Refusal] = CheckpointError) -> dict[str, Any]:
    """Read a JSON file that must hold an object; anything else is `error`, an unreadable file `CheckpointError`."""
    with reading(path):
        text = path.read_bytes()
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON ({problem}); download or save it again") from None
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, not {type(value).__name__}; download or save it again")
    return value


def parse_json(text: bytes, **options: Any) -> Any:
    """The value of a JSON text, which must be UTF-8 without a byte order mark. Raises `ValueError` where it is not.

    Given bytes, `json.loads` guesses the encoding and takes UTF-16, UTF-32 and marks as well, which loaders reject.
    """
    return json.loads(text.decode("utf-8"), **options)

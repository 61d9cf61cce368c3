"""Opening a GGUF: refuse what is not one, not whole or one part of several, before anything else is read."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashnorm.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_gguf(file: Path) -> GGUFReader:
    """Memory-map a GGUF and read its metadata and table of tensors.

    Raises `CheckpointError` when `gguf` or `accelerate` is not installed, when `file` is missing, is no GGUF, is
    truncated or corrupt, is big-endian, or is one part of a split GGUF.
    """
    _require_packages()
    _require_magic(file)
    from gguf import GGUFEndian, GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        # The reader has no error of its own: what it meets past the end of the file surfaces as one of these.
        raise CheckpointError(
            f"{file} is a truncated or corrupt GGUF; compare its size with the original's and copy it again"
        ) from error
    if reader.endianess != GGUFEndian.LITTLE:
        raise CheckpointError(f"{file} is a big-endian GGUF; convert it with gguf-convert-endian first")
    if metadata(reader, "split.count", 1) > 1:
        raise CheckpointError(_is_a_part(file))
    return reader


def metadata(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """The value of one metadata key, or `default` when the file does not have it."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _require_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"reading a GGUF needs the package {' and '.join(missing)}; run `pip install 'flashnorm[gguf]'`"
        )


def _require_magic(file: Path) -> None:
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; name a GGUF file")
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file; name the GGUF file itself")
    try:
        with file.open("rb") as stream:
            start = stream.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; check its permissions") from error
    if start != MAGIC:
        raise CheckpointError(f"{file} is not a GGUF, since it does not start with the bytes 'GGUF'; name a GGUF file")


def _is_a_part(file: Path) -> str:
    """What to say about one part of a split GGUF: which parts are missing, and how to join them."""
    match = PART_NAME.fullmatch(file.name)
    if match is None:
        return f"{file} is one part of a split GGUF; join its parts with `llama-gguf-split --merge` first"
    count = int(match["count"])
    parts = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [part for part in parts if not (file.parent / part).exists()]
    lacking = f", and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing beside it" if missing else ""
    return (
        f"{file} is one of {count} parts of a split GGUF{lacking}; get all parts and join them with "
        f"`llama-gguf-split --merge {parts[0]} {match['stem']}.gguf` first"
    )

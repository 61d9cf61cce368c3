"""`flashnorm.json`: what was folded, from which files, into which files. The schema is docs/flashnorm.schema.json.

The original gains and biases lie beside it in `flashnorm.gains`, a safetensors file under another name: loaders that
take every *.safetensors file of a folder must not take that one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashnorm.checkpoint.tree import read_json
from flashnorm.errors import CheckpointError
from flashnorm.folders import require_folder

MANIFEST = "flashnorm.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    sha256: str
    size: int


@dataclass(frozen=True)
class Reader:
    """A stored tensor that a gain was folded into, along `axis`; `channels` names an index tensor in `flashnorm.gains`.

    Position i was scaled by the gain's channel `channels[i]` (-1: not at all); None is the identity map.
    """

    tensor: str
    axis: int
    channels: str | None


@dataclass(frozen=True)
class SiteRecord:
    """One folded norm. Its gain is `offset + weight`, with the original `weight` in `flashnorm.gains`."""

    norm: str
    gain: str
    bias: str | None
    convention: str
    offset: float
    readers: tuple[Reader, ...]


@dataclass(frozen=True)
class Manifest:
    """What `flashnorm.json` says. `originals`: stored tensors whose value before folding is in `flashnorm.gains`.

    `added`: tensors that the source did not store (an untied head); `removed`: those that the output does not.
    `config`: the text of the source's `config.json` where folding changed it. `lost`: by tensor, how many weights
    became zero for being too small for their dtype. `new_biases`: those of `added` that are biases, for which the
    config was told to make room.
    """

    tool_version: str
    mode: str
    untied: bool
    source: dict[str, FileRecord]
    output: dict[str, FileRecord]
    sites: tuple[SiteRecord, ...]
    skipped: dict[str, str]
    originals: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    config: str | None
    lost: dict[str, int] = field(default_factory=dict)
    new_biases: tuple[str, ...] = ()
    schema_version: int = field(default=SCHEMA_VERSION)


def is_folded(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` is an output of this project's fold."""
    return (Path(folder) / MANIFEST).is_file()


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read a folder's `flashnorm.json`. Raises `CheckpointError` where there is none, or it is damaged or too new."""
    require_folder(folder)
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}; give a folder that `flashnorm fold` wrote")
    table = read_json(path)
    version = table.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has schema version {version!r}, this version reads {SCHEMA_VERSION}; use the version that wrote it"
        )
    if table.get("digest") != _digest(table):
        raise CheckpointError(
            f"{path} was changed after it was written: its digest does not match; fold the source again"
        )
    return _from_table(table)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The text of `flashnorm.json`, with a digest over everything else in it."""
    table = asdict(manifest)
    table["tool"] = {"name": "flashnorm", "version": table.pop("tool_version")}
    table["digest"] = _digest(table)
    return (json.dumps(dict(sorted(table.items())), indent=2) + "\n").encode()


def _digest(table: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in table.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _from_table(table: dict[str, Any]) -> Manifest:
    return Manifest(
        tool_version=table["tool"]["version"],
        mode=table["mode"],
        untied=table["untied"],
        source={name: FileRecord(**record) for name, record in table["source"].items()},
        output={name: FileRecord(**record) for name, record in table["output"].items()},
        sites=tuple(
            SiteRecord(**{**site, "readers": tuple(Reader(**reader) for reader in site["readers"])})
            for site in table["sites"]
        ),
        skipped=table["skipped"],
        originals=tuple(table["originals"]),
        added=tuple(table["added"]),
        removed=tuple(table["removed"]),
        config=table["config"],
        lost=table["lost"],
        new_biases=tuple(table.get("new_biases", ())),  # absent in folders of older versions, which made none
    )

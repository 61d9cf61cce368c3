"""A checkpoint folder, opened: every stored tensor's place, dtype and shape, without reading any weights."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashnorm.checkpoint.foreign import refuse_foreign
from flashnorm.checkpoint.header import Shard, TensorInfo
from flashnorm.checkpoint.layout import open_shards
from flashnorm.checkpoint.quantised import refuse_quantised
from flashnorm.checkpoint.tree import file_size, list_files, read_json, reading
from flashnorm.errors import CheckpointError, ConfigError

CONFIG = "config.json"


@dataclass(frozen=True)
class Source:
    """A whole, readable, floating-point safetensors checkpoint.

    `files`: every file of the folder, as paths relative to it, shards included. `index`: the name of the shard index,
    or None for a checkpoint of one file.
    """

    folder: Path
    config: dict[str, Any]
    files: tuple[str, ...]
    shards: tuple[Shard, ...]
    index: str | None
    tensors: dict[str, TensorInfo] = field(repr=False)
    marks: dict[str, tuple[int, ...]] = field(repr=False)  # of every file as it was opened, to see that it stays

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` where a file is not the one that was opened: half of it may have been read before."""
        for name, mark in self.marks.items():
            if _mark(self.folder / name) != mark:
                raise CheckpointError(
                    f"{self.folder / name} changed while it was read; try again when nothing writes to the folder"
                )

    def by_size(self) -> list[tuple[str, int]]:
        """Every file and its size in bytes, the largest first: worked on in this order, none is left to run alone."""
        sizes = {name: file_size(self.folder / name) for name in self.files}
        return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))

    def read(self, name: str) -> torch.Tensor:
        """Read one stored tensor into memory of its own. Raises `CheckpointError` where there is none of that name."""
        info = self._info(name)
        return self._read(info, info.start, info.end, info.shape)

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read `tensor[first:last]` of one stored tensor that has at least one dimension."""
        info = self._info(name)
        row = info.nbytes // info.shape[0]
        start, end = info.start + first * row, info.start + last * row
        return self._read(info, start, end, (last - first, *info.shape[1:]))

    def read_span(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read elements `first` to `last` of one stored tensor, counted as they lie in the file: (last - first,)."""
        info = self._info(name)
        width = info.dtype.itemsize
        return self._read(info, info.start + first * width, info.start + last * width, (last - first,))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} stores no tensor named {name!r}")
        return self.tensors[name]

    def _read(self, info: TensorInfo, start: int, end: int, shape: tuple[int, ...]) -> torch.Tensor:
        buffer = torch.empty(end - start, dtype=torch.uint8)
        path = self.folder / info.shard
        with reading(path), path.open("rb", buffering=0) as file:
            read_exactly(file.fileno(), buffer.numpy().data, start)
        return buffer.view(info.dtype).reshape(shape)


def read_exactly(descriptor: int, into: memoryview, position: int) -> None:
    """Fill `into` from `position` of an open file. Raises `CheckpointError` where the file ends before that."""
    while len(into):
        count = os.preadv(descriptor, [into], position)
        if count == 0:
            raise CheckpointError("a file of the checkpoint became shorter while it was read; leave the source alone")
        into, position = into[count:], position + count


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint folder and check everything that can be checked without reading the weights.

    Costs one small read for each shard: about a second for 160 shards and 90,000 tensors. Raises `ConfigError` where
    `config.json` is missing or invalid, and `CheckpointError` where the files are incomplete, inconsistent, corrupt,
    unreadable, quantised, or not a safetensors checkpoint at all.
    """
    folder = Path(path)
    refuse_foreign(folder)
    files = list_files(folder)
    if CONFIG not in files:
        raise ConfigError(f"{folder} has no {CONFIG}; give a checkpoint folder as written by `save_pretrained`")
    config = read_json(folder / CONFIG, ConfigError)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{folder / CONFIG} names no model_type; give a checkpoint folder of Transformers")
    marks = {name: _mark(folder / name) for name in files}
    index, shards = open_shards(folder, files, config)
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    refuse_quantised(folder, files, config, tensors)
    return Source(folder, config, files, shards, index, tensors, marks)


def _mark(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    with reading(path):
        status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

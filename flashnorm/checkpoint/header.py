"""The safetensors header: eight bytes of length, JSON, then the tensors' bytes without a gap.

Reading a header costs a few kilobytes of input whatever the size of the file, and proves that the file is whole:
the byte ranges must tile the rest of the file exactly, as the format demands
(https://github.com/huggingface/safetensors, section "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashnorm.checkpoint.tree import parse_json, reading
from flashnorm.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000  # the format's own limit, which keeps a corrupt length from being believed

# Code in the header -> bits per element, and the torch dtype of those that are whole numbers of bytes.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_BITS |= {code: 8 * dtype.itemsize for code, dtype in DTYPES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: where its bytes lie and what they mean. `start`, `end`: byte positions in the shard file."""

    name: str
    shard: str
    code: str  # the header's word for the dtype, e.g. "BF16"
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.code]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Shard:
    """One safetensors file. `tensors` are in the order of their bytes; `data_start` is where the first one begins."""

    name: str
    size: int
    data_start: int
    metadata: dict[str, str]
    tensors: tuple[TensorInfo, ...]


class Entry(NamedTuple):
    """One tensor as a header describes it, wherever its bytes will lie."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.code].itemsize

    @property
    def nbytes(self) -> int:
        return self.itemsize * prod(self.shape)


def read_header(path: Path) -> Shard:
    """Read and check one file's header. Raises `CheckpointError` where the file is not whole, valid safetensors."""
    with reading(path), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not (size >= 8 and 2 <= length <= MAX_JSON_BYTES):
            raise CheckpointError(_not_safetensors(path))
        _refuse_unless(8 + length <= size, path, "it ends inside its own header")
        text = file.read(length)
    entries = _parse(text, path)
    metadata = entries.pop("__metadata__", {})
    _refuse_unless(
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()),
        path,
        "its __metadata__ is not a table of strings",
    )
    start = 8 + length
    infos = sorted(
        (_tensor(name, entry, start, path) for name, entry in entries.items()), key=lambda t: (t.start, t.end)
    )
    _check_tiling(infos, start, size, path)
    return Shard(path.name, size, start, metadata, tuple(infos))


def encode_header(entries: Iterable[Entry], metadata: dict[str, str]) -> bytes:
    """The header, its length included, of a file that holds `entries` in that order.

    Raises `CheckpointError` where a tensor would not begin on a multiple of its element size: readers map the file.
    """
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for entry in entries:
        if position % entry.itemsize:
            raise CheckpointError(
                f"{entry.name!r} would not be aligned in its shard; save the checkpoint again with `save_pretrained`"
            )
        end = position + entry.nbytes
        table[entry.name] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the widest element takes eight bytes
    return len(text).to_bytes(8, "little") + text


def _refuse_unless(condition: bool, path: Path, what: str) -> None:
    if not condition:
        raise CheckpointError(f"{path} is truncated or corrupt: {what}; download or save it again")


def _not_safetensors(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            return f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"
    return f"{path} is truncated or corrupt: it does not begin with a safetensors header; download or save it again"


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    names: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names.extend(name for name, _ in pairs)
        return table

    try:
        table = parse_json(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        table = None
    _refuse_unless(isinstance(table, dict), path, "its header is not valid JSON in UTF-8")
    if names:
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path} holds {twice!r} twice: tensor names must be unique; save the checkpoint again")
    return table


def _tensor(name: str, entry: Any, data_start: int, path: Path) -> TensorInfo:
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    _refuse_unless(whole, path, f"its entry for {name!r} lacks a dtype, a shape or byte offsets")
    if not isinstance(code, str) or code not in _BITS:
        raise CheckpointError(
            f"{path} stores {name!r} as {code!r}, a number format that this version does not know; "
            f"convert the checkpoint to one of {', '.join(sorted(DTYPES))}"
        )
    _refuse_unless(
        8 * (end - begin) == _BITS[code] * prod(shape), path, f"{name!r} has not as many bytes as its shape needs"
    )
    return TensorInfo(name, path.name, code, shape, data_start + begin, data_start + end)


def _check_tiling(tensors: list[TensorInfo], start: int, size: int, path: Path) -> None:
    position = start
    for tensor in tensors:
        _refuse_unless(tensor.start == position, path, f"the bytes of {tensor.name!r} overlap or leave a gap")
        position = tensor.end
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes of the {position} that its header promises; "
            "download or save it again"
        )
    _refuse_unless(position == size, path, f"{size - position} bytes follow its last tensor")

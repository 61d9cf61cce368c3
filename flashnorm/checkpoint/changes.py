"""What a transform changes in a checkpoint, and what that makes of each of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashnorm.checkpoint.edit import check_scales, rewritten
from flashnorm.checkpoint.header import CODES, Entry, Shard, TensorInfo, encode_header
from flashnorm.checkpoint.plan import TensorEdit
from flashnorm.checkpoint.source import CONFIG, Source
from flashnorm.checkpoint.stream import Copy, New, Scaled, Segment, Skip
from flashnorm.checkpoint.tree import read_json
from flashnorm.errors import CheckpointError

_NONE = TensorEdit()


@dataclass(frozen=True)
class Addition:
    """A tensor that the source does not store: a copy of one that it does, edited under its new name, or given data."""

    shard: str
    content: TensorInfo | torch.Tensor


@dataclass(frozen=True)
class Changes:
    """Edits by stored (or added) name, new tensors by name, and the text of `config.json` (None: as it is)."""

    edits: Mapping[str, TensorEdit]
    additions: Mapping[str, Addition]
    config: bytes | None = None

    def edit(self, name: str) -> TensorEdit:
        return self.edits.get(name, _NONE)


@dataclass(frozen=True)
class _Item:
    """A stretch of the new shard: one tensor, or (`entry` None) the gap where one was removed."""

    entry: Entry | None
    segments: tuple[Segment, ...]


def check_changes(source: Source, changes: Changes) -> None:
    """Find before anything is written what could not be carried out.

    Raises `CheckpointError` where a change names a tensor that the source lacks, adds one that it has, or scales one
    by a factor that does not fit or is not finite.
    """
    for name in changes.additions:
        if name in source.tensors:
            raise CheckpointError(f"{source.folder} stores a tensor named {name!r} already; it cannot be added")
    for name, edit in changes.edits.items():
        content = changes.additions[name].content if name in changes.additions else source.tensors.get(name)
        if content is None:
            raise CheckpointError(f"{source.folder} stores no tensor named {name!r}, which was to be changed")
        for shift in edit.shifts:
            if shift.weight not in source.tensors:
                raise CheckpointError(f"{source.folder} stores no tensor named {shift.weight!r}, needed for {name!r}")
        if isinstance(content, TensorInfo):
            check_scales(name, content, edit.scales)


def output_bytes(source: Source, changes: Changes) -> int:
    """How many bytes of tensors the output holds more (or, negative, fewer) than the source."""
    added = sum(addition.content.nbytes for addition in changes.additions.values())
    return added - sum(source.tensors[name].nbytes for name, edit in changes.edits.items() if edit.remove)


def vanishes(source: Source, name: str, changes: Changes) -> bool:
    """Whether `name` is a shard of which nothing is left: the index no longer names it, so it must not exist."""
    infos = [info for shard in source.shards if shard.name == name for info in shard.tensors]
    kept = any(addition.shard == name for addition in changes.additions.values())
    return bool(infos) and not kept and all(changes.edit(info.name).remove for info in infos)


def file_segments(source: Source, name: str, size: int, changes: Changes) -> list[Segment]:
    """The segments that make the output's file `name` of the source's, which has `size` bytes."""
    for shard in source.shards:
        if shard.name == name:
            return _shard_segments(source, shard, changes)
    if name == CONFIG and changes.config is not None:
        return [Skip(0, size), New(changes.config)]
    names_change = changes.additions or any(edit.remove for edit in changes.edits.values())
    if name == source.index and names_change:
        return [Skip(0, size), New(_new_index(source, name, changes))]
    return [Copy(0, size)]


def _shard_segments(source: Source, shard: Shard, changes: Changes) -> list[Segment]:
    items = [_stored(source, info, changes.edit(info.name)) for info in shard.tensors]
    new_names = any(item.entry is None for item in items)
    for name, addition in changes.additions.items():
        if addition.shard == shard.name:
            _insert(items, _added(source, name, addition, changes.edit(name)))
            new_names = True
    header: list[Segment] = [Copy(0, shard.data_start)]
    if new_names:  # else the header stays byte for byte
        entries = [item.entry for item in items if item.entry]
        header = [Skip(0, shard.data_start), New(encode_header(entries, shard.metadata))]
    return header + [segment for item in items for segment in item.segments]


def _stored(source: Source, info: TensorInfo, edit: TensorEdit) -> _Item:
    if edit.remove:
        return _Item(None, (Skip(info.start, info.end),))
    return _Item(Entry(info.name, info.code, info.shape), _content(source, info.name, info, edit, again=False))


def _added(source: Source, name: str, addition: Addition, edit: TensorEdit) -> _Item:
    content = addition.content
    if isinstance(content, TensorInfo):
        entry = Entry(name, content.code, content.shape)
        return _Item(entry, _content(source, name, content, edit, again=True))
    return _Item(Entry(name, CODES[content.dtype], tuple(content.shape)), (New(tensor_bytes(content)),))


def _content(source: Source, name: str, info: TensorInfo, edit: TensorEdit, *, again: bool) -> tuple[Segment, ...]:
    if edit.fill is not None or edit.replace is not None or edit.shifts:
        new = New(tensor_bytes(rewritten(source, name, info, edit)))
        return (new,) if again else (Skip(info.start, info.end), new)
    if edit.scales:
        return (Scaled(name, info, edit.scales, again),)
    return (Copy(info.start, info.end, again),)


def _insert(items: list[_Item], new: _Item) -> None:
    """Put a tensor behind the last one with elements as wide as its own, so that all stay aligned."""
    assert new.entry is not None
    width = new.entry.itemsize
    place = max((i + 1 for i, item in enumerate(items) if item.entry and item.entry.itemsize >= width), default=0)
    items.insert(place, new)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as safetensors stores them."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _new_index(source: Source, name: str, changes: Changes) -> bytes:
    index: dict[str, Any] = read_json(source.folder / name)
    removed = {name for name, edit in changes.edits.items() if edit.remove}
    weight_map = {name: shard for name, shard in index["weight_map"].items() if name not in removed}
    weight_map |= {name: addition.shard for name, addition in changes.additions.items()}
    index["weight_map"] = dict(sorted(weight_map.items()))
    metadata = index.get("metadata")
    if isinstance(metadata, dict):
        counts = {"total_size": output_bytes(source, changes), "total_parameters": _more_elements(source, changes)}
        for key, change in counts.items():
            if isinstance(metadata.get(key), int | float):
                metadata[key] += change
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _more_elements(source: Source, changes: Changes) -> int:
    added = sum(_numel(addition.content) for addition in changes.additions.values())
    return added - sum(source.tensors[name].numel for name, edit in changes.edits.items() if edit.remove)


def _numel(content: TensorInfo | torch.Tensor) -> int:
    return content.numel if isinstance(content, TensorInfo) else content.numel()

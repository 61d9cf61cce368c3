"""Which safetensors files make up a checkpoint, and that together they are whole and consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashnorm.checkpoint.header import Shard, read_header
from flashnorm.checkpoint.tree import read_json
from flashnorm.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_shards(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> tuple[str | None, tuple[Shard, ...]]:
    """The name of the shard index (None where there is one file) and the shards, headers read and checked.

    Stock loaders take `model.safetensors`, else the files that the index names; a config may name another file in
    `transformers_weights`. Raises `CheckpointError` for a missing shard, a stray one, a tensor that its shard lacks, a
    tensor stored twice, and for every file that is not whole.
    """
    index = _index_name(files, config)
    if index is None:
        single = config.get("transformers_weights") or SINGLE
        if single not in files:
            raise CheckpointError(_no_weights(folder, files))
        _refuse_strays(folder, files, {single}, "a checkpoint without an index has one safetensors file")
        return None, (read_header(folder / single),)
    weight_map = read_weight_map(folder / index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if name not in files]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {missing[0]!r}, {_count(len(missing), 'shard')} of the {len(names)} that {index} names; "
            "download the rest of the checkpoint"
        )
    _refuse_strays(folder, files, set(names), f"{index} does not name it")
    shards = tuple(read_header(folder / name) for name in names)
    _check_against_index(folder, index, weight_map, shards)
    return index, shards


def read_weight_map(path: Path) -> dict[str, str]:
    """The index's table from tensor name to shard. Raises `CheckpointError` unless it is one, of plain file names."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map from tensor names to shards; save the checkpoint again")
    for shard in set(weight_map.values()):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {shard!r}, which is not a safetensors file of the same folder")
    return weight_map


def _index_name(files: tuple[str, ...], config: dict[str, Any]) -> str | None:
    explicit = config.get("transformers_weights")
    if explicit:
        return explicit if str(explicit).endswith(".index.json") else None
    return INDEX if INDEX in files else None


def _no_weights(folder: Path, files: tuple[str, ...]) -> str:
    others = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if len(others) == 1:
        return f"{folder} has {others[0]!r} but no {SINGLE}, which is the name that loaders look for; rename it"
    if others:
        return f"{folder} has {len(others)} safetensors files but no {INDEX}; download the index as well"
    return f"{folder} has no {SINGLE} and no {INDEX}; give a folder that holds the weights"


def _refuse_strays(folder: Path, files: tuple[str, ...], named: set[str], why: str) -> None:
    # Loaders that take every *.safetensors file of the folder would mix a stray one into the model.
    for name in files:
        if name.endswith(".safetensors") and "/" not in name and name not in named:
            raise CheckpointError(f"{folder} has a stray file {name!r}: {why}; move it out of the folder")


def _check_against_index(folder: Path, index: str, weight_map: dict[str, str], shards: tuple[Shard, ...]) -> None:
    home: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in home:
                raise CheckpointError(
                    f"{folder} stores {tensor.name!r} twice, in {home[tensor.name]!r} and in {shard.name!r}: shards of "
                    "two checkpoints may be mixed; download it into an empty folder"
                )
            home[tensor.name] = shard.name
    for name, shard_name in weight_map.items():
        if home.get(name) != shard_name:
            raise CheckpointError(
                f"{folder / index} says that {name!r} is in {shard_name!r}, but it is not there: the index and "
                "the shards belong to different checkpoints; download both again"
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

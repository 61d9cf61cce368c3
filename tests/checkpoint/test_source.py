import json
import os
import time

import pytest
import torch

from flashnorm.checkpoint.header import Entry, encode_header
from flashnorm.checkpoint.source import open_source, read_exactly
from flashnorm.errors import CheckpointError, ConfigError
from tests.checkpoint.tiny import random_weights, write_checkpoint


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_reads_every_tensor(tmp_path, shards, dtype):
    weights = random_weights(dtype) | {"scalar": torch.tensor(3.0), "none": torch.empty(0, 2), "ids": torch.arange(5)}
    source = open_source(write_checkpoint(tmp_path / "source", weights, shards))
    assert set(source.tensors) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(source.read(name), tensor)
        assert source.read(name).dtype == source.tensors[name].dtype == tensor.dtype


def test_reads_rows(tmp_path):
    weights = {"matrix": torch.arange(12).view(4, 3), "vector": torch.arange(4.0)}
    source = open_source(write_checkpoint(tmp_path / "source", weights, shards=1))
    for name, tensor in weights.items():
        assert torch.equal(source.read_rows(name, 1, 3), tensor[1:3])
        assert torch.equal(source.read_rows(name, 0, 4), tensor)


def test_knows_every_file(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "source", shards=1))
    assert {"code/modeling_custom.py", "LICENSE", "config.json", "model.safetensors"} <= set(source.files)
    assert source.config["rms_norm_eps"] == 1e-5


def test_no_such_tensor(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "source"))
    with pytest.raises(CheckpointError, match="stores no tensor named 'nothing'"):
        source.read("nothing")


def test_a_snapshot_of_links(tmp_path):
    """The Hugging Face cache: each file of a snapshot is a relative link to a blob named by its hash."""
    real = write_checkpoint(tmp_path / "real")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in real.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        link = snapshot / path.relative_to(real)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    weights = random_weights()
    source = open_source(snapshot)
    assert torch.equal(source.read("norm.weight"), weights["norm.weight"])


def test_missing_config(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_source(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ("{}", "names no model_type"),
        ('{"model_type": null}', "names no model_type"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_invalid_config(tmp_path, text, words):
    folder = write_checkpoint(tmp_path / "source")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        open_source(folder)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"abc")
    with path.open("rb") as file, pytest.raises(CheckpointError, match="became shorter"):
        read_exactly(file.fileno(), memoryview(bytearray(4)), 0)


def test_a_folder_of_the_largest_size_opens_fast(tmp_path):
    """671B parameters in 163 shards and 90,000 tensors, like DeepSeek-V3; holes take no room on the disk."""
    folder = write_checkpoint(tmp_path / "source", shards=1)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(163):
        entries = [Entry(f"layers.{shard}.experts.{i}.weight", "BF16", (2048, 3584)) for i in range(560)]
        name = f"model-{shard:05}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(encode_header(entries, {"format": "pt"}))
            file.truncate(file.tell() + sum(entry.nbytes for entry in entries))
        weight_map |= dict.fromkeys((entry.name for entry in entries), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    began = time.process_time()
    source = open_source(folder)
    assert sum(info.numel for info in source.tensors.values()) > 660e9
    assert time.process_time() - began < 10  # seconds; about one on an idle core


@pytest.mark.parametrize("read", ["read", "read_rows", "by_size", "again"])
def test_a_file_that_is_gone_is_the_sources_trouble(tmp_path, read):
    source = open_source(write_checkpoint(tmp_path / "source"))
    calls = {
        "read": lambda: source.read("norm.weight"),
        "read_rows": lambda: source.read_rows("norm.weight", 0, 1),
        "by_size": source.by_size,
        "again": lambda: open_source(tmp_path / "gone"),
    }
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"cannot be read: No such file|does not exist"):
        calls[read]()

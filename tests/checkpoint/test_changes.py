import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashnorm.checkpoint.changes import Addition, Changes
from flashnorm.checkpoint.engine import transform
from flashnorm.checkpoint.plan import Scale, Shift, TensorEdit
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from tests.checkpoint.tiny import random_weights, write_checkpoint

INDEX = "model.safetensors.index.json"
REMOVE = TensorEdit(remove=True)


def run(folder, edits=(), additions=(), config=None):
    """The weights of the folder's output, and the output."""
    source, dst = open_source(folder), folder.parent / "out"
    transform(source, Changes(dict(edits), dict(additions), config), dst, lambda *_: None, what="test", quiet=True)
    return {name: open_source(dst).read(name) for name in open_source(dst).tensors}, dst


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_nothing(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    weights, dst = run(folder)
    assert same(weights, random_weights())
    assert (dst / INDEX).read_bytes() == (folder / INDEX).read_bytes()


@pytest.mark.parametrize("shards", [1, 3])
def test_removal(tmp_path, shards):
    folder = write_checkpoint(tmp_path / "source", shards=shards)
    gone = ["layers.0.norm.weight", "norm.weight", "embed.weight"]
    weights, dst = run(folder, dict.fromkeys(gone, REMOVE))
    kept = {name: tensor for name, tensor in random_weights().items() if name not in gone}
    assert same(weights, kept)
    if shards > 1:
        index, before = (json.loads((path / INDEX).read_text()) for path in (dst, folder))
        assert index["weight_map"] == {name: before["weight_map"][name] for name in sorted(kept)}
        assert index["metadata"] == {
            "total_size": sum(tensor.nbytes for tensor in kept.values()),
            "total_parameters": sum(tensor.numel() for tensor in kept.values()),
        }


@pytest.mark.parametrize("shards", [1, 3])
def test_addition_of_a_copy_and_its_edit(tmp_path, shards):
    folder = write_checkpoint(tmp_path / "source", shards=shards)
    info = open_source(folder).tensors["embed.weight"]
    gain = torch.full((48,), 2.0)
    additions = {"lm_head.weight": Addition(info.shard, info), "copy.weight": Addition(info.shard, info)}
    weights, dst = run(folder, {"lm_head.weight": TensorEdit(scales=(Scale(1, gain),))}, additions)
    embed = random_weights()["embed.weight"]
    assert same(weights, random_weights() | {"lm_head.weight": 2 * embed, "copy.weight": embed})
    if shards > 1:
        index, before = (json.loads((path / INDEX).read_text()) for path in (dst, folder))
        assert index["weight_map"]["lm_head.weight"] == info.shard
        assert index["metadata"]["total_size"] == before["metadata"]["total_size"] + 2 * embed.nbytes


def test_addition_of_data(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    shard = open_source(folder).shards[1].name
    weights, _ = run(folder, {}, {"new": Addition(shard, torch.arange(4))})
    assert torch.equal(weights["new"], torch.arange(4))


def test_the_metadata_of_a_shard_survives_its_new_header(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    _, dst = run(folder, {"layers.0.norm.weight": REMOVE})
    shard = open_source(folder).tensors["layers.0.norm.weight"].shard
    with safe_open(dst / shard, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "kept"}


def test_wide_tensors_are_added_before_narrow_ones(tmp_path):
    """An odd number of bytes at a file's end must not shift the next tensor off the multiples of its element size."""
    folder = write_checkpoint(tmp_path / "source", {"odd": torch.ones(3, dtype=torch.bool)}, shards=1)
    additions = {name: Addition("model.safetensors", torch.ones(3)) for name in ("a", "b")}
    weights, dst = run(folder, {}, additions)
    assert set(load_file(dst / "model.safetensors")) == set(weights) == {"odd", "a", "b"}


def test_a_removal_that_would_misalign_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "source", {"w": torch.ones(2)}, shards=1)
    (folder / "model.safetensors").unlink()
    entries = {"x": (torch.ones(1, dtype=torch.bfloat16)), "y": torch.ones(1, dtype=torch.bfloat16), "z": torch.ones(1)}
    table, data = {}, b""
    for name, tensor in entries.items():
        code = "BF16" if tensor.dtype == torch.bfloat16 else "F32"
        table[name] = {"dtype": code, "shape": [1], "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += bytes(tensor.nbytes)
    text = json.dumps(table).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match="'z' would not be aligned"):
        run(folder, {"x": REMOVE})


def test_a_shard_with_nothing_left_does_not_exist(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    last = open_source(folder).shards[-1]
    weights, dst = run(folder, {info.name: REMOVE for info in last.tensors})
    assert not (dst / last.name).exists()
    assert same(weights, {n: t for n, t in random_weights().items() if n not in {info.name for info in last.tensors}})


def test_config(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    _, dst = run(folder, config=b'{"model_type": "llama", "new": 1}')
    assert json.loads((dst / "config.json").read_text())["new"] == 1


def test_an_index_without_metadata_gets_none(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    index = json.loads((folder / INDEX).read_text())
    del index["metadata"]
    (folder / INDEX).write_text(json.dumps(index))
    _, dst = run(folder, {"norm.weight": REMOVE})
    assert set(json.loads((dst / INDEX).read_text())) == {"weight_map"}


@pytest.mark.parametrize(
    ("edits", "additions", "words"),
    [
        ({"nothing": REMOVE}, {}, "stores no tensor named 'nothing', which was to be changed"),
        (
            {"norm.weight": TensorEdit(shifts=(Shift("w", torch.ones(1)),))},
            {},
            "no tensor named 'w', needed for 'norm.w",
        ),
        ({}, {"embed.weight": Addition("x", torch.ones(1))}, "stores a tensor named 'embed.weight' already"),
        ({"embed.weight": TensorEdit(scales=(Scale(1, torch.ones(7)),))}, {}, "does not take 7 gains"),
    ],
)
def test_changes_that_do_not_fit_the_source(tmp_path, edits, additions, words):
    folder = write_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match=words):
        run(folder, edits, additions)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_every_dtype_passes_unchanged(tmp_path):
    dtypes = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64, torch.uint8]
    weights = {str(dtype): torch.ones(3).to(dtype) for dtype in dtypes} | {"none": torch.empty(0, 3)}
    folder = write_checkpoint(tmp_path / "source", weights, shards=1)
    save_file(weights, folder / "model.safetensors")
    assert same(run(folder)[0], weights)

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from tests.checkpoint.tiny import random_weights, write_checkpoint

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "source")


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def refuses(folder, words):
    with pytest.raises(CheckpointError, match=words) as refusal:
        open_source(folder)
    assert str(folder) in str(refusal.value)


def test_missing_shard(folder):
    (folder / SHARD).unlink()
    refuses(folder, f"lacks '{SHARD}', 1 shard of the 3 that {INDEX} names; download the rest")


def test_index_names_a_tensor_that_its_shard_lacks(folder):
    change_index(folder, lambda index: index["weight_map"].update({"layers.9.norm.weight": SHARD}))
    refuses(folder, f"says that 'layers.9.norm.weight' is in '{SHARD}', but it is not there")


def test_index_names_the_wrong_shard(folder):
    change_index(folder, lambda index: index["weight_map"].update({"embed.weight": SHARD}))
    refuses(folder, f"says that 'embed.weight' is in '{SHARD}'")


def test_stray_shard(folder):
    shutil.copy(folder / SHARD, folder / "model-00004-of-00004.safetensors")
    refuses(folder, "a stray file 'model-00004-of-00004.safetensors': .*does not name it")


def test_stray_file_beside_a_single_one(tmp_path):
    folder = write_checkpoint(tmp_path / "source", shards=1)
    save_file({"x": torch.ones(1)}, folder / "consolidated.safetensors")
    refuses(folder, "a stray file 'consolidated.safetensors'")


def test_safetensors_in_a_subfolder_are_other_files(folder):
    save_file({"x": torch.ones(1)}, folder / "code" / "model.safetensors")
    assert "code/model.safetensors" in open_source(folder).files


def test_duplicate_tensor(folder):
    tensors = load_file(folder / SHARD)
    save_file({**tensors, "embed.weight": torch.ones(2)}, folder / SHARD)
    refuses(folder, f"stores 'embed.weight' twice, in 'model-00001-of-00003.safetensors' and in '{SHARD}'")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'])
def test_index_without_a_weight_map(folder, text):
    (folder / INDEX).write_text(text)
    refuses(folder, "has no weight_map")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_index_that_is_not_an_object(folder, text):
    (folder / INDEX).write_text(text, encoding="latin-1")
    refuses(folder, "is not valid JSON|must hold a JSON object")


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_index_that_points_elsewhere(folder, shard):
    change_index(folder, lambda index: index["weight_map"].update({"embed.weight": shard}))
    refuses(folder, "is not a safetensors file of the same folder")


def test_shards_without_their_index(folder):
    (folder / INDEX).unlink()
    refuses(folder, f"has 3 safetensors files but no {INDEX}; download the index")


def test_single_file_under_another_name(tmp_path):
    folder = write_checkpoint(tmp_path / "source", shards=1)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    refuses(folder, "has 'weights.safetensors' but no model.safetensors.*rename it")


def test_no_weights_at_all(tmp_path):
    folder = write_checkpoint(tmp_path / "source", shards=1)
    (folder / "model.safetensors").unlink()
    refuses(folder, f"has no model.safetensors and no {INDEX}")


def test_the_config_may_name_the_file(tmp_path):
    folder = write_checkpoint(tmp_path / "source", shards=1, transformers_weights="weights.safetensors")
    refuses(folder, "a stray file 'model.safetensors'|has 'model.safetensors'|has no")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert [shard.name for shard in open_source(folder).shards] == ["weights.safetensors"]


def test_the_config_may_name_the_index(folder):
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    refuses(folder, "download the index")
    config = {"model_type": "llama", "transformers_weights": "other.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_source(folder).index == "other.safetensors.index.json"


def test_an_index_over_a_single_file(tmp_path):
    folder = write_checkpoint(tmp_path / "source", shards=1)
    weight_map = dict.fromkeys(random_weights(), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert open_source(folder).index == INDEX

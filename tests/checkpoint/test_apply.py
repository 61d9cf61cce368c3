import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors import safe_open

from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.gains import SIDECAR, read_gains
from flashnorm.checkpoint.hashes import verify_hashes
from flashnorm.checkpoint.manifest import MANIFEST, is_folded, read_manifest
from flashnorm.checkpoint.plan import FoldPlan, Scale, TensorEdit
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError, OutputError
from tests.checkpoint.tiny import LAYERS, READERS, hand_plan, random_weights, tree, write_checkpoint
from tests.peak import marks

INDEX = "model.safetensors.index.json"
GAINS = [f"layers.{index}.norm.weight" for index in range(LAYERS)]
SCALED = [f"layers.{index}.{reader}.weight" for index in range(LAYERS) for reader in READERS]


def fold(folder, dst, sums=MappingProxyType({}), **options):
    source = open_source(folder)
    apply_plan(source, hand_plan(source, **options), dst, sums=sums, quiet=True)
    return open_source(dst)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_weights(tmp_path, dtype, shards):
    weights = random_weights(dtype)
    out = fold(write_checkpoint(tmp_path / "source", weights, shards), tmp_path / "out")
    assert set(out.tensors) == set(weights)
    for name, before in weights.items():
        after = out.read(name)
        assert after.dtype == dtype
        if name in GAINS:
            assert torch.equal(after, torch.ones_like(before))
        elif name in SCALED:
            gain = weights[f"layers.{name.split('.')[1]}.norm.weight"]
            assert torch.equal(after, (before.double() * gain.double()).to(dtype))
        else:
            assert torch.equal(after, before)


@pytest.mark.parametrize("shards", [1, 3])
def test_everything_else_is_kept_byte_for_byte(tmp_path, shards):
    folder = write_checkpoint(tmp_path / "source", shards=shards)
    before = tree(folder)
    out = fold(folder, tmp_path / "out")
    after = tree(tmp_path / "out")
    assert tree(folder) == before
    assert set(after) == set(before) | {MANIFEST, SIDECAR}
    assert {name for name in before if after[name] != before[name]} <= {shard.name for shard in out.shards}
    for shard in out.shards:  # layout: the same header, the same size
        old, new = (path / shard.name for path in (folder, tmp_path / "out"))
        assert old.read_bytes()[: shard.data_start] == new.read_bytes()[: shard.data_start]
        assert old.stat().st_size == new.stat().st_size


def test_a_snapshot_of_links_becomes_real_files(tmp_path):
    real, snapshot = write_checkpoint(tmp_path / "real"), tmp_path / "snapshot"
    for path in (path for path in real.rglob("*") if path.is_file()):
        link = snapshot / path.relative_to(real)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    fold(snapshot, tmp_path / "out")
    fold(real, tmp_path / "same")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert tree(tmp_path / "out") == tree(tmp_path / "same")


def test_the_result_does_not_depend_on_the_workers(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "source"))
    for workers in (1, 2, 7):
        apply_plan(source, hand_plan(source), tmp_path / str(workers), quiet=True, workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "7")


def test_the_number_of_torch_threads_comes_back(tmp_path):
    before = torch.get_num_threads()
    fold(write_checkpoint(tmp_path / "source"), tmp_path / "out")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("shards", [1, 3])
def test_strict(tmp_path, shards):
    folder = write_checkpoint(tmp_path / "source", shards=shards)
    out = fold(folder, tmp_path / "out", strict=True)
    assert set(out.tensors) == set(random_weights()) - set(GAINS)
    assert out.config == {**json.loads((folder / "config.json").read_text()), "flashnorm": {"mode": "strict"}}
    assert list(out.config) == ["model_type", "rms_norm_eps", "flashnorm"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest.mode == "strict"
    assert set(manifest.removed) == set(GAINS)
    assert manifest.config == (folder / "config.json").read_text()


def test_untied(tmp_path):
    """The head is a copy of the embedding with the final norm's gain in it, and every tie flag changes."""
    folder = write_checkpoint(tmp_path / "source", text_config={"tie_word_embeddings": True}, tie_word_embeddings=True)
    source = open_source(folder)
    gain = source.read("norm.weight").float()
    plan = FoldPlan(
        edits={"norm.weight": TensorEdit(fill=1.0), "lm_head.weight": TensorEdit(scales=(Scale(1, gain),))},
        additions={"lm_head.weight": "embed.weight"},
        sites=(),
        skipped={},
        mode="compatible",
        untied=True,
        config_changes={("tie_word_embeddings",): False, ("text_config", "tie_word_embeddings"): False},
    )
    apply_plan(source, plan, tmp_path / "out", quiet=True)
    out, embed = open_source(tmp_path / "out"), source.read("embed.weight")
    assert torch.equal(out.read("embed.weight"), embed)
    assert torch.equal(out.read("lm_head.weight"), (embed.double() * gain.double()).bfloat16())
    assert out.config["tie_word_embeddings"] is out.config["text_config"]["tie_word_embeddings"] is False
    assert source.config["tie_word_embeddings"] is True
    assert json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]["lm_head.weight"] == out.shards[0].name
    assert read_manifest(tmp_path / "out").added == ("lm_head.weight",)


def test_the_manifest(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    assert not is_folded(folder)
    fold(folder, tmp_path / "out")
    assert is_folded(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert {name: record.sha256 for name, record in manifest.source.items()} == tree(folder)
    output = tree(tmp_path / "out")
    del output[MANIFEST]
    assert {name: record.sha256 for name, record in manifest.output.items()} == output
    assert {name: record.size for name, record in manifest.output.items()} == {
        name: (tmp_path / "out" / name).stat().st_size for name in output
    }
    assert [site.gain for site in manifest.sites] == GAINS
    assert [reader.tensor for site in manifest.sites for reader in site.readers] == SCALED
    assert manifest.skipped == {"norm": "the head is tied"}
    gains = read_gains(tmp_path / "out", manifest)
    assert all(torch.equal(gains[name], random_weights()[name]) for name in GAINS)


def test_an_already_folded_folder_is_refused(tmp_path):
    fold(write_checkpoint(tmp_path / "source"), tmp_path / "out")
    source = open_source(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"has a flashnorm\.json: it is folded already.*`flashnorm unfold`"):
        apply_plan(source, hand_plan(source), tmp_path / "twice", quiet=True)
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gains_that_are_not_finite_leave_nothing(tmp_path, value):
    weights = random_weights()
    weights["layers.1.norm.weight"][5] = value
    with pytest.raises(CheckpointError, match=re.escape("'layers.1.q_proj.weight'") + f" is {value} at channel 5"):
        fold(write_checkpoint(tmp_path / "source", weights), tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_overflow_leaves_nothing(tmp_path):
    weights = random_weights(torch.float16)
    weights["layers.2.norm.weight"][:] = 60000
    with pytest.raises(CheckpointError, match=r"'layers\.2\..*' does not fit its dtype"):
        fold(write_checkpoint(tmp_path / "source", weights), tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("place", ["source", "source/out", "out", "nowhere/out"])
def test_outputs_that_are_refused(tmp_path, place):
    folder = write_checkpoint(tmp_path / "source")
    (tmp_path / "out").mkdir()
    before = tree(tmp_path)
    with pytest.raises(OutputError):
        fold(folder, tmp_path / place)
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path / "out") == []


def test_progress_on_stderr_and_nothing_on_stdout(tmp_path, capsys):
    source = open_source(write_checkpoint(tmp_path / "source"))
    apply_plan(source, hand_plan(source), tmp_path / "out", quiet=False)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fold: 0 B of ")
    assert printed.err.endswith("0 s left\n")


def test_a_relative_destination(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    fold("source", "out")
    assert verify_hashes("out", quiet=True).passed


def test_edits_that_change_nothing_keep_the_hashes(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "source"))
    plan = replace(hand_plan(source), edits={}, sites=())
    apply_plan(source, plan, tmp_path / "out", quiet=True)
    manifest = read_manifest(tmp_path / "out")
    assert {n: r for n, r in manifest.output.items() if n != SIDECAR} == manifest.source


def test_stock_loaders_take_it(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    model = LlamaForCausalLM(config).eval()
    gain = torch.rand(64) + 0.5
    model.model.layers[0].post_attention_layernorm.weight.data.copy_(gain)
    model.save_pretrained(tmp_path / "source")
    source = open_source(tmp_path / "source")
    edits = {f"model.layers.0.mlp.{name}_proj.weight": TensorEdit(scales=(Scale(1, gain),)) for name in ("gate", "up")}
    edits["model.layers.0.post_attention_layernorm.weight"] = TensorEdit(fill=1.0)
    apply_plan(source, FoldPlan(edits, {}, (), {}, "compatible"), tmp_path / "out", quiet=True)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    folded = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (folded.model.layers[0].post_attention_layernorm.weight == 1).all()
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        before, after = model(tokens).logits, folded(tokens).logits
    assert (after - before).norm() <= 1e-5 * before.norm()


def test_loaders_that_take_every_safetensors_file_find_no_gains(tmp_path):
    fold(write_checkpoint(tmp_path / "source", shards=1), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


IMPORTS = """
from pathlib import Path
import torch
from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.source import open_source
from tests.checkpoint.tiny import hand_plan
"""
FOLD = """
source = open_source(sys.argv[1])
apply_plan(source, hand_plan(source), Path(sys.argv[2]), quiet=True, workers=2)
mark()
source.read("large.weight")
mark()
"""


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """Tensors of 105 MB and 17 MB: a few buffers a worker, far below the bound of two tensors and 1 GiB."""
    weights = random_weights(layers=LAYERS, width=1024, out=8192) | {"large.weight": torch.ones(50, 1 << 20).bfloat16()}
    folder = write_checkpoint(tmp_path / "source", weights, shards=2)
    # Two workers with three pairs of 4 MiB buffers and scratch each: 54 MiB; the rest is the allocators' own.
    limit = 100 * 2**20
    streamed, read_whole = marks(IMPORTS, FOLD, folder, tmp_path / "out")
    assert streamed < limit
    assert read_whole > limit  # so that the measure is known to see it


def test_a_config_that_becomes_unreadable_is_the_sources_fault(tmp_path, monkeypatch):
    source = open_source(write_checkpoint(tmp_path / "source"))
    plan = hand_plan(source, strict=True)
    unchanged = Path.read_bytes

    def fail(path):
        if path == source.folder / "config.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return unchanged(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match=r"source/config\.json cannot be read: Input/output error"):
        apply_plan(source, plan, tmp_path / "out", quiet=True)
    assert os.listdir(tmp_path) == ["source"]


def test_sums_that_are_known_are_not_taken_again(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "source", random_weights(), shards=2)
    fold(folder, tmp_path / "plain")
    manifest = read_manifest(tmp_path / "plain")
    sums = {name: record.sha256 for name, record in manifest.source.items()}
    fold(folder, tmp_path / "told", sums=sums)
    assert read_manifest(tmp_path / "told") == manifest
    changed = [name for name, record in manifest.source.items() if manifest.output[name] != record]
    assert changed
    fold(folder, tmp_path / "believed", sums=sums | dict.fromkeys(changed, "0" * 64))
    assert {read_manifest(tmp_path / "believed").source[name].sha256 for name in changed} == {"0" * 64}


def test_a_known_sum_of_a_file_that_is_copied_is_compared(tmp_path):
    folder = write_checkpoint(tmp_path / "source", random_weights())
    with pytest.raises(CheckpointError, match=r"LICENSE changed while it was read"):
        fold(folder, tmp_path / "out", sums={"LICENSE": "0" * 64})
    assert not (tmp_path / "out").exists()

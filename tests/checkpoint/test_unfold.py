import os

import pytest
import torch

from flashnorm.algebra import gain_factor
from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.gains import SIDECAR
from flashnorm.checkpoint.manifest import MANIFEST, is_folded
from flashnorm.checkpoint.plan import FoldedSite, FoldPlan, Scale, Shift, TensorEdit
from flashnorm.checkpoint.source import open_source
from flashnorm.checkpoint.unfold import unfold_checkpoint
from flashnorm.errors import CheckpointError, OutputError
from tests.checkpoint.test_edit import steps
from tests.checkpoint.tiny import READERS, hand_plan, random_weights, tree, write_checkpoint

READER_NAMES = {f"layers.{index}.{reader}.weight" for index in range(3) for reader in READERS}


def fold(folder, dst, **options):
    source = open_source(folder)
    apply_plan(source, hand_plan(source, **options), dst, quiet=True)
    return dst


def unfold(folder, dst):
    report = unfold_checkpoint(folder, dst, quiet=True)
    return report, open_source(dst)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip(tmp_path, dtype, strict, shards):
    weights = random_weights(dtype)
    folder = write_checkpoint(tmp_path / "source", weights, shards)
    fold(folder, tmp_path / "folded", strict=strict)
    report, back = unfold(tmp_path / "folded", tmp_path / "back")
    assert set(back.tensors) == set(weights)
    for name, before in weights.items():
        after = back.read(name)
        assert after.dtype == dtype
        if name in READER_NAMES:
            normal = before.abs() * 0.25 >= torch.finfo(dtype).smallest_normal  # the gains are above a quarter
            assert (steps(after, before)[normal] <= 1).all()
        else:
            assert torch.equal(after, before)
    assert set(report.divided) == READER_NAMES
    assert set(report.restored) == {f"layers.{index}.norm.weight" for index in range(3)}
    shards_and_index = {shard.name for shard in back.shards} | {back.index}
    before, after = tree(folder), tree(tmp_path / "back")
    assert set(after) == set(before)
    assert {name for name in before if before[name] != after[name]} <= shards_and_index
    assert not is_folded(tmp_path / "back")


def test_powers_of_two_come_back_bit_for_bit(tmp_path):
    weights = random_weights()
    for index in range(3):
        weights[f"layers.{index}.norm.weight"].copy_(2.0 ** torch.arange(-24, 24))
    folder = write_checkpoint(tmp_path / "source", weights)
    unfold(fold(folder, tmp_path / "folded"), tmp_path / "back")
    assert tree(tmp_path / "back") == tree(folder)


def test_an_untied_head_goes_and_the_tie_flag_comes_back(tmp_path):
    folder = write_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    source = open_source(folder)
    gain = source.read("norm.weight").float()
    plan = FoldPlan(
        edits={"norm.weight": TensorEdit(fill=1.0), "lm_head.weight": TensorEdit(scales=(Scale(1, gain),))},
        additions={"lm_head.weight": "embed.weight"},
        sites=(FoldedSite("norm", "norm.weight", None, "plain", 0.0, {"lm_head.weight": (1, None)}),),
        skipped={},
        mode="compatible",
        untied=True,
        config_changes={("tie_word_embeddings",): False},
    )
    apply_plan(source, plan, tmp_path / "folded", quiet=True)
    unfold(tmp_path / "folded", tmp_path / "back")
    index = "model.safetensors.index.json"
    before, after = tree(folder), tree(tmp_path / "back")
    assert {name for name in before if before[name] != after[name]} == {index}  # written anew, with the same content
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_one_plus_channels_and_a_moved_bias(tmp_path):
    weights = random_weights(torch.float32) | {
        "n.weight": torch.rand(48) - 0.5,
        "n.bias": torch.randn(48),
        "o.weight": torch.randn(6, 96),
        "o.bias": 1e-3 * torch.randn(6),
    }
    source = open_source(write_checkpoint(tmp_path / "source", weights))
    channels = torch.arange(48).repeat_interleave(2)
    edits = {
        "n.weight": TensorEdit(fill=0.0),
        "n.bias": TensorEdit(fill=0.0),
        "o.weight": TensorEdit(scales=(Scale(1, gain_factor(source.read("n.weight"), 1.0, channels)),)),
        "o.bias": TensorEdit(shifts=(Shift("o.weight", source.read("n.bias")[channels]),)),
    }
    site = FoldedSite("n", "n.weight", "n.bias", "one-plus", 1.0, {"o.weight": (1, channels)})
    apply_plan(source, FoldPlan(edits, {}, (site,), {}, "compatible"), tmp_path / "folded", quiet=True)
    _, back = unfold(tmp_path / "folded", tmp_path / "back")
    for name in ("n.weight", "n.bias", "o.bias"):  # a bias of 1e-3 under a shift of 10 could not be computed back
        assert torch.equal(back.read(name), weights[name])
    assert (steps(back.read("o.weight"), weights["o.weight"]) <= 1).all()


def test_a_zero_gain_is_named_and_refused(tmp_path):
    weights = random_weights()
    weights["layers.1.norm.weight"][7] = 0
    fold(write_checkpoint(tmp_path / "source", weights), tmp_path / "folded")
    with pytest.raises(
        CheckpointError, match=r"the gain of 'layers\.1\.norm' is zero at channel 7 of 'layers\.1\.q_proj"
    ):
        unfold_checkpoint(tmp_path / "folded", tmp_path / "back", quiet=True)
    assert sorted(os.listdir(tmp_path)) == ["folded", "source"]


def test_a_trained_model(smollm2_bf16, tmp_path):
    """Real gains, from near zero to large: every weight comes back as itself or a neighbour."""
    source = open_source(smollm2_bf16)
    readers_of = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    edits: dict[str, TensorEdit] = {}
    sites = []
    for index in range(source.config["num_hidden_layers"]):
        for norm, names in readers_of.items():
            gain = f"model.layers.{index}.{norm}.weight"
            readers = {f"model.layers.{index}.{name}.weight": (1, None) for name in names}
            edits |= dict.fromkeys(readers, TensorEdit(scales=(Scale(1, source.read(gain).float()),)))
            edits[gain] = TensorEdit(fill=1.0)
            sites.append(FoldedSite(gain.removesuffix(".weight"), gain, None, "plain", 0.0, readers))
    apply_plan(source, FoldPlan(edits, {}, tuple(sites), {}, "compatible"), tmp_path / "folded", quiet=True)
    report, back = unfold(tmp_path / "folded", tmp_path / "back")
    assert len(report.divided) == 5 * source.config["num_hidden_layers"]
    for name in source.tensors:
        distance = steps(back.read(name), source.read(name)).max()
        assert distance <= (name in report.divided), name


@pytest.fixture
def folded(tmp_path):
    return fold(write_checkpoint(tmp_path / "source"), tmp_path / "folded", strict=True)


def refuses(folded, words):
    with pytest.raises(CheckpointError, match=words):
        unfold_checkpoint(folded, folded.parent / "back", quiet=True)
    assert sorted(os.listdir(folded.parent)) == ["folded", "source"]


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json"])
def test_weights_or_config_that_folding_did_not_write(folded, name):
    data = (folded / name).read_bytes()
    (folded / name).write_bytes(data[:-1] + (b" " if name == "config.json" else bytes([data[-1] ^ 1])))
    refuses(folded, f"{name} is not the file that folding wrote: its SHA-256 differs")


def test_gains_that_are_missing_or_altered(folded):
    data = (folded / SIDECAR).read_bytes()
    (folded / SIDECAR).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refuses(folded, r"flashnorm\.gains is not the file that folding wrote")
    (folded / SIDECAR).unlink()
    refuses(folded, r"lacks flashnorm\.gains")


def test_a_manifest_that_is_missing(folded):
    (folded / MANIFEST).unlink()
    refuses(folded, r"has no flashnorm\.json")


def test_other_files_may_have_changed(folded):
    (folded / "README.md").write_text("mine")
    (folded / "LICENSE").write_text("other")
    unfold(folded, folded.parent / "back")
    assert (folded.parent / "back" / "README.md").read_text() == "mine"


def test_an_output_that_exists(folded):
    (folded.parent / "back").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        unfold_checkpoint(folded, folded.parent / "back", quiet=True)

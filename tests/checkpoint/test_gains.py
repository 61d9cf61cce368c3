import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashnorm.algebra import gain_factor
from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.gains import SIDECAR, read_gains, reader_scales
from flashnorm.checkpoint.manifest import read_manifest
from flashnorm.checkpoint.plan import FoldedSite, FoldPlan, Scale, Shift, TensorEdit
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from tests.checkpoint.tiny import hand_plan, random_weights, write_checkpoint


@pytest.fixture
def folded(tmp_path):
    """A norm whose gain lies repeated along one reader, and whose bias moved into that reader's."""
    weights = random_weights(torch.float16) | {"o.weight": torch.ones(4, 96).half(), "o.bias": torch.ones(4).half()}
    source = open_source(write_checkpoint(tmp_path / "source", weights))
    channels = torch.arange(48).repeat(2)
    channels[0] = -1
    gain = source.read("norm.weight")
    edits = {
        "norm.weight": TensorEdit(fill=1.0),
        "o.weight": TensorEdit(scales=(Scale(1, gain_factor(gain, 0.0, channels)),)),
        "o.bias": TensorEdit(shifts=(Shift("o.weight", torch.ones(96)),)),
    }
    readers = {"o.weight": (1, channels), "layers.0.q_proj.weight": (1, None), "layers.1.q_proj.weight": (1, channels)}
    site = FoldedSite("norm", "norm.weight", None, "plain", 0.0, readers)
    apply_plan(source, FoldPlan(edits, {}, (site,), {}, "compatible"), tmp_path / "out", quiet=True)
    return source, tmp_path / "out"


def test_originals_and_index_tensors(folded):
    source, out = folded
    manifest = read_manifest(out)
    gains = read_gains(out, manifest)
    assert manifest.originals == ("norm.weight", "o.bias")
    assert all(torch.equal(gains[name], source.read(name)) for name in manifest.originals)
    assert gains["norm.weight"].dtype == torch.float16
    readers = {reader.tensor: reader.channels for reader in manifest.sites[0].readers}
    assert readers["o.weight"] == readers["layers.1.q_proj.weight"] == "channels/0"  # stored once
    assert readers["layers.0.q_proj.weight"] is None
    assert set(gains) == {"norm.weight", "o.bias", "channels/0"}
    assert gains["channels/0"].tolist() == [-1, *range(1, 48), *range(48)]


def test_scales_by_reader(folded):
    source, out = folded
    manifest = read_manifest(out)
    scales = reader_scales(manifest, read_gains(out, manifest))
    (scale,) = scales["o.weight"]
    exact = source.read("o.weight").double() * scale.factor.double()
    assert torch.equal(open_source(out).read("o.weight"), exact.half())


def test_a_reader_of_two_norms_has_two_scales(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "source"))
    plan = hand_plan(source)
    apply_plan(source, replace(plan, sites=plan.sites[:1] * 2), tmp_path / "out", quiet=True)
    manifest = read_manifest(tmp_path / "out")
    assert len(reader_scales(manifest, read_gains(tmp_path / "out", manifest))["layers.0.q_proj.weight"]) == 2


def test_missing_gains(folded):
    (folded[1] / SIDECAR).unlink()
    with pytest.raises(CheckpointError, match=r"lacks flashnorm\.gains, which holds the original gains"):
        read_gains(folded[1], read_manifest(folded[1]))


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda _: b""]
)
def test_altered_gains(folded, change):
    path = folded[1] / SIDECAR
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"flashnorm\.gains is not the file that folding wrote"):
        read_gains(folded[1], read_manifest(folded[1]))


def test_gains_that_cannot_be_read(folded, monkeypatch):
    manifest = read_manifest(folded[1])

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match=r"flashnorm\.gains cannot be read: Input/output error"):
        read_gains(folded[1], manifest)

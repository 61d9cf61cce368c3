"""Undo a fold: put the original gains back and divide them out of the weights that took them in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashnorm.checkpoint.changes import Addition, Changes
from flashnorm.checkpoint.engine import transform
from flashnorm.checkpoint.gains import SIDECAR, read_gains, reader_scales, site_scales
from flashnorm.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from flashnorm.checkpoint.plan import TensorEdit
from flashnorm.checkpoint.source import CONFIG, Source, open_source
from flashnorm.checkpoint.stream import Sums
from flashnorm.errors import CheckpointError


@dataclass(frozen=True)
class UnfoldReport:
    """`restored`: stored tensors put back bit for bit; `divided`: weights that a gain was divided out of."""

    out: str
    restored: tuple[str, ...]
    divided: tuple[str, ...]


def unfold_checkpoint(
    folder: str | os.PathLike[str], dst: str | os.PathLike[str], *, quiet: bool = True, workers: int | None = None
) -> UnfoldReport:
    """Write the checkpoint that `folder` was folded from to the new folder `dst`. `quiet`: without progress on stderr.

    Everything that folding overwrote (gains, biases, the config) comes back bit for bit. A weight w that took in a
    gain g comes back as round(round(w g) / g), which is w or a neighbour of w: rounding w g moves it by less than one
    unit in the last place of w after the division, so the nearest stored number is at most one unit from w. The
    exception is a product below the smallest normal number (6.1e-5 in fp16; 1.2e-38 in bf16 and fp32), where folding
    itself kept fewer bits: there the error is at most half the smallest subnormal divided by |g|, plus that unit.

    Raises `CheckpointError` where `folder` is not folded, a gain is zero (the weights it multiplied are gone), or any
    weight, gain or config is not the one that folding wrote, and `OutputError` where `dst` cannot be written.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    gains = read_gains(folder, manifest)
    _refuse_zero_gains(manifest, gains)
    source = open_source(folder)
    changes = _changes(source, manifest, gains)
    # These are computed from or replaced, so they must be the files that folding wrote; the rest is only copied.
    checked = [shard.name for shard in source.shards] + [CONFIG] * (manifest.config is not None)

    def finish(_: Path, sums: Mapping[str, Sums]) -> None:
        for name in checked:
            record = manifest.output.get(name)
            if record is None or sums[name].source != record.sha256:
                raise CheckpointError(
                    f"{folder / name} is not the file that folding wrote: its SHA-256 differs, so it cannot be "
                    "unfolded; go back to the source"
                )

    transform(
        source,
        changes,
        Path(dst),
        finish,
        what="unfold",
        omit=frozenset({MANIFEST, SIDECAR}),
        quiet=quiet,
        workers=workers,
    )
    divided = tuple(name for name, edit in changes.edits.items() if edit.scales)
    return UnfoldReport(str(dst), manifest.originals, divided)


def _refuse_zero_gains(manifest: Manifest, gains: Mapping[str, torch.Tensor]) -> None:
    for site, reader, scale in site_scales(manifest, gains):
        zero = (scale.factor == 0).nonzero()
        if len(zero):
            raise CheckpointError(
                f"the gain of {site.norm!r} is zero at channel {int(zero[0])} of {reader.tensor!r}, so the weights "
                "that it multiplied are gone; go back to the source"
            )


def _changes(source: Source, manifest: Manifest, gains: Mapping[str, torch.Tensor]) -> Changes:
    edits = {
        name: TensorEdit(scales=tuple(replace(scale, divide=True) for scale in scales))
        for name, scales in reader_scales(manifest, gains).items()
    }
    edits |= {name: TensorEdit(remove=True) for name in manifest.added}
    edits |= {name: TensorEdit(replace=gains[name]) for name in manifest.originals if name in source.tensors}
    homes = _homes(source, manifest)
    additions = {
        name: Addition(homes.get(name, source.shards[0].name), gains[name])
        for name in manifest.originals
        if name not in source.tensors
    }
    config = None if manifest.config is None else manifest.config.encode("utf-8", "surrogateescape")
    return Changes(edits, additions, config)


def _homes(source: Source, manifest: Manifest) -> dict[str, str]:
    """The shard that a removed gain or bias goes back to: that of the first weight that it was folded into."""
    return {
        name: source.tensors[site.readers[0].tensor].shard
        for site in manifest.sites
        for name in (site.gain, site.bias)
        if name and site.readers and site.readers[0].tensor in source.tensors
    }

"""`flashnorm.gains`: the tensors that folding overwrote, as they were, and what they mean for each reader."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch

from flashnorm.algebra import gain_factor
from flashnorm.checkpoint.manifest import Manifest, Reader, SiteRecord
from flashnorm.checkpoint.plan import FoldedSite, FoldPlan, Scale
from flashnorm.checkpoint.source import Source
from flashnorm.checkpoint.tree import reading
from flashnorm.errors import CheckpointError

SIDECAR = "flashnorm.gains"


def sidecar(source: Source, plan: FoldPlan) -> tuple[bytes, tuple[SiteRecord, ...], tuple[str, ...]]:
    """The bytes of `flashnorm.gains`, the sites as the manifest names their index tensors, and the originals' names."""
    rewritten = [
        name
        for name, edit in plan.edits.items()
        if name in source.tensors and (edit.remove or edit.fill is not None or edit.replace is not None or edit.shifts)
    ]
    gains = [name for site in plan.sites for name in (site.gain_tensor, site.bias_tensor) if name]
    names = tuple(sorted({*rewritten, *gains}))
    tensors = {name: source.read(name) for name in names}
    keys: dict[bytes, str] = {}
    records = tuple(_record(site, tensors, keys) for site in plan.sites)
    return safetensors.torch.save(tensors, metadata={"format": "pt"}), records, names


def read_gains(folder: str | os.PathLike[str], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The contents of `flashnorm.gains`: originals by stored name, index tensors by the key that readers give.

    Raises `CheckpointError` where the file is missing, unreadable, or not the one that was written.
    """
    path = Path(folder) / SIDECAR
    if not path.is_file():
        raise CheckpointError(f"{folder} lacks {SIDECAR}, which holds the original gains; fold the source again")
    with reading(path):
        data = path.read_bytes()
    record = manifest.output.get(SIDECAR)
    if record is None or hashlib.sha256(data).hexdigest() != record.sha256:
        raise CheckpointError(f"{path} is not the file that folding wrote: its SHA-256 differs; fold the source again")
    return safetensors.torch.load(data)


def reader_scales(manifest: Manifest, gains: Mapping[str, torch.Tensor]) -> dict[str, tuple[Scale, ...]]:
    """What folding multiplied into each stored tensor: by its name, a factor for every gain that it reads."""
    scales: dict[str, tuple[Scale, ...]] = {}
    for _, reader, scale in site_scales(manifest, gains):
        scales[reader.tensor] = (*scales.get(reader.tensor, ()), scale)
    return scales


def site_scales(manifest: Manifest, gains: Mapping[str, torch.Tensor]) -> Iterator[tuple[SiteRecord, Reader, Scale]]:
    """The factor that each site put on each of its readers."""
    for site in manifest.sites:
        factors: dict[str | None, torch.Tensor] = {}  # shared: a norm before experts has hundreds of readers
        for reader in site.readers:
            if reader.channels not in factors:
                channels = None if reader.channels is None else gains[reader.channels]
                factors[reader.channels] = gain_factor(gains[site.gain], site.offset, channels)
            yield site, reader, Scale(reader.axis, factors[reader.channels])


def _record(site: FoldedSite, tensors: dict[str, torch.Tensor], keys: dict[bytes, str]) -> SiteRecord:
    readers = []
    for name, (axis, channels) in site.readers.items():
        key = None if channels is None else _store(channels, tensors, keys)
        readers.append(Reader(name, axis, key))
    return SiteRecord(site.norm, site.gain_tensor, site.bias_tensor, site.convention, site.offset, tuple(readers))


def _store(channels: torch.Tensor, tensors: dict[str, torch.Tensor], keys: dict[bytes, str]) -> str:
    """Keep an index tensor once, however many readers share it."""
    index = channels.to(torch.int32).contiguous()
    content = index.numpy().tobytes()
    if content not in keys:
        keys[content] = f"channels/{len(keys)}"
        tensors[keys[content]] = index
    return keys[content]

"""What folding did to every weight of a folded checkpoint, by the name that the weight has in the model.

The manifest speaks of stored tensors; whoever adapts a model speaks of its modules. Where Transformers rearranges
tensors while loading (experts stored one by one, projections stored fused), the two differ, and the gains are laid
along the axes of the parameters here.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flashnorm.algebra import gain_of, least_channels
from flashnorm.checkpoint.conversion import Placement, placements
from flashnorm.checkpoint.gains import SIDECAR, read_gains
from flashnorm.checkpoint.manifest import Manifest, SiteRecord, read_manifest
from flashnorm.checkpoint.source import Source, open_source
from flashnorm.sites.build import hollow_model, read_config
from flashnorm.sites.tying import tied_groups

_UNSEEN = -2  # a position that no stored tensor has accounted for; -1: it reads no gain


@dataclass(frozen=True)
class Gain:
    """One norm's gain along one axis of a weight.

    `values`: (channels of the norm,) fp32 or fp64. `channels`: as for `algebra.fold_gain`. `shift`: the norm's
    original bias if folding moved it into the next bias, (channels of the norm,), else None.
    """

    norm: str
    axis: int
    values: torch.Tensor
    channels: torch.Tensor | None
    shift: torch.Tensor | None

    def same_place(self, other: Gain) -> bool:
        """Whether both put the same factor on the same positions."""
        return (self.norm, self.axis) == (other.norm, other.axis) and (
            self.channels is other.channels
            or (self.channels is not None and other.channels is not None and self.channels.equal(other.channels))
        )


@dataclass(frozen=True)
class Weight:
    """A weight of the folded base, and what folding did to it.

    `transposed`: its module computes x W, not x Wᵀ (Conv1D), or looks rows up (Embedding). `gains`: None where parts of
    the weight took in different gains, so that none can be named for the whole. `moved`: what folding added to it, fp32
    or fp64, where it is a bias that a norm's bias moved into. `new`: the base's source does not have it.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    gains: tuple[Gain, ...] | None
    moved: torch.Tensor | None = None
    new: bool = False


@dataclass(frozen=True)
class FoldedBase:
    """A folded checkpoint, as an adapter sees it.

    `parameters`: by name in the model. `stored`: by name in the files, for adapters that were trained on modules which
    newer versions of Transformers have merged. `norms`: the modules that are norms. `prefix`: the name of the model
    without its head inside the model. `fingerprint`: equal for bases that were folded with the same gains.
    """

    folder: Path
    parameters: Mapping[str, Weight]
    stored: Mapping[str, Weight]
    norms: frozenset[str]
    prefix: str
    untied: bool
    fingerprint: str


def open_folded_base(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> FoldedBase:
    """Open a folder that `flashnorm fold` wrote. Reads headers and gains, no weights.

    Raises `CheckpointError` where the folder is not folded or is damaged, `ConfigError` where its model is unknown.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    originals = read_gains(folder, manifest)
    source = open_source(folder)
    model = hollow_model(read_config(folder, trust_remote_code), trust_remote_code)
    shapes = {name: tuple(info.shape) for name, info in source.tensors.items()}
    gains = _stored_gains(source, manifest, originals)
    moved = _moved(source, manifest, originals)
    stored = {
        name: Weight(name, shape, False, gains.get(name, ()), moved.get(name), name in manifest.new_biases)
        for name, shape in shapes.items()
    }
    return FoldedBase(
        folder=folder,
        parameters=_parameters(model, placements(model, shapes), stored),
        stored=stored,
        norms=frozenset([site.norm for site in manifest.sites] + list(manifest.skipped)),
        prefix=str(model.base_model_prefix),
        untied=manifest.untied,
        fingerprint=manifest.output[SIDECAR].sha256,
    )


def _stored_gains(
    source: Source, manifest: Manifest, originals: Mapping[str, torch.Tensor]
) -> dict[str, tuple[Gain, ...]]:
    found: dict[str, list[Gain]] = defaultdict(list)
    for site in manifest.sites:
        values = gain_of(originals[site.gain].reshape(-1), site.offset)
        shift = _shift(source, site, originals)
        for reader in site.readers:
            channels = originals[reader.channels].long() if reader.channels else None
            axis = reader.axis % len(source.tensors[reader.tensor].shape)
            found[reader.tensor].append(Gain(site.norm, axis, values, channels, shift))
    return {name: tuple(gains) for name, gains in found.items()}


def _shift(source: Source, site: SiteRecord, originals: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The norm's bias, if it has moved: then what the folded base stores in its place is zero."""
    if site.bias is None or (site.bias in source.tensors and source.read(site.bias).any()):
        return None
    shift = originals[site.bias].reshape(-1)
    return shift if shift.any() else None


def _moved(source: Source, manifest: Manifest, originals: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What folding added to each stored bias that it rewrote or made."""
    own = {name for site in manifest.sites for name in (site.gain, site.bias)}
    return {name: gain_of(source.read(name)) for name in manifest.new_biases} | {
        name: gain_of(source.read(name)) - gain_of(originals[name])
        for name in manifest.originals
        if name in source.tensors and name not in own
    }


def _parameters(
    model: nn.Module, placed: Mapping[str, list[Placement]], stored: Mapping[str, Weight]
) -> dict[str, Weight]:
    pieces: dict[str, list[tuple[Weight, Placement]]] = defaultdict(list)
    for name, places in placed.items():
        for piece in places:
            pieces[piece.parameter].append((stored[name], piece))
    found = {}
    for names in tied_groups(model):  # they share what is stored under any of their names
        parts = [part for name in names for part in pieces[name]]
        for name in names:
            owner = model.get_submodule(name.rpartition(".")[0])
            shape = tuple(model.get_parameter(name).shape)
            transposed = isinstance(owner, (Conv1D, nn.Embedding))
            new = any(weight.new for weight, _ in parts)
            found[name] = Weight(name, shape, transposed, laid_out(shape, parts), _whole_shift(parts), new)
    return found


def laid_out(shape: tuple[int, ...], parts: list[tuple[Weight, Placement]]) -> tuple[Gain, ...] | None:
    """The gains of a parameter's stored parts along its own axes; None where the parts disagree."""
    places: dict[tuple[str, int], Gain] = {}
    for weight, piece in parts:
        for gain in weight.gains or ():
            axes = [axis for axis, (stored_axis, _) in piece.axes.items() if stored_axis == gain.axis]
            if not axes:
                return None
            places[gain.norm, axes[0]] = gain
    found = []
    for (norm, axis), gain in places.items():
        line = _merged((_line(axis, norm, *part) for part in parts), shape[axis])
        if line is None:
            return None
        found.append(replace(gain, axis=axis, channels=least_channels(line, len(gain.values))))
    return tuple(found)


def _merged(lines: Iterable[torch.Tensor | None], length: int) -> torch.Tensor | None:
    """What all parts together say of an axis, -1 where none says anything; None where two contradict each other."""
    merged = torch.full((length,), _UNSEEN)
    for line in lines:
        if line is None or ((line != _UNSEEN) & (merged != _UNSEEN) & (line != merged)).any():
            return None
        merged = torch.where(line == _UNSEEN, merged, line)
    return merged.clamp(min=-1)


def _line(axis: int, norm: str, weight: Weight, piece: Placement) -> torch.Tensor | None:
    """What one stored part says of every position along a parameter's axis: its channel of `norm`, -1, or `_UNSEEN`."""
    if axis not in piece.axes:
        return None
    stored_axis = piece.axes[axis][0]
    gain = next((g for g in weight.gains or () if (g.norm, g.axis) == (norm, stored_axis)), None)
    length = weight.shape[stored_axis]
    if gain is None:
        channels = torch.full((length,), -1)
    else:
        channels = torch.arange(length) if gain.channels is None else gain.channels
    return piece.to_parameter(axis, channels, _UNSEEN)


def _whole_shift(parts: list[tuple[Weight, Placement]]) -> torch.Tensor | None:
    """Folding moves a shift only into a bias that is stored one to one, so there is one part or no shift."""
    return parts[0][0].moved if len(parts) == 1 else None

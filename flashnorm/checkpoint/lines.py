"""For every stored tensor: which norm's gain meets each position along each axis.

A parameter may be split over several stored tensors (experts), and several parameters may share one (fused
projections). What the audit says of parameters is laid down here on the tensors that are really in the files, and a
stored tensor that would have to be scaled in one part only is found out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from flashnorm.algebra import least_channels
from flashnorm.checkpoint.conversion import Placement
from flashnorm.sites.shadow import PLAIN, Numbering
from flashnorm.sites.types import Consumer, Site

Homes = Mapping[str, list[tuple[str, Placement]]]  # parameter -> the stored tensors it is made of
_Reading = tuple[Site, Consumer]

_ABSENT = -1  # a position that has not been looked at; otherwise PLAIN, or the code of a gain channel


class Misfit(Exception):
    """A site folds in the model, but its readers cannot be scaled as they are stored."""

    def __init__(self, norm: str, reason: str):
        super().__init__(reason)
        self.norm = norm


@dataclass(frozen=True)
class Line:
    """One gain along one axis of a stored tensor; `channels` as in `Consumer.channels`."""

    axis: int
    norm: str
    channels: torch.Tensor | None


def lines_of(sites: Iterable[Site], homes: Homes) -> dict[str, tuple[Line, ...]]:
    """The gains of `sites` on every stored tensor that they scale. Raises `Misfit` naming a site that does not fit."""
    readers: dict[str, list[_Reading]] = defaultdict(list)
    for site in sites:
        for consumer in site.consumers:
            readers[consumer.weight].append((site, consumer))
    contents: dict[str, list[tuple[Placement, list[_Reading]]]] = defaultdict(list)
    for parameter, places in homes.items():
        for stored, piece in places:
            contents[stored].append((piece, readers.get(parameter, [])))
    return {
        stored: _lines_on(stored, pieces)
        for stored, pieces in contents.items()
        if any(readings for _, readings in pieces)
    }


def _lines_on(stored: str, pieces: list[tuple[Placement, list[_Reading]]]) -> tuple[Line, ...]:
    """Number the gain channels of all sites that this tensor meets, and lay every parameter in it along its axes."""
    numbering = Numbering()
    widths = {site.norm: site.width for _, readings in pieces for site, _ in readings}
    merged: dict[int, torch.Tensor] = {}
    for piece, readings in pieces:
        for site, consumer in readings:
            if consumer.axis not in piece.axes:
                raise Misfit(site.norm, f"its reader {consumer.weight} is rearranged in {stored}: no axis follows it")
        for parameter_axis, (axis, _) in piece.axes.items():
            line = _line(piece.shape[parameter_axis], parameter_axis, readings, numbering)
            line = piece.to_stored(parameter_axis, line, _ABSENT)
            before = merged.get(axis, torch.full_like(line, _ABSENT))
            if ((before != line) & (before != _ABSENT) & (line != _ABSENT)).any():
                raise Misfit(
                    next(iter(widths)),
                    f"its readers are stored in {stored} together with weights that it does not feed",
                )
            merged[axis] = torch.where(before == _ABSENT, line, before)
    return tuple(
        Line(axis, norm, least_channels(numbering.channels_of(norm, line), widths[norm]))
        for axis, line in merged.items()
        for norm in numbering.norms_in(line)
    )


def _line(length: int, axis: int, readings: list[_Reading], numbering: Numbering) -> torch.Tensor:
    line = torch.full((length,), PLAIN, dtype=torch.int32)
    for site, consumer in readings:
        codes = numbering.codes(site.norm, site.width)
        if consumer.axis == axis:
            channels = torch.arange(length) if consumer.channels is None else consumer.channels
            line = torch.where(channels >= 0, codes[channels.clamp(min=0)], line)
    return line

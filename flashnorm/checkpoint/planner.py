"""Plans a fold: carries the audit's verdicts over from the model's parameters to the tensors on disk."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from flashnorm import algebra
from flashnorm.checkpoint.conversion import Placement
from flashnorm.checkpoint.lines import Homes, Line, Misfit, lines_of
from flashnorm.checkpoint.plan import FoldedSite, FoldPlan, NewBias, Scale, Shift, TensorEdit
from flashnorm.checkpoint.source import Source
from flashnorm.sites.audit import AuditReport
from flashnorm.sites.folding import gain_of, moves_shift, remaining_bias, value_problem
from flashnorm.sites.types import Site

_Lines = dict[str, tuple[Line, ...]]


@dataclass(frozen=True)
class _Stored:
    """A site with its gain and bias as they are on disk."""

    site: Site
    gain_names: tuple[str, ...]  # several where a gain that two norms share is stored twice
    bias_names: tuple[str, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None
    shift_moves: bool

    @property
    def gain(self) -> torch.Tensor:
        return gain_of(self.site, self.weight)


def plan_fold(
    source: Source,
    report: AuditReport,
    placed: dict[str, list[Placement]],
    *,
    strict: bool = False,
    untied: bool = False,
    additions: dict[str, str] | None = None,
    config_changes: dict[tuple[str, ...], object] | None = None,
    new_biases: dict[str, NewBias] | None = None,
) -> FoldPlan:
    """The plan for folding every foldable site of `report` in the checkpoint `source`.

    `placed`: where each stored tensor goes (`conversion.placements`), additions and new biases among them. `untied`:
    the report is that of the model with its head untied, whether or not the head had a copy of its own (`additions`) to
    get. A site whose readers are stored in a way that cannot be scaled is skipped with the reason. Raises `Refusal` on
    broken gains.
    """
    skipped = dict(report.skipped)
    homes = _homes(report, placed)
    chosen: dict[str, _Stored] = {}
    for site in report.foldable:
        try:
            chosen[site.norm] = _read(source, site, homes)
        except Misfit as misfit:
            skipped[site.norm] = str(misfit)
    lines = _fitting_lines(chosen, skipped, homes)
    return FoldPlan(
        edits=_edits(chosen, lines, homes, strict),
        additions=additions or {},
        sites=_records(chosen, lines),
        skipped=skipped,
        mode="strict" if strict else "compatible",
        untied=untied,
        config_changes=config_changes or {},
        new_biases=new_biases or {},
        keeps_bias=tuple(norm for norm, s in chosen.items() if s.bias is not None and not s.shift_moves),
    )


def _homes(report: AuditReport, placed: dict[str, list[Placement]]) -> Homes:
    first = {alias: name for name, aliases in report.aliases.items() for alias in aliases}
    homes: dict[str, list[tuple[str, Placement]]] = defaultdict(list)
    for stored, pieces in placed.items():
        for piece in pieces:
            homes[first.get(piece.parameter, piece.parameter)].append((stored, piece))
    return dict(homes)


def _read(source: Source, site: Site, homes: Homes) -> _Stored:
    gain_names = _whole(homes, site, site.weight, "gain")
    bias_names = _whole(homes, site, site.bias, "bias") if site.bias else ()
    for consumer in site.consumers:
        if consumer.weight not in homes:
            raise Misfit(site.norm, f"its reader {consumer.weight} is not stored in the checkpoint")
    weight = _read_copies(source, site, gain_names)
    bias = _read_copies(source, site, bias_names) if bias_names else None
    shift_moves = bias is not None and moves_shift(site) and _stored_plainly(site, homes)
    problem = value_problem(site, weight, bias, shift_moves)
    if problem is not None:
        raise Misfit(site.norm, problem)
    return _Stored(site, gain_names, bias_names, weight, bias, shift_moves)


def _read_copies(source: Source, site: Site, names: tuple[str, ...]) -> torch.Tensor:
    """A tensor that is stored under each of `names`. The loader ties copies only where they are equal."""
    first = source.read(names[0])
    for other in names[1:]:
        copied = source.read(other)
        if copied.dtype != first.dtype or not copied.equal(first):
            raise Misfit(site.norm, f"it is stored as {names[0]} and as {other}, which differ")
    return first


def _whole(homes: Homes, site: Site, parameter: str | None, what: str) -> tuple[str, ...]:
    """The stored names of a norm's own parameter, which must be stored as it is."""
    found = homes.get(parameter or "", [])
    if not found:
        raise Misfit(site.norm, f"its {what} {parameter} is not stored in the checkpoint")
    for name, piece in found:
        if any(positions is not None for _, positions in piece.axes.values()):
            raise Misfit(site.norm, f"its {what} {parameter} is stored as a part of {name}")
    return tuple(name for name, _ in found)


def _stored_plainly(site: Site, homes: Homes) -> bool:
    """Every reader and the bias after it are stored one to one, so that W b can be added to the stored bias."""
    names = [name for c in site.consumers for name in (c.weight, c.bias) if name]
    return all(
        len(homes.get(name, [])) == 1 and all(p is None for _, p in homes[name][0][1].axes.values()) for name in names
    )


def _fitting_lines(chosen: dict[str, _Stored], skipped: dict[str, str], homes: Homes) -> _Lines:
    """Drop sites from `chosen` until the rest fits: two sites may share a stored tensor, so start over each time."""
    while True:
        try:
            return lines_of([stored.site for stored in chosen.values()], homes)
        except Misfit as misfit:
            skipped[misfit.norm] = str(misfit)
            del chosen[misfit.norm]


def _edits(chosen: dict[str, _Stored], lines: _Lines, homes: Homes, strict: bool) -> dict[str, TensorEdit]:
    edits: dict[str, TensorEdit] = {}
    for name, on_it in lines.items():
        edits[name] = TensorEdit(scales=_scales(on_it, chosen))
    shifts: dict[str, list[Shift]] = defaultdict(list)
    for stored in chosen.values():
        convention = stored.site.convention
        assert convention is not None
        for name in stored.gain_names:
            edits[name] = TensorEdit(remove=True) if strict else TensorEdit(fill=convention.identity)
        if stored.bias is None:
            continue
        left = TensorEdit(fill=0.0) if stored.shift_moves else TensorEdit(replace=_left_bias(stored))
        edits.update(dict.fromkeys(stored.bias_names, left))
        if stored.shift_moves:
            for consumer in stored.site.consumers:
                weight, bias = homes[consumer.weight][0][0], homes[consumer.bias or ""][0][0]
                wide = algebra.gain_of(stored.bias.reshape(-1))
                shifts[bias].append(Shift(weight, algebra.spread(wide, consumer.channels, 0.0), consumer.axis))
    for bias, vectors in shifts.items():
        edits[bias] = TensorEdit(scales=edits[bias].scales if bias in edits else (), shifts=tuple(vectors))
    return edits


def _left_bias(stored: _Stored) -> torch.Tensor:
    assert stored.bias is not None
    return remaining_bias(stored.gain, stored.bias).reshape(stored.bias.shape)


def _scales(lines: tuple[Line, ...], chosen: dict[str, _Stored]) -> tuple[Scale, ...]:
    by_axis: dict[int, torch.Tensor] = {}
    for line in lines:
        stored = chosen[line.norm]
        factor = algebra.gain_factor(stored.weight, _offset(stored), line.channels)
        by_axis[line.axis] = by_axis[line.axis] * factor if line.axis in by_axis else factor
    return tuple(Scale(axis, factor) for axis, factor in by_axis.items())


def _records(chosen: dict[str, _Stored], lines: _Lines) -> tuple[FoldedSite, ...]:
    readers: dict[str, dict[str, tuple[int, torch.Tensor | None]]] = defaultdict(dict)
    for name, on_it in lines.items():
        for line in on_it:
            readers[line.norm][name] = (line.axis, line.channels)
    return tuple(
        FoldedSite(
            norm=norm,
            gain_tensor=stored.gain_names[0],
            bias_tensor=stored.bias_names[0] if stored.bias_names else None,
            convention={0.0: "plain", 1.0: "one-plus"}.get(_offset(stored), "offset"),
            offset=_offset(stored),
            readers=readers[norm],
        )
        for norm, stored in chosen.items()
    )


def _offset(stored: _Stored) -> float:
    assert stored.site.convention is not None
    return stored.site.convention.offset

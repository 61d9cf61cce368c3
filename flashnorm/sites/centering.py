"""Which LayerNorms need not subtract a mean, once the weights that write their inputs are centered.

A LayerNorm reads y − mean(y). Where y is a sum of what linear layers and embeddings have written, each of these can
write y − mean(y) at once (`algebra.center`), and the norm is an RMSNorm. That takes two things: all that is in the
norm's input is written so, and nothing but LayerNorms reads what these weights write.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flashnorm.sites.assemble import block_of, unseen_weights
from flashnorm.sites.audit import AuditReport, hollow_of, report_of, trace_fully
from flashnorm.sites.ownership import Ownership
from flashnorm.sites.probing import NormProbe
from flashnorm.sites.tracing import Trace
from flashnorm.sites.tying import untie_head
from flashnorm.sites.writer_record import Normalised, WriterTrace
from flashnorm.sites.writers import trace_writers
from flashnorm.sites.written_rows import Foreign, Writer


@dataclass(frozen=True)
class Centered:
    """A part of a parameter that is to have no mean along an axis: its entries `start` to `stop` there."""

    parameter: str
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Centering:
    """Whether a norm need not subtract a mean. `writers`: what has to be centered for it, as far as that is known."""

    norm: str
    centerable: bool
    reason: str  # why not; empty where it can
    writers: tuple[Centered, ...] = ()


@dataclass(frozen=True)
class CenteringAudit:
    """The verdicts of one model, in the order of its modules, how its norms work, and who reads them."""

    centerings: tuple[Centering, ...]
    probes: Mapping[str, NormProbe] = field(repr=False)
    irregular: Mapping[str, str] = field(repr=False)
    readers: AuditReport = field(repr=False)

    def __str__(self) -> str:
        subtracting = [c for c in self.centerings if self.probes[c.norm].convention.subtracts_mean]
        return f"{sum(c.centerable for c in subtracting)} of {len(subtracting)} LayerNorms can become RMSNorms"


def audit_centering(
    model: nn.Module | str | os.PathLike[str],
    *,
    inputs: dict[str, Any] | None = None,
    untie: bool = False,
    trust_remote_code: bool = False,
) -> CenteringAudit:
    """Which LayerNorms of a live model, or of a checkpoint folder by its config alone, can become RMSNorms.

    Arguments and errors are those of `flashnorm.audit`.
    """
    hollow = hollow_of(model, trust_remote_code)
    if untie:
        untie_head(hollow)
    live = model if isinstance(model, nn.Module) else None
    record = trace_fully(hollow, inputs, live)
    found = writers_of(hollow, record, live)
    return CenteringAudit(tuple(centerings(record, found)), found.probes, found.irregular, report_of(hollow, record))


def writers_of(hollow: nn.Module, record: Trace, live: nn.Module | None = None) -> WriterTrace:
    """`trace_writers` for the runs of a trace; nothing is run where no norm subtracts a mean, so that nobody asks."""
    if any(found.convention.subtracts_mean for found in record.probes.values()):
        return trace_writers(hollow, record.runs, live)
    return WriterTrace(hollow, record.probes)


def centerings(record: Trace, found: WriterTrace) -> list[Centering]:
    """One verdict for each norm that ran, in the order of the model's modules."""
    judge = _Judge(record, found)
    return [judge.verdict(name) for name, _ in record.model.named_modules() if name in found.probes]


class _Judge:
    """Weighs what a run has shown of norms against what it has shown of writers."""

    def __init__(self, record: Trace, found: WriterTrace) -> None:
        self.record, self.found = record, found
        self.owners = Ownership(record)
        self.unseen = unseen_weights(record)
        self.parts: dict[Writer, set[tuple[int, int]]] = defaultdict(set)  # what norms read of each writer
        for norm, readings in found.normalised.items():
            for reading in readings:
                for writer in _writers(reading):
                    self.parts[writer].add((reading.start, reading.stop))
                    if norm in found.irregular:
                        what = f"{norm} reads it, which is not a LayerNorm alone"
                        found.stop(writer, torch.arange(reading.start, reading.stop), what)

    def verdict(self, norm: str) -> Centering:
        if not self.found.probes[norm].convention.subtracts_mean:
            return Centering(norm, False, "it subtracts no mean")
        readings = self.found.normalised[norm]
        writers = {(w, r.start, r.stop): None for r in readings for w in _writers(r)}
        needed = tuple(sorted((Centered(w.parameter, w.axis, *part) for w, *part in writers), key=str))
        reason = self._problem(norm, readings)
        return Centering(norm, not reason, reason, needed)

    def _problem(self, norm: str, readings: set[Normalised]) -> str:
        if norm in self.found.irregular:
            return f"it is not a LayerNorm alone: {self.found.irregular[norm]}"
        reasons = dict.fromkeys(self.found.broken[norm])
        reasons |= {m.what: None for r in readings for m in r.members if isinstance(m, Foreign)}
        reasons = dict.fromkeys(sorted(reasons))
        for reading in sorted(readings, key=lambda r: (r.start, r.stop)):
            for writer in sorted(_writers(reading), key=lambda w: (w.parameter, w.axis)):
                problem = self._unfit(writer, reading.start, reading.stop)
                if problem is not None:
                    reasons[f"{writer.parameter}, which writes into it, cannot be centered: {problem}"] = None
        return "; ".join(reasons) or self._unreached(norm, readings) or ""

    def _unfit(self, writer: Writer, start: int, stop: int) -> str | None:
        """Why these channels of a writer cannot be centered."""
        name = writer.parameter
        for axis, where in self.found.uses[name].items():
            if axis != writer.axis:
                tied = len(self.record.ledger.aliases[name]) > 1
                return f"it is also used otherwise [{where}]" + (" (--untie removes this)" if tied else "")
        stopped = self.found.stopped.get(writer)
        if stopped is not None and bool(stopped[start:stop].any()):
            reasons = list(self.found.reasons[writer])
            return reasons[0] + (f", and {len(reasons) - 1} more" if len(reasons) > 1 else "")
        if any(part != (start, stop) and part[0] < stop and start < part[1] for part in self.parts[writer]):
            return "norms read different parts of it"
        dtype = self.record.model.get_parameter(name).dtype
        if dtype != torch.float32:  # what any full floating-point dtype is in a hollow model
            return f"it holds codes of {dtype}, not numbers; dequantise it"
        if self.owners.is_norms_own(name):
            return "it is also the gain or bias of a norm"
        blocker = self.owners.unseen_use(name, "the weight")
        return None if blocker is None else str(blocker)

    def _unreached(self, norm: str, readings: set[Normalised]) -> str | None:
        """A matrix that no run touched might write into the same input: refuse where it fits and lies near a writer."""
        model = self.record.model
        near = tuple(filter(None, (block_of(model, w.parameter) for r in readings for w in _writers(r))))
        widths = {r.stop - r.start for r in readings}
        for name, shape in self.unseen.items():
            if name.startswith(near) and widths & set(shape):
                return f"{name} was not reached by the trace and may write into it too"
        return None


def _writers(reading: Normalised) -> list[Writer]:
    return [member for member in reading.members if isinstance(member, Writer)]

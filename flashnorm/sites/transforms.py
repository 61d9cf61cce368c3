"""What may be done with every norm of a model: fold, defer, cancel and center, each with its reason, from one audit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from flashnorm.sites.audit import AuditReport, hollow_of, report_of, trace_fully
from flashnorm.sites.cancelling import Cancellation, CancellationAudit, before_any_linear, cancellations
from flashnorm.sites.centering import Centering, centerings, writers_of
from flashnorm.sites.folding import moves_shift
from flashnorm.sites.scalars import trace_scalars
from flashnorm.sites.tying import untie_head
from flashnorm.sites.types import Site

Word = Literal["yes", "partial", "centered", "no"]


@dataclass(frozen=True)
class Verdict:
    """`yes`, `partial` (cancel: for a part of the readers), `centered` (defer: once the norm is an RMSNorm) or `no`."""

    word: Word
    reason: str = ""  # why not, or not wholly


@dataclass(frozen=True)
class Transforms:
    """What may be done with one norm.

    `fold`: its gain into the weights that read it. `defer`: its scalar behind the products that read it. `cancel`: its
    division left out, since later norms divide. `center`: its mean subtraction into the weights that write its input.
    """

    fold: Verdict
    defer: Verdict
    cancel: Verdict
    center: Verdict


@dataclass(frozen=True)
class FullAudit:
    """The sites of a model, and for each of them what may be done with it."""

    report: AuditReport
    transforms: dict[str, Transforms]  # norm -> verdicts, for every site of the report
    cancellation: CancellationAudit


def audit_fully(
    model: nn.Module | str | os.PathLike[str],
    *,
    inputs: dict[str, Any] | None = None,
    untie: bool = False,
    trust_remote_code: bool = False,
) -> FullAudit:
    """`flashnorm.audit` and the verdicts of all transforms. Arguments and errors are those of `flashnorm.audit`."""
    hollow = hollow_of(model, trust_remote_code)
    if untie:
        untie_head(hollow)
    live = model if isinstance(model, nn.Module) else None
    record = trace_fully(hollow, inputs, live)
    report = report_of(hollow, record)
    scalars = trace_scalars(hollow, record.runs, live)
    redundant = {c.norm: c for c in cancellations(scalars)}
    centered = {c.norm: c for c in centerings(record, writers_of(hollow, record, live))}
    problems = before_any_linear(scalars)
    transforms = {
        site.norm: _transforms(site, problems.get(site.norm), redundant.get(site.norm), centered.get(site.norm))
        for site in report.sites
    }
    audit = CancellationAudit(tuple(redundant.values()), scalars.probes, scalars.irregular)
    return FullAudit(report, transforms, audit)


_UNREACHED = Verdict("no", "the trace never ran it")


def _transforms(
    site: Site, problem: str | None, cancellation: Cancellation | None, centering: Centering | None
) -> Transforms:
    fold = Verdict("yes") if site.foldable else Verdict("no", site.reason)
    if cancellation is None or centering is None or site.convention is None:
        return Transforms(fold, _UNREACHED, _UNREACHED, _UNREACHED)
    cancel = Verdict("yes" if cancellation.verdict == "full" else cancellation.verdict, cancellation.reason)
    center = Verdict("yes" if centering.centerable else "no", centering.reason)
    return Transforms(fold, _defer(site, problem, center), cancel, center)


def _defer(site: Site, problem: str | None, center: Verdict) -> Verdict:
    """W (g ⊙ n(x) + b) + c = (W (g ⊙ x)) / r(x) + (c + W b): only products with weights read it, and b can move on."""
    convention = site.convention
    assert convention is not None
    if convention.has_bias:
        if not site.foldable:
            return Verdict("no", f"its bias, which the scalar does not multiply, cannot move on: {site.reason}")
        if not moves_shift(site):
            bare = ", ".join(c.weight for c in site.consumers if not c.takes_shift)
            return Verdict("no", f"its bias, which the scalar does not multiply, has nowhere to go: {bare} has none")
    elif problem is not None:
        return Verdict("no", problem)
    if convention.saturates:
        return Verdict("no", "it does not divide a row by one number")
    if not convention.subtracts_mean:
        return Verdict("yes")
    if center.word == "yes":
        return Verdict("centered", "it subtracts a mean until it is centered")
    return Verdict("no", f"it subtracts a mean: {center.reason}")

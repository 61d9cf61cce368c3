"""The audit report as one line and as plain data, and the parts of its table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flashnorm.sites.audit import AuditReport
from flashnorm.sites.types import Site


def summary_line(report: AuditReport) -> str:
    """How many norms fold, and what keeps the others from it."""
    kinds = Counter(site.blockers[0].kind for site in report.blocked if site.blockers)
    blocked = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    without = sum(1 for site in report.sites if site.weight is None)
    parts = [f"{len(report.foldable)} of {len(report.sites)} norms can be folded"]
    if kinds:
        parts.append(f"{len(report.blocked)} cannot ({blocked})")
    if without:
        parts.append(f"{without} have no gain")
    return "; ".join(parts)


def verdict(site: Site) -> str:
    """One word: fold, no gain, or blocked."""
    if site.foldable:
        return "fold"
    return "no gain" if site.weight is None else "blocked"


def to_dict(report: AuditReport) -> dict[str, Any]:
    """The report as JSON-ready data; documented in docs/audit.md."""
    return {
        "model_type": report.model_type,
        "summary": summary_line(report),
        "norms": len(report.sites),
        "foldable": len(report.foldable),
        "sites": [_site(site) for site in report.sites],
    }


def _site(site: Site) -> dict[str, Any]:
    convention = site.convention
    return {
        "norm": site.norm,
        "gain": site.weight,
        "bias": site.bias,
        "width": site.width,
        "shared_with": list(site.shared_with),
        "convention": None
        if convention is None
        else {
            "kind": convention.kind,
            "offset": convention.offset,
            "eps": convention.eps,
            "eps_placement": convention.eps_placement,
            "multiply": convention.multiply,
            "group_size": convention.group_size,
            "gated": convention.gated,
        },
        "verdict": verdict(site),
        "reason": site.reason,
        "readers": [
            {"weight": c.weight, "axis": c.axis, "op": c.op, "where": c.where, "partial": c.channels is not None}
            for c in site.consumers
        ],
        "blockers": [
            {"kind": b.kind, "op": b.op, "where": b.where, "detail": b.detail, "remedy": b.remedy}
            for b in site.blockers
        ],
    }


def convention_text(site: Site) -> str:
    """How a norm turns its weight into a gain, and its epsilon."""
    convention = site.convention
    if convention is None:
        return "not run"
    if convention.saturates:
        return convention.name
    eps = "" if convention.eps_placement == "inside_sqrt" else f" ({convention.eps_placement})"
    return f"{convention.name if site.weight else convention.name.replace(' w', '')}, eps {convention.eps:g}{eps}"


def readers_text(site: Site) -> str:
    """Reader names without the part that they share with the norm."""
    shared = site.norm.rpartition(".")[0]
    names = [c.weight.removeprefix(f"{shared}.").removesuffix(".weight") for c in site.consumers]
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"

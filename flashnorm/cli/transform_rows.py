"""The audit of all transforms as a table and as plain data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from flashnorm.cli.audit_rows import grouped
from flashnorm.sites.render import convention_text, readers_text, to_dict
from flashnorm.sites.transforms import FullAudit, Transforms, Verdict
from flashnorm.sites.types import Blocker, Site

# Column of the table -> name in JSON.
COLUMNS = {"fold": "foldable", "defer": "deferrable", "cancel": "cancellable", "center": "centerable"}


def transforms_tables(audit: FullAudit, every: bool = False) -> list[Table]:
    """Two tables with a row for each norm, or for each group of layers that are alike.

    The first has its readers and four verdicts, the second every reason for a `no` or a `partial`.
    """
    report = audit.report
    title = Text(f"{report.model_type}: {len(report.sites)} norms", style="table.title")
    verdicts = Table(title=title, title_justify="left")
    for column in ("norm", "convention", "readers", *COLUMNS):
        verdicts.add_column(column, overflow="fold")
    reasons = Table(title=Text("reasons", style="table.title"), title_justify="left")
    for column in ("norm", "", "reason"):
        reasons.add_column(column, overflow="fold")
    rows = [_as_row(site, audit.transforms[site.norm]) for site in report.sites]
    for site in rows if every else grouped(rows):
        found = [_read(blocker) for blocker in site.blockers]
        words = ["no gain" if reason == _NO_GAIN else word for _, word, reason in found]
        # As plain text: the brackets of a reason are no markup.
        verdicts.add_row(*map(Text, (site.norm, convention_text(site), readers_text(site), *words)))
        for name, word, reason in found:
            if reason and word != _DASH:
                reasons.add_row(*map(Text, (site.norm, name, reason)))
    return [verdicts, reasons]


_DASH = "-"  # center, of a norm that subtracts no mean: the table gives no reason for that
_NO_GAIN = "it has no gain"


def _as_row(site: Site, transforms: Transforms) -> Site:
    """In the form that `grouped` takes: a blocker for each verdict, in the order of the columns."""
    subtracts = site.convention is not None and site.convention.subtracts_mean
    blockers = []
    for name in COLUMNS:
        verdict: Verdict = getattr(transforms, name)
        word = _DASH if name == "center" and not subtracts else verdict.word
        blockers.append(Blocker("", "", "", f"{name}|{word}|{verdict.reason}"))
    return replace(site, blockers=tuple(blockers))


def _read(blocker: Blocker) -> tuple[str, str, str]:
    """Column, word and reason."""
    name, word, reason = blocker.detail.split("|", 2)
    return name, word, reason


def full_dict(audit: FullAudit) -> dict[str, Any]:
    """The audit as JSON-ready data; documented in docs/audit.md."""
    table = to_dict(audit.report)
    for site in table["sites"]:
        transforms = audit.transforms[site["norm"]]
        for name, key in COLUMNS.items():
            verdict: Verdict = getattr(transforms, name)
            site[key] = {"verdict": verdict.word, "reason": verdict.reason}
    return table


def short_dict(audit: FullAudit) -> dict[str, Any]:
    """One architecture of `--all-architectures`: a row for each group of norms that are alike."""
    rows = []
    for site in grouped(_as_row(site, audit.transforms[site.norm]) for site in audit.report.sites):
        verdicts = {
            COLUMNS[name]: {"verdict": "no" if word == _DASH else word, "reason": reason}
            for name, word, reason in map(_read, site.blockers)
        }
        rows.append({"norm": site.norm, "convention": convention_text(site), **verdicts})
    return {"norms": len(audit.report.sites), "rows": rows}

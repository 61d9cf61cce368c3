"""The verdicts of cancellation as a table and as plain data."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from flashnorm.cli.audit_rows import grouped
from flashnorm.sites.cancelling import Cancellation, CancellationAudit
from flashnorm.sites.types import Blocker, Consumer, Site


def cancel_table(audit: CancellationAudit, every: bool = False) -> Table:
    """One row for each norm, or for each group of layers that are alike: the verdict, free readers and the reason."""
    table = Table(title=Text("cancellable norms", style="table.title"), title_justify="left")
    for column in ("norm", "cancellable", "readers without the scalar", "reason"):
        table.add_column(column, overflow="fold")
    sites = [_as_site(c) for c in audit.cancellations]
    for site in sites if every else grouped(sites):
        shared = site.norm.rpartition(".")[0]
        free = ", ".join(c.weight.removeprefix(f"{shared}.") for c in site.consumers)
        (verdict,) = site.blockers
        table.add_row(*map(Text, (site.norm, verdict.kind, free, verdict.detail)))
    return table


def _as_site(cancellation: Cancellation) -> Site:
    """In the form that `grouped` takes: free readers as consumers, the verdict and its reason as a blocker."""
    free = tuple(Consumer(reader, 0, "", "") for reader in cancellation.free)
    verdict = Blocker(cancellation.verdict, "", "", cancellation.reason)
    return Site(cancellation.norm, None, None, 0, None, free if cancellation.absorbers else (), (verdict,))


def to_dict(cancellation: Cancellation) -> dict[str, Any]:
    """One verdict as JSON-ready data; documented in docs/cancel.md."""
    return {
        "norm": cancellation.norm,
        "cancellable": cancellation.verdict,
        "reason": cancellation.reason,
        "free": list(cancellation.free),
        "kept": [
            {
                "reader": kept.reader,
                "channels": None if kept.channels is None else int(kept.channels.sum()),
                "reason": kept.reason,
            }
            for kept in cancellation.kept
        ],
        "absorbed_by": [absorber.norm for absorber in cancellation.absorbers],
    }

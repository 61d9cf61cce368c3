"""`flashnorm audit FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Quiet, TrustRemoteCode, console, print_json, say
from flashnorm.folders import require_folder


def command(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder; its config.json is enough.")],
    untie: Annotated[
        bool, typer.Option("--untie", help="Audit the model as it would be with its head untied.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="One row for each norm, not for all layers that are alike.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Say too which norms a later norm makes redundant; takes twice the time.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """List every norm, its convention, who reads it, and whether its gain can be folded."""
    require_folder(folder)
    if not quiet:
        say("audit", f"opening {folder}")
    from flashnorm.checkpoint.remarks import remarks
    from flashnorm.cli.audit_rows import grouped
    from flashnorm.cli.cancel_rows import cancel_table
    from flashnorm.cli.cancel_rows import to_dict as cancellation_to_dict
    from flashnorm.sites.audit import audit
    from flashnorm.sites.cancelling import audit_cancellation
    from flashnorm.sites.render import audit_table, summary_line, to_dict

    report = audit(folder, untie=untie, trust_remote_code=trust_remote_code)
    notes = remarks(folder, trust_remote_code)
    redundant = audit_cancellation(folder, trust_remote_code=trust_remote_code) if cancel else None
    if as_json:
        table = {**to_dict(report), "notes": list(notes)}
        if redundant is not None:
            table["cancellations"] = [cancellation_to_dict(c) for c in redundant.cancellations]
        print_json(table)
        return
    console().print(audit_table(report, report.sites if every else grouped(report.sites)))
    if redundant is not None:
        console().print(cancel_table(redundant, every))
        typer.echo(str(redundant))
    typer.echo(summary_line(report))
    for note in notes:
        typer.echo(f"note: {note}")

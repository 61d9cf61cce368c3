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
    from flashnorm.sites.audit import audit
    from flashnorm.sites.render import audit_table, summary_line, to_dict

    report = audit(folder, untie=untie, trust_remote_code=trust_remote_code)
    notes = remarks(folder, trust_remote_code)
    if as_json:
        print_json({**to_dict(report), "notes": list(notes)})
        return
    console().print(audit_table(report, report.sites if every else grouped(report.sites)))
    typer.echo(summary_line(report))
    for note in notes:
        typer.echo(f"note: {note}")

"""`flashnorm audit FOLDER`."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def command(
    folder: Path = typer.Argument(..., help="A checkpoint folder; its config.json is enough."),
    untie: bool = typer.Option(False, "--untie", help="Audit the model as it would be with its head untied."),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Run the model code that the folder brings along."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """List every norm, its convention, who reads it, and whether its gain can be folded."""
    from flashnorm.sites.audit import audit
    from flashnorm.sites.render import audit_table, summary_line, to_dict

    report = audit(folder, untie=untie, trust_remote_code=trust_remote_code)
    if as_json:
        typer.echo(json.dumps(to_dict(report), indent=2))
        return
    from rich.console import Console

    console = Console(width=None if _is_terminal() else 200)
    console.print(audit_table(report))
    console.print(summary_line(report), highlight=False)


def _is_terminal() -> bool:
    import sys

    return sys.stdout.isatty()

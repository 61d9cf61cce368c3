"""`flashnorm audit FOLDER`, and of every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Quiet, TrustRemoteCode, console, print_json, say
from flashnorm.errors import Refusal
from flashnorm.folders import require_folder


def command(
    folder: Annotated[
        Path | None, typer.Argument(help="A checkpoint folder; its config.json is enough.", show_default=False)
    ] = None,
    all_architectures: Annotated[
        bool,
        typer.Option(
            "--all-architectures",
            help="Audit every causal language model of the installed Transformers, by its default config.",
        ),
    ] = False,
    seconds: Annotated[
        float, typer.Option("--time-limit", min=1, help="With --all-architectures: seconds for each of them.")
    ] = 120,
    untie: Annotated[
        bool, typer.Option("--untie", help="Audit the model as it would be with its head untied.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="One row for each norm, not for all layers that are alike.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="A second table: which readers of a redundant norm need its scalar.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """List every norm, its convention, who reads it, and whether it can be folded, deferred, cancelled and centered."""
    if all_architectures != (folder is None):
        raise Refusal("give either a checkpoint folder or --all-architectures")
    if folder is None:
        _audit_all(seconds, untie, as_json, quiet)
        return
    require_folder(folder)
    if not quiet:
        say("audit", f"opening {folder}")
    from flashnorm.checkpoint.remarks import remarks
    from flashnorm.cli.cancel_rows import cancel_table
    from flashnorm.cli.cancel_rows import to_dict as cancellation_to_dict
    from flashnorm.cli.transform_rows import full_dict, transforms_tables
    from flashnorm.sites.render import summary_line
    from flashnorm.sites.transforms import audit_fully

    audit = audit_fully(folder, untie=untie, trust_remote_code=trust_remote_code)
    notes = remarks(folder, trust_remote_code)
    if as_json:
        table = {**full_dict(audit), "notes": list(notes)}
        if cancel:
            table["cancellations"] = [cancellation_to_dict(c) for c in audit.cancellation.cancellations]
        print_json(table)
        return
    for shown in transforms_tables(audit, every):
        console().print(shown)
    if cancel:
        console().print(cancel_table(audit.cancellation, every))
        typer.echo(str(audit.cancellation))
    typer.echo(summary_line(audit.report))
    for note in notes:
        typer.echo(f"note: {note}")


def _audit_all(seconds: float, untie: bool, as_json: bool, quiet: bool) -> None:
    import transformers

    from flashnorm.cli.audit_all import audit_types, summary_table
    from flashnorm.sites.architectures import causal_types

    transformers.logging.set_verbosity_error()
    tables = audit_types(causal_types(), seconds, untie, lambda name: None if quiet else say("audit", name))
    if as_json:
        print_json({"transformers": transformers.__version__, "untie": untie, "architectures": tables})
    else:
        console().print(summary_table(tables))

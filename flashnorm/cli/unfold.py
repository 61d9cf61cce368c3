"""`flashnorm unfold`: a folded checkpoint back to the one that it was made from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Quiet, print_json, say
from flashnorm.folders import require_folder


def command(
    folder: Annotated[Path, typer.Argument(help="A folder that `flashnorm fold` wrote.")],
    out: Annotated[Path, typer.Argument(help="The checkpoint folder to write; must not exist.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Put the original gains back and divide them out of the weights, to within one unit in the last place."""
    require_folder(folder)
    if not quiet:  # before torch, which takes seconds to load
        say("unfold", f"opening {folder}")
    from flashnorm.checkpoint.unfold import unfold_checkpoint

    report = unfold_checkpoint(folder, out, quiet=quiet)
    if as_json:
        print_json(asdict(report))
        return
    typer.echo(
        f"{report.out}: {len(report.restored)} tensors restored, {len(report.divided)} weights divided by their gains"
    )

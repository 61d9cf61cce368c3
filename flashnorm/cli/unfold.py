"""`flashnorm unfold`: a folded checkpoint back to the one that it was made from."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(help="A folder that `flashnorm fold` wrote.")],
    out: Annotated[Path, typer.Argument(help="The checkpoint folder to write; must not exist.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Put the original gains back and divide them out of the weights, to within one unit in the last place."""
    if not quiet:  # before torch, which takes seconds to load
        print(f"unfold: opening {folder}", file=sys.stderr, flush=True)
    from flashnorm.checkpoint.unfold import unfold_checkpoint

    report = unfold_checkpoint(folder, out, quiet=quiet)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    typer.echo(
        f"{report.out}: {len(report.restored)} tensors restored, {len(report.divided)} weights divided by their gains"
    )

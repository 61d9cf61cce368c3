"""`flashnorm fold SRC DST`."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def command(
    src: Path = typer.Argument(..., help="The checkpoint folder to fold; it is only read."),
    dst: Path = typer.Argument(..., help="The new folder; it must not exist."),
    strict: bool = typer.Option(False, "--strict", help="Remove the gains; load the result with flashnorm.load."),
    untie: bool = typer.Option(False, "--untie", help="Untie the head, so that the final norm folds too."),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Run the model code that the folder brings along."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress on stderr."),
) -> None:
    """Fold the norm gains of a checkpoint into the next weights."""
    if not quiet:
        typer.echo(f"fold: opening {src}", err=True)  # importing torch takes seconds, and silence looks like a hang
    from flashnorm.checkpoint.fold import fold_checkpoint

    report = fold_checkpoint(src, dst, strict=strict, untie=untie, trust_remote_code=trust_remote_code, quiet=quiet)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "source": str(src),
                    "output": None if report.already_folded else str(dst),
                    "already_folded": report.already_folded,
                    "folded": report.folded,
                    "skipped": report.skipped,
                    "grown_bytes": report.grown_bytes,
                },
                indent=2,
            )
        )
        return
    if report.already_folded:
        typer.echo(f"{src} is folded already ({len(report.folded)} norms); nothing was done")
        return
    typer.echo(f"folded {len(report.folded)} norms into {dst}")
    for reason, norms in _by_reason(report.skipped).items():
        names = norms[0] if len(norms) == 1 else f"{norms[0]} and {len(norms) - 1} like it"
        typer.echo(f"left alone: {names}: {reason}")
    if report.grown_bytes:
        typer.echo(f"the untied head adds {report.grown_bytes / 1e6:.1f} MB")


def _by_reason(skipped: dict[str, str]) -> dict[str, list[str]]:
    """Norms grouped by their reason, with layer numbers left out so that layers fall together."""
    import re

    groups: dict[str, list[str]] = {}
    for norm, reason in skipped.items():
        plain = re.sub(r"\.\d+\.", ".*.", reason)
        groups.setdefault(plain, []).append(norm)
    return groups

"""`flashnorm fold SRC DST`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Quiet, TrustRemoteCode, counted, print_json, say
from flashnorm.folders import require_folder


def command(
    src: Annotated[Path, typer.Argument(help="The checkpoint folder to fold; it is only read.")],
    dst: Annotated[Path, typer.Argument(help="The new folder; it must not exist.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Remove the gains; load the result with flashnorm.load.")
    ] = False,
    untie: Annotated[bool, typer.Option("--untie", help="Untie the head, so that the final norm folds too.")] = False,
    add_bias: Annotated[
        bool,
        typer.Option(
            "--add-bias", help="Give linears a bias where the config allows it, for norms' biases to move to."
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fold the norm gains of a checkpoint into the next weights."""
    require_folder(src)
    if not quiet:
        say("fold", f"opening {src}")  # importing torch takes seconds, and silence looks like a hang
    from flashnorm.checkpoint.fold import fold_checkpoint

    report = fold_checkpoint(
        src,
        dst,
        strict=strict,
        untie=untie,
        add_bias=add_bias,
        trust_remote_code=trust_remote_code,
        quiet=quiet,
    )
    if as_json:
        print_json(
            {
                "source": str(src),
                "out": None if report.already_folded else str(dst),
                "already_folded": report.already_folded,
                "folded": report.folded,
                "skipped": report.skipped,
                "grown_bytes": report.grown_bytes,
                "lost": report.lost,
                "new_biases": list(report.new_biases),
                "keeps_bias": list(report.keeps_bias),
            }
        )
        return
    if report.already_folded:
        typer.echo(
            f"{src} is folded already ({counted(len(report.folded), 'norm')}); nothing was done, {dst} was not made"
        )
        return
    typer.echo(f"folded {counted(len(report.folded), 'norm')} into {dst}")
    for line in by_reason(report.skipped):
        typer.echo(f"left alone: {line}")
    if report.new_biases:
        typer.echo(f"biases added: {len(report.new_biases)} ({report.new_biases[0]} for one)")
    if report.keeps_bias:
        kept = counted(len(report.keeps_bias), "norm")
        typer.echo(f"{kept} kept a bias, divided by the gain ({report.keeps_bias[0]} for one)")
    if report.lost:
        typer.echo(
            f"{counted(sum(report.lost.values()), 'weight')} of {counted(len(report.lost), 'tensor')} became zero, too "
            f"small for their dtype ({next(iter(report.lost))} for one)"
        )
    if report.grown_bytes:
        typer.echo(f"the untied head adds {report.grown_bytes / 1e6:.1f} MB")


def by_reason(skipped: Mapping[str, str]) -> list[str]:
    """One line for each reason; norms whose reasons differ in layer numbers alone are taken together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for norm, reason in skipped.items():
        groups[re.sub(r"\.\d+\.", ".*.", reason)].append(norm)
    return [
        f"{norms[0]}: {skipped[norms[0]]}" if len(norms) == 1 else f"{norms[0]} and {len(norms) - 1} like it: {reason}"
        for reason, norms in groups.items()
    ]

"""`flashnorm lora`: a LoRA adapter of a model, made one for its folded form, and back."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Quiet, TrustRemoteCode, print_json, say
from flashnorm.folders import require_folder


class Side(str, Enum):
    """The base that the translated adapter is for."""

    folded = "folded"
    original = "original"


def command(
    adapter: Annotated[Path, typer.Argument(help="The PEFT adapter folder; it is only read.")],
    base_folded: Annotated[Path, typer.Argument(help="The folded base, as `flashnorm fold` wrote it.")],
    out: Annotated[Path, typer.Argument(help="The adapter folder to write; must not exist.")],
    to: Annotated[
        Side,
        typer.Option(help="The base that the result is for; `original` takes an adapter trained on the folded one."),
    ] = Side.folded,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Translate a LoRA adapter between a base and its folded form."""
    require_folder(adapter, "LoRA adapter folder")
    require_folder(base_folded)
    if not quiet:
        say("lora", f"opening {adapter}")
    from flashnorm.checkpoint.lora import translate_lora

    report = translate_lora(adapter, base_folded, out, to=to.value, trust_remote_code=trust_remote_code)
    if as_json:
        print_json(asdict(report))
        return
    typer.echo(
        f"{report.out}: an adapter for the {report.side} base; {len(report.scaled)} adapted weights scaled, "
        f"{len(report.unchanged)} unchanged, {len(report.shifted)} given a bias"
    )
    if to is Side.original and not report.base:
        typer.echo("its config names no base model now: load it onto the original base explicitly")

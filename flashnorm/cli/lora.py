"""`flashnorm lora`: a LoRA adapter of a model, made one for its folded form, and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


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
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model code that the base brings along.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Translate a LoRA adapter between a base and its folded form."""
    from flashnorm.checkpoint.lora import translate_lora

    report = translate_lora(adapter, base_folded, out, to=to.value, trust_remote_code=trust_remote_code)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    typer.echo(
        f"{report.out}: an adapter for the {report.side} base; {len(report.scaled)} adapted weights scaled, "
        f"{len(report.unchanged)} unchanged, {len(report.shifted)} given a bias"
    )
    if to is Side.original and not report.base:
        typer.echo("its config names no base model now: load it onto the original base explicitly")

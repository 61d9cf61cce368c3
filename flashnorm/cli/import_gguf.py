"""`flashnorm import-gguf`: a GGUF to a Transformers checkpoint."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flashnorm.cli.options import AsJson, Dtype, Quiet, print_json, say


def command(
    file: Annotated[Path, typer.Argument(help="The GGUF file; it is only read.")],
    out: Annotated[Path, typer.Argument(help="The new checkpoint folder; it must not exist.")],
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the weights; float32 keeps every dequantised value.")
    ] = Dtype.bfloat16,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Dequantise a GGUF to a Transformers checkpoint, with its tokenizer and chat template."""
    if quiet or as_json:
        os.environ["TQDM_DISABLE"] = "1"  # the bars are those of Transformers, which reads this when it is imported
    if not quiet:
        say("import-gguf", f"opening {file}")
    import torch

    from flashnorm.checkpoint.gguf_import import import_gguf

    report = import_gguf(file, out, dtype=getattr(torch, dtype.value))
    if as_json:
        print_json(asdict(report))
        return
    extras = "with tokenizer" if report.tokenizer else "without a tokenizer, since the GGUF has none"
    if report.chat_template:
        extras += " and chat template"
    typer.echo(
        f"{report.out}: {report.model_type}, {report.parameters:,} parameters in {report.dtype}, {extras} "
        f"(from {report.architecture} in {report.source})"
    )
    if report.ignored:
        names = ", ".join(report.ignored)
        typer.echo(f"Settings that Transformers does not take over, now at its defaults: {names}", err=True)

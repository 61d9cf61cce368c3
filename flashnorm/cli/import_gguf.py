"""`flashnorm import-gguf`: a GGUF to a Transformers checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path

import typer


class DType(str, Enum):
    """Names of the types that a checkpoint can be written in."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def command(
    file: Path = typer.Argument(..., help="The GGUF file; it is only read."),
    out: Path = typer.Argument(..., help="The new checkpoint folder; it must not exist."),
    dtype: DType = typer.Option(DType.bf16, help="Type of the weights; fp32 keeps every dequantised value."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Dequantise a GGUF to a Transformers checkpoint, with its tokenizer and chat template."""
    import torch

    from flashnorm.checkpoint.gguf_import import import_gguf

    dtypes = {DType.bf16: torch.bfloat16, DType.fp16: torch.float16, DType.fp32: torch.float32}
    report = import_gguf(file, out, dtype=dtypes[dtype])
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
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

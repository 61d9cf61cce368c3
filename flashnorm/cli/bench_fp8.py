"""`flashnorm bench fp8`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnorm.cli.bench_options import Commit, RecordFile, gpu
from flashnorm.cli.options import AsJson, Quiet, console, print_json, say

if TYPE_CHECKING:
    from flashnorm.bench.fp8 import Row


def command(
    output: RecordFile = None,
    static: Annotated[
        bool, typer.Option("--static", help="Also FlashInfer's fused kernel with a static scale; it is compiled first.")
    ] = False,
    integer: Annotated[bool, typer.Option("--int8", help="Codes in int8 instead of e4m3.")] = False,
    commit: Commit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time RMSNorm then linear in eight bits, with the norm in a scale, against a fused norm and quantisation."""
    if static and integer:
        raise typer.BadParameter("--static has no int8: FlashInfer's fused kernel writes e4m3")

    from flashnorm.bench.fp8 import ceilings_of, kernels_of, measure, require_matmul, shapes
    from flashnorm.bench.fp8_record import fp8_record, summary_sentence
    from flashnorm.bench.record import provenance, write
    from flashnorm.kernels.w8a8_dispatch import CODES

    device = gpu()
    codes = "int8" if integer else "e4m3"
    require_matmul(device, CODES[codes])
    ceilings = ceilings_of(device, CODES[codes])
    options = (" --static" if static else "") + (" --int8" if integer else "")
    source = provenance(device, "flashnorm bench fp8" + options, commit)
    rows: list[Row] = []
    for row in measure(ceilings, device, shapes(), static=static, dtype=CODES[codes]):
        rows.append(row)
        if not quiet:
            say("bench fp8", f"K={row.k} N={row.n} M={row.m}: {row.ours:.2f} us, fused {row.fused:.2f} us")
        if output is not None:
            write(fp8_record(rows, ceilings, {}, source, codes), output)
    kernels = kernels_of(device, CODES[codes], static=static)  # last: a profiler slows what follows it
    record = fp8_record(rows, ceilings, kernels, source, codes)
    if output is not None:
        write(record, output)
    if as_json:
        print_json(record)
        return
    _show(record)
    typer.echo(f"{source['device']}: {summary_sentence(record)}.")


def _show(record: dict[str, Any]) -> None:
    from rich.table import Table

    from flashnorm.bench.fp8_record import table_lines, table_titles

    table = Table(title="RMSNorm then linear in eight bits, cold weights, CUDA graphs; medians in microseconds")
    for title in table_titles(record):
        table.add_column(title, justify="right")
    for line in table_lines(record):
        table.add_row(*line)
    console().print(table)

"""`flashnorm bench`: `op` is here, `e2e` and `fp8` beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashnorm.cli import bench_e2e, bench_fp8
from flashnorm.cli.bench_options import Commit, RecordFile, gpu
from flashnorm.cli.options import AsJson, Quiet, console, print_json, say

if TYPE_CHECKING:
    from rich.table import Table

    from flashnorm.bench.op import Row

app = typer.Typer(no_args_is_help=True, help="Measure on this machine, against baselines and against the limit.")
app.command("e2e")(bench_e2e.command)
app.command("fp8")(bench_fp8.command)


@app.command("op")
def op(
    output: RecordFile = None,
    compiled: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help="Include torch.compile, minutes of tuning.")
    ] = True,
    gated: Annotated[
        bool, typer.Option("--gated", help="Measure the norm, gate and up projections and SwiGLU instead.")
    ] = False,
    commit: Commit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time the deferred norm against every norm-then-linear that is installed."""
    from flashnorm.bench.limits import measure_ceilings
    from flashnorm.bench.op import gated_shapes, linear_shapes, measure, summarise
    from flashnorm.bench.record import op_record, provenance, write

    device = gpu()
    ceilings = measure_ceilings(device)
    command = "flashnorm bench op" + (" --gated" if gated else "") + ("" if compiled else " --no-compiled")
    source = provenance(device, command, commit)
    rows: list[Row] = []
    for row in measure(ceilings, device, gated_shapes() if gated else linear_shapes(), compiled=compiled):
        rows.append(row)
        if not quiet:
            say("bench op", f"K={row.k} N={row.n} M={row.m}: {row.ours:.2f} us, best baseline {row.best:.2f} us")
        if output is not None:
            write(op_record(rows, ceilings, source), output)
    record = op_record(rows, ceilings, source)
    if as_json:
        print_json(record)
        return
    console().print(_table(rows))
    summary = summarise(rows)
    typer.echo(
        f"{source['device']}: faster than the best baseline, beyond the spread, in {summary.won} of "
        f"{summary.rows}; geometric mean of time over best baseline {summary.ratio:.3f}; not slower than the linear "
        f"alone in {summary.free}."
    )


def _table(rows: list[Row]) -> Table:
    """One line per shape: medians in microseconds, the ratios that matter, and the percentage of the limit."""
    from rich.table import Table

    from flashnorm.bench.op import OURS

    what = "RMSNorm, gate and up, SwiGLU" if rows[0].activation else "RMSNorm then linear"
    names = [name for name in rows[0].timings if name != OURS]
    table = Table(title=f"{what}, bf16, cold weights, CUDA graphs; medians in microseconds")
    for title in ("K,N", "M", *names, OURS, "±", "/ best", "/ alone", "% of limit", "won"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row.k},{row.n}",
            str(row.m),
            *(f"{row.timings[name].median:.2f}" for name in names),
            f"{row.ours:.2f}",
            f"{row.timings[OURS].spread:.2f}",
            f"{row.ours / row.best:.3f}",
            f"{row.ours / row.bare:.3f}",
            f"{100 * row.limit / row.ours:.0f}",
            "yes" if row.won else "no",
        )
    return table

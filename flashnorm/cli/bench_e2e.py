"""`flashnorm bench e2e`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnorm.cli.bench_options import Commit, gpu
from flashnorm.cli.options import AsJson, Quiet, console, print_json, say

if TYPE_CHECKING:
    from rich.table import Table

Record = dict[str, Any]


def command(
    output: Annotated[
        Path | None,
        typer.Option("--record", help="Write the record here after every row; rows of the same commit are kept."),
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="Measure this row only; may be given several times.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help="Include the baselines that torch.compile compiles.")
    ] = True,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Tune the gpt-fast recipe's kernels as well, minutes for each row.")
    ] = False,
    commit: Commit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time whole models against the usual ways to run them, each checked first."""
    import torch

    from flashnorm.bench.e2e.measure import measure
    from flashnorm.bench.e2e.record import make_record, row_record, rows_to_keep, with_row
    from flashnorm.bench.e2e.rows import choose_rows
    from flashnorm.bench.limits import measure_ceilings
    from flashnorm.bench.record import provenance, write
    from flashnorm.errors import CheckFailed, Refusal

    chosen = choose_rows(rows or [])
    if tuned and not compiled:
        raise Refusal("--tuned tunes what --no-compiled leaves out; give one of them")
    device = gpu()
    source = provenance(device, _command(rows or [], compiled, tuned), commit)
    done = [] if output is None else rows_to_keep(output, source)
    ceilings = measure_ceilings(device)
    torch.cuda.empty_cache()
    wrong: list[str] = []
    for row in chosen:
        try:
            measured = measure(row, device, ceilings, compiled=compiled, tuned=tuned)
        except CheckFailed as error:  # the other rows stand for themselves
            wrong.append(str(error))
            continue
        done = with_row(done, row_record(measured, source))
        if not quiet:
            medians = ", ".join(f"{name} {timed.median:,.1f} us" for name, timed in measured.contenders.items())
            say("bench e2e", f"{row.name}: {medians} ({measured.seconds:.0f} s)")
        if output is not None:  # after every row: a run takes minutes, and what was measured should outlive it
            write(make_record(done, source), output)
    record = make_record(done, source)
    if as_json:
        print_json(record)
    else:
        console().print(contenders_table(record))
        console().print(asked_table(record))
    if wrong:
        raise CheckFailed("; ".join(wrong))


def _command(rows: list[str], compiled: bool, tuned: bool) -> str:
    options = [*(f"--row {name}" for name in rows), *([] if compiled else ["--no-compiled"])]
    return " ".join(["flashnorm bench e2e", *options, *(["--tuned"] if tuned else [])])


def contenders_table(record: Record) -> Table:
    """One line per row and contender: times of a step, or of a whole prompt."""
    from rich.table import Table

    from flashnorm.bench.e2e.tables import CONTENDERS, contender_lines

    table = Table(title=f"{record['provenance']['device']}, bf16, medians")
    for title in CONTENDERS:
        table.add_column(title, justify="left" if title in CONTENDERS[:2] else "right")
    for line in contender_lines(record["rows"]):
        table.add_row(*line)
    return table


def asked_table(record: Record) -> Table:
    """One line per figure that is asked for."""
    from rich.table import Table

    from flashnorm.bench.e2e.tables import ASKED, asked_lines

    table = Table(title="what is asked")
    for title in ASKED:
        table.add_column(title, justify="left" if title in ASKED[:2] else "right")
    for line in asked_lines(record["rows"]):
        table.add_row(*line)
    return table

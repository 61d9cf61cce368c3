"""The battery's report as a table for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashnorm.verify.outcome import BatteryReport, Outcome


def battery_table(report: BatteryReport) -> RenderableType:
    """One row for each figure, the checks that could not run with the reason, and the notes."""
    table = Table(title=Text(f"{report.subject} ({report.level})"), title_justify="left")
    table.add_column("check")
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for outcome in report.outcomes:
        _add_rows(table, outcome)
    notes = [f"{outcome.name}: {note}" for outcome in report.outcomes for note in outcome.notes]
    return Group(table, *(Text(f"note: {note}") for note in (*report.notes, *notes)))


def _add_rows(table: Table, outcome: Outcome) -> None:
    if outcome.skipped:
        table.add_row(outcome.name, Text(f"not run: {outcome.skipped}"), "", "", "skipped")
    for i, figure in enumerate(outcome.figures):
        verdict = "passed" if figure.passed else "FAILED"
        table.add_row(
            outcome.name if i == 0 else "", Text(figure.name), f"{figure.value:.4g}", f"{figure.bound:.4g}", verdict
        )

"""The battery behind `flashnorm verify --model` and `--endpoint`: run it, print it, write its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flashnorm.cli.options import console, print_json
from flashnorm.errors import CheckFailed, OutputError, Refusal

if TYPE_CHECKING:
    from flashnorm.verify.outcome import BatteryReport


def run(make: Callable[[], BatteryReport], *, as_json: bool, junit: Path | None, html: Path | None) -> None:
    """Make the report, print it and write it where asked. Raises `CheckFailed` where a check failed.

    Where a file cannot be written is found out before anything runs.
    """
    for path in (junit, html):
        if path is not None:
            _require_writable(path)
    report = make()
    if not report.passed and not report.failures:
        raise Refusal(report.verdict)  # nothing could be checked: there is nothing to write
    if junit is not None:
        from flashnorm.verify.junit import junit_xml

        _write(junit, junit_xml(report))
    if html is not None:
        from flashnorm.verify.page import html_page

        _write(html, html_page(report))
    if as_json:
        print_json(report.to_dict())
    else:
        from flashnorm.verify.outcome_table import battery_table

        console().print(battery_table(report))
    if report.failures:
        raise CheckFailed(report.verdict)
    if not as_json:
        typer.echo(report.verdict)


def names(given: str | None) -> list[str]:
    """What `--only lag,causality` and `--tasks arc_easy,piqa` list."""
    return [name.strip() for name in given.split(",") if name.strip()] if given else []


def _require_writable(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OutputError(f"{path} cannot be written: give the path of a file in a folder that exists")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error

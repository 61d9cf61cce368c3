"""`flashnorm audit --all-architectures`: every causal language model of the installed Transformers.

Each is audited in a process of its own, which may take its time or crash without the others being lost.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from rich.table import Table
from rich.text import Text

from flashnorm.cli.transform_rows import COLUMNS, short_dict
from flashnorm.errors import FlashnormError
from flashnorm.sites.architectures import short_model
from flashnorm.sites.transforms import audit_fully

_Work = Callable[[str, bool], dict[str, Any]]
_MOST_AT_ONCE = 4  # an audit of a model with a large vocabulary takes a GB or two


@dataclass(frozen=True)
class _Running:
    """The process that audits one type, and when its time is over."""

    model_type: str
    process: ForkProcess
    deadline: float


def audit_types(
    types: Iterable[str],
    seconds: float,
    untie: bool = False,
    told: Callable[[str], None] = lambda model_type: None,
    work: _Work | None = None,
) -> list[dict[str, Any]]:
    """One table for each model type: `model_type` and either `norms` and `rows` or `error`, a sentence.

    `seconds`: the time that each may take. `told` is called with each type when it is done. `work`: what is done with
    each, in its own process.
    """
    left, types = list(types), list(types)
    running: dict[Connection, _Running] = {}
    found: dict[str, dict[str, Any]] = {}
    try:
        while left or running:
            while left and len(running) < max(1, min(os.cpu_count() or 1, _MOST_AT_ONCE)):
                connection, started = _start(left.pop(0), untie, seconds, work or audit_type)
                running[connection] = started
            soonest = min(one.deadline for one in running.values())
            ready = set(wait(list(running), max(0.0, soonest - time.monotonic())))
            for connection, one in list(running.items()):
                if connection in ready or time.monotonic() > one.deadline:
                    late = {"error": f"it took longer than {seconds:g} seconds"}
                    found[one.model_type] = _received(connection, one) if connection in ready else late
                    _end(connection, running.pop(connection))
                    told(one.model_type)
    finally:
        for connection, one in running.items():
            _end(connection, one)
    return [{"model_type": name, **found[name]} for name in types]


def audit_type(model_type: str, untie: bool) -> dict[str, Any]:
    """The audit of one type's default model, made short."""
    return short_dict(audit_fully(short_model(model_type), untie=untie))


def _start(model_type: str, untie: bool, seconds: float, work: _Work) -> tuple[Connection, _Running]:
    """`work` in a process of its own, forked, since importing everything again would take longer than the work."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, work, model_type, untie), daemon=True)
    process.start()
    theirs.close()
    return ours, _Running(model_type, process, time.monotonic() + seconds)


def _received(connection: Connection, one: _Running) -> dict[str, Any]:
    try:
        table: dict[str, Any] = connection.recv()
    except EOFError:
        one.process.join()
        return {"error": f"its process ended with status {one.process.exitcode}"}
    return table


def _end(connection: Connection, one: _Running) -> None:
    connection.close()
    one.process.kill()
    one.process.join()


def _send(theirs: Connection, work: _Work, model_type: str, untie: bool) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        theirs.send(work(model_type, untie))
    except FlashnormError as error:
        theirs.send({"error": str(error)})
    except Exception as error:  # third-party code that raises where no one foresaw it is a result here too
        theirs.send({"error": f"{type(error).__name__}: {error}"})


def summary_table(tables: Iterable[dict[str, Any]]) -> Table:
    """One row for each architecture: of how many norms what may be done; an error stands in its place."""
    table = Table(title=Text("norms of every architecture", style="table.title"), title_justify="left")
    for column in ("model type", "kinds of norm", *COLUMNS.values(), "error"):
        table.add_column(column, overflow="fold")
    for found in tables:
        rows = found.get("rows", [])
        counts = [str(sum(row[key]["verdict"] != "no" for row in rows)) for key in COLUMNS.values()]
        cells = (found["model_type"], str(len(rows)), *counts) if rows else (found["model_type"], "", "", "", "", "")
        table.add_row(*map(Text, (*cells, found.get("error", ""))))
    return table

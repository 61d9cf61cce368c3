"""Put the records of the battery into its page: on healthy models, and of an implicit join on a GPU.

Usage: `python -m tools.battery_tables`. How a page marks the place of a table: see `tools.tables`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from tools import tables
from tools.implicit_join_table import implicit_join
from tools.tables import RECORDS, ROOT, table

PAGE = ROOT / "docs" / "battery.md"
NAME, JOINS = "false-alarms", "implicit-join-h200"
_TITLES = ("subject", "runs", "false alarms", "largest figure, in its bound", "checks that ran", "longest run, s")


def false_alarms(record: dict[str, Any]) -> str:
    """One line per healthy model of a record of `python -m benchmarks.false_alarms`."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in record["rows"]:
        runs[row["subject"]].append(row)
    whole = "" if record["complete"] else " The record is not complete."
    about = f"{record['alarms']} false alarms in {record['outcomes']} runs. {tables.where_from(record['provenance'])}."
    return "\n".join([*table(_TITLES, (_line(*subject) for subject in runs.items())), "", about + whole, ""])


def _line(subject: str, runs: list[dict[str, Any]]) -> tuple[object, ...]:
    ran = sorted({name for run in runs for name, passed in run["checks"].items() if passed is not None})
    return (
        subject,
        len(runs),
        sum(not run["passed"] for run in runs),
        f"{max(run['largest_figure_in_bounds'] for run in runs):.2f}",
        ", ".join(ran),
        f"{max(run['seconds'] for run in runs):.1f}",
    )


TABLES: Mapping[str, Callable[[dict[str, Any]], str]] = MappingProxyType({NAME: false_alarms, JOINS: implicit_join})


def _made(name: str) -> str:
    """The table of a record. A page may have a place for one that is still to be measured."""
    path = RECORDS / f"{name}.json"
    return TABLES[name](tables.read(path)) if path.exists() else "Not measured yet.\n"


def with_tables(page: str) -> str:
    """The page's text with its marked tables made anew."""
    return tables.with_tables(page, {name: partial(_made, name) for name in TABLES})


if __name__ == "__main__":
    tables.fill([PAGE], with_tables)

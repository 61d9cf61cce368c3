"""Put the tables of the kernels' benchmark records into the pages that speak of them.

Usage: `python -m tools.kernel_tables`. How a page marks the place of a table: see `tools.tables`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from tools import tables
from tools.tables import RECORDS, ROOT, table

_NOTES = ROOT / "docs" / "notes"
PAGES = (ROOT / "docs" / "kernels.md", _NOTES / "where-the-norm-goes.md", _NOTES / "one-kernel-step.md")
OURS, ALONE = "flashnorm", "linear alone"


def op_table(name: str) -> str:
    """One line per shape of a record of `flashnorm bench op`."""
    record = _read(name)
    baselines = [title for title in record["rows"][0]["medians"] if title not in (OURS, ALONE)]
    titles = "K,N", "M", ALONE, *baselines, OURS, "±", "/ best", "/ alone", "% of limit", "won"
    lines = table(titles, (_op_line(row, baselines) for row in record["rows"]))
    return "\n".join([*lines, "", _op_summary(record), ""])


def _op_line(row: dict[str, Any], baselines: list[str]) -> tuple[object, ...]:
    medians = row["medians"]
    ours = medians[OURS]
    return (
        f"{row['k']},{row['n']}",
        row["m"],
        *(f"{medians[title]:.2f}" for title in (ALONE, *baselines)),
        f"**{ours:.2f}**",
        f"{_spread(row['samples'][OURS]):.2f}",
        f"{row['over_best_baseline']:.3f}",
        f"{ours / medians[ALONE]:.3f}",
        f"{100 * row['limit'] / ours:.0f}",
        "yes" if row["won"] else "no",
    )


def _op_summary(record: dict[str, Any]) -> str:
    summary, ceilings = record["summary"], record["ceilings"]
    bandwidth, rate = ceilings["read_bytes_per_second"] / 1e12, ceilings["bf16_flops_per_second"] / 1e12
    return (
        f"Faster than the best baseline, beyond both spreads, in {summary['won']} of {summary['rows']} rows; geometric "
        f"mean of time over best baseline {summary['geometric_mean_over_best_baseline']:.3f}; not slower than the "
        f"linear alone in {summary['not_slower_than_linear_alone']}. {tables.where_from(record['provenance'])}. "
        f"Limit: {bandwidth:.2f} TB/s read, {rate:.0f} TFLOP/s."
    )


def places_table(name: str) -> str:
    """One line per shape and run of the search for the norm's place: the best of each variant."""
    titles = "run", "K,N", "M", "library, no norm", "best of each variant"
    return "\n".join([*table(titles, map(_places_line, _read(name)["runs"])), ""])


def _places_line(row: dict[str, Any]) -> tuple[object, ...]:
    best = "; ".join(f"{title} {time:.2f}" for title, time in row["best"].items())
    return row["run"], f"{row['k']},{row['n']}", row["m"], f"{row['library']:.2f}", best


def stages_table(name: str) -> str:
    """One line per measurement of the forms of a decode step that were tried."""
    titles = "stage", "form", "shape", "variant", "us a step", "% of the bandwidth limit"
    return "\n".join([*table(titles, map(_stages_line, _read(name)["runs"])), ""])


def _stages_line(run: dict[str, Any]) -> tuple[object, ...]:
    step, percent = f"{run['step_us']:,.1f}", run["percent_of_limit"]
    share = "" if percent is None else f"{percent:.1f}"
    return run["stage"], run["form"], run["shape"], run["variant"], step, share


TABLES: dict[str, Callable[[str], str]] = {
    "op-h200": op_table,
    "op-gated-h200": op_table,
    "where-the-norm-goes-h200": places_table,
    "one-kernel-step-h200": stages_table,
}


def with_tables(page: str) -> str:
    """The page's text with every marked table made anew."""
    return tables.with_tables(page, {name: partial(make, name) for name, make in TABLES.items()})


def _read(name: str) -> dict[str, Any]:
    return tables.read(RECORDS / f"{name}.json")


def _spread(samples: list[float]) -> float:
    """Half the distance between the first and the last quartile."""
    first, _, last = statistics.quantiles(samples, n=4)
    return (last - first) / 2


if __name__ == "__main__":
    tables.fill(PAGES, with_tables)

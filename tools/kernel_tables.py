"""Put the tables of the benchmark records into the pages that speak of them.

Usage: `python -m tools.kernel_tables`. A page marks the place of a table: `<!-- table:NAME:begin -->` to `:end`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PAGES = (ROOT / "docs" / "kernels.md", ROOT / "docs" / "notes" / "where-the-norm-goes.md")
_MARK = re.compile(r"(<!-- table:(\S+):begin -->\n).*?(<!-- table:\2:end -->)", re.DOTALL)
OURS, ALONE = "flashnorm", "linear alone"


def op_table(name: str) -> str:
    """One line per shape of a record of `flashnorm bench op`."""
    record = _read(name)
    baselines = [title for title in record["rows"][0]["medians"] if title not in (OURS, ALONE)]
    lines = [
        _row("K,N", "M", ALONE, *baselines, OURS, "±", "/ best", "/ alone", "% of limit", "won"),
        _row(*["---"] * (len(baselines) + 9)),
    ]
    for row in record["rows"]:
        medians = row["medians"]
        ours = medians[OURS]
        lines.append(
            _row(
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
        )
    return "\n".join([*lines, "", _op_summary(record), ""])


def _op_summary(record: dict[str, Any]) -> str:
    source, summary, ceilings = record["provenance"], record["summary"], record["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in source["packages"].items() if version)
    bandwidth, rate = ceilings["read_bytes_per_second"] / 1e12, ceilings["bf16_flops_per_second"] / 1e12
    return (
        f"Faster than the best baseline, beyond both spreads, in {summary['won']} of {summary['rows']} rows; geometric "
        f"mean of time over best baseline {summary['geometric_mean_over_best_baseline']:.3f}; not slower than the "
        f"linear alone in {summary['not_slower_than_linear_alone']}. {source['device']}, driver {source['driver']}, "
        f"{versions}; `{source['command']}` at {source['commit'][:12]}, {source['date'][:10]}. "
        f"Limit: {bandwidth:.2f} TB/s read, {rate:.0f} TFLOP/s."
    )


def places_table(name: str) -> str:
    """One line per shape and run of the search for the norm's place: the best of each variant."""
    lines = [_row("run", "K,N", "M", "library, no norm", "best of each variant"), _row(*["---"] * 5)]
    for row in _read(name)["runs"]:
        best = "; ".join(f"{title} {time:.2f}" for title, time in row["best"].items())
        lines.append(_row(row["run"], f"{row['k']},{row['n']}", row["m"], f"{row['library']:.2f}", best))
    return "\n".join([*lines, ""])


TABLES: dict[str, Callable[[str], str]] = {
    "op-h200": op_table,
    "op-gated-h200": op_table,
    "where-the-norm-goes-h200": places_table,
}


def with_tables(page: str) -> str:
    """The page's text with every marked table made anew."""
    return _MARK.sub(lambda match: match.group(1) + TABLES[match.group(2)](match.group(2)) + match.group(3), page)


def _read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _spread(samples: list[float]) -> float:
    """Half the distance between the first and the last quartile."""
    first, _, last = statistics.quantiles(samples, n=4)
    return (last - first) / 2


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")

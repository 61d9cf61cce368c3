"""The record of `flashnorm bench fp8`, and the lines of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashnorm.bench.fp8 import FUSED, Row, summarise
from flashnorm.bench.limits import Ceilings
from flashnorm.bench.op import BARE, OURS
from flashnorm.kernels.timing import Timing


def fp8_record(
    rows: Sequence[Row],
    ceilings: Ceilings,
    kernels: Mapping[str, Sequence[str]],
    source: dict[str, Any],
    codes: str = "e4m3",
) -> dict[str, Any]:
    """Times in microseconds. `kernels`: what one call of each contender launches, by name. `codes`: "e4m3", "int8"."""
    summary = summarise(rows)
    return {
        "kind": "fp8" if codes == "e4m3" else codes,
        "provenance": source,
        "method": "CUDA graph replays, contenders taking turns, weights rotated beyond the L2 cache, bfloat16 in and "
        f"out, {codes} inside with a scale for each token and output"
        + (", fast accumulation off" if codes == "e4m3" else ""),
        "ceilings": {
            "read_bytes_per_second": ceilings.bytes_per_us * 1e6,
            f"{codes}_flops_per_second": ceilings.flops_per_us * 1e6,
        },
        "kernels": {name: list(names) for name, names in kernels.items()},
        "summary": {
            "rows": summary.rows,
            "not_above_fused_beyond_spread": summary.not_above,
            "median_not_above_fused": summary.median_not_above,
            "geometric_mean_over_fused": round(summary.ratio, 4),
        },
        "rows": [_row(row) for row in rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "m": row.m,
        "k": row.k,
        "n": row.n,
        "error_in_bounds": round(row.error, 4),
        "limit": round(row.limit, 3),
        "not_above_fused": row.not_above,
        "medians": {name: round(timing.median, 3) for name, timing in row.timings.items()},
        "over_fused": round(row.ours / row.fused, 4),
        "samples": {name: [round(value, 3) for value in timing.samples] for name, timing in row.timings.items()},
    }


def table_titles(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The heads of the columns; contenders as the record has them, ours last."""
    return ("K,N", "M", *_theirs(record), OURS, "±", f"/ {FUSED}", "/ alone", "% of limit", "not above")


def table_lines(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One line per shape: medians and the spread in microseconds, ratios, the percentage of the limit."""
    return [_line(row, _theirs(record)) for row in record["rows"]]


def _theirs(record: Mapping[str, Any]) -> list[str]:
    return [name for name in record["rows"][0]["medians"] if name != OURS]


def _line(row: Mapping[str, Any], theirs: Sequence[str]) -> tuple[str, ...]:
    medians, ours = row["medians"], row["medians"][OURS]
    return (
        f"{row['k']},{row['n']}",
        str(row["m"]),
        *(f"{medians[name]:.2f}" for name in theirs),
        f"{ours:.2f}",
        f"{Timing(tuple(row['samples'][OURS])).spread:.2f}",
        f"{row['over_fused']:.3f}",
        f"{ours / medians[BARE]:.3f}",
        f"{100 * row['limit'] / ours:.0f}",
        "yes" if row["not_above_fused"] else "no",
    )


def summary_sentence(record: Mapping[str, Any]) -> str:
    """What the run says as a whole."""
    summary = record["summary"]
    return (
        "Not above the fused norm and quantisation, beyond both spreads, in "
        f"{summary['not_above_fused_beyond_spread']} of {summary['rows']} rows, and with a median not above it in "
        f"{summary['median_not_above_fused']}; geometric mean of time over it "
        f"{summary['geometric_mean_over_fused']:.3f}"
    )

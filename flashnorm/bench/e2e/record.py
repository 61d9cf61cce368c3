"""The record of whole-model runs: every sample, and rows of several runs of one commit on one machine in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashnorm.bench.e2e.figures import figures
from flashnorm.bench.e2e.measure import RUNS, Measured, Timed
from flashnorm.bench.e2e.rows import LEAD, ROWS, Work
from flashnorm.errors import OutputError

KIND = "e2e"
_OF_A_RUN = ("command", "date")  # what may differ between runs whose rows stand in one record
_METHOD = (
    f"bfloat16, random weights in the published shape, greedy; medians of {RUNS} runs, contenders taking turns; wall "
    f"clock between two waits for the device, the prompt and {LEAD} steps after it left out; every contender's logits "
    "compared with the same weights in wider arithmetic before anything is timed"
)


def row_record(measured: Measured, source: Mapping[str, Any]) -> dict[str, Any]:
    """One row; times in microseconds, of a step or of a prompt. `needed`: bytes of a step, operations of a prompt."""
    row, ceilings = measured.row, measured.ceilings
    last = row.context if row.work is Work.PREFILL else row.context + row.tokens
    return {
        "name": row.name,
        "shape": row.shape,
        "work": row.work.value,
        "batch": row.batch,
        "context": [row.context, last],
        **{key: source[key] for key in _OF_A_RUN},
        "seconds": round(measured.seconds, 1),
        "ceilings": {
            "read_bytes_per_second": ceilings.bytes_per_us * 1e6,
            "bf16_flops_per_second": ceilings.flops_per_us * 1e6,
        },
        "needed": measured.needed,
        "limit_us": round(measured.limit, 3),
        "contenders": {name: _contender(timed, measured) for name, timed in measured.contenders.items()},
    }


def _contender(timed: Timed, measured: Measured) -> dict[str, Any]:
    tokens = timed.tokens if measured.row.work is Work.PREFILL else measured.row.batch
    return {
        "tokens_per_run": timed.tokens,
        "median_us": round(timed.median, 3),
        "tokens_per_second": round(1e6 * tokens / timed.median, 1),
        "percent_of_limit": round(100 * measured.limit / timed.median, 2),
        "error_over_stock": round(timed.error.over_stock, 4),
        "error_allowed": round(timed.error.allowed, 4),
        "memory": None if timed.memory is None else asdict(timed.memory),
        "samples_us": [round(sample, 3) for sample in timed.samples],
    }


def make_record(rows: Sequence[Mapping[str, Any]], source: Mapping[str, Any]) -> dict[str, Any]:
    """The record of these rows, in the table's order, with what is asked of them.

    Its provenance names every command that rows are of, and the last one's date.
    """
    order = [row.name for row in ROWS]
    ordered = sorted(rows, key=lambda row: order.index(row["name"]))
    commands = "; ".join(dict.fromkeys(row["command"] for row in ordered))
    dates = [row["date"] for row in ordered] or [source["date"]]
    return {
        "kind": KIND,
        "provenance": {**source, "command": commands or source["command"], "date": max(dates)},
        "method": _METHOD,
        "asked": [
            {
                "model": figure.asked.model,
                "figure": figure.asked.title,
                "wanted": str(figure.asked),
                "value": None if figure.value is None else round(figure.value, 4),
                "met": figure.met,
            }
            for figure in figures(ordered)
        ],
        "rows": ordered,
    }


def rows_to_keep(path: Path, source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the record at `path`, which a run with provenance `source` may add to; none where no file is.

    Raises `OutputError` where the file is no such record, or was measured on another device, with other versions or
    from another commit, or where the commit is not known.
    """
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        kind, theirs, rows = record["kind"], dict(record["provenance"]), list(record["rows"])
        found = {row["name"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} exists and is no record ({error}); name another file") from error
    if kind != KIND or not found <= {row.name for row in ROWS}:
        raise OutputError(f"{path} is a record of something else, or of other rows; name another file")
    if source["commit"] is None:
        raise OutputError(f"{path} exists, and the commit that runs is not known; pass --commit, or name another file")
    differing = [key for key in source if key not in _OF_A_RUN and theirs.get(key) != source[key]]
    if differing:
        key = differing[0]
        raise OutputError(
            f"{path} was measured with another {key} ({theirs.get(key)}, now {source[key]}), and rows of both in one "
            "record could not be compared; name another file"
        )
    return rows


def with_row(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with this one added, in place of an older one of its name."""
    return [*(other for other in rows if other["name"] != row["name"]), row]

"""A record's rows as lines of text, for the terminal and for the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashnorm.bench.e2e.figures import figures

CONTENDERS = ("row", "contender", "us", "range", "tokens/s", "% of limit", "error / stock's", "tokens a run")
ASKED = ("model", "figure", "measured", "asked", "met")


def contender_lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Under `CONTENDERS`: median and range of the time of a step, or of a whole prompt."""
    return [
        (
            row["name"],
            name,
            f"{timed['median_us']:,.1f}",
            f"{max(timed['samples_us']) - min(timed['samples_us']):,.1f}",
            f"{timed['tokens_per_second']:,.0f}",
            f"{timed['percent_of_limit']:.1f}",
            f"{timed['error_over_stock']:.2f}",
            f"{timed['tokens_per_run']:,}",
        )
        for row in rows
        for name, timed in row["contenders"].items()
    ]


def asked_lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Under `ASKED`."""
    return [
        (figure.asked.model, figure.asked.title, figure.shown, str(figure.asked), figure.verdict)
        for figure in figures(rows)
    ]

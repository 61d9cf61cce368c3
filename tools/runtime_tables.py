"""Put the tables of the records of whole-model runs into the pages that speak of them.

Usage: `python -m tools.runtime_tables`. How a page marks the place of a table: see `tools.tables`. Where there is no
record yet, the places say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from flashnorm.bench.e2e.tables import ASKED, CONTENDERS, asked_lines, contender_lines
from tools import tables
from tools.tables import RECORDS, ROOT, table

PAGES = (ROOT / "docs" / "accelerate.md", ROOT / "docs" / "decode.md")
RECORD, AGREEMENT = "e2e-h200", "agreement-smollm2"
_COMMANDS = {
    RECORD: "flashnorm bench e2e --record",
    AGREEMENT: "python -m benchmarks.agreement",
}
_LEVEL_ONE = "level-one-"
Lines = Iterable[tuple[str, ...]]


def asked(record: dict[str, Any]) -> str:
    """What is asked of the whole, and what was reached."""
    return _text(record, ASKED, asked_lines(record["rows"]))


def contenders(record: dict[str, Any]) -> str:
    """Every row and contender of the decode program."""
    return _text(record, CONTENDERS, _lines(record, level_one=False))


def level_one(record: dict[str, Any]) -> str:
    """The rows of level one."""
    return _text(record, CONTENDERS, _lines(record, level_one=True))


def agreement(record: dict[str, Any]) -> str:
    """How near the texts of a program, and of the stock model, are to fp32."""
    titles = "run", "steps", "program: KL", "stock: KL", "ratio", "program: same token", "stock: same token"
    lines = [
        (
            row["name"],
            f"{row['steps']:,}",
            *(f"{row[who]['divergence']:.2e}" for who in ("program", "stock")),
            f"{row['divergence_ratio']:.2f}",
            *(f"{100 * row[who]['same_token']:.2f} %" for who in ("program", "stock")),
        )
        for row in record["rows"]
    ]
    return "\n".join([*table(titles, lines), "", f"{record['model']}; {tables.where_from(record['provenance'])}.", ""])


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {  # name -> record, and what is made of it
    f"{RECORD}-asked": (RECORD, asked),
    f"{RECORD}-contenders": (RECORD, contenders),
    f"{RECORD}-level-one": (RECORD, level_one),
    AGREEMENT: (AGREEMENT, agreement),
}


def with_tables(page: str) -> str:
    """The page's text with every marked table made anew."""
    return tables.with_tables(page, {name: partial(_made, *source) for name, source in TABLES.items()})


def _made(record: str, make: Callable[[dict[str, Any]], str]) -> str:
    path = RECORDS / f"{record}.json"
    return make(tables.read(path)) if path.exists() else _not_yet(record)


def _not_yet(record: str) -> str:
    return f"Not measured yet: `{_COMMANDS[record]} benchmarks/records/{record}.json`.\n"


def _lines(record: dict[str, Any], *, level_one: bool) -> Lines:
    return contender_lines([row for row in record["rows"] if row["name"].startswith(_LEVEL_ONE) == level_one])


def _text(record: dict[str, Any], titles: tuple[str, ...], lines: Lines) -> str:
    lines = list(lines)
    if not lines:
        return _not_yet(RECORD)
    source = tables.where_from(record["provenance"])
    bandwidths = [row["ceilings"]["read_bytes_per_second"] / 1e12 for row in record["rows"]]
    low, high = (f"{extreme:.2f}" for extreme in (min(bandwidths), max(bandwidths)))
    read = low if low == high else f"{low} to {high}"
    return "\n".join([*table(titles, lines), "", f"{source}. Read bandwidth measured: {read} TB/s.", ""])


if __name__ == "__main__":
    tables.fill(PAGES, with_tables)

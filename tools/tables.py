"""Tables of the benchmark records, in the places that pages mark for them.

A page marks the place of a table: `<!-- table:NAME:begin -->` to `:end`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
_MARK = re.compile(r"(<!-- table:(\S+):begin -->\n).*?(<!-- table:\2:end -->)", re.DOTALL)


def with_tables(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page's text with every marked table made anew. `tables`: by name."""
    return _MARK.sub(lambda match: match.group(1) + tables[match.group(2)]() + match.group(3), page)


def fill(pages: Iterable[Path], filled: Callable[[str], str]) -> None:
    """Rewrite the pages."""
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A record."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def table(titles: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """A table's lines in Markdown."""
    return [row(*titles), row(*["---"] * len(titles)), *(row(*line) for line in lines)]


def row(*cells: object) -> str:
    """One line of a table in Markdown."""
    return "| " + " | ".join(map(str, cells)) + " |"


def where_from(source: Mapping[str, Any]) -> str:
    """A record's provenance as a sentence, without its end."""
    versions = ", ".join(f"{name} {version}" for name, version in source["packages"].items() if version)
    driver = f", driver {source['driver']}" if source["driver"] else ""
    return (
        f"{source['device']}{driver}, {versions}; `{source['command']}` at {source['commit'][:12]}, "
        f"{source['date'][:10]}"
    )

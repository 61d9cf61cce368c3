"""Put the tables of the low-precision records into their page.

Usage: `python -m tools.low_precision_tables`. How a page marks the place of a table: see `tools.tables`. Where there is
no record yet, the place says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from flashnorm.bench.fp8_record import summary_sentence, table_lines, table_titles
from tools import tables
from tools.tables import RECORDS, ROOT, table

PAGE = ROOT / "docs" / "low-precision.md"
_VOCABULARY = 49152  # of SmolLM2: the perplexity of guessing blindly
_TITLES = ("weights", "scale for each", "activations", "quantised", "folded, then quantised")
_DIFFERENCES = ("difference", "99.9% interval", "control", "folding first is")


def fp8(record: dict[str, Any]) -> str:
    """One line per shape of a record of `flashnorm bench fp8`, and which kernels ran."""
    ceilings, codes = record["ceilings"], "int8" if record["kind"] == "int8" else "e4m3"
    kernels = "; ".join(f"{name}: {', '.join(map(_short, ran))}" for name, ran in record["kernels"].items())
    about = (
        f"{summary_sentence(record)}. {tables.where_from(record['provenance'])}. Limit: "
        f"{ceilings['read_bytes_per_second'] / 1e12:.2f} TB/s read, "
        f"{ceilings[f'{codes}_flops_per_second'] / 1e12:.0f} {'TOP/s' if codes == 'int8' else 'TFLOP/s'}."
    )
    ran = [f"Kernels of one call. {kernels}.", ""] if kernels else []
    return "\n".join([*table(table_titles(record), table_lines(record)), "", about, "", *ran])


def _short(kernel: str) -> str:
    """A kernel's name without what a template or a signature adds, which can be hundreds of characters."""
    return f"`{re.split('[<(]', kernel, maxsplit=1)[0]}`"


def quantise(record: dict[str, Any]) -> str:
    """One line per scheme of a record of `python -m benchmarks.quantise`."""
    whole = "" if record["complete"] else " The record is not complete."
    about = (
        f"{record['model']}, {record['tokens']:,} tokens; without quantisation {record['perplexity']:.3f}, folded "
        f"{record['perplexity_folded']:.3f}. {tables.where_from(record['provenance'])}.{whole}"
    )
    lines = table((*_TITLES, *_DIFFERENCES), map(_scheme_line, record["rows"]))
    return "\n".join([*lines, "", _findings(record["rows"]), "", about, ""])


def _findings(rows: list[dict[str, Any]]) -> str:
    """The schemes by verdict."""
    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        codes = "weights and activations" if row["activations"] else "weights"
        by_verdict.setdefault(verdict(row), []).append(f"{row['weights']} {codes} with a scale for each {_shared(row)}")
    return " ".join(f"Folding first is {says}, for {'; '.join(which)}." for says, which in by_verdict.items())


def _shared(row: dict[str, Any]) -> str:
    """What of a weight has a scale in common."""
    group = row["group"]
    return {"tensor": "tensor", "channel": "output"}.get(group, f"{group} inputs")


def _scheme_line(row: dict[str, Any]) -> tuple[str, ...]:
    difference = row["difference"]
    return (
        row["weights"],
        _shared(row),
        f"{row['weights']}, a scale for each token" if row["activations"] else "fp32",
        f"{row['perplexity_quantised']:.3f}",
        f"{row['perplexity_folded_then_quantised']:.3f}",
        f"{difference['mean']:+.4f}",
        f"{difference['low']:+.4f} to {difference['high']:+.4f}",
        ", ".join(f"{value:+.4f}" for value in row["control_differences"]),
        verdict(row),
    )


def verdict(row: dict[str, Any]) -> str:
    """What a row shows: an effect has to leave zero out of its interval and to exceed the control's."""
    if row["perplexity_quantised"] > _VOCABULARY:
        return "of no matter (blind guessing is better)"
    difference, control = row["difference"], max(map(abs, row["control_differences"]))
    if difference["low"] <= 0 <= difference["high"] or abs(difference["mean"]) <= control:
        return "no different, as far as shown"
    return "better" if difference["mean"] < 0 else "worse"


TABLES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "fp8-h200": (fp8, "flashnorm bench fp8 --record"),
    "int8-h200": (fp8, "flashnorm bench fp8 --int8 --record"),
    "quantise-smollm2": (quantise, "python -m benchmarks.quantise"),
    "quantise-smollm2-dithered": (quantise, "python -m benchmarks.quantise --dithered"),
}


def with_tables(page: str) -> str:
    """The page's text with every marked table made anew."""
    return tables.with_tables(page, {name: partial(_made, name) for name in TABLES})


def _made(name: str) -> str:
    make, command = TABLES[name]
    path = RECORDS / f"{name}.json"
    return (
        make(tables.read(path)) if path.exists() else f"Not measured yet: `{command} benchmarks/records/{name}.json`.\n"
    )


if __name__ == "__main__":
    tables.fill([PAGE], with_tables)

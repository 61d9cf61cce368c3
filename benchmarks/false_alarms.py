"""Does the quick battery raise a false alarm? It runs on healthy models, again and again; every outcome is recorded.

    python -m benchmarks.false_alarms RECORD.json [--runs 5] [--only NAME]

Subjects: SmolLM2-135M in bf16 and fp32, each with Transformers' sdpa and eager attention, and tiny models of twenty
families in fp32. No two runs ask the same: each reads another part of the text, and tiny models get other weights.

The record is written after every outcome. Outcomes that it holds already, from the same commit, are not measured again,
so that an interrupted measurement goes on where it stopped; `complete` says whether everything is there. Exit status 1:
a check failed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import flashnorm
from examples.assets import sotu_text
from flashnorm.bench.record import provenance, write
from flashnorm.verify.outcome import BatteryReport, plain
from tests import zoo
from tests.conftest import _imported
from tests.verify.healthy import FAMILIES

_STRETCH = 60_000  # characters of the text that one run is given


@dataclass(frozen=True)
class Subject:
    """A healthy model by name; `check(run)` runs the battery on it, on what that run is to ask."""

    name: str
    check: Callable[[int], BatteryReport]


def subjects() -> Iterator[Subject]:
    """Every healthy model that is asked."""
    for dtype in (torch.bfloat16, torch.float32):
        for attention in ("sdpa", "eager"):
            yield _real(dtype, attention)
    for family in FAMILIES:
        yield _tiny(family)


def _real(dtype: torch.dtype, attention: str) -> Subject:
    def check(run: int) -> BatteryReport:
        text = sotu_text()[run * _STRETCH : (run + 1) * _STRETCH]
        with TemporaryDirectory() as folder:
            checkpoint = _with_attention(_imported(dtype), Path(folder), attention)
            return flashnorm.battery(checkpoint, level="quick", text=text)

    return Subject(f"SmolLM2-135M, {str(dtype).removeprefix('torch.')}, {attention}", check)


def _with_attention(source: Path, folder: Path, attention: str) -> Path:
    """The same checkpoint, its weights linked, with the attention named in its config: every load of it is that."""
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": attention}))
    loaded = flashnorm.load(folder).config._attn_implementation
    if loaded != attention:
        raise SystemExit(f"{attention} attention was asked for and {loaded} was loaded; nothing was measured")
    return folder


def _tiny(family: str) -> Subject:
    return Subject(
        f"tiny {family}, float32",
        lambda run: flashnorm.battery(zoo.tiny_model("causal", family, seed=run), level="quick"),
    )


def outcome(subject: Subject, run: int) -> dict[str, Any]:
    """One row: each check's verdict (null: it could not run), and how near its bound the worst figure came."""
    start = time.monotonic()
    report = subject.check(run)
    nearest = [f.value / f.bound for o in report.outcomes for f in o.figures if f.bound > 0]
    return plain(
        {
            "subject": subject.name,
            "run": run,
            "passed": report.passed,
            "verdict": report.verdict,
            "checks": {o.name: None if o.skipped else o.passed for o in report.outcomes},
            "largest_figure_in_bounds": round(max(nearest, default=0.0), 4),
            "seconds": round(time.monotonic() - start, 1),
        }
    )


def measure(record: Path, chosen: list[Subject], runs: int, *, everything: bool) -> dict[str, Any]:
    """Every run of every subject that the record does not hold; `everything`: no subject was left out."""
    source = provenance(torch.device("cpu"), f"python -m benchmarks.false_alarms --runs {runs}", None)
    rows = _kept(record, source["commit"])
    held = {(row["subject"], row["run"]) for row in rows}
    wanted = [(subject, run) for run in range(runs) for subject in chosen]
    for subject, run in wanted:
        if (subject.name, run) in held:
            continue
        rows.append(outcome(subject, run))
        print(f"{rows[-1]['subject']}, run {run}: {rows[-1]['verdict']} ({rows[-1]['seconds']} s)", flush=True)
        write(_table(rows, source, complete=False), record)
    table = _table(rows, source, complete=everything)
    write(table, record)
    return table


def _table(rows: list[dict[str, Any]], source: dict[str, Any], *, complete: bool) -> dict[str, Any]:
    alarms = sum(not row["passed"] for row in rows)
    return {
        "kind": "false-alarms",
        "complete": complete,
        "outcomes": len(rows),
        "alarms": alarms,
        "provenance": source,
        "rows": rows,
    }


def _kept(record: Path, commit: str | None) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    table = json.loads(record.read_text())
    return table["rows"] if commit and table["provenance"]["commit"] == commit else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="", help="subjects whose names contain this; the record is not complete then")
    arguments = parser.parse_args()
    chosen = [subject for subject in subjects() if arguments.only in subject.name]
    if not chosen:
        raise SystemExit(f"no subject's name contains {arguments.only!r}")
    table = measure(arguments.record, chosen, arguments.runs, everything=not arguments.only)
    raise SystemExit(1 if table["alarms"] else 0)


if __name__ == "__main__":
    main()

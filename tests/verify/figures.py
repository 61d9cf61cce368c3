"""How sharp the checks are, for docs/verify.md: `python -m tests.verify.figures` measures, records and writes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import flashnorm
from tests.verify.faults import ANYWHERE
from tests.verify.tiny import folded, tiny_model

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "verify.json"
DEMO = ROOT / "docs" / "example.json"
PAGE = ROOT / "docs" / "verify.md"
FAMILIES = ("llama", "gemma", "qwen2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKS = ("drift_ratio", "exact_drift_ratio")
FAULTS = {
    "gain_left_in_place": "one norm keeps its gain",
    "value_projection_missed": "q and k folded, v missed",
    "other_convention": "gain read in the other convention",
    "folded_twice": "gain folded twice",
    "tied_head_folded": "final norm folded into a tied head",
    "row_negated": "one row of one weight negated",
}
_MARK = re.compile(r"(<!-- figures:begin -->\n).*?(<!-- figures:end -->)", re.DOTALL)


def measure() -> dict[str, Any]:
    """By dtype: the smallest and largest bound and figure of correct folds, and of each fault the smallest figure."""
    record: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        sources = [tiny_model(family, dtype) for family in FAMILIES]
        healthy = [_checks(source, folded(source)) for source in sources]
        record[name] = {
            "bounds": {check: _range(found[check]["bound"] for found in healthy) for check in CHECKS},
            "healthy": {check: _range(found[check]["value"] for found in healthy) for check in CHECKS},
            "faults": {
                fault.__name__: min(_checks(source, fault(source))["exact_drift_ratio"]["value"] for source in sources)
                for fault in ANYWHERE
            },
        }
    return record


def _checks(source: torch.nn.Module, candidate: torch.nn.Module) -> dict[str, dict[str, Any]]:
    report = flashnorm.verify(source, candidate, new_tokens=0)
    return {check["name"]: check for check in report.to_dict()["checks"]}


def _range(values: Iterable[float]) -> list[float]:
    known = sorted(values)
    return [known[0], known[-1]]


def table(record: dict[str, Any], demo: dict[str, Any]) -> str:
    """The page's table."""
    lines = ["| | fp32 | bf16 |", "|---|---|---|"]
    for kind, words in (("bounds", "bound of"), ("healthy", "correct folds (Llama, Gemma, Qwen2):")):
        for check in CHECKS:
            lines.append(f"| {words} `{check}` | " + " | ".join(_span(record[d][kind][check]) for d in DTYPES) + " |")
    for fault, words in FAULTS.items():
        least = (_two_digits(record[dtype]["faults"][fault]) for dtype in DTYPES)
        figures = (f"{value:,.0f} and more" for value in least)
        lines.append(f"| {words}: `exact_drift_ratio` | " + " | ".join(figures) + " |")
    logits = demo["verify"]["logits"]
    for check in CHECKS:
        lines.append(f"| SmolLM2-135M, correct: `{check}` | | {logits[check]:.2f} |")
    return "\n".join(lines) + "\n"


def _two_digits(value: float) -> float:
    """Rounded down, since it stands for "and more"."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.floor(value / unit) * unit


def _span(ends: list[float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def with_table(page: str) -> str:
    """The page's text with the table between its marks."""
    text = table(json.loads(RECORD.read_text()), json.loads(DEMO.read_text()))
    return _MARK.sub(lambda match: match.group(1) + text + match.group(2), page)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text()))

"""A record made by hand, whose every asked figure is known."""

from __future__ import annotations

from typing import Any

from flashnorm.bench.e2e.contender import Memory
from flashnorm.bench.e2e.correctness import Error
from flashnorm.bench.e2e.measure import Measured, Timed
from flashnorm.bench.e2e.record import make_record, row_record
from flashnorm.bench.e2e.rows import (
    HF_COMPILED,
    HF_EAGER,
    LEVEL_ONE,
    OURS,
    PREFILL_COMPILED,
    PREFILL_EAGER,
    RECIPE,
    ROWS,
    Work,
)
from flashnorm.bench.limits import Ceilings

CEILINGS = Ceilings(bytes_per_us=4e6, flops_per_us=8e8)
SOURCE: dict[str, Any] = {
    "command": "flashnorm bench e2e",
    "commit": "0123456789abcdef",
    "date": "2026-12-01T10:00:00+00:00",
    "device": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "python": "3.12.3",
    "flashnorm": "0.1.0",
    "packages": {"torch": "2.11.0", "transformers": "5.17.0", "triton": None},
}
_MEDIANS = {OURS: 500.0, RECIPE: 1100.0, HF_COMPILED: 2100.0, HF_EAGER: 8000.0, LEVEL_ONE: 5000.0}
_MEDIANS |= {PREFILL_COMPILED: 520.0, PREFILL_EAGER: 510.0}
_OURS = {
    "decode-llama-3.2-1b-batch-8": 520.0,
    "decode-llama-3.2-1b-batch-32": 640.0,
    "decode-llama-3.2-1b-context-8192": 570.0,
    "decode-smollm2-135m": 200.0,
}
_NEEDED = {"decode-llama-3.2-1b-context-8192": 2_108_000_000}


def measured(name: str) -> Measured:
    """A row whose step needs 1.86 GB, 465 us; the longer context 248 MB or 62 us more."""
    row = next(row for row in ROWS if row.name == name)
    needed = _NEEDED.get(name, 1_860_000_000)
    limit = needed / CEILINGS.bytes_per_us if row.work is Work.DECODE else 300.0
    contenders = {who: timed(_OURS.get(name, 500.0) if who == OURS else _MEDIANS[who], who) for who in row.contenders}
    return Measured(row, contenders, needed, limit, CEILINGS, 12.34)


def timed(median: float, who: str) -> Timed:
    """Three runs around a median."""
    samples = median - 1, median, median + 2
    memory = Memory(10**9, 10**7, 123_000_000) if who == OURS else None
    return Timed(samples, 128 if who == HF_EAGER else 512, Error(0.98, 1.06), memory)


def rows() -> list[dict[str, Any]]:
    """All rows, as they stand in a record."""
    return [row_record(measured(row.name), SOURCE) for row in ROWS]


def record() -> dict[str, Any]:
    """The whole record."""
    return make_record(rows(), SOURCE)

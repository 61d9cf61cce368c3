"""What is asked of the whole, each figure computed from a record's rows, whoever wrote them and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashnorm.bench.e2e.rows import (
    HF_COMPILED,
    HF_EAGER,
    LEVEL_ONE,
    OURS,
    PREFILL_COMPILED,
    RECIPE,
    TUNED_RECIPE,
)

Rows = Mapping[str, Mapping[str, Any]]  # a record's rows by name
_ONE_B, _EIGHT_B = "decode-llama-3.2-1b", "decode-llama-3.1-8b"
_LONG = "decode-llama-3.2-1b-context-8192"


class Missing(Exception):
    """A figure's row, or a contender in it, was not measured."""


@dataclass(frozen=True)
class Asked:
    """One figure: what it is, how it follows from the rows, and the value that it must reach or must not exceed."""

    model: str
    title: str
    value: Callable[[Rows], float]
    wanted: float
    at_least: bool = True
    digits: int = 2

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.wanted:g}"

    def met(self, value: float) -> bool:
        return value >= self.wanted if self.at_least else value <= self.wanted


@dataclass(frozen=True)
class Figure:
    """An asked figure and its value; None where something that it needs was not measured."""

    asked: Asked
    value: float | None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.asked.met(self.value)

    @property
    def shown(self) -> str:
        return "not measured" if self.value is None else f"{self.value:,.{self.asked.digits}f}"

    @property
    def verdict(self) -> str:
        return {None: "", True: "yes", False: "no"}[self.met]


def figures(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Every asked figure, from the rows of a record."""
    by_name = {row["name"]: row for row in rows}
    return [Figure(asked, _value(asked, by_name)) for asked in ASKED]


def _value(asked: Asked, rows: Rows) -> float | None:
    try:
        return asked.value(rows)
    except Missing:
        return None


def _row(rows: Rows, name: str) -> Mapping[str, Any]:
    if name not in rows:
        raise Missing
    return rows[name]


def _median(rows: Rows, name: str, *contenders: str) -> float:
    """Microseconds of the fastest of these contenders."""
    timed = _row(rows, name)["contenders"]
    found = [timed[contender]["median_us"] for contender in contenders if contender in timed]
    if not found:
        raise Missing
    return float(min(found))


def _speedup(name: str, *baselines: str, ours: str = OURS) -> Callable[[Rows], float]:
    return lambda rows: _median(rows, name, *baselines) / _median(rows, name, ours)


def _time_over(name: str, baseline: str) -> Callable[[Rows], float]:
    return lambda rows: _median(rows, name, OURS) / _median(rows, name, baseline)


def _share(name: str) -> Callable[[Rows], float]:
    return lambda rows: 100 * _row(rows, name)["limit_us"] / _median(rows, name, OURS)


def _throughput(name: str) -> Callable[[Rows], float]:
    """Tokens per second of all sequences together."""
    return lambda rows: 1e6 * _row(rows, name)["batch"] / _median(rows, name, OURS)


def _scaling(name: str) -> Callable[[Rows], float]:
    return lambda rows: _throughput(name)(rows) / _throughput(_ONE_B)(rows)


def _slowdown(rows: Rows) -> float:
    """The longer step's additional time over what reading its additional bytes takes at the measured bandwidth."""
    longer, shorter = _row(rows, _LONG), _row(rows, _ONE_B)
    explained = 1e6 * (longer["needed"] - shorter["needed"]) / longer["ceilings"]["read_bytes_per_second"]
    return (_median(rows, _LONG, OURS) - _median(rows, _ONE_B, OURS)) / explained


def _memory(rows: Rows) -> float:
    """Megabytes beyond weights and cache in the worst row."""
    worst = -math.inf
    for row in rows.values():
        memory = row["contenders"].get(OURS, {}).get("memory")
        worst = worst if memory is None else max(worst, memory["beyond"] / 1e6)
    if worst == -math.inf:
        raise Missing
    return worst


_PREFILLS = (("Llama-3.2-1B", "prefill-llama-3.2-1b"), ("Llama-3.1-8B", "prefill-llama-3.1-8b"))
_SLOWEST = ((f"time over {PREFILL_COMPILED}", 1.0), ("the same, aimed at", 0.95))
_RECIPES = (RECIPE, TUNED_RECIPE)

ASKED = (
    Asked("Llama-3.2-1B", "% of the bandwidth limit", _share(_ONE_B), 90, digits=1),
    Asked("Llama-3.2-1B", f"speed over {HF_COMPILED}", _speedup(_ONE_B, HF_COMPILED), 4),
    Asked("Llama-3.2-1B", f"speed over {HF_EAGER}", _speedup(_ONE_B, HF_EAGER), 15),
    Asked("Llama-3.2-1B", "speed over the gpt-fast recipe", _speedup(_ONE_B, *_RECIPES), 2),
    Asked("Llama-3.1-8B", "% of the bandwidth limit", _share(_EIGHT_B), 96, digits=1),
    Asked("Llama-3.1-8B", "speed over the gpt-fast recipe", _speedup(_EIGHT_B, *_RECIPES), 1.4),
    Asked("SmolLM2-135M", "tokens/s", _throughput("decode-smollm2-135m"), 4000, digits=0),
    Asked("Qwen3-1.7B", "% of the bandwidth limit", _share("decode-qwen3-1.7b"), 90, digits=1),
    Asked("Llama-3.2-1B, batch 8", "throughput over batch 1", _scaling(f"{_ONE_B}-batch-8"), 7),
    Asked("Llama-3.2-1B, batch 32", "throughput over batch 1", _scaling(f"{_ONE_B}-batch-32"), 20),
    Asked("Llama-3.2-1B, context 8,192", "additional time over what KV bytes explain", _slowdown, 1.15, at_least=False),
    *(
        Asked(f"{model}, prefill 2,048", title, _time_over(name, PREFILL_COMPILED), wanted, at_least=False)
        for model, name in _PREFILLS
        for title, wanted in _SLOWEST
    ),
    Asked(
        "Llama-3.2-1B, level one",
        f"speed over {HF_EAGER}",
        _speedup("level-one-llama-3.2-1b", HF_EAGER, ours=LEVEL_ONE),
        1.3,
    ),
    Asked("worst row", "MB of GPU memory beyond weights and cache", _memory, 300, at_least=False, digits=0),
)

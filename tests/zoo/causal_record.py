"""The record of what a transform did to every causal architecture, and the table that is generated from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import transformers

from tests.zoo.report import build_report

_DOCS = Path(__file__).parents[2] / "docs"


class Outcome(Protocol):
    """What a transform did to one tiny model. `refused`: why it could not be traced."""

    @property
    def model_type(self) -> str: ...

    @property
    def refused(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


O = TypeVar("O", bound=Outcome)  # noqa: E741


@dataclass(frozen=True)
class Record(Generic[O]):
    """Outcomes, and the types that cannot be built with the reason."""

    transformers: str
    outcomes: list[O]
    unbuilt: dict[str, str]

    @property
    def of_this_transformers(self) -> bool:
        """Whether the installed Transformers is the one that the record is of."""
        return self.transformers == transformers.__version__

    def of(self, model_type: str) -> O:
        """The outcome of one type."""
        return next(row for row in self.outcomes if row.model_type == model_type)

    def not_examined(self) -> list[str]:
        """The last sections of every table."""
        refused = [f"- {row.model_type}: {row.refused}" for row in self.outcomes if row.refused]
        unbuilt = [f"- {name}: {reason}" for name, reason in sorted(self.unbuilt.items())]
        return ["## Not traced", "", *(refused or ["- none"]), "", "## Not built", "", *unbuilt, ""]


@dataclass(frozen=True)
class Documents(Generic[O]):
    """`docs/<name>.json`, the outcomes, and `docs/<name>-architectures.md`, `lines` and then what was left out."""

    name: str
    outcome: Callable[..., O]
    lines: Callable[[Record[O]], list[str]]

    @property
    def table(self) -> Path:
        return _DOCS / f"{self.name}-architectures.md"

    @property
    def _record(self) -> Path:
        return _DOCS / f"{self.name}.json"

    def read(self) -> Record[O]:
        """The committed record."""
        stored = json.loads(self._record.read_text())
        outcomes = [self.outcome(**row) for row in stored["outcomes"]]
        return Record(stored["transformers"], outcomes, stored["unbuilt"])

    def text(self, record: Record[O]) -> str:
        """The table of a record."""
        return "\n".join([*self.lines(record), *record.not_examined()])

    def write(self, record: Record[O]) -> None:
        """Write the record and the table."""
        rows = [outcome.to_dict() for outcome in record.outcomes]
        stored = {"transformers": record.transformers, "outcomes": rows, "unbuilt": record.unbuilt}
        self._record.write_text(json.dumps(stored, indent=1) + "\n")
        self.table.write_text(self.text(record))

    def make(self, examine: Callable[[str], O], progress: Callable[[O], str]) -> None:
        """Examine every type that can be built and write what came of it; a line of progress for each on stderr."""
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        reasons = build_report("causal")
        outcomes: list[O] = []
        for model_type in (name for name, reason in reasons.items() if reason == "ok"):
            outcomes.append(examine(model_type))
            print(f"{model_type:28s} {progress(outcomes[-1])}", file=sys.stderr, flush=True)
        unbuilt = {name: reason for name, reason in reasons.items() if reason != "ok"}
        self.write(Record(transformers.__version__, outcomes, unbuilt))


def named(norms: Iterable[str]) -> str:
    """Names of norms in one cell of a table."""
    return ", ".join(f"`{norm}`" for norm in norms)

"""What a fold reports, on a live module and on disk alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FoldReport:
    """What a fold did: the norms whose gains now live in the next weights, and for every other norm the reason."""

    folded: list[str]
    skipped: dict[str, str]
    grown_bytes: int = 0  # by how much an untied head makes the checkpoint larger
    already_folded: bool = False  # nothing was done: the input was the output of an earlier fold

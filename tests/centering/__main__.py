"""`python -m tests.centering`: run every causal architecture, write docs/center.json and the table of it."""

from __future__ import annotations

from tests.centering.examine import Outcome, examine
from tests.centering.record import DOCUMENTS


def _progress(row: Outcome) -> str:
    return (
        f"centered {len(row.centered)} untied {len(row.untied)} no {len(row.no)} "
        f"{row.error:.1e} {row.error_small:.1e} {row.over_cautious} {row.refused}"
    )


if __name__ == "__main__":
    DOCUMENTS.make(examine, _progress)

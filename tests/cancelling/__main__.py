"""`python -m tests.cancelling`: run every causal architecture, write docs/cancel.json and the table of it."""

from __future__ import annotations

from tests.cancelling.examine import Outcome, examine
from tests.cancelling.record import DOCUMENTS


def _progress(row: Outcome) -> str:
    return (
        f"full {len(row.full)} partial {len(row.partial)} no {len(row.no)} "
        f"{row.error:.1e} {row.error_small:.1e} {row.over_cautious} {row.refused}"
    )


if __name__ == "__main__":
    DOCUMENTS.make(examine, _progress)

"""No architecture comes out wrong, and no refusal is over-cautious."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests import zoo
from tests.coverage.examine import Outcome, examine
from tests.coverage.record import FAMILIES, README, TABLE, full_table, read_record, with_summary
from tests.zoo.report import working_model

CASES = [(family, model_type) for family in FAMILIES for model_type in zoo.model_types(family)]


@pytest.mark.parametrize(("family", "model_type"), CASES)
def test_folding_changes_nothing(family: str, model_type: str, tmp_path: Path) -> None:
    model, state = working_model(family, model_type)
    if model is None:
        _only_if_recorded(family, model_type)
        pytest.skip(state)
    outcome = examine(family, model_type, model, tmp_path)
    assert outcome.right or outcome.refused, f"relative error {outcome.error:.1e}"
    assert not outcome.over_cautious
    assert outcome.folded + sum(outcome.blocked.values()) == outcome.norms
    _compare_with_record(family, outcome)


def _only_if_recorded(family: str, model_type: str) -> None:
    """A type that could be built when the record was made must not be skipped."""
    record = read_record()
    if record.transformers == transformers.__version__:
        assert model_type in record.unbuilt[family]


def _compare_with_record(family: str, outcome: Outcome) -> None:
    record = read_record()
    if record.transformers != transformers.__version__:
        return
    recorded = next(row for row in record.outcomes[family] if row.model_type == outcome.model_type)
    now, then = ((row.folded, row.norms, bool(row.refused)) for row in (outcome, recorded))
    assert now == then, "run `python -m tests.coverage` and look at the change"


def test_documents_are_generated_from_the_record() -> None:
    record = read_record()
    assert TABLE.read_text() == full_table(record)
    assert README.read_text() == with_summary(README.read_text(), record)

from __future__ import annotations

import json

from tests.verify.faults import ANYWHERE
from tests.verify.figures import DEMO, DTYPES, FAULTS, PAGE, RECORD, table, with_table


def test_the_page_is_generated_from_its_records() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text())
    assert table(json.loads(RECORD.read_text()), json.loads(DEMO.read_text())) in PAGE.read_text()


def test_every_fault_has_a_row() -> None:
    assert {fault.__name__ for fault in ANYWHERE} == set(FAULTS)


def test_the_record_separates_faults_from_folds() -> None:
    record = json.loads(RECORD.read_text())
    for dtype in DTYPES:
        bound = record[dtype]["bounds"]["exact_drift_ratio"][1]
        assert record[dtype]["healthy"]["exact_drift_ratio"][1] < bound
        assert all(figure > 5 * bound for figure in record[dtype]["faults"].values())


def test_another_record_gives_another_table() -> None:
    record = json.loads(RECORD.read_text())
    before = table(record, json.loads(DEMO.read_text()))
    record["bf16"]["faults"]["folded_twice"] *= 2
    assert table(record, json.loads(DEMO.read_text())) != before

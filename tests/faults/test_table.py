"""Every planted fault is caught by the check that is meant for it, and the page shows what the record says."""

from __future__ import annotations

import json

import pytest

from flashnorm.verify.suite import CHECKS
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.table import PAGE, PERPLEXITY_MOVES, RECORD, failing, question, unit_test_passes, with_table
from tests.faults.two_streams import FAULTS as RACES

STORY = ("lag", "causality", "batching", "slots")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_right_check_catches_it(fault: Fault) -> None:
    assert failing(fault, (fault.check,)) == [fault.check]


@pytest.mark.parametrize("check", sorted({fault.check for fault in FAULTS}))
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_without_a_fault_no_check_fails(family: str, check: str) -> None:
    assert CHECKS[check](question(Fault("none", check, family=family))).passed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_record_is_what_is_measured(fault: Fault) -> None:
    row = json.loads(RECORD.read_text())[fault.name]
    assert fault.check in row["checks"]
    assert row["unit_test_passes"] is unit_test_passes(fault)


def test_unit_tests_and_perplexity_miss_what_the_story_is_about() -> None:
    """For each of its checks there is a fault that passes both."""
    record = json.loads(RECORD.read_text())
    for check in STORY:
        missed = [
            fault.name
            for fault in FAULTS
            if fault.check == check
            and record[fault.name]["unit_test_passes"]
            and abs(record[fault.name]["perplexity_change"]) < PERPLEXITY_MOVES
        ]
        assert missed or check == "causality"  # there perplexity moves, downwards: the text is read with its answer
    causal = [record[fault.name] for fault in FAULTS if fault.check == "causality"]
    assert all(row["unit_test_passes"] for row in causal)


def test_the_page_shows_the_record_and_nothing_is_missing() -> None:
    assert set(json.loads(RECORD.read_text())) == {f.name for f in FAULTS} | {f"two streams: {name}" for name in RACES}
    page = PAGE.read_text()
    assert with_table(page) == page

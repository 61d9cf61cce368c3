from __future__ import annotations

import json

import pytest

from tools import battery_tables
from tools.battery_tables import JOINS, NAME, PAGE, TABLES, with_tables
from tools.tables import RECORDS, read


def test_the_page_shows_what_the_record_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text
    assert all(f"table:{name}:begin" in text for name in TABLES)


def test_another_outcome_is_another_page(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = read(RECORDS / f"{NAME}.json")
    record["rows"][0]["passed"], record["alarms"], record["complete"] = False, 1, False
    (tmp_path / f"{NAME}.json").write_text(json.dumps(record))
    monkeypatch.setattr(battery_tables, "RECORDS", tmp_path)
    page = with_tables(PAGE.read_text(encoding="utf-8"))
    assert "1 false alarms in" in page
    assert "not complete" in page
    assert page.count("| 5 | 1 |") == 1


def test_a_record_that_is_still_to_be_measured_leaves_a_place(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery_tables, "RECORDS", tmp_path)
    page = f"<!-- table:{JOINS}:begin -->\nold\n<!-- table:{JOINS}:end -->\n"
    assert with_tables(page) == page.replace("old", "Not measured yet.")
    (tmp_path / f"{JOINS}.json").write_text("{}")
    with pytest.raises(KeyError, match="forms"):  # once it is there it must be shown
        with_tables(page)


def test_the_record_holds_what_was_asked() -> None:
    """Five runs of each subject: two precisions and two attentions of a real model, and twenty families."""
    record = read(RECORDS / f"{NAME}.json")
    subjects = [row["subject"] for row in record["rows"]]
    assert len(set(subjects)) >= 24
    assert all(subjects.count(subject) == 5 for subject in subjects)
    assert record["outcomes"] == len(subjects)
    assert record["alarms"] == sum(not row["passed"] for row in record["rows"])

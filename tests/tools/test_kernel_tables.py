from __future__ import annotations

import json

import pytest

from tools import kernel_tables
from tools.kernel_tables import PAGES, RECORDS, TABLES, op_table, with_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_the_records_say(page):
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text
    assert "table:" in text


def test_a_changed_record_changes_the_page(tmp_path, monkeypatch):
    for record in RECORDS.glob("*.json"):
        data = json.loads(record.read_text())
        if record.stem == "op-h200":
            data["rows"][0]["medians"]["flashnorm"] += 1
        (tmp_path / record.name).write_text(json.dumps(data))
    monkeypatch.setattr(kernel_tables, "RECORDS", tmp_path)
    text = PAGES[0].read_text(encoding="utf-8")
    assert with_tables(text) != text


def test_every_table_has_a_record_and_a_place():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(TABLES) <= {record.stem for record in RECORDS.glob("*.json")}
    assert all(f"table:{name}:begin" in pages for name in TABLES)


def test_what_a_record_says_of_itself_follows_from_its_samples():
    for record in RECORDS.glob("op-*.json"):
        for row in json.loads(record.read_text())["rows"]:
            for name, samples in row["samples"].items():
                ordered = sorted(samples)
                middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
                assert middle == pytest.approx(row["medians"][name], abs=2e-3)
        assert "geometric mean" in op_table(record.stem)

from __future__ import annotations

import pytest

from tools import kernel_tables, runtime_tables
from tools.tables import RECORDS, row, table, with_tables

PAGE = "a\n<!-- table:one:begin -->\nold\n<!-- table:one:end -->\nb\n"


def test_only_marked_places_change():
    assert with_tables(PAGE, {"one": lambda: "new\n"}) == PAGE.replace("old", "new")
    assert with_tables("table:one", {}) == "table:one"


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="one"):
        with_tables(PAGE, {"two": lambda: ""})


def test_a_table_has_a_rule_as_wide_as_its_titles():
    assert table(("a", "b"), [(1, "x")]) == ["| a | b |", "| --- | --- |", row(1, "x")]


def test_every_record_is_shown_somewhere():
    shown = {*kernel_tables.TABLES, runtime_tables.RECORD}
    assert {record.stem for record in RECORDS.glob("*.json")} <= shown
    assert not kernel_tables.TABLES.keys() & runtime_tables.TABLES.keys()

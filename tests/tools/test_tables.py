from __future__ import annotations

import pytest

from tools import battery_tables, kernel_tables, low_precision_tables, runtime_tables, scalar_tables
from tools.tables import RECORDS, row, table, where_from, with_tables

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
    shown = {*kernel_tables.TABLES, *low_precision_tables.TABLES, *battery_tables.TABLES}
    shown |= {record for tables in (runtime_tables, scalar_tables) for record, _ in tables.TABLES.values()}
    assert {record.stem for record in RECORDS.glob("*.json")} <= shown
    names = [*kernel_tables.TABLES, *runtime_tables.TABLES, *low_precision_tables.TABLES, *scalar_tables.TABLES]
    assert len(set(names)) == len(names)


def test_a_machine_without_a_driver_is_told_without_one():
    source = {"device": "2 cores", "driver": None, "packages": {"torch": "2", "triton": None}, "command": "a command"}
    source |= {"commit": "0123456789abcdef", "date": "2026-11-30T00:00:00"}
    assert where_from(source) == "2 cores, torch 2; `a command` at 0123456789ab, 2026-11-30"
    assert where_from({**source, "driver": "580"}).startswith("2 cores, driver 580, torch 2; ")

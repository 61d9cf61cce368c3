"""The report as data and as a table."""

from __future__ import annotations

import pytest

from flashnorm.runtime.report import Acceleration, SiteReport

REPORT = Acceleration(
    "llama",
    1,
    (
        SiteReport("layers.0.norm", ("q + k", "o")),
        SiteReport("layers.1.norm", ("q + k", "o")),
        SiteReport("layers.2.norm", reason="its reader layers.2.q is [odd]"),
        SiteReport("layers.3.norm", reason="its reader layers.3.q is [odd]"),
        SiteReport("norm", reason="its output is returned"),
    ),
)


def test_replaced_and_stock_are_all_there_is():
    assert REPORT.replaced == {"layers.0.norm": ("q + k", "o"), "layers.1.norm": ("q + k", "o")}
    assert list(REPORT.stock) == ["layers.2.norm", "layers.3.norm", "norm"]


def test_the_table_has_a_row_for_norms_that_are_alike():
    page = str(REPORT)
    assert "llama: level 1, 2 of 5 norms replaced" in page
    assert "layers.0.norm" in page
    assert "layers.1.norm" not in page
    assert "its reader layers.2.q is [odd]" in page
    assert "layers.3" not in page
    assert all(line == line.rstrip() and len(line) <= 120 for line in page.splitlines())


def test_a_report_is_not_changed():
    with pytest.raises(AttributeError):
        REPORT.level = 2

from __future__ import annotations

import pytest

from flashnorm.bench.e2e.figures import ASKED, figures
from flashnorm.bench.e2e.rows import OURS, RECIPE, ROWS, TUNED_RECIPE
from flashnorm.bench.e2e.tables import asked_lines, contender_lines
from tests.bench.e2e.records import rows

# In the order of the table: value and whether it is enough.
_EXPECTED = [
    (93.0, True),  # 465 us of 500
    (4.2, True),
    (16.0, True),
    (2.2, True),
    (93.0, False),
    (2.2, True),
    (5000.0, True),
    (93.0, True),
    (8 * 500 / 520, True),
    (32 * 500 / 640, True),
    (70 / 62, True),  # 70 us more, 62 us of which are bytes
    (500 / 520, True),
    (500 / 520, False),
    (500 / 520, True),
    (500 / 520, False),
    (1.6, True),
    (123.0, True),
]


def test_every_figure_follows_from_the_rows():
    found = figures(rows())
    assert [figure.value for figure in found] == [pytest.approx(value) for value, _ in _EXPECTED]
    assert [figure.met for figure in found] == [met for _, met in _EXPECTED]


def test_what_was_not_measured_has_no_value_and_hides_nothing_else():
    some = [row for row in rows() if row["name"] == "decode-llama-3.2-1b"]
    del some[0]["contenders"][RECIPE]
    known = [figure.asked.title for figure in figures(some) if figure.value is not None]
    assert len(known) == 4
    assert {figure.verdict for figure in figures(some) if figure.value is None} == {""}
    assert all(figure.value is None for figure in figures([]))


def test_the_faster_recipe_counts():
    changed = rows()
    row = next(row for row in changed if row["name"] == "decode-llama-3.2-1b")
    row["contenders"][TUNED_RECIPE] = {**row["contenders"][RECIPE], "median_us": 900.0}
    assert figures(changed)[3].value == pytest.approx(1.8)
    assert figures(changed)[3].met is False


def test_memory_is_the_worst_rows():
    changed = rows()
    changed[-1]["contenders"][OURS]["memory"]["beyond"] = 301_000_000
    worst = figures(changed)[-1]
    assert (worst.value, worst.met, worst.shown, worst.verdict) == (301.0, False, "301", "no")


def test_figures_on_the_bound_are_met():
    least = next(asked for asked in ASKED if asked.at_least)
    most = next(asked for asked in ASKED if not asked.at_least)
    assert least.met(least.wanted)
    assert not least.met(least.wanted - 1e-6)
    assert most.met(most.wanted)
    assert not most.met(most.wanted + 1e-6)


def test_lines_show_every_row_and_figure():
    assert len(contender_lines(rows())) == sum(len(row.contenders) for row in ROWS)
    assert len(asked_lines(rows())) == len(ASKED)
    first = contender_lines([row for row in rows() if row["name"] == "decode-llama-3.2-1b-batch-8"])[0]
    assert first == ("decode-llama-3.2-1b-batch-8", OURS, "520.0", "3.0", "15,385", "89.4", "0.98", "512")
